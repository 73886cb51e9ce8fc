"""Reference: the compiled searches against plain torch and against brute force."""

from __future__ import annotations

import pytest
import torch

from karui.configs import QuantSpec
from karui.kernels import rounding
from karui.kernels.quantize import elements
from karui.kernels.quantize.grid import grouped, inverse
from karui.kernels.quantize.integer import find_range
from karui.kernels.rounding import reference

native = pytest.mark.skipif(rounding._library() is None, reason="no compiler")


def loss(x: torch.Tensor, h: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, spec: QuantSpec) -> torch.Tensor:
    """Weighted squared error by group in float64."""
    step, shift = inverse(scale).double().unsqueeze(-1), 0 if zero is None else zero.double().unsqueeze(-1)
    codes = (torch.round(x.double() / step) + shift).clamp(*spec.code_range)
    return ((x.double() - (codes - shift) * step).square() * h.double()).sum(-1)


@native
@pytest.mark.parametrize("text", ["w4g32", "w3g24", "w2g16", "w4g32a", "w2g16a", "w8", "w4g32:bf16", "w3g24:fp32"])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_compiled_search_is_as_good_as_the_reference(text: str, weighted: bool) -> None:
    spec = QuantSpec.parse(text)
    generator = torch.Generator().manual_seed(3)
    w = torch.randn(37, 96, generator=generator) * torch.exp(torch.randn(37, 1, generator=generator))
    w[5] = 0.0
    x = grouped(w, spec)
    h = torch.rand(1, *x.shape[1:], generator=generator) if weighted else None
    start, zero = find_range(x, spec)
    ratios = torch.linspace(0.4, 1.2, 20).tolist()
    signs = 2 if spec.symmetric and spec.bits < 8 else 1
    wanted = reference.search_scale(x, h, start, zero, spec, ratios, signs, 2)
    found = rounding.search_scale(x, h, start, zero, spec, ratios=ratios, signs=signs, refine=2)
    assert found[0].dtype == start.dtype and (found[1] is None) == spec.symmetric
    weight = torch.ones_like(x[:1]) if h is None else h
    ours, theirs, first = (loss(x, weight, *grid, spec) for grid in (found, wanted, (start, zero)))
    assert (ours <= first * (1 + 1e-5)).all() and ours[5].sum() == 0
    torch.testing.assert_close(ours.sum(), theirs.sum(), rtol=1e-3, atol=0)
    near = torch.isclose(found[0].float(), wanted[0].float(), rtol=1e-5)  # equal but for fits that differ in the last bits
    assert float(near.float().mean()) > 0.97


@native
@pytest.mark.parametrize("columns", [1, 7, 64])
@pytest.mark.parametrize("rows", [1, 63, 64, 200])
@pytest.mark.parametrize("affine", [False, True])
def test_compiled_columns_follow_the_reference(columns: int, rows: int, affine: bool) -> None:
    generator = torch.Generator().manual_seed(columns + rows)
    work = torch.randn(columns, rows, generator=generator)
    rest = (torch.randn(columns, columns, generator=generator) * 0.1).triu()
    step = torch.rand(columns, rows, generator=generator) * 0.2 + 0.1
    step[:, ::3] *= -1
    zero = torch.randint(0, 16, (columns, rows), generator=generator).float() if affine else None
    low, high = (0, 15) if affine else (-8, 7)
    kept = work.clone()
    codes, err = rounding.round_columns(work, rest, step, zero, low, high)
    assert torch.equal(work, kept) and codes.min() >= low and codes.max() <= high and torch.equal(codes, codes.round())
    shift = 0 if zero is None else zero
    # by its definition in float64, following the codes that were chosen: what is left of each column is its error
    for j in range(columns):
        left = work[j].double() - (rest[:j, j, None].double() * err[:j].double()).sum(0)
        value = (codes[j] - (shift if zero is None else zero[j])).double() * step[j].double()
        torch.testing.assert_close(err[j].double(), left - value, rtol=0, atol=1e-5)
        free = (left / step[j] + (0 if zero is None else zero[j])).clamp(low, high)
        assert (free - codes[j]).abs().max() <= 0.5 + 1e-4
    again = reference.round_columns(work, rest, step, zero, low, high)
    assert float((again[0] == codes).float().mean()) > 0.98 and torch.equal(work, kept)


@native
@pytest.mark.parametrize("element", ["e2m1", "e4m3"])
def test_compiled_columns_round_to_small_floats_as_the_encoder_does(element: rounding.Element) -> None:
    """One column, so nothing is carried over: every magnitude from below the smallest step to beyond the largest, and all ties."""
    kind = elements.ELEMENTS[element]
    values = elements.decode(torch.arange(kind.max_code + 1, dtype=torch.uint8), kind)
    points = torch.cat([values, (values[1:] + values[:-1]) / 2, values * 1.01, values * 0.99, torch.tensor([1e-5, 500.0, 1e4])])
    points = torch.cat([points, -points])[None]
    wanted = elements.decode(elements.encode(points, kind), kind)
    one = torch.ones_like(points)
    codes, err = rounding.round_columns(points, torch.ones(1, 1), one, None, 0, 0, element)
    again, _ = reference.round_columns(points, torch.ones(1, 1), one, None, 0, 0, element)
    assert torch.equal(codes, wanted) and torch.equal(again, wanted) and torch.equal(err, points - wanted)


@native
def test_neither_threads_nor_rows_change_a_bit() -> None:
    spec = QuantSpec.parse("w3g32")
    w = torch.randn(301, 64, generator=torch.Generator().manual_seed(0))
    before = torch.get_num_threads()
    found = []
    for threads, rows in ((1, 301), (3, 301), (2, 150)):
        torch.set_num_threads(threads)
        x = grouped(w[:rows], spec)
        start, _ = find_range(x, spec)
        scale, _ = rounding.search_scale(x, None, start, None, spec, ratios=[0.6, 0.8, 1.0], signs=2)
        step = inverse(scale).repeat_interleave(32, 1).T.contiguous()
        codes, err = rounding.round_columns(w[:rows].T, torch.full((64, 64), 0.05).triu(), step, None, *spec.code_range)
        found.append((scale, codes[:, :150], err[:, :150]))
    torch.set_num_threads(before)
    for other in found[1:]:
        for a, b in zip(found[0], other):
            assert torch.equal(a[: len(b)], b) if a.ndim == 2 and len(a) != 64 else torch.equal(a, b)
