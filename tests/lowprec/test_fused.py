"""Reference tests: the one-pass emulation gives the bits of the oracle's codes, natively and in torch, wherever a matrix lies."""

import pytest
import torch

from karui.kernels.native import train
from karui.kernels.quantize import elements, fused
from karui.kernels.quantize.elements import ELEMENTS
from karui.kernels.quantize.fused import NoiseKey, hadamard_blocks, scaled_codes, tile_amax
from karui.kernels.quantize.nvfp4 import hadamard16, signs16
from karui.lowprec.operand import as_values, encode, values
from karui.lowprec.precision import GEMMS, RECIPES, Precision

KEY = NoiseKey(seed=(3 << 32) + 7, step=torch.tensor(5), layer=11, tensor=1)
CASES = sorted(
    {(repr(o), o, c) for r in RECIPES for g in GEMMS for o in Precision(recipe=r).operands(g, r)
     for c in ("te", "ao", "deepgemm") if not (r == "nvfp4" and c == "deepgemm")},
    key=lambda case: (case[0], case[2]),
)  # fmt: skip


@pytest.fixture(params=["native", "torch"])
def path(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(fused, "_library", lambda: None)
    elif fused._library() is None:
        pytest.skip("no compiler here")
    return request.param


def bits(x):
    """fp32 bits with every NaN alike."""
    return torch.where(torch.isnan(x), float("nan"), x).contiguous().view(torch.int32)


def matrices():
    generator = torch.Generator().manual_seed(0)
    for shape in ((1, 1), (33, 64), (40, 96), (128, 50), (17, 272), (16, 2000)):
        x = torch.randn(shape, generator=generator) * torch.exp(3 * torch.randn(shape, generator=generator))
        yield x
        yield x.t().contiguous().t()  # the same values, lying the other way
        yield x.bfloat16()
    special = torch.randn(32, 128, generator=generator) * 1e-30
    special[3], special[4, 7], special[5, ::3] = 0.0, 1e30, -0.0
    yield special
    for bad in (float("nan"), float("inf"), -float("inf")):
        broken = torch.randn(32, 128, generator=generator)
        broken[9, 20] = bad
        yield broken
    yield torch.zeros(32, 32)
    yield torch.full((4, 64), 1e-45)


@pytest.mark.parametrize("name, operand, compat", CASES, ids=[f"{c[0][8:70]}-{c[2]}" for c in CASES])
def test_values_are_the_oracles(path, name, operand, compat):
    for x in matrices():
        noise = KEY if operand.stochastic else None
        for scale in (torch.tensor(0.0), torch.tensor(37.5)) if operand.delayed else (None,):
            expected = encode(x, operand, compat=compat, scale=scale, noise=noise).dequantize()
            one_pass, _ = values(x, operand, compat=compat, scale=scale, noise=noise)
            for got in (one_pass, as_values(encode(x, operand, compat=compat, scale=scale, noise=noise))):
                if operand.format == "nvfp4":  # the tensor's scale is multiplied with last
                    assert torch.allclose(got.dequantize(), expected, rtol=4e-7, atol=1e-44, equal_nan=True)
                else:
                    assert torch.equal(bits(got.dequantize()), bits(expected)), (tuple(x.shape), x.dtype, x.stride())
                if got.exact:
                    assert torch.equal(bits(got.value), bits(got.value.bfloat16().float()))
            if operand.tile == "tensor":
                got, coded = values(x, operand, compat=compat, scale=scale, keep=True)
                assert torch.equal(bits(coded.dequantize()), bits(expected)) and torch.equal(
                    bits(got.dequantize()), bits(expected)
                )


def test_every_float8_code_survives_a_round_trip(path):
    for element in (ELEMENTS[n] for n in ("e4m3", "e5m2")):
        codes = torch.arange(256, dtype=torch.uint8).view(element.dtype).float().view(2, 128)
        finite = torch.where(torch.isfinite(codes), codes, 0.0)
        one = torch.ones(1, 1)
        got, value = scaled_codes(finite, one, one, element)
        assert torch.equal(got.view(torch.uint8), finite.to(element.dtype).view(torch.uint8)) and torch.equal(
            bits(value), bits(finite)
        )


def test_midpoints_and_their_neighbours(path):
    """Every border between two E4M3, E5M2 and E2M1 values, and the fp32 numbers on its two sides."""
    one = torch.ones(1, 1)
    for element in ELEMENTS.values():
        grid = elements.values(element)
        grid = grid[torch.isfinite(grid)].unique()
        middle = (grid[1:] + grid[:-1]) / 2
        x = torch.cat([middle, torch.nextafter(middle, torch.tensor(1e9)), torch.nextafter(middle, torch.tensor(-1e9)), grid])[
            None
        ]
        got = fused.scaled_values(x, one, one, (1, x.shape[1]), element)
        assert torch.equal(got, elements.decode(elements.encode(x, element), element))


def test_amax_of_tiles_at_ragged_edges(path):
    x = torch.randn(37, 70)
    x[36, 69], x[0, 0] = float("nan"), -float("inf")
    for rows, cols in ((1, 16), (16, 16), (16, 1), (128, 128), (1, 70), (37, 70)):
        got = tile_amax(x, rows, cols)
        for i in range(got.shape[0]):
            for j in range(got.shape[1]):
                expected = x[i * rows : (i + 1) * rows, j * cols : (j + 1) * cols].abs().max()
                assert torch.equal(bits(got[i, j]), bits(expected))


def test_butterflies_are_the_matrix(path):
    x = torch.randn(48, 80)
    expected = (x.double().view(48, 5, 16) @ hadamard16().double()).view(48, 80)
    for y in (hadamard_blocks(x, signs16()), hadamard_blocks(x.t().contiguous().t(), signs16())):
        assert (y - expected).abs().max() < 1e-6
    assert torch.equal(hadamard_blocks(x, signs16()), hadamard_blocks(x.t().contiguous().t(), signs16()))


@pytest.mark.parametrize("m, n, k", [(1, 1, 1), (5, 7, 3), (12, 32, 384), (13, 33, 385), (100, 70, 1001)])
def test_exact_products_against_float64(path, m, n, k):
    """Whichever way the operands lie, on one thread and on more; the error of k sums in fp32."""
    if path == "native" and not train.has_bf16():
        pytest.skip("no AVX512-BF16 here")
    a, b = (torch.randn(rows, k).bfloat16().float() for rows in (m, n))
    expected = a.double() @ b.double().t()
    size = a.double().abs() @ b.double().abs().t()
    first = fused.exact_product(a, b)
    assert ((first - expected).abs() <= 2e-7 * k**0.5 * size + 1e-30).all()
    for left in (a, a.t().contiguous().t()):
        for right in (b, b.t().contiguous().t()):
            again = fused.exact_product(left, right)
            assert torch.equal(again, first) if path == "native" else torch.allclose(again, first, atol=1e-5)
