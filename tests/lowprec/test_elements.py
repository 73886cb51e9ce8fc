"""Reference tests of the E4M3, E5M2 and E2M1 encoders: exhaustive codes, float64 brute force, torch's casts, and of the noise."""

import numpy as np
import pytest
import torch

from karui.kernels.quantize.elements import (
    E2M1,
    E4M3,
    E5M2,
    ELEMENTS,
    decode,
    encode,
    pack_pairs,
    round_values,
    unpack_pairs,
    values,
)
from karui.kernels.quantize.noise import noise_bits, philox
from tests.lowprec import goldens


def brute_force(x, element):
    """Nearest value in float64 over the whole table, ties to the even code, saturating."""
    magnitudes = values(element)[: element.max_code + 1].double().numpy()
    size = np.minimum(np.abs(x.astype(np.float64)), magnitudes[-1])
    above = np.searchsorted(magnitudes, size)
    below = np.maximum(above - 1, 0)
    to_below, to_above = size - magnitudes[below], magnitudes[above] - size
    code = np.where(to_above < to_below, above, below)
    code = np.where(to_above == to_below, np.where(above % 2 == 0, above, below), code)
    return (code + np.where(np.signbit(x), 1 << (element.bits - 1), 0)).astype(np.uint8)


def floats(seed, count=200_000):
    generator = torch.Generator().manual_seed(seed)
    bits = (
        torch.randint(-(2**31), 2**31 - 1, (count,), generator=generator, dtype=torch.int64).to(torch.int32).view(torch.float32)
    )
    near = torch.randn(count, generator=generator) * torch.exp2(torch.randint(-20, 18, (count,), generator=generator))
    return torch.cat([bits[~bits.isnan()], near])


@pytest.mark.parametrize("element", [E4M3, E5M2])
def test_all_256_codes_decode_as_torch_does_and_encode_back(element):
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(element.dtype).float()
    assert torch.equal(decode(codes, element).nan_to_num(nan=-7.0), expected.nan_to_num(nan=-7.0))
    finite = torch.isfinite(expected)
    assert finite.sum() == {"e4m3": 254, "e5m2": 248}[element.name]
    assert torch.equal(encode(expected, element)[finite], codes[finite])
    assert torch.equal(encode(expected, element, saturate=False)[~expected.isnan()], codes[~expected.isnan()])


@pytest.mark.parametrize("name", list(ELEMENTS))
def test_every_value_midpoint_and_its_neighbours_against_float64(name):
    element = ELEMENTS[name]
    table = values(element)[: element.max_code + 1]
    middles = (table[1:] + table[:-1]) / 2  # exact in fp32
    up, down = torch.full_like(middles, float("inf")), torch.zeros_like(middles)
    x = torch.cat([table, middles, torch.nextafter(middles, up), torch.nextafter(middles, down)])
    x = torch.cat([x, -x])
    assert np.array_equal(encode(x, element).numpy(), brute_force(x.numpy(), element))


@pytest.mark.parametrize("name", list(ELEMENTS))
def test_random_fp32_against_float64(name):
    x = floats(1)
    assert np.array_equal(encode(x, ELEMENTS[name]).numpy(), brute_force(x.numpy(), ELEMENTS[name]))


@pytest.mark.parametrize("element", [E4M3, E5M2])
def test_against_torchs_cast(element):
    x = floats(2)
    assert torch.equal(encode(x, element), x.clamp(-element.max, element.max).to(element.dtype).view(torch.uint8))
    assert torch.equal(round_values(x, element), decode(encode(x, element), element))
    if element is E5M2:  # torch's E4M3 cast saturates, so only E5M2 shows overflow
        assert torch.equal(encode(x, element, saturate=False), x.to(element.dtype).view(torch.uint8))


def test_overflow_of_e4m3_without_saturation_is_nan_past_the_midpoint():
    assert encode(torch.tensor([464.0, 465.0, -500.0, float("inf")]), E4M3, saturate=False).tolist() == [0x7E, 0x7F, 0xFF, 0x7F]


def test_nan_and_infinity():
    x = torch.tensor([float("nan"), float("inf"), -float("inf")])
    assert encode(x, E4M3).tolist() == [0x7F, 0x7E, 0xFE]
    assert encode(x, E5M2).tolist() == [0x7E, 0x7B, 0xFB]
    assert encode(x, E2M1).tolist() == [0x7, 0x7, 0xF]


def test_e2m1_goldens():
    assert values(E2M1)[:8].tolist() == list(goldens.E2M1_VALUES)
    x = torch.tensor(list(goldens.E2M1_TIES))
    assert decode(encode(x, E2M1), E2M1).tolist() == list(goldens.E2M1_TIES.values())
    assert decode(encode(-x, E2M1), E2M1).tolist() == [-v for v in goldens.E2M1_TIES.values()]


@pytest.mark.parametrize("name", list(goldens.RANGES))
def test_ranges(name):
    finite = values(ELEMENTS[name])
    finite = finite[torch.isfinite(finite) & (finite > 0)]
    assert (finite.max().item(), finite.min().item()) == goldens.RANGES[name]
    assert 2.0 ** ELEMENTS[name].max_exponent <= ELEMENTS[name].max < 2.0 ** (ELEMENTS[name].max_exponent + 1)


def test_pairs_put_the_even_element_in_the_low_nibble():
    codes = torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)
    assert pack_pairs(codes).tolist() == [[0x21, 0x0F]]
    assert torch.equal(unpack_pairs(pack_pairs(codes)), codes)


@pytest.mark.parametrize("counter,key,expected", goldens.PHILOX)
def test_philox_known_answers(counter, key, expected):
    words = philox(tuple(torch.tensor([c]) for c in counter), key)
    assert tuple(int(w) for w in words) == expected


def test_noise_is_a_function_of_its_key_alone():
    key = dict(seed=7, step=3, layer=11, tensor=2)
    first = noise_bits((1000,), **key)
    assert torch.equal(first, noise_bits((1000,), **key)) and torch.equal(first[:10], noise_bits((2, 5), **key).reshape(-1))
    assert torch.equal(first, noise_bits((1000,), **{**key, "step": torch.tensor([3])}))
    for name in key:
        assert (noise_bits((1000,), **{**key, name: key[name] + 1}) == first).float().mean() < 0.01, name
    assert (noise_bits((1000,), **{**key, "seed": 7 + (1 << 32)}) == first).float().mean() < 0.01
    assert torch.equal(first[400:], noise_bits((600,), **key, start=400))
    assert first.min() >= 0 and first.dtype == torch.int32


@pytest.mark.parametrize("name", list(ELEMENTS))
def test_stochastic_rounding_is_unbiased(name):
    """The mean over n draws lies within 4.5 standard errors of x, at every place of the grid, subnormals included."""
    element, n = ELEMENTS[name], 100_000
    low = values(element)[1].item()
    points = [low * 0.003, low * 0.3, low * 0.5, low * 1.7, element.max * 0.37, element.max * 0.93, -element.max * 0.61, 1.0, 4.7]
    for place, x in enumerate(points):
        if abs(x) > element.max:
            continue
        noise = noise_bits((n,), seed=5, step=0, layer=0, tensor=place)
        rounded = decode(encode(torch.full((n,), x), element, noise=noise), element).double()
        exact = torch.tensor(x).double().item()
        assert rounded.unique().numel() <= 2
        error = abs(rounded.mean().item() - exact)
        assert error <= 4.5 * rounded.std().item() / n**0.5 + 1e-12, (name, x, error)


def test_stochastic_rounding_keeps_representable_values_and_saturates():
    for element in ELEMENTS.values():
        table = values(element)
        exact = table[torch.isfinite(table)]
        noise = torch.full(exact.shape, 2**31 - 1, dtype=torch.int32)
        assert torch.equal(decode(encode(exact, element, noise=noise), element), exact)
        over = torch.tensor([element.max * 1.2, -element.max * 3])
        assert decode(encode(over, element, noise=noise[:2]), element).tolist() == [element.max, -element.max]


def test_a_small_value_is_not_always_lost():
    """With 8 random bits a value of 1/1000 step would never round up; with 31 it does, as often as it should."""
    noise = noise_bits((400_000,), seed=1, step=0, layer=0, tensor=0)
    up = (encode(torch.full((400_000,), 0.0005), E2M1, noise=noise) != 0).sum().item()
    assert abs(up - 400) < 5 * 20
