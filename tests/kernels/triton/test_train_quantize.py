"""Reference: the quantize kernels against the oracles of `karui.kernels.quantize`, every byte of codes and scales.

The kernels encode in integers (`triton_support.codecs`), never through the interpreter's fp8 casts, which drop carries; so what
holds in the interpreter holds on hardware. Inputs of the Hadamard transform are small integers, whose sums are exact in any order.
"""

import pytest
import torch
import triton
import triton.language as tl

from karui.configs.errors import KaruiError, UnsupportedError
from karui.kernels.quantize import elements
from karui.kernels.quantize.elements import E2M1, encode
from karui.kernels.train_quantize import KINDS, Noise, quantize_both
from karui.kernels.triton_support.codecs import decode_e2m1, decode_e4m3, encode_e2m1, encode_e4m3, encode_e5m2


@triton.jit
def _encode(x_ptr, out_ptr, size, FORMAT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, at < size, 0.0)
    if FORMAT == 0:
        codes = encode_e4m3(x)
    elif FORMAT == 1:
        codes = encode_e5m2(x)
    else:
        codes = encode_e2m1(x)
    tl.store(out_ptr + at, codes, at < size)


@triton.jit
def _decode(out_ptr, wide_ptr):
    at = tl.arange(0, 16)
    tl.store(out_ptr + at, decode_e2m1(at))
    at = tl.arange(0, 256)
    tl.store(wide_ptr + at, decode_e4m3(at))


def same(a, b):
    for name in ("codes", "scale", "global_scale"):
        x, y = getattr(a, name), getattr(b, name)
        if y is None:
            assert x is None
            continue
        assert x.shape == y.shape and x.dtype == y.dtype, (name, x.shape, y.shape, x.dtype, y.dtype)
        x, y = (t.contiguous().view(torch.uint8 if t.element_size() == 1 else torch.int32) for t in (x, y))
        assert torch.equal(x, y), (name, int((x != y).sum()), x.numel(), torch.nonzero(x != y)[:4].tolist())
    assert a.tile == b.tile and a.shape == b.shape


def matrix(m, k, device, rng, dtype=torch.float32):
    """Values over many magnitudes, with zeros, a zero block, and signs of both kinds."""
    x = torch.randn(m, k, generator=rng, device=device) * torch.exp2(torch.randint(-9, 9, (m, k), generator=rng, device=device).float())
    x[0, : min(k, 40)] = 0
    x[-1, -1] = -0.0
    return x.to(dtype)


@pytest.mark.parametrize(("shape", "dtype"), [((1, 1), torch.float32), ((37, 150), torch.bfloat16), ((130, 72), torch.float16), ((33, 70), torch.float32)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_bits(kind, shape, dtype, device, rng):
    x = matrix(*shape, device, rng, dtype)
    for got, want in zip(quantize_both(x, kind, backend="triton"), quantize_both(x, kind, backend="torch")):
        same(got, want)


@pytest.mark.parametrize("compat", ["ao", "deepgemm"])
@pytest.mark.parametrize("kind", ["e4m3-tensor", "e4m3-row", "e4m3-1x128", "e4m3-128x128"])
def test_other_libraries(kind, compat, device, rng):
    x = matrix(40, 260, device, rng)
    for pow2 in (False, True):
        fast = quantize_both(x, kind, compat=compat, power_of_two=pow2, backend="triton")
        for got, want in zip(fast, quantize_both(x, kind, compat=compat, power_of_two=pow2, backend="torch")):
            same(got, want)


@pytest.mark.parametrize("kind", ["e4m3-tensor", "e4m3-1x128", "mxfp8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e-40, 3e38], ids=str)
def test_extremes(kind, value, device, rng):
    x = matrix(3, 160, device, rng)
    x[1, 7] = value
    for got, want in zip(quantize_both(x, kind, backend="triton"), quantize_both(x, kind, backend="torch")):
        same(got, want)


@pytest.mark.parametrize("kind", ["e4m3-1x128", "nvfp4"])
def test_the_largest_magnitude_is_noted(kind, device, rng):
    x, seen = matrix(37, 150, device, rng).clamp(-100, 100), torch.zeros(3, device=device)
    x[5, 3] = -300.0
    for value, want in ((0.0, 300.0), (500.0, 500.0), (float("nan"), float("inf")), (0.0, float("inf"))):
        x[1, 7] = value
        for backend, at in (("triton", 1), ("torch", 2)):
            quantize_both(x, kind, cols=False, seen=seen[at], backend=backend)
        assert seen.tolist() == [0.0, want, want]


def test_a_strided_matrix_and_one_side_only(device, rng):
    x = matrix(64, 96, device, rng).t()
    one, other = quantize_both(x, "mxfp8", rows=False, backend="triton")
    assert one is None
    same(other, quantize_both(x, "mxfp8", rows=False, backend="torch")[1])


def test_delayed_scale(device, rng):
    x = matrix(20, 33, device, rng)
    scale = torch.tensor([3.7], device=device)
    for got, want in zip(quantize_both(x, "e5m2-tensor", scale=scale, backend="triton"),
                         quantize_both(x, "e5m2-tensor", scale=scale, backend="torch")):  # fmt: skip
        same(got, want)


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4"])
def test_noise_and_hadamard(kind, device, rng):
    x = torch.randint(-60, 60, (68, 84), generator=rng, device=device).float()
    options = {"hadamard": True, "row_noise": Noise(7, 3, 5, 0), "col_noise": Noise(2**40 + 9, 3, 5, 1)}
    fast = quantize_both(x, kind, **options, backend="triton")
    for got, want in zip(fast, quantize_both(x, kind, **options, backend="torch")):
        same(got, want)
    plain = quantize_both(x, kind, backend="torch")[0]
    assert not torch.equal(fast[0].codes, plain.codes)


def test_every_value_of_the_small_floats(device):
    """All midpoints, neighbours of midpoints and values of the three elements through the kernels' encoders."""
    for number, element in enumerate(elements.ELEMENTS.values()):
        values = elements.values(element)
        values = values[torch.isfinite(values)].unique()
        points = torch.cat([values, (values[1:] + values[:-1]) / 2, torch.tensor([1e9, float("inf"), 1e-45])])
        x = torch.cat([points, torch.nextafter(points, points + 1), torch.nextafter(points, points - 1)]).to(device)
        x = torch.cat([x, -x, torch.zeros(1, device=device)])
        out = torch.empty(x.numel(), dtype=torch.int32, device=device)
        _encode[(1,)](x, out, x.numel(), FORMAT=number, BLOCK=triton.next_power_of_2(x.numel()))
        assert torch.equal(out.to(torch.uint8), encode(x, element)), element.name


def test_e2m1_decodes(device):
    out, wide = torch.empty(16, device=device), torch.empty(256, device=device)
    _decode[(1,)](out, wide)
    assert torch.equal(out, elements.values(E2M1).to(device))
    assert torch.equal(wide.nan_to_num(nan=-1.0), elements.values(elements.E4M3).to(device).nan_to_num(nan=-1.0))


def test_refusals(device):
    x = torch.zeros(3, 5, device=device)
    with pytest.raises(KaruiError, match="is not known"):
        quantize_both(x, "fp6")
    with pytest.raises(KaruiError, match="Hadamard"):
        quantize_both(x, "mxfp8", hadamard=True)
    with pytest.raises(KaruiError, match="stochastic"):
        quantize_both(x, "mxfp8", row_noise=Noise(0, 0, 0, 0))
    with pytest.raises(UnsupportedError, match="multiple of 4"):
        quantize_both(x, "nvfp4", row_noise=Noise(0, 0, 0, 0), backend="triton")
    with pytest.raises(UnsupportedError, match="no ao variant"):
        quantize_both(x, "nvfp4", compat="ao", backend="triton")
