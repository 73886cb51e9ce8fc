"""Reference: adapters against peft's own layers in float64, exchange of files with peft, refusals."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from karui.adapters.files import adapter_values, fingerprint, load_adapter, save_adapter
from karui.adapters.lora import attach
from karui.adapters.merge import merge_adapter
from karui.adapters.quantized_linear import QuantizedLinear
from karui.adapters.targets import resolve_targets
from karui.configs.errors import CorruptError, KaruiError
from karui.configs.quantspec import QuantSpec
from karui.configs.steps import LoraStep

IDS = torch.arange(3, 23).unsqueeze(0)


def tiny(seed=0, tied=True, bias=False, dtype=torch.float32):
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        tie_word_embeddings=tied, attention_bias=bias, mlp_bias=bias)).to(dtype)


def fill(model, seed=3):
    """B away from zero, so that adapters do something."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=g, dtype=torch.float64) * 0.1)


def same_gradients(ours, theirs, *, count, rtol):
    """Both models have gradients for the same `count` parameters, none of them zero, and they agree."""
    grads = {n: p.grad for n, p in ours.named_parameters() if p.grad is not None}
    peers = {n: p.grad for n, p in theirs.named_parameters() if p.grad is not None}
    assert grads.keys() == peers.keys() and len(grads) == count
    for name in grads:
        assert float(peers[name].abs().max()) > 0
        assert torch.allclose(grads[name], peers[name], rtol=rtol, atol=1e-12), name


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rslora", [False, True])
def test_fused_forward_and_gradients_are_pefts_in_float64(rslora, bias):
    from peft import LoraConfig, get_peft_model

    ours = attach(tiny(dtype=torch.float64, bias=bias), LoraStep(method="lora", rank=3, alpha=7, rslora=rslora)).model
    theirs = get_peft_model(tiny(dtype=torch.float64, bias=bias), LoraConfig(
        r=3, lora_alpha=7, use_rslora=rslora, target_modules="all-linear", task_type="CAUSAL_LM"), autocast_adapter_dtype=False)
    theirs.load_state_dict(ours.state_dict())
    for model in (ours, theirs):
        model.double()
        fill(model)
        model.train()
        model(input_ids=IDS, labels=IDS).loss.backward()
    same_gradients(ours, theirs, count=2 * 7 * 2, rtol=1e-9)


def test_rslora_scales_by_the_root_of_the_rank():
    model = attach(tiny(), LoraStep(method="lora", rank=16, alpha=8, rslora=True)).model
    assert model.get_base_model().model.layers[0].mlp.up_proj.scaling["default"] == pytest.approx(8 / 4)


def test_dropout_and_disabled_adapters_take_pefts_own_path():
    model = attach(tiny(), LoraStep(method="lora", rank=4, dropout=0.5)).model
    fill(model)
    model.train()
    torch.manual_seed(0)
    a = model(input_ids=IDS).logits
    b = model(input_ids=IDS).logits
    assert not torch.equal(a, b)
    model.eval()
    with model.disable_adapter():
        assert torch.allclose(model(input_ids=IDS).logits, tiny()(input_ids=IDS).logits, atol=1e-6)


@pytest.mark.parametrize("spec", ["nf4dq", "w4g32", "w8", "fp8"])
def test_qlora_equals_lora_over_the_dequantized_base(spec):
    model = attach(tiny(), LoraStep(method="qlora", rank=4, base=spec)).model
    fill(model)
    plain = tiny()
    for name, module in model.get_base_model().named_modules():
        if isinstance(module, QuantizedLinear):
            with torch.no_grad():
                plain.get_submodule(name.removesuffix(".base_layer")).weight.copy_(module.dequantize())
    plain = attach(plain, LoraStep(method="lora", rank=4)).model
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if "lora_" in k}, strict=False)
    for m in (model, plain):
        m.train()
        m(input_ids=IDS, labels=IDS).loss.backward()
    assert torch.allclose(model(input_ids=IDS).logits, plain(input_ids=IDS).logits, atol=1e-5)
    a, b = ({n: p.grad for n, p in m.named_parameters() if p.requires_grad} for m in (model, plain))
    for name in a:
        assert torch.allclose(a[name], b[name], rtol=1e-4, atol=1e-6), name


def test_files_load_in_peft_and_pefts_load_here(tmp_path):
    from peft import LoraConfig, PeftModel, get_peft_model

    done = attach(tiny(), LoraStep(method="lora", rank=4))
    fill(done.model)
    done.model.eval()
    expected = done.model(input_ids=IDS).logits
    save_adapter(done.model, tmp_path / "ours", base=done.base, base_name="tiny")
    assert torch.allclose(PeftModel.from_pretrained(tiny(), tmp_path / "ours").eval()(input_ids=IDS).logits, expected, atol=1e-5)
    assert torch.equal(load_adapter(tiny(), tmp_path / "ours")(input_ids=IDS).logits, expected)
    theirs = get_peft_model(tiny(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    fill(theirs)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_adapter(tiny(), tmp_path / "theirs")(input_ids=IDS).logits
    assert torch.allclose(ours, theirs.eval()(input_ids=IDS).logits, atol=1e-5)


def test_saving_twice_gives_the_same_bytes(tmp_path):
    done = attach(tiny(), LoraStep(method="lora", rank=4))
    for name in ("a", "b", "a"):
        save_adapter(done.model, tmp_path / name, base=done.base, base_name="tiny")
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def test_an_adapter_for_another_base_is_refused(tmp_path):
    done = attach(tiny(), LoraStep(method="lora", rank=4))
    save_adapter(done.model, tmp_path / "a", base=done.base, base_name="tiny")
    with pytest.raises(KaruiError, match="another base"):
        load_adapter(tiny(seed=1), tmp_path / "a")


def test_fingerprint_sees_values_shapes_and_names():
    assert fingerprint(tiny()) == fingerprint(tiny())
    assert len({fingerprint(tiny()), fingerprint(tiny(seed=1)), fingerprint(tiny(bias=True)), fingerprint(tiny(tied=False))}) == 4


def test_damaged_adapters_are_refused(tmp_path):
    done = attach(tiny(), LoraStep(method="lora", rank=4))
    save_adapter(done.model, tmp_path / "a", base=done.base, base_name="tiny")
    path = tmp_path / "a" / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(CorruptError, match="cannot be read"):
        load_adapter(tiny(), tmp_path / "a")
    path.unlink()
    with pytest.raises(KaruiError, match="missing"):
        load_adapter(tiny(), tmp_path / "a")
    (tmp_path / "a" / "adapter_config.json").write_text("{")
    path.write_bytes(b"")
    with pytest.raises(CorruptError, match="JSON"):
        load_adapter(tiny(), tmp_path / "a")


def test_a_rank_that_does_not_fit_the_saved_tensors_is_refused(tmp_path):
    done = attach(tiny(), LoraStep(method="lora", rank=4))
    save_adapter(done.model, tmp_path / "a", base=done.base, base_name="tiny")
    config = tmp_path / "a" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "r": 5}))
    with pytest.raises(CorruptError, match="shape"):
        load_adapter(tiny(), tmp_path / "a")


def test_targets_are_resolved_or_refused_with_the_nearest_name():
    model = tiny()
    assert len(resolve_targets(model, "all-linear")) == 14 and "lm_head" not in resolve_targets(model, "all-linear")
    assert resolve_targets(model, ("mlp.up_proj",)) == [f"model.layers.{i}.mlp.up_proj" for i in range(2)]
    with pytest.raises(KaruiError, match=r"'q_prj'.*q_proj.*Did you mean 'q_proj'"):
        resolve_targets(model, ("v_proj", "q_prj"))
    with pytest.raises(KaruiError, match="shares its weight"):
        resolve_targets(model, ("lm_head",))
    assert resolve_targets(tiny(tied=False), ("lm_head",)) == ["lm_head"]


def test_a_rank_above_the_dimensions_is_refused():
    with pytest.raises(KaruiError, match=r"rank 33.*k_proj.*32"):
        attach(tiny(), LoraStep(method="lora", rank=33))


def test_targets_of_some_layers_only_are_kept_apart():
    done = attach(tiny(), LoraStep(method="lora", rank=2, targets=("layers.1.mlp.up_proj",)))
    assert done.targets == ("model.layers.1.mlp.up_proj",)
    assert sum(p.requires_grad for p in done.model.parameters()) == 2


@pytest.mark.parametrize("method,spec", [("lora", "none"), ("qlora", "nf4dq")])
def test_merging_gives_the_same_logits_and_reports(method, spec, tmp_path):
    done = attach(tiny(), LoraStep(method=method, rank=4, **({"base": spec} if method == "qlora" else {})))
    fill(done.model)
    done.model.eval()
    expected = done.model(input_ids=IDS).logits
    save_adapter(done.model, tmp_path / "a", base=done.base, base_name="tiny", base_spec=QuantSpec.parse(spec))
    assert adapter_values(tmp_path / "a")
    merged, report = merge_adapter(done.model)
    assert torch.allclose(merged(input_ids=IDS).logits, expected, atol=1e-5)
    assert len(report.layers) == 14 and report.base == spec and report.largest > 0
    assert not any("lora" in n or isinstance(m, QuantizedLinear) for n, m in merged.named_modules())
    assert merged.lm_head.weight is merged.model.embed_tokens.weight
