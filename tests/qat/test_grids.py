"""Reference: steps, codes and searches of every grid against dequantization itself; GPTQ on all of them against rounding."""

from __future__ import annotations

import pytest
import torch

from karui.configs import QuantSpec, UnsupportedError
from karui.kernels.qtensor import QTensor
from karui.kernels.quantize import quantize
from karui.kernels.quantize.grid import grouped
from karui.qat.gptq import GPTQConfig, solve
from karui.qat.grids import SOLVABLE, coded, element, searched, step_of, zero_of
from tests.qat.conftest import run, tiny

GRIDS = ["w4g32", "w3g32a", "w2g64", "w8", "w8t", "w1.58", "w1.58g32", "fp8", "fp8t", "mxfp8", "mxfp4", "nvfp4"]


def weight(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(40, 128, generator=generator) * torch.exp(torch.randn(40, 1, generator=generator)) * 0.05
    w[3] = 0.0
    return w


def values_of(q: QTensor) -> torch.Tensor:
    from karui.kernels.quantize import elements

    return elements.decode(q.codes, elements.E2M1) if element(q.spec) == "e2m1" else q.codes.float()


@pytest.mark.parametrize("text", GRIDS)
def test_steps_and_codes_are_the_grid_s_own(text: str) -> None:
    spec = QuantSpec.parse(text)
    q = quantize(weight(), spec)
    zero = zero_of(q)
    value = values_of(q) if zero is None else values_of(q) - zero
    torch.testing.assert_close(value * step_of(q), q.dequantize(), rtol=1e-6, atol=0)
    again = coded(q, values_of(q))
    assert torch.equal(again.dequantize(), q.dequantize()) and again.codes.dtype == q.codes.dtype


@pytest.mark.parametrize("text", GRIDS)
@pytest.mark.parametrize("weighted", [False, True])
def test_no_group_loses_by_the_search(text: str, weighted: bool) -> None:
    spec, w = QuantSpec.parse(text), weight()
    h = torch.rand(128, generator=torch.Generator().manual_seed(1)) if weighted else None
    found, plain = searched(w, spec, weight=h), quantize(w, spec)

    def loss(q: QTensor) -> torch.Tensor:
        return grouped((w - q.dequantize()).double().square() * (1 if h is None else h), spec).sum(-1)

    ours, theirs = loss(found), loss(plain)
    assert (ours <= theirs * (1 + 1e-5) + 1e-12).all()
    if spec.format in ("ternary", "nvfp4") or (spec.format == "int" and spec.bits < 5):
        assert ours.sum() < 0.97 * theirs.sum()
    if spec.format == "mxfp4":  # its rule is nearly the best power of two
        assert ours.sum() < theirs.sum()
    assert found.scale.dtype == plain.scale.dtype and found.codes.dtype == plain.codes.dtype


@pytest.mark.parametrize("text", GRIDS)
def test_gptq_beats_rounding_on_every_grid(text: str) -> None:
    spec, w = QuantSpec.parse(text), weight()
    x = torch.randn(600, 128, generator=torch.Generator().manual_seed(2)) @ torch.randn(128, 128)
    gram = 2 * x.T @ x / len(x)
    result = solve(w, gram, spec, GPTQConfig())
    assert result is not None
    q, nearest = result[0], searched(w, spec, weight=gram.diagonal())

    def lost(value: torch.Tensor) -> float:
        return float(((w - value) @ x.T).double().square().sum())

    assert lost(q.dequantize()) < 0.9 * lost(nearest.dequantize())
    assert torch.equal(q.dequantize()[3], torch.zeros(128))


@pytest.mark.parametrize("text", ["w1.58", "w1.58g16", "fp8", "mxfp4", "nvfp4", "w8t"])
@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_a_whole_model_on_other_grids(text: str, method: str) -> None:
    result = run(tiny(hidden_size=64, intermediate_size=96), method, text)
    found = [v for v in result.weights.values() if isinstance(v, QTensor)]
    assert len(found) == 21 and {str(v.spec) for v in found} == {text}
    assert all(r.fallback is None for r in result.report)
    if QuantSpec.parse(text).granularity == "tensor":
        assert len({float(v.scale) for v in found}) > 18  # each its own


@pytest.mark.parametrize("text", ["nf4", "w1"])
def test_a_grid_without_a_step_is_refused_by_gptq(text: str) -> None:
    assert QuantSpec.parse(text).format not in SOLVABLE
    with pytest.raises(UnsupportedError, match="GPTQ serves the grids"):
        run(tiny(hidden_size=64, intermediate_size=128), "gptq", text)
