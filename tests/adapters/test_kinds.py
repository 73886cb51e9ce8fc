"""Reference and behavioural: DoRA, starts that change the base, EVA, LoRA+ and whole trained modules, on a tiny model."""

import json

import pytest
import torch
from torch import nn

from karui.adapters.dora import DoraLinear
from karui.adapters.files import fingerprint, load_adapter, resume_values, save_adapter
from karui.adapters.lora import Look, attach
from karui.adapters.lora_plus import plus_groups
from karui.adapters.merge import merge_adapter
from karui.adapters.quantized_linear import QuantizedLinear
from karui.configs.errors import CorruptError, KaruiError
from karui.configs.recipe import Recipe
from karui.configs.steps import LoraStep
from karui.kernels.dora.reference import dora_linear
from tests.adapters.test_lora import IDS, fill, same_gradients, tiny

STARTS = [("lora", "pissa", "none"), ("lora", "olora", "none"), ("qlora", "pissa", "nf4dq"), ("qlora", "loftq", "nf4dq"),
          ("qlora", "loftq", "w4g32"), ("qlora", "olora", "w4g32")]


def step(method="lora", **kw):
    return LoraStep(method=method, **{"rank": 4, "alpha": 6, **kw})


def changed(model, seed=5):
    """Every trained tensor moved a little, as training would."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=g) * 0.02)
    return model.eval()


@pytest.mark.parametrize("bias", [False, True])
def test_dora_and_its_gradients_are_pefts_in_float64(bias):
    from peft import LoraConfig, get_peft_model

    ours = attach(tiny(dtype=torch.float64, bias=bias), step(dora=True)).model
    theirs = get_peft_model(tiny(dtype=torch.float64, bias=bias), LoraConfig(
        r=4, lora_alpha=6, use_dora=True, target_modules="all-linear", task_type="CAUSAL_LM"), autocast_adapter_dtype=False)
    assert sum(isinstance(m, DoraLinear) for m in ours.modules()) == 14
    for model in (ours, theirs):
        model.double()
    for name, parameter in ours.named_parameters():  # a magnitude starts as the row's norm
        if "magnitude" in name:
            weight = ours.get_parameter(name.replace("lora_magnitude_vector.default.weight", "base_layer.weight"))
            assert torch.allclose(parameter, weight.norm(dim=1), rtol=1e-6)
    theirs.load_state_dict(ours.state_dict())
    for model in (ours, theirs):
        fill(model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "magnitude" in name:
                    parameter.mul_(1.1)
        model.train()
        model(input_ids=IDS, labels=IDS).loss.backward()
    same_gradients(ours, theirs, count=2 * 7 * 3, rtol=1e-8)


def test_dora_follows_factors_that_an_optimizer_changed():
    """Fused optimizers leave no trace in a tensor's version; the norm must follow all the same."""
    model = attach(tiny(), step(dora=True)).model
    fill(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.1, fused=True)
    for _ in range(2):
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    layer = model.get_base_model().model.layers[0].mlp.up_proj
    x = torch.randn(3, 64)
    expected = dora_linear(x, layer.base_layer.weight, None, layer.lora_A["default"].weight, layer.lora_B["default"].weight,
                           layer.lora_magnitude_vector["default"].weight, layer.scaling["default"])
    assert torch.allclose(layer(x), expected, atol=1e-5)


def test_dora_with_dropout_and_disabled():
    model = attach(tiny(), step(dora=True, dropout=0.5)).model
    fill(model)
    model.train()
    torch.manual_seed(0)
    assert not torch.equal(model(input_ids=IDS).logits, model(input_ids=IDS).logits)
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None and bool(torch.isfinite(p.grad).all()) for p in model.parameters() if p.requires_grad)
    model.eval()
    with model.disable_adapter():
        assert torch.allclose(model(input_ids=IDS).logits, tiny()(input_ids=IDS).logits, atol=1e-6)


@pytest.mark.parametrize("spec", ["nf4dq", "w4g32", "fp8", "nvfp4"])
def test_dora_over_a_packed_base(spec):
    model = attach(tiny(), step("qlora", base=spec, dora=True)).model
    fill(model)
    layer = model.get_base_model().model.layers[1].self_attn.k_proj
    x = torch.randn(2, 3, 64)
    expected = dora_linear(x, layer.base_layer.dequantize(), None, layer.lora_A["default"].weight, layer.lora_B["default"].weight,
                           layer.lora_magnitude_vector["default"].weight, layer.scaling["default"])
    assert torch.allclose(layer(x), expected, atol=1e-5)


def test_dora_keeps_no_matrix_of_the_weights_size():
    model = attach(tiny(), step("qlora", base="w4g32", dora=True)).model
    layer = model.get_base_model().model.layers[0].mlp.up_proj
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        layer(torch.randn(2, 64, requires_grad=True))
    assert sizes and max(sizes) < 128 * 64


@pytest.mark.parametrize("method,init,base", STARTS)
def test_a_start_keeps_the_model(method, init, base):
    """Before training: unquantized starts give the original logits; LoftQ and PiSSA on a grid come closer than plain rounding."""
    plain = tiny()(input_ids=IDS).logits
    logits = attach(tiny(), step(method, init=init, base=base)).model.eval()(input_ids=IDS).logits
    if base == "none":
        assert torch.allclose(logits, plain, atol=2e-5)
    else:
        rounded = attach(tiny(), step(method, base=base)).model.eval()(input_ids=IDS).logits
        far = (rounded - plain).norm()
        assert (logits - plain).norm() < far * (1.0 if init == "loftq" else 1.3) and not torch.equal(logits, rounded)


@pytest.mark.parametrize("method,init,base", STARTS)
@pytest.mark.parametrize("dora", [False, True])
def test_saved_starts_load_here_on_the_original_model(method, init, base, dora, tmp_path):
    done = attach(tiny(), step(method, init=init, base=base, dora=dora, rslora=True))
    model = changed(done.model)
    expected = model(input_ids=IDS).logits
    spec = step(method, base=base).base
    save_adapter(model, tmp_path / "a", base=done.base, base_name="tiny", base_spec=spec)
    loaded = load_adapter(tiny(), tmp_path / "a")
    assert torch.allclose(loaded(input_ids=IDS).logits, expected, atol=2e-5)
    assert (base == "none") == (not (tmp_path / "a" / "karui_residual.safetensors").exists())


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_an_unquantized_start_loads_in_peft_on_the_original_model(init, tmp_path):
    from peft import PeftModel

    done = attach(tiny(), step(init=init))
    expected = changed(done.model)(input_ids=IDS).logits
    save_adapter(done.model, tmp_path / "a", base=done.base, base_name="tiny")
    peer = PeftModel.from_pretrained(tiny(), tmp_path / "a").eval()
    assert torch.allclose(peer(input_ids=IDS).logits, expected, atol=2e-5)
    assert json.loads((tmp_path / "a" / "adapter_config.json").read_text())["r"] == 8


@pytest.mark.parametrize("method,init,base", STARTS)
def test_resuming_gives_every_bit_back(method, init, base, tmp_path):
    s = step(method, init=init, base=base)
    one = changed(attach(tiny(), s).model)
    save_adapter(one, tmp_path / "a", base="x", base_name="tiny", base_spec=s.base)

    def forbidden(name):
        raise AssertionError("the start is the same, so no original weight is needed")

    two = attach(tiny(), s).model.eval()
    resume_values(two, tmp_path / "a", forbidden)
    assert torch.equal(one(input_ids=IDS).logits, two(input_ids=IDS).logits)
    save_adapter(two, tmp_path / "b", base="x", base_name="tiny", base_spec=s.base)
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes(), file.name


@pytest.mark.parametrize("method,init,base", STARTS)
def test_resuming_where_the_start_came_out_differently(method, init, base, tmp_path):
    """Another machine's eigenvectors differ in their last digits: the base is made anew from the stored factors."""
    s = step(method, init=init, base=base)
    one = changed(attach(tiny(), s).model)
    save_adapter(one, tmp_path / "a", base="x", base_name="tiny", base_spec=s.base)
    two = attach(tiny(seed=9), s).model.eval()  # a different start altogether
    original = tiny()
    for name, module in two.get_base_model().named_modules():
        if isinstance(module, (nn.Embedding, nn.Linear)) or "norm" in name.rpartition(".")[2]:
            plain = dict(original.named_modules()).get(name)
            if plain is not None and hasattr(module, "weight"):
                module.weight.data.copy_(plain.weight)
    resume_values(two, tmp_path / "a", lambda name: original.get_submodule(name).weight.detach())
    assert torch.equal(one(input_ids=IDS).logits, two(input_ids=IDS).logits)


def test_a_residual_needs_the_original_model_and_a_whole_file(tmp_path):
    s = step("qlora", init="loftq")
    done = attach(tiny(), s)
    save_adapter(done.model, tmp_path / "a", base=done.base, base_name="tiny", base_spec=s.base)
    packed = attach(tiny(), step("qlora")).model.unload()
    assert any(isinstance(m, QuantizedLinear) for m in packed.modules())
    with pytest.raises(KaruiError, match="packed already"):
        load_adapter(packed, tmp_path / "a", base=done.base)
    path = tmp_path / "a" / "karui_residual.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CorruptError, match="cut short"):
        load_adapter(tiny(), tmp_path / "a")
    path.unlink()
    with pytest.raises(KaruiError, match="not a whole adapter"):
        load_adapter(tiny(), tmp_path / "a")


def test_lora_plus_splits_the_groups():
    model = attach(tiny(), step(train_also=("embed_tokens", "norm"), lr_ratio=16)).model
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trained if p.ndim >= 2], "weight_decay": 0.1, "lr_scale": 1.0},
              {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0, "lr_scale": 1.0}]
    split = plus_groups(model, groups, ratio=16, embedding_lr=None, lr=2e-4)
    names = {id(p): n for n, p in model.named_parameters()}
    rate = {names[id(p)]: g["lr_scale"] * 2e-4 for g in split for p in g["params"]}
    assert len(rate) == len(trained)
    for name, value in rate.items():
        expected = 16 * 2e-4 if "lora_B" in name else 1e-6 if "embed_tokens" in name else 2e-4
        assert value == pytest.approx(expected), name
    assert all(g["weight_decay"] == (0.1 if g["params"][0].ndim >= 2 else 0.0) for g in split)
    assert plus_groups(model, groups, ratio=1, embedding_lr=None, lr=2e-4) is groups


def test_lora_plus_is_pefts():
    from peft.optimizers import create_loraplus_optimizer

    model = attach(tiny(), step(lr_ratio=16)).model
    trained = [p for p in model.parameters() if p.requires_grad]
    ours = {id(p): g["lr_scale"] * 1e-4 for g in plus_groups(
        model, [{"params": trained, "weight_decay": 0.0}], ratio=16, embedding_lr=None, lr=1e-4) for p in g["params"]}
    peer = create_loraplus_optimizer(model, torch.optim.AdamW, lr=1e-4, loraplus_lr_ratio=16)
    theirs = {id(p): g["lr"] for g in peer.param_groups for p in g["params"]}
    assert ours.keys() == theirs.keys() and all(ours[k] == pytest.approx(theirs[k]) for k in ours)


def looks(model, count=6):
    batches = [torch.randint(3, 64, (1, 40), generator=torch.Generator().manual_seed(i)) for i in range(count)]
    return Look(batches=batches, forward=lambda m, ids: m(input_ids=ids))


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_eva_starts_along_what_the_layers_see(method):
    """A spans the principal directions of the layer's centred input, found here by one whole SVD."""
    model = attach(tiny(), step(method, init="eva"), look=looks(None)).model
    layer = model.get_base_model().model.layers[1].mlp.down_proj
    seen = []
    hook = layer.register_forward_pre_hook(lambda m, args: seen.append(args[0].detach()[0]))
    for ids in looks(None).batches:
        model(input_ids=ids)
    hook.remove()
    x = torch.cat(seen)
    top = torch.linalg.svd(x - x.mean(0)).Vh[:4]
    a = layer.lora_A["default"].weight.detach()
    assert torch.allclose(a @ a.T, torch.eye(4), atol=1e-3)
    captured = float(((x - x.mean(0)) @ a.T).square().sum() / ((x - x.mean(0)) @ top.T).square().sum())
    assert captured > 0.9
    assert float(layer.lora_B["default"].weight.detach().abs().max()) == 0


def test_eva_may_move_ranks_and_its_files_say_so(tmp_path):
    done = attach(tiny(), step(init="eva", eva_rho=2.0), look=looks(None))
    model = changed(done.model)
    expected = model(input_ids=IDS).logits
    save_adapter(model, tmp_path / "a", base=done.base, base_name="tiny")
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert config["rank_pattern"] and config["init_lora_weights"] is True
    assert torch.allclose(load_adapter(tiny(), tmp_path / "a")(input_ids=IDS).logits, expected, atol=1e-5)
    with pytest.raises(KaruiError, match="batches to look at"):
        attach(tiny(), step(init="eva"))


@pytest.mark.parametrize("tied", [False, True])
def test_embedding_and_norms_trained_whole_are_saved_and_exchanged(tied, tmp_path):
    from peft import LoraConfig, PeftModel, get_peft_model

    done = attach(tiny(tied=tied), step(train_also=("embed_tokens", "model.norm")))
    model = changed(done.model)
    inner = model.get_base_model()
    assert (inner.get_input_embeddings().weight is inner.get_output_embeddings().weight) == tied
    expected = model(input_ids=IDS).logits
    save_adapter(model, tmp_path / "ours", base=done.base, base_name="tiny")
    assert torch.allclose(load_adapter(tiny(tied=tied), tmp_path / "ours")(input_ids=IDS).logits, expected, atol=1e-5)
    peer = PeftModel.from_pretrained(tiny(tied=tied), tmp_path / "ours").eval()
    assert torch.allclose(peer(input_ids=IDS).logits, expected, atol=1e-5)
    theirs = changed(get_peft_model(tiny(tied=tied), LoraConfig(
        r=4, target_modules=["q_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=tied, task_type="CAUSAL_LM")))
    theirs.save_pretrained(tmp_path / "theirs")
    assert torch.allclose(load_adapter(tiny(tied=tied), tmp_path / "theirs")(input_ids=IDS).logits, theirs(input_ids=IDS).logits,
                          atol=1e-5)


def test_train_also_names_are_resolved_or_refused():
    with pytest.raises(KaruiError, match=r"train_also 'embed_token' matches no module.*Did you mean 'embed_tokens'"):
        attach(tiny(), step(train_also=("embed_token",)))
    with pytest.raises(KaruiError, match=r"shares its weight.*embed_tokens"):
        attach(tiny(), step(train_also=("lm_head",)))
    names = [n for n, p in attach(tiny(), step(train_also=("norm",))).model.named_parameters() if p.requires_grad and "lora" not in n]
    assert len(names) == 1  # the last norm, not every name that ends in the letters


@pytest.mark.parametrize("values,message", [
    ({"method": "lora", "init": "loftq"}, "quantized base"),
    ({"method": "lora", "init_steps": 3}, "belongs to init"),
    ({"method": "qlora", "base": "none"}, "needs a quantized base"),
    ({"method": "lora", "eva_rho": 2}, "belongs to init eva"),
    ({"method": "lora", "embedding_lr": 1e-5}, "train_also"),
    ({"method": "lora", "init": "loftk"}, "kaiming"),
])
def test_steps_that_make_no_sense_are_refused(values, message):
    with pytest.raises(KaruiError, match=message):
        Recipe.build({"model": "x", "data": {"train": "y"}, "prepare": [values]})


def test_the_fingerprint_is_that_of_the_model_before_its_base_changed():
    assert attach(tiny(), step(init="pissa")).base == fingerprint(tiny())


MERGED = [{"dora": True}, {"method": "qlora", "dora": True}, {"init": "pissa", "dora": True}, {"method": "qlora", "init": "loftq"},
          {"train_also": ("embed_tokens", "norm")}, {"dora": True, "train_also": ("embed_tokens",)}]


@pytest.mark.parametrize("kind", MERGED)
def test_merging_every_kind_in_memory_gives_the_same_logits(kind):
    model = changed(attach(tiny(), step(**kind)).model)
    expected = model(input_ids=IDS).logits
    merged, report = merge_adapter(model)
    assert torch.allclose(merged(input_ids=IDS).logits, expected, atol=2e-5)
    assert len(report.layers) == 14 and len(report.replaced) == (0 if "train_also" not in kind else 1 + ("norm" in kind["train_also"]) + 1)
    assert merged.lm_head.weight is merged.model.embed_tokens.weight
    assert {type(m) for m in merged.modules() if "Linear" in type(m).__name__} == {nn.Linear}
