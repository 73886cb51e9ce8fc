"""Behavioural: mixtures of experts are quantized expert by expert; experts that saw too few tokens are named, none is NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from karui.configs import UnsupportedError
from karui.kernels.qtensor import QTensor
from karui.qat.experts import Experts, unfuse
from karui.qat.methods import METHODS
from karui.qat.types import LayerReport
from tests.qat.conftest import rows, run, tiny
from tests.qat.test_run import QUICK, names_for

SMALL: dict[str, Any] = dict(num_hidden_layers=2, moe_intermediate_size=32, shared_expert_intermediate_size=48, num_local_experts=6,
                             num_experts=6, num_experts_per_tok=2)  # fmt: skip
KINDS = {"mixtral": 2 * (4 + 6 * 3), "qwen2_moe": 2 * (4 + 6 * 3 + 3), "gpt_oss": 2 * (4 + 6 * 3)}
METHODS_HERE = [m for m in METHODS if m != "rotation"]


def moe(kind: str, seed: int = 0, **changes: Any) -> Any:
    return tiny(kind, seed=seed, **{**SMALL, **changes})


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(rows(3, 20, seed=9)).logits


@pytest.mark.parametrize("kind", KINDS)
def test_taking_experts_apart_leaves_the_logits_alone(kind: str) -> None:
    model = moe(kind)
    before, size = logits(model), sum(p.numel() for p in model.parameters())
    assert unfuse(model) == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-5)
    assert sum(p.numel() for p in model.parameters()) == size
    assert unfuse(model) == [] and isinstance(model.model.layers[0].mlp.experts, Experts)


@pytest.mark.parametrize("name", METHODS_HERE)
@pytest.mark.parametrize("kind", KINDS)
def test_no_expert_stays_in_high_precision(kind: str, name: str) -> None:
    model = moe(kind)
    result = run(model, name, names_for(name), settings=QUICK.get(name, {}))
    quantized = {n for n, v in result.weights.items() if isinstance(v, QTensor)}
    assert len(quantized) == KINDS[kind] and sum(".experts." in n for n in quantized) == 2 * 6 * 3
    assert not any(isinstance(v, torch.Tensor) and v.ndim == 3 for v in result.weights.values())
    assert all(torch.isfinite(v).all() for v in result.dense().values())
    other = moe(kind, seed=5)
    unfuse(other)
    other.load_state_dict(result.dense(), strict=True)
    assert torch.equal(logits(model), logits(other))


def test_the_router_and_the_shared_expert_s_gate_stay_and_are_named() -> None:
    result = run(moe("qwen2_moe"), "rtn")
    fates = {r.name: r for r in result.report}
    gate = "model.layers.0.mlp.shared_expert_gate.weight"
    assert fates[gate].spec == "none" and "router" in fates[gate].note
    assert isinstance(result.weights["model.layers.0.mlp.gate.weight"], torch.Tensor)


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_tokens_are_counted_by_expert_and_a_starved_one_is_named(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model = moe("mixtral")
    router = model.model.layers[0].mlp.gate.weight.data
    router[2] = 0.0  # scores 0 against the others' spread: among the first two of six for almost no token
    router[3:] *= 4
    result = run(model, name, settings={"min_tokens": 60})
    report: dict[str, LayerReport] = {r.name: r for r in result.report if ".layers.0.mlp.experts." in r.name}
    counted = [report[f"model.layers.0.mlp.experts.{e}.down_proj.weight"].tokens for e in range(6)]
    assert sum(counted) == 2 * rows().numel() and min(counted) < 60 <= max(counted)
    for e, tokens in enumerate(counted):
        for part in ("gate_proj", "up_proj", "down_proj"):
            entry = report[f"model.layers.0.mlp.experts.{e}.{part}.weight"]
            assert entry.tokens == tokens
            assert (entry.fallback is not None) == (tokens < 60)
            if tokens < 60:
                assert (
                    f"only {tokens} of {rows().numel()} tokens reached it" in (entry.fallback or "") and entry.name in caplog.text
                )


def test_an_expert_no_token_reached_has_finite_codes() -> None:
    model = moe("mixtral")
    for layer in model.model.layers:
        layer.mlp.gate.weight.data[5] = layer.mlp.gate.weight.data[4] * 0.0
        layer.mlp.gate.weight.data[:2] *= 30
    for name in METHODS_HERE:
        found = run(moe_copy(model), name, names_for(name), settings=QUICK.get(name, {}))
        assert all(torch.isfinite(v).all() for v in found.dense().values()), name


def moe_copy(model: nn.Module) -> Any:
    other = moe("mixtral", seed=3)
    other.load_state_dict(model.state_dict())
    return other


def test_down_of_an_expert_is_calibrated_on_its_quantized_gate_and_up() -> None:
    """The Hessian of down_proj is that of the inputs the quantized gate and up give, not of the unquantized ones."""
    from karui.qat.gptq import accumulate
    from tests.qat.test_methods import block_of

    model = moe("mixtral")
    unfuse(model)
    block = block_of(model, 0)
    first, second = block.stages()[-2:]
    assert {n.rpartition(".weight")[0].rpartition(".")[2] for g in first for n in g.names} == {"gate_proj", "up_proj"}
    assert {n.rpartition(".weight")[0].rpartition(".")[2] for g in second for n in g.names} == {"down_proj"}
    before, counts = accumulate(block, second)
    for group in first:
        for n in group.names:
            block.linears[n].weight.data.mul_(0.5)
    after, _ = accumulate(block, second)
    assert sum(counts) == 2 * block.tokens
    assert all(float(a.trace()) < float(b.trace()) for a, b, c in zip(after, before, counts) if c)


def test_a_layout_that_is_not_plain_is_refused() -> None:
    odd = moe("mixtral")
    odd.model.layers[1].mlp.experts.has_post_expert_norm = True
    with pytest.raises(UnsupportedError, match="fused experts of MixtralExperts.*has_post_expert_norm"):
        run(odd, "rtn")
    model = tiny()
    model.model.layers[1].mlp.extra = nn.Parameter(torch.zeros(2, 3, 4))
    with pytest.raises(UnsupportedError, match=r"layers\.1\.mlp\.extra is a 3-D parameter"):
        run(model, "rtn")
