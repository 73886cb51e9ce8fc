"""Reference tests of the FP8, MXFP8, MXFP4 and NVFP4 quantizers: goldens, float64 brute force, the libraries' differences."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from karui.configs import KaruiError, QuantSpec, UnsupportedError
from karui.kernels.quantize import quantize
from karui.kernels.quantize.compat import tiled_amax
from karui.kernels.quantize.elements import E2M1, E4M3, E5M2, decode, encode
from karui.kernels.quantize.microscaling import e8m0_value, quantize_mx, scale_exponent
from karui.kernels.quantize.noise import noise_bits
from karui.kernels.quantize.nvfp4 import SIGNS, global_scale, hadamard16, quantize_nvfp4, random_hadamard
from karui.kernels.quantize.scaled_float8 import quantize_float8, tile_scales
from tests.lowprec import goldens
from tests.lowprec.test_elements import brute_force


def matrix(rows, cols, seed=0, spread=3.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, cols, generator=generator) * torch.exp2(spread * torch.randn(rows, cols, generator=generator))


# FP8


@pytest.mark.parametrize("tile,size", [("tensor", (40, 300)), ("row", (1, 300)), ("1x128", (1, 128)), ("128x128", (128, 128))])
@pytest.mark.parametrize("element", [E4M3, E5M2])
@pytest.mark.parametrize("compat", ["te", "ao", "deepgemm"])
def test_float8_tiles_against_float64(tile, size, element, compat):
    """Each tile by itself in numpy: its scale from float64, its codes by brute force, its values by multiplication."""
    x = matrix(40, 300) if tile != "128x128" else matrix(200, 300)
    q = quantize_float8(x, tile=tile, element=element, compat=compat, power_of_two=False)
    value = q.dequantize()
    for i in range(0, x.shape[0], size[0]):
        for j in range(0, x.shape[1], size[1]):
            part = x[i : i + size[0], j : j + size[1]].numpy()
            amax = float(np.abs(part).max())
            scale = q.scale[i // size[0], j // size[1]].item()
            assert scale == pytest.approx(amax / element.max, rel=3e-7)
            enc = np.float32(1.0) / np.float32(scale) if compat == "deepgemm" else np.float32(element.max / amax)
            codes = brute_force(np.float32(part * enc), element)
            assert np.array_equal(q.codes[i : i + size[0], j : j + size[1]].view(torch.uint8).numpy(), codes)
            expected = decode(torch.from_numpy(codes), element).double() * scale
            assert torch.allclose(value[i : i + size[0], j : j + size[1]].double(), expected, rtol=1e-7, atol=0)


def test_te_rounds_power_of_two_scales_down_and_deepgemm_rounds_its_inverse_up():
    x = matrix(4, 256)
    for compat, tile in (("te", "1x128"), ("deepgemm", "1x128")):
        q = quantize_float8(x, tile=tile, compat=compat, power_of_two=True)
        exponent = torch.log2(q.scale)
        assert torch.equal(exponent, exponent.round())
        ratio = q.scale / (tiled_amax(x, 1, 128) / 448)
        assert (ratio >= 1 - 1e-6).all() and (ratio < 2).all()
    assert quantize_float8(x, tile="1x128").scale.log2().frac().abs().max() == 0  # te's default for tiles of 128
    assert quantize_float8(x, tile="1x128", compat="ao").scale.log2().frac().abs().max() > 0


def test_amax_edges_of_each_library():
    amax = torch.tensor([[0.0, float("inf"), float("nan"), 1e-45, 448.0]])
    enc, dec = tile_scales(amax, E4M3, "te", False)
    assert enc[0, :3].tolist() == [1.0, 1.0, 1.0] and enc[0, 3] == torch.finfo(torch.float32).max and enc[0, 4] == 1.0
    assert torch.isfinite(dec).all()
    enc, _ = tile_scales(amax, E4M3, "ao", False)
    assert enc[0, 0].item() == np.float32(448 / 1e-12) and enc[0, 1] == 0 and torch.isnan(enc[0, 2])
    enc, dec = tile_scales(amax, E4M3, "deepgemm", False)
    assert dec[0, 0].item() == np.float32(np.float32(1e-4) / np.float32(448)) and dec[0, 3] == dec[0, 0]


def test_scales_are_divisions_rounded_once():
    """`number / tensor` in torch is a product with the reciprocal, which is off by one unit for a tenth of all inputs."""
    amax = matrix(100, 100, seed=9).abs()
    exact = torch.from_numpy(np.float32(448.0) / amax.numpy())
    assert torch.equal(tile_scales(amax, E4M3, "te", False)[0], exact) and not torch.equal(448.0 / amax, exact)
    assert torch.equal(global_scale(amax), torch.from_numpy(np.float32(2688.0) / amax.numpy()))


@pytest.mark.parametrize("compat", ["te", "ao", "deepgemm"])
@pytest.mark.parametrize("tile", ["tensor", "row", "1x128", "128x128"])
def test_zeros_stay_zero_and_give_no_nan(compat, tile):
    x = torch.zeros(130, 130)
    x[0, 0] = 1.0 if tile != "tensor" else 0.0
    value = quantize_float8(x, tile=tile, compat=compat).dequantize()
    assert torch.isfinite(value).all() and (value[1:] == 0).all()


def test_nan_is_not_hidden():
    x = torch.ones(2, 256)
    x[0, 3] = float("nan")
    for compat in ("te", "ao", "deepgemm"):
        assert torch.isnan(quantize_float8(x, tile="1x128", compat=compat).dequantize()[0, 3])
    assert torch.isnan(quantize_mx(x).dequantize()[0, :32]).all() and torch.isfinite(quantize_mx(x).dequantize()[1]).all()
    assert torch.isnan(quantize_nvfp4(x).dequantize()[0, 3])


def test_a_given_scale_is_used_and_saturates():
    q = quantize_float8(torch.tensor([[1.0, 1000.0]]), scale=torch.tensor(2.0))
    assert q.dequantize().tolist() == [[1.0, 224.0]]
    with pytest.raises(KaruiError, match="per tensor"):
        quantize_float8(torch.ones(1, 128), tile="1x128", scale=torch.tensor(2.0))


# MX


@pytest.mark.parametrize("amax", list(goldens.MX_BYTES))
def test_mx_byte_goldens(amax):
    bytes_ = [int(scale_exponent(torch.tensor([amax]), E4M3, mode, "ao")) for mode in ("floor", "rceil", "ceil", "even")]
    assert tuple(bytes_) == goldens.MX_BYTES[amax]
    assert int(scale_exponent(torch.tensor([amax]), E4M3, "rceil", "te")) == goldens.MX_BYTES[amax][1]


def test_mx_edge_codes():
    edges = torch.tensor(list(goldens.TE_BYTES))
    assert scale_exponent(edges, E4M3, "rceil", "te").tolist() == list(goldens.TE_BYTES.values())
    assert scale_exponent(edges, E4M3, "rceil", "ao").tolist() == [0, 254, 255]
    assert scale_exponent(edges, E4M3, "floor", "ao").tolist() == [0, 247, 255]
    deepgemm = scale_exponent(edges, E4M3, "rceil", "deepgemm").tolist()
    assert deepgemm[1:] == [254, 254] and deepgemm[0] == 127 + math.ceil(math.log2(1e-4 / 448))


@settings(max_examples=300, deadline=None)
@given(st.floats(min_value=2.0**-110, max_value=2.0**120, width=32), st.sampled_from([E4M3, E5M2, E2M1]))
def test_mx_bytes_against_exact_logarithms(amax, element):
    mantissa, exponent = math.frexp(amax)  # amax = mantissa * 2^exponent, mantissa in [0.5, 1)
    floor_log = exponent - 1
    emax = element.max_exponent
    expected = {
        "floor": floor_log - emax,
        "ceil": floor_log + (mantissa > 0.5) - emax,
        "even": floor_log + (mantissa * 2 >= 2 - 2.0 ** -(element.mantissa_bits + 1)) - emax,
    }
    for mode, value in expected.items():
        byte = int(scale_exponent(torch.tensor([amax]), element, mode, "ao"))
        assert byte == min(max(value + 127, 0), 255), (mode, amax)
    ratio = float(np.float32(amax) * np.float32(1.0 / element.max))
    mantissa, exponent = math.frexp(ratio)
    byte = int(scale_exponent(torch.tensor([amax]), element, "rceil", "te"))
    assert byte == min(max(exponent - (mantissa == 0.5) + 127, 0), 254)


def test_torchaos_logarithm_misses_a_carry_that_te_sees():
    """log2 in fp32 of just above a power of two is that power: the two libraries' bytes differ, and both are reproduced."""
    amax = torch.tensor([448.0 * 2.0**90]).nextafter(torch.tensor([float("inf")]))
    assert int(scale_exponent(amax, E4M3, "rceil", "te")) == int(scale_exponent(amax, E4M3, "rceil", "ao")) + 1


@pytest.mark.parametrize("element", [E4M3, E5M2, E2M1])
@pytest.mark.parametrize("mode", ["floor", "rceil", "ceil", "even"])
def test_mx_codes_and_values_against_float64(element, mode):
    x = matrix(17, 96, seed=3)
    q = quantize_mx(x, element=element, mode=mode, compat="ao")
    for block in range(3):
        part = x[:, 32 * block : 32 * block + 32].double().numpy()
        scale = 2.0 ** (q.exponent[:, block].double().numpy() - 127)[:, None]
        codes = brute_force((part / scale).astype(np.float32), element)  # exact: a division by a power of two
        mine = q.codes[:, 32 * block : 32 * block + 32]
        assert np.array_equal((mine if element is E2M1 else mine.view(torch.uint8)).numpy(), codes)
        expected = decode(torch.from_numpy(codes), element).double().numpy() * scale
        assert np.array_equal(q.dequantize()[:, 32 * block : 32 * block + 32].double().numpy(), expected)


def test_mx_modes_that_should_not_saturate_do_not():
    x = matrix(64, 64, seed=4, spread=1.0)
    for element in (E4M3, E2M1):
        step = {"e4m3": 2.0**-4, "e2m1": 2.0**-2}[element.name]
        for mode in ("rceil", "ceil"):
            q = quantize_mx(x, element=element, mode=mode, compat="ao")
            amax = x.view(64, 2, 32).abs().amax(-1, keepdim=True)
            at_peak = x.view(64, 2, 32).abs() == amax
            error = ((q.dequantize() - x).view(64, 2, 32) / amax)[at_peak].abs()
            assert error.max() <= step
    floor = quantize_mx(torch.full((1, 32), 511.0), mode="floor", compat="ao")
    assert (floor.dequantize() == 448).all()


def test_deepgemm_e2m1_ties_go_down():
    ties = list(goldens.E2M1_TIES_DEEPGEMM)
    x = torch.tensor([ties + [6.0] + [0.0] * 23 + [-0.0]])
    q = quantize_mx(x, element=E2M1, compat="deepgemm")
    assert q.dequantize()[0, :7].tolist() == list(goldens.E2M1_TIES_DEEPGEMM.values()) and int(q.codes[0, -1]) == 0
    assert quantize_mx(x, element=E2M1, compat="te").dequantize()[0, :7].tolist() == list(goldens.E2M1_TIES.values())


def test_mx_tiny_and_huge_blocks():
    x = torch.tensor([[1e-44] * 32 + [3e38] * 32 + [0.0] * 32])
    q = quantize_mx(x)
    assert q.exponent.tolist()[0][2] == 0 and torch.isfinite(q.dequantize()).all()
    assert q.dequantize()[0, 32].item() == pytest.approx(3e38, rel=0.07)
    assert (q.dequantize()[0, 64:] == 0).all()


def test_e8m0_values():
    bytes_ = torch.arange(255, dtype=torch.uint8)
    assert torch.equal(e8m0_value(bytes_).double(), torch.exp2(bytes_.double() - 127))
    assert torch.isnan(e8m0_value(torch.tensor([255], dtype=torch.uint8))).all()
    assert torch.equal(e8m0_value(bytes_), bytes_.view(torch.float8_e8m0fnu).float())


@pytest.mark.parametrize("compat,mode", [("te", "floor"), ("deepgemm", "even"), ("te", "sideways")])
def test_a_mode_the_library_lacks_is_an_error(compat, mode):
    with pytest.raises(UnsupportedError, match="compat='ao' has all four"):
        quantize_mx(torch.ones(1, 32), mode=mode, compat=compat)


def test_unknown_libraries_are_errors():
    with pytest.raises(UnsupportedError, match="not a known library"):
        quantize_float8(torch.ones(1, 1), compat="tensorrt")
    with pytest.raises(UnsupportedError, match="NVFP4 has no 'deepgemm' variant"):
        quantize_nvfp4(torch.ones(1, 16), compat="deepgemm")


# NVFP4


def nvfp4_by_hand(x, tile):
    """The formulas of the paper over numpy float32 scalars, one block at a time; E4M3 by brute force over its table."""
    f32 = np.float32
    amax = f32(np.abs(x).max())
    enc = f32(min(f32(2688.0) / amax, np.finfo(np.float32).max)) if amax > 0 else f32(1.0)
    codes = np.zeros(x.shape, np.uint8)
    scales = np.zeros((-(-x.shape[0] // tile), -(-x.shape[1] // 16)), np.float64)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = x[i * tile : (i + 1) * tile, j * 16 : (j + 1) * 16]
            wanted = min(f32(np.abs(part).max()) * f32(enc / f32(6.0)), f32(448.0))
            code = brute_force(np.array([wanted], np.float32), E4M3)
            scale = decode(torch.from_numpy(code), E4M3).numpy()[0]
            with np.errstate(divide="ignore"):
                multiplier = min(f32(1.0) / f32(scale / enc), np.finfo(np.float32).max)
            codes[i * tile : (i + 1) * tile, j * 16 : (j + 1) * 16] = brute_force(f32(part * f32(multiplier)), E2M1)
            scales[i, j] = scale
    return codes, scales, enc


@pytest.mark.parametrize("tile,rows", [("1x16", 1), ("16x16", 16)])
@pytest.mark.parametrize("shape", [(32, 64), (19, 37)])
def test_nvfp4_against_the_formulas_by_hand(tile, rows, shape):
    x = matrix(*shape, seed=5)
    x[2:18, 16:32] = 0  # an all-zero block
    q = quantize_nvfp4(x, tile=tile)
    codes, scales, enc = nvfp4_by_hand(x.numpy(), rows)
    assert np.array_equal(q.codes.numpy(), codes)
    assert np.array_equal(q.scale.double().numpy(), scales)
    assert q.global_scale.item() == enc
    expected = decode(q.codes, E2M1).double().numpy() * np.kron(scales, np.ones((rows, 16)))[: shape[0], : shape[1]] / float(enc)
    assert np.allclose(q.dequantize().numpy(), expected, rtol=3e-7, atol=0)


def test_nvfp4_zero_and_extremes():
    assert torch.equal(quantize_nvfp4(torch.zeros(4, 32)).dequantize(), torch.zeros(4, 32))
    assert quantize_nvfp4(torch.zeros(4, 32)).global_scale.item() == 1.0
    for size in (1e-42, 1e-30, 1e30, 3e38):
        value = quantize_nvfp4(torch.full((2, 32), size)).dequantize()
        assert torch.isfinite(value).all(), size
    assert quantize_nvfp4(torch.full((2, 32), 1e30)).dequantize()[0, 0].item() == pytest.approx(1e30, rel=1e-6)


def test_nvfp4_of_torchao_has_a_smallest_scale():
    x = torch.cat([torch.full((1, 16), 1000.0), torch.full((1, 16), 1e-3)], 1)
    assert quantize_nvfp4(x, compat="ao").scale[0, 1].item() == 2.0**-6
    assert quantize_nvfp4(x, compat="te").scale[0, 1].item() == 0.0
    assert torch.isfinite(quantize_nvfp4(x, compat="ao").dequantize()).all()
    assert torch.equal(quantize_nvfp4(torch.zeros(1, 16), compat="ao").dequantize(), torch.zeros(1, 16))


def test_16x16_tiles_quantize_the_transpose_to_the_same_values():
    x = matrix(64, 48, seed=6)
    assert torch.equal(quantize_nvfp4(x, tile="16x16").dequantize().T, quantize_nvfp4(x.T, tile="16x16").dequantize())
    assert not torch.equal(quantize_nvfp4(x).dequantize().T, quantize_nvfp4(x.T).dequantize())


def test_nvfp4_stochastic_rounding_is_unbiased_over_steps():
    x = matrix(8, 64, seed=7, spread=1.0)
    draws = 600
    total = sum(
        quantize_nvfp4(x, noise=noise_bits(x.shape, seed=1, step=step, layer=0, tensor=0)).dequantize().double()
        for step in range(draws)
    )
    q = quantize_nvfp4(x)
    block = (q.scale.float() / q.global_scale).repeat_interleave(16, 1)
    # a block scale that was rounded down saturates its peak, which no rounding of elements can repair
    inside = x.abs() <= 6 * block
    assert inside.float().mean() > 0.9
    error = ((total / draws - x).abs() / block)[inside]
    assert error.max() < 5 * 1.0 / draws**0.5  # the widest step is 2, its standard deviation at most 1
    assert ((q.dequantize() - x).abs() / block)[inside].max() > 0.5  # rounding to nearest is that far off


def test_hadamard_is_the_published_matrix_and_cancels():
    h = hadamard16()
    assert torch.allclose(h @ h.T, torch.eye(16)) and torch.equal(h.bfloat16().float(), h)
    sylvester = np.array([[1.0]])
    for _ in range(4):
        sylvester = np.kron(np.array([[1, 1], [1, -1]]), sylvester)
    assert np.array_equal(h.numpy(), np.diag(SIGNS) @ sylvester / 4)
    assert SIGNS == (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
    a, b = torch.randn(5, 40), torch.randn(7, 40)
    assert random_hadamard(a).shape == (5, 48)
    assert torch.allclose(random_hadamard(a) @ random_hadamard(b).T, a @ b.T, atol=1e-5)


def test_hadamard_takes_an_outlier_apart():
    x = 0.1 * torch.randn(4, 256)
    x[:, 7] = 50.0
    plain = (quantize_nvfp4(x).dequantize() - x).pow(2)[:, :16].sum()
    turned = random_hadamard(x)
    spread_out = (quantize_nvfp4(turned).dequantize() - turned).pow(2)[:, :16]
    assert turned[:, :16].abs().max() < 13 and spread_out.max() < 50**2 and plain > 0


# the registry


@pytest.mark.parametrize("spelling", ["mxfp8", "mxfp4", "nvfp4"])
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), rows=st.integers(1, 5), blocks=st.integers(1, 4), size=st.floats(-6, 6))
def test_weight_grids_round_trip_and_are_idempotent(spelling, seed, rows, blocks, size):
    spec = QuantSpec.parse(spelling)
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(rows, 32 * blocks, generator=generator) * 10.0**size
    q = quantize(w, spec)
    value = q.dequantize()
    assert value.shape == w.shape and torch.isfinite(value).all()
    assert q.scale.shape == (rows, w.shape[1] // spec.group_size)
    blocks_w = w.view(-1, spec.group_size)
    bound = {"mxfp8": 2.0**-4, "mxfp4": 1 / 4, "nvfp4": 1 / 6 + 1 / 16 + 1e-3}[spelling]
    assert ((value.view_as(blocks_w) - blocks_w).abs() <= bound * blocks_w.abs().amax(-1, keepdim=True) + 1e-30).all()


def test_mxfp_values_that_lie_on_the_grid_come_back_exactly():
    x = torch.tensor([[6.0, 4, 3, 2, 1.5, 1, 0.5, 0] * 4])
    for spelling in ("mxfp4", "mxfp8", "nvfp4"):
        assert torch.equal(quantize(x, QuantSpec.parse(spelling)).dequantize(), x)


def test_registry_refuses_foreign_block_sizes_and_nan():
    with pytest.raises(KaruiError, match="nvfp4 has blocks of 16, not 32"):
        quantize(torch.ones(1, 32), QuantSpec(format="nvfp4", bits=4, group_size=32, scale_dtype="e4m3"))
    with pytest.raises(KaruiError, match="mxfp8 has blocks of 32, not 16"):
        quantize(torch.ones(1, 32), QuantSpec(format="mxfp8", bits=8, group_size=16, scale_dtype="e8m0"))
    with pytest.raises(KaruiError, match="layer.q: 1 of 32 values are NaN"):
        quantize(torch.tensor([[float("nan")] + [1.0] * 31]), QuantSpec.parse("mxfp8"), name="layer.q")


def test_the_quantizers_use_the_integer_encoder():
    """MXFP8 and FP8 take torch's cast as a shortcut; the integer encoder gives the same codes."""
    x = matrix(9, 64, seed=8)
    q = quantize_mx(x)
    scaled = x * e8m0_value(254 - q.exponent.int()).repeat_interleave(32, 1)
    assert torch.equal(q.codes.view(torch.uint8), encode(scaled, E4M3))
