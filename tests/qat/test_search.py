"""Reference: the scale search against brute force over a dense set of scales in float64."""

from __future__ import annotations

import pytest
import torch

from karui.configs import QuantSpec, UnsupportedError
from karui.kernels.quantize import quantize
from karui.qat.search import encode, search_scale, weight_error


@pytest.mark.parametrize("spec", ["w2g16", "w3g16", "w4g16", "w2g16a", "w4g16a", "w4", "w8", "w4t"])
def test_never_worse_than_the_range(spec: str) -> None:
    w = torch.randn(12, 64, generator=torch.Generator().manual_seed(0))
    grid = QuantSpec.parse(spec)
    q = encode(w, grid, *search_scale(w, grid), tuple(w.shape))
    assert weight_error(w, q) <= weight_error(w, quantize(w, grid)) + 1e-9


@pytest.mark.parametrize("bits", [2, 3])
def test_close_to_the_best_scale_by_brute_force(bits: int) -> None:
    w = torch.randn(6, 16, generator=torch.Generator().manual_seed(1))
    grid = QuantSpec.parse(f"w{bits}g16")
    low, high = grid.code_range
    scales = torch.linspace(-3, 3, 20001, dtype=torch.float64)
    scales = scales[scales.abs() > 0.01]
    x = w.double()
    codes = (x[None] / scales[:, None, None]).round().clamp(low, high)
    best = ((codes * scales[:, None, None] - x) ** 2).sum(-1).min(0).values
    q = encode(w, grid, *search_scale(w, grid, steps=60), tuple(w.shape))
    assert ((q.dequantize() - w) ** 2).sum(-1).double().sum() <= best.sum() * 1.03


def test_weights_move_the_choice_towards_important_inputs() -> None:
    w = torch.randn(8, 16, generator=torch.Generator().manual_seed(2))
    h = torch.ones(16)
    h[3] = 1000.0
    grid = QuantSpec.parse("w2g16")
    plain = encode(w, grid, *search_scale(w, grid), (8, 16)).dequantize()
    tuned = encode(w, grid, *search_scale(w, grid, weight=h), (8, 16)).dequantize()
    assert ((tuned - w)[:, 3] ** 2).sum() < ((plain - w)[:, 3] ** 2).sum()


def test_encode_is_quantize_with_the_same_scale() -> None:
    w = torch.randn(8, 32, generator=torch.Generator().manual_seed(3))
    for spec in ("w3g16", "w3g16a"):
        grid = QuantSpec.parse(spec)
        scale, zero = search_scale(w, grid)
        ours, core = encode(w, grid, scale, zero, (8, 32)), quantize(w, grid, scale=scale, zero=zero)
        assert torch.equal(ours.codes, core.codes) and torch.equal(ours.scale, core.scale)


def test_all_zero_group_stays_zero() -> None:
    w = torch.zeros(2, 32)
    grid = QuantSpec.parse("w4g16")
    assert torch.equal(encode(w, grid, *search_scale(w, grid), (2, 32)).dequantize(), w)


def test_other_grids_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="int grids"):
        search_scale(torch.randn(4, 64), QuantSpec.parse("nf4"))
