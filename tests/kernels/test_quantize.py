"""Unit, property and reference tests of the grids: worked examples, bitsandbytes, prepare == convert."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from karui.configs import KaruiError, QuantSpec, UnsupportedError
from karui.kernels.pack import pack, packed_width, unpack
from karui.kernels.qtensor import QTensor
from karui.kernels.quantize import dequantize, fake_quantize, nf4, quantize

GRIDS = ["w2g32", "w3g32", "w4g32", "w4g32a", "w2g64a", "w8", "w8a", "w8t", "w5g32", "w1.58", "w1.58g32", "w1", "nf4", "nf4dq",
         "fp8", "fp8t", "w4g32:bf16", "w4g32:fp32", "w3"]  # fmt: skip
EXAMPLE = torch.tensor([[134.6, -62.9, 0, 111.4, -186.2, 47.5, 303.3, -26.4]])


def test_worked_example_symmetric():
    q = quantize(EXAMPLE, QuantSpec.parse("w8t:fp32"))
    assert q.codes.tolist() == [[56, -26, 0, 47, -78, 20, 127, -11]]
    assert ((q.dequantize() - EXAMPLE).double() ** 2).mean().item() == pytest.approx(0.27499, abs=1e-5)


def test_worked_example_affine():
    q = quantize(EXAMPLE, QuantSpec.parse("w8ta:fp32"))
    assert (q.codes.int() - 128).tolist() == [[39, -64, -31, 27, -128, -6, 127, -45]]
    assert q.zero.item() - 128 == -31
    assert ((q.dequantize() - EXAMPLE).double() ** 2).mean().item() == pytest.approx(0.090124, abs=1e-5)


def test_an_outlier_ruins_its_group_only():
    row = torch.tensor([[1.2, -0.7, 0.4, 2.1, -1.5, 0.8, -2.2, 0.5, 0.3, 1.1, -0.9, 0.2, -1.0, 0.6, -0.3, 10000]])
    whole = quantize(row, QuantSpec.parse("w8t:fp32"))
    assert whole.codes[0, :-1].abs().max() == 0 and whole.codes[0, -1] == 127
    grouped = quantize(row, QuantSpec.parse("w8g8:fp32"))
    assert (grouped.dequantize() - row)[0, :8].abs().max() < 0.01


@pytest.mark.parametrize("spelling", GRIDS)
def test_prepare_equals_convert_over_1000_seeds(spelling):
    """What training saw is, bit for bit, what comes back from packed codes decoded by other arithmetic (float64 numpy)."""
    spec = QuantSpec.parse(spelling)
    drawn = [torch.randn(4, 64, generator=torch.Generator().manual_seed(seed)) * 10.0 ** (seed % 7 - 4) for seed in range(1000)]
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    if spec.granularity != "tensor" and not spec.double_quant:  # rows are independent: all seeds are those of one matrix
        given = [(torch.cat(drawn), dtype) for dtype in dtypes]
    else:
        given = list(zip(drawn, itertools.cycle(dtypes)))
    for w, dtype in given:
        prepared = fake_quantize(w.to(dtype), spec)
        assert prepared.dtype == dtype
        assert torch.equal(prepared, _decode_independently(quantize(w.to(dtype), spec)).to(dtype)), (spelling, dtype)


def _decode_independently(q: QTensor) -> torch.Tensor:
    codes = q.codes.float().numpy()
    if q.spec.format == "nf4":
        codes = np.array(nf4.CODEBOOK, dtype=np.float32)[q.codes.numpy()]
        scale = nf4.block_absmax(q).numpy()
    else:
        low = q.spec.code_range[0] if q.codes.dtype == torch.int8 else 0
        bits = 2 if q.spec.format in ("ternary", "binary") else q.spec.bits
        if q.spec.format != "fp8":
            stored = pack((q.codes.int() - low).to(torch.uint8), bits)
            codes = unpack(stored, bits, q.codes.shape[-1]).int().numpy() + low
        scale = q.scale.float().numpy()
    n = codes.shape[1] // scale.shape[1]
    zero = 0 if q.zero is None else np.repeat(q.zero.int().numpy(), n, 1)
    scale = np.broadcast_to(np.repeat(scale, n, 1), codes.shape)
    # a product of two fp32 numbers is exact in float64, so one rounding remains, as in fp32
    return torch.from_numpy(((codes.astype(np.float64) - zero) * scale.astype(np.float64)).astype(np.float32))


@pytest.mark.parametrize("spelling", GRIDS)
def test_relative_error_is_what_the_bits_allow(spelling):
    spec = QuantSpec.parse(spelling)
    w = torch.randn(16, 128, generator=torch.Generator().manual_seed(0))
    error = (dequantize(quantize(w, spec)) - w).norm() / w.norm()
    bound = {2: 0.6, 3: 0.3, 4: 0.12, 5: 0.06, 8: 0.03, 1: 0.7}[spec.bits if spec.format != "ternary" else 1]
    assert 0 < error < bound


@settings(max_examples=60)
@given(st.integers(2, 8), st.booleans(), st.sampled_from([8, 16, 32]), st.integers(0, 2**31), st.floats(1e-6, 1e4))
@example(8, True, 8, 12200, 6903.6484375)
def test_integer_codes_are_the_nearest_on_their_grid(bits, affine, group, seed, spread):
    spec = QuantSpec(format="int", bits=bits, granularity="group", group_size=group, symmetric=not affine, scale_dtype="float32")
    w = torch.randn(3, 64, generator=torch.Generator().manual_seed(seed)) * spread
    q = quantize(w, spec)
    low, high = spec.code_range
    every = torch.arange(low, high + 1).double()
    scale = q.scale.double().repeat_interleave(group, 1)[..., None]
    zero = 0 if q.zero is None else q.zero.double().repeat_interleave(group, 1)[..., None]
    best = ((every - zero) * scale - w.double()[..., None]).abs().amin(-1)
    mine = (q.dequantize().double() - w.double()).abs()
    # in fp32 up to 255 steps are known to 2^-16 of one, on the way there and back
    assert (mine <= best + 2**-14 * scale[..., 0] + 1e-12).all()


def test_quantizing_again_with_the_same_grid_changes_nothing():
    w = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    q = quantize(w, QuantSpec.parse("w4g32a"))
    again = quantize(q.dequantize(), q.spec, scale=q.scale, zero=q.zero)
    assert torch.equal(again.codes, q.codes) and torch.equal(again.scale, q.scale) and torch.equal(again.zero, q.zero)


def test_gradient_goes_straight_through():
    w = torch.randn(4, 32, requires_grad=True)
    upstream = torch.randn(4, 32)
    fake_quantize(w, QuantSpec.parse("w2g32")).backward(upstream)
    assert torch.equal(w.grad, upstream)


def test_all_zero_groups_stay_zero():
    for spelling in GRIDS:
        spec = QuantSpec.parse(spelling)
        values = quantize(torch.zeros(2, 64), spec).dequantize()
        assert torch.isfinite(values).all() and values.abs().max() <= (1.01e-5 if spec.format in ("binary", "ternary") else 0)


def test_tiny_groups_do_not_vanish():
    q = quantize(torch.full((1, 32), 1e-8), QuantSpec.parse("w4g32"))
    assert (q.scale > 0).all()


def test_ternary_follows_the_paper():
    w = torch.randn(8, 32, generator=torch.Generator().manual_seed(2))
    q = quantize(w, QuantSpec.parse("w1.58:fp32"))
    beta = w.double().abs().mean()
    assert q.scale.item() == pytest.approx(beta.item(), rel=1e-6)
    assert torch.equal(q.codes.double(), (w.double() / beta).round().clamp(-1, 1))


class TestBitsandbytes:
    """NF4 against the library that QLoRA ships with."""

    functional = pytest.importorskip("bitsandbytes.functional")

    def _theirs(self, w, double):
        packed, state = self.functional.quantize_4bit(w, blocksize=64, quant_type="nf4", compress_statistics=double)
        high_first = torch.stack([packed.flatten() >> 4, packed.flatten() & 15], -1).view_as(w)
        return high_first, state, self.functional.dequantize_4bit(packed, state)

    def test_nf4_codes_absmax_and_values_are_equal(self):
        w = torch.randn(192, 576, generator=torch.Generator().manual_seed(3)) * 0.05
        codes, state, values = self._theirs(w, False)
        q = quantize(w, QuantSpec.parse("nf4"))
        assert torch.equal(q.codes, codes)
        assert torch.equal(q.scale.flatten(), state.absmax)
        assert torch.equal(q.dequantize(), values)

    def test_double_quantization_decodes_their_storage(self):
        w = torch.randn(192, 576, generator=torch.Generator().manual_seed(4)) * 0.05
        codes, state, values = self._theirs(w, True)
        extra = {"absmax_scale": state.state2.absmax, "absmax_mean": state.offset.reshape(1)}
        q = QTensor(codes, state.absmax.view(192, 9), None, QuantSpec.parse("nf4dq"), (192, 576), extra)
        assert torch.allclose(q.dequantize(), values, rtol=0, atol=1e-8)

    def test_double_quantization_encodes_nearest(self):
        """Their CPU code rounds ~0.2 % of the absmax values to the farther neighbour; ours never does."""
        w = torch.randn(192, 576, generator=torch.Generator().manual_seed(5)) * 0.05
        codes, state, _ = self._theirs(w, True)
        q = quantize(w, QuantSpec.parse("nf4dq"))
        assert torch.equal(q.codes, codes)
        assert torch.equal(q.extra["absmax_scale"], state.state2.absmax)
        steps = (q.scale.flatten().int() - state.absmax.int()).abs()
        assert steps.max() <= 1 and (steps > 0).float().mean() < 0.01
        exact = w.view(192, 9, 64).abs().amax(-1)
        theirs = QTensor(codes, state.absmax.view(192, 9), None, q.spec, q.shape, q.extra)
        assert (nf4.block_absmax(q) - exact).abs().sum() <= (nf4.block_absmax(theirs) - exact).abs().sum()

    def test_dynamic_map_is_theirs(self):
        assert torch.equal(nf4.dynamic_map(), self.functional.create_dynamic_map())


@settings(max_examples=80)
@given(st.integers(1, 8), st.integers(1, 70), st.integers(1, 3), st.integers(0, 2**31))
def test_pack_is_the_little_endian_bit_stream(bits, n, rows, seed):
    codes = torch.randint(0, 2**bits, (rows, n), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (rows, packed_width(n, bits))
    assert torch.equal(unpack(packed, bits, n), codes)
    stream = int.from_bytes(bytes(packed[0].tolist()), "little")
    assert [(stream >> (i * bits)) & (2**bits - 1) for i in range(n)] == codes[0].tolist()


class TestBadInput:
    def test_group_that_does_not_divide(self):
        with pytest.raises(KaruiError, match="mlp.up: group size 128 does not divide its input width 576.*64"):
            quantize(torch.zeros(2, 576), QuantSpec.parse("w4g128"), name="mlp.up")

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
    @pytest.mark.parametrize("spelling", ["w4g32", "w1.58", "nf4dq", "fp8"])
    def test_non_finite_weights(self, bad, spelling):
        w = torch.zeros(2, 64)
        w[1, 3] = bad
        with pytest.raises(KaruiError, match="layer: 1 of 128 values are NaN or infinite"):
            quantize(w, QuantSpec.parse(spelling), name="layer")

    def test_scale_beyond_fp16(self):
        with pytest.raises(KaruiError, match="layer: a scale of .* too large for float16; write w4g32:fp32"):
            quantize(torch.full((1, 32), 1e6), QuantSpec.parse("w4g32"), name="layer")

    def test_empty_tensor(self):
        with pytest.raises(KaruiError, match="empty"):
            quantize(torch.zeros(0, 32), QuantSpec.parse("w4g32"))

    def test_no_grid(self):
        with pytest.raises(UnsupportedError, match="no quantizer for 'none'"):
            quantize(torch.zeros(2, 32), QuantSpec.parse("none"))

    def test_pack_refuses_what_does_not_fit(self):
        with pytest.raises(KaruiError, match="code 4 does not fit in 2 bits"):
            pack(torch.tensor([4], dtype=torch.uint8), 2)
        with pytest.raises(KaruiError, match="uint8"):
            pack(torch.tensor([1]), 2)
        with pytest.raises(KaruiError, match="take 2 bytes, got 1"):
            unpack(torch.zeros(1, dtype=torch.uint8), 4, 3)
