"""Reference: folds and rotations leave the model's output alone; activation grids and LLM.int8() against plain arithmetic."""

from __future__ import annotations

import pytest
import torch

from karui.configs import KaruiError, QuantSpec, UnsupportedError
from karui.kernels.quantize import quantize
from karui.qat import hqq
from karui.qat.activations import attach, fake_quantize_static, fake_quantize_tokens
from karui.qat.autoround import LearnedRounding
from karui.qat.calibration import Block, block_arguments, decoder_of
from karui.qat.fold import all_groups, pairs
from karui.qat.llm_int8 import linear
from karui.qat.methods import METHODS
from karui.qat.rotation import RotationConfig, orthogonal, prepare_model
from karui.qat.smoothquant import factors
from tests.qat.conftest import rows, run, tiny


def block_of(model: torch.nn.Module, index: int = 1) -> Block:
    data = rows()
    kwargs, embed = block_arguments(model, data.shape[1])
    _, layers, prefix = decoder_of(model)
    block = Block(
        index=index, name=f"{prefix}.{index}", module=layers[index], linears={}, specs={}, kwargs=kwargs[index], inputs=embed(data),
        targets=None, batch=4, device=torch.device("cpu"), seed=0,
    )  # fmt: skip
    block.linears = block.linears_all
    return block


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_every_fold_of_awq_and_smoothquant_leaves_the_block_alone(kind: str) -> None:
    block = block_of(tiny(kind))
    found = pairs(block, all_groups(block))
    assert {p.producer.rpartition("layers.1.")[2] for p in found} == {
        "input_layernorm.weight", "self_attn.v_proj.weight", "post_attention_layernorm.weight", "mlp.up_proj.weight",
    }  # fmt: skip
    with torch.no_grad():
        before = block.forward(block.inputs)
        for pair in found:
            width = block.linears_all[pair.consumers[0]].in_features
            pair.fold(pair.share(torch.rand(width) * 3 + 0.2), block.linears_all)
        torch.testing.assert_close(block.forward(block.inputs), before, rtol=1e-4, atol=1e-4)


def test_stages_are_found_by_what_linears_read() -> None:
    block = block_of(tiny("qwen3"))
    names = [[n.rpartition(".weight")[0].rpartition(".")[2] for g in s for n in g.names] for s in block.stages()]
    assert names == [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]]


def test_replayed_passes_give_the_block_s_own_inputs_and_outputs() -> None:
    block = block_of(tiny())
    wanted: dict[str, list[torch.Tensor]] = {}
    hooks = [
        m.register_forward_pre_hook(lambda _, a, n=n: wanted.setdefault(n, []).append(a[0])) for n, m in block.linears.items()
    ]
    with torch.no_grad():
        out = torch.cat([block.forward(block.inputs[r]) for r in block.slices()])
    for h in hooks:
        h.remove()
    for stage in block.stages():
        for i, (group, x) in enumerate(block.capture(stage)):
            for name in group.names:
                assert torch.equal(x, wanted[name][i].reshape(x.shape))
    assert torch.equal(torch.cat([y for _, y in block.propagate()]), out)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_rotation_leaves_the_logits_alone(kind: str, tied: bool) -> None:
    model = tiny(kind, tie_word_embeddings=tied)
    config = model.config.to_dict()
    with torch.no_grad():
        before = model(rows()).logits
        before_v = model.model.layers[0].self_attn.v_proj.weight.clone()
        prepare_model(model, config, RotationConfig(), 0)
        after = model(rows()).logits
    assert not torch.allclose(before_v, model.model.layers[0].self_attn.v_proj.weight)
    assert (after - before).abs().max() <= 1e-4 * before.abs().max()
    assert config["tie_word_embeddings"] is False


def test_rotation_without_r1_keeps_the_tie() -> None:
    model = tiny(tie_word_embeddings=True)
    result = run(model, "rotation", settings={"r1": False})
    assert result.config["tie_word_embeddings"] is True and "lm_head.weight" not in result.weights


@pytest.mark.parametrize("n", [1, 8, 12, 576])
def test_orthogonal(n: int) -> None:
    r = orthogonal(n, torch.Generator().manual_seed(0))
    torch.testing.assert_close(r @ r.T, torch.eye(n, dtype=torch.float64))


@pytest.mark.parametrize("grid", ["w3g32", "w1.58g32", "mxfp4", "nvfp4", "fp8"])
def test_awq_beats_rounding_where_some_channels_are_strong(grid: str) -> None:
    """On every kind of grid it serves; the error is that of the logits."""
    errors = {}
    for method in ("rtn", "awq"):
        model = tiny(num_hidden_layers=1)
        for layer in model.model.layers:
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.weight.data[3::16] *= 30
        with torch.no_grad():
            before = model(rows()).logits
            run(model, method, grid, rows())
            errors[method] = float((model(rows()).logits - before).norm() / before.norm())
    # a small float errs by a share of each weight, so that scaling one up gains less; powers of two leave least of it
    assert errors["awq"] < (1.0 if grid == "mxfp4" else 0.9) * errors["rtn"], errors


def test_smoothquant_factors_at_half_level_both_maxima() -> None:
    x, w = torch.tensor([16.0, 1.0, 0.0]), torch.tensor([1.0, 4.0, 2.0])
    s = factors(x, w, 0.5)
    torch.testing.assert_close(s, torch.tensor([4.0, 0.5, 1.0]))
    torch.testing.assert_close((x / s)[:2], (w * s)[:2])


def test_smoothquant_beats_plain_w8a8_where_activations_have_outliers() -> None:
    def outlying() -> torch.nn.Module:
        model = tiny()
        for layer in model.model.layers:
            layer.input_layernorm.weight.data[5] *= 200
            layer.post_attention_layernorm.weight.data[9] *= 200
            for m in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
                m.weight.data[:, 5] /= 200
            for m in (layer.mlp.gate_proj, layer.mlp.up_proj):
                m.weight.data[:, 9] /= 200
        return model

    with torch.no_grad():
        wanted = outlying()(rows(seed=4)).logits
        errors = {}
        for name, settings in (("rtn", {"clip_search": False}), ("smoothquant", {"alpha": 0.5}), ("smoothquant", {})):
            model = outlying()
            result = run(model, name, "w8a8", settings=settings)
            attach(model, {r.name: None for r in result.report if r.spec == "w8a8"})
            kind = f"{name} {settings.get('alpha', 'searched')}"
            errors[kind] = float((model(rows(seed=4)).logits - wanted).norm() / wanted.norm())
    assert errors["smoothquant 0.5"] < 0.5 * errors["rtn searched"]
    assert errors["smoothquant searched"] < errors["smoothquant 0.5"]


def test_llm_int8_is_decomposed_as_in_the_paper() -> None:
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(7, 32, generator=g), torch.randn(5, 32, generator=g)
    x[2, 3], x[:, 20] = 30.0, 9.0
    q = quantize(w, QuantSpec.parse("w8a8"))
    wanted = torch.zeros(7, 5, dtype=torch.float64)
    deq = q.dequantize().double()
    for i in range(7):
        rest = [j for j in range(32) if j not in (3, 20)]
        scale = max(abs(float(x[i, j])) for j in rest) / 127
        for o in range(5):
            total = sum(round(float(x[i, j]) / scale) * int(q.codes[o, j]) for j in rest) * scale * float(q.scale[o, 0])
            wanted[i, o] = total + sum(float(x[i, j]) * float(deq[o, j]) for j in (3, 20))
    torch.testing.assert_close(linear(x, q).double(), wanted, rtol=1e-4, atol=1e-4)
    exact = x @ q.dequantize().T  # what is left is the activations' rounding alone
    assert (linear(x, q) - exact).norm() < 0.3 * (linear(x, q, threshold=0) - exact).norm()


def test_llm_int8_refuses_other_grids() -> None:
    with pytest.raises(UnsupportedError, match="w8a8"):
        run(tiny(), "llm_int8", "w4g16")


def test_activation_grids() -> None:
    x = torch.tensor([[1.0, -127.0, 0.4], [0.0, 0.0, 0.0]], requires_grad=True)
    y = fake_quantize_tokens(x)
    assert y.tolist() == [[1.0, -127.0, 0.0], [0.0, 0.0, 0.0]]
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(2, 3))  # type: ignore[arg-type]
    x.grad = None
    fake_quantize_static(x, 0.5).sum().backward()
    assert x.grad is not None and x.grad[0].tolist() == [1.0, 0.0, 1.0]  # -127 lies outside +-63.5
    with pytest.raises(KaruiError, match="not the weight of a linear"):
        attach(tiny(), {"model.norm.weight": None})


def test_hqq_lowers_the_norm_it_minimises() -> None:
    g = torch.Generator().manual_seed(0)
    w = torch.randn(16, 64, generator=g) / torch.rand(16, 64, generator=g).sqrt().clamp_min(0.1)
    for spec in ("w3g16", "w3g16a"):
        grid = QuantSpec.parse(spec)
        config = hqq.HQQConfig(search=False)
        ours = (hqq.solve(w, grid, config).dequantize() - w).abs().pow(0.7).sum()
        assert ours < (quantize(w, grid).dequantize() - w).abs().pow(0.7).sum()


@pytest.mark.parametrize("spec", ["w4g16", "w2g16", "w3g16a"])
def test_learned_rounding_trains_what_it_exports(spec: str) -> None:
    w = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
    start = quantize(w, QuantSpec.parse(spec))
    learned = LearnedRounding(w, start)
    assert torch.equal(learned.codes().codes, start.codes)
    for _ in range(5):
        (learned.value() * torch.linspace(-1, 1, 32)).sum().backward()
        learned.step(0.1, 0.2, 0.3)
        assert torch.equal(learned.value().detach(), learned.codes().dequantize())
    assert not torch.equal(learned.codes().codes, start.codes)


def test_the_registry_says_what_each_costs() -> None:
    for name, entry in METHODS.items():
        assert entry.paper and entry.cost and hasattr(entry.load(), "quantize_block"), name
