"""Reference: packed frozen linears against their `QTensor`, against bitsandbytes, and by gradient check."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from karui.adapters.quantized_linear import QuantizedLinear, quantize_linears
from karui.configs.errors import KaruiError
from karui.configs.quantspec import QuantSpec
from karui.kernels.quantize import quantize

SPECS = ["nf4", "nf4dq", "w4g32", "w4", "w4t", "w8", "w8g64", "w3g64", "w2g32", "w4g64a", "w8a8", "w1.58", "w1", "fp8", "nvfp4", "mxfp4", "mxfp8"]


def _linear(out=48, width=128, bias=True, seed=0):
    torch.manual_seed(seed)
    return torch.nn.Linear(width, out, bias=bias)


@pytest.mark.parametrize("spec", SPECS)
def test_packed_weight_is_bit_equal_to_the_qtensor(spec):
    linear = _linear()
    q = quantize(linear.weight.detach(), QuantSpec.parse(spec))
    packed = QuantizedLinear(q, linear.bias)
    assert torch.equal(packed.dequantize(), q.dequantize())
    assert torch.equal(packed.dequantize(torch.bfloat16), q.dequantize(torch.bfloat16))
    back = packed.qtensor()
    assert torch.equal(back.codes.float(), q.codes.float()) and torch.equal(back.scale.float(), q.scale.float()) and back.spec == q.spec


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), out=st.integers(1, 9), groups=st.integers(1, 5), spec=st.sampled_from(["nf4", "nf4dq", "w4g64"]))
def test_odd_shapes_are_bit_equal_too(seed, out, groups, spec):
    w = torch.randn(out, 64 * groups, generator=torch.Generator().manual_seed(seed))
    q = quantize(w, QuantSpec.parse(spec))
    assert torch.equal(QuantizedLinear(q).dequantize(), q.dequantize())


@pytest.mark.parametrize("double", [False, True])
def test_nf4_is_bit_compatible_with_bitsandbytes(double):
    """Codes, their packing, absmax and values, against bitsandbytes' own CPU quantizer."""
    functional = pytest.importorskip("bitsandbytes.functional")
    torch.manual_seed(1)
    w = torch.randn(96, 576) * 0.05
    packed, state = functional.quantize_4bit(w, blocksize=64, quant_type="nf4", compress_statistics=double)
    ours = QuantizedLinear(quantize(w, QuantSpec.parse("nf4dq" if double else "nf4")))
    assert torch.equal(ours.qweight.reshape(-1), packed.reshape(-1))
    if double:
        assert torch.equal(ours.absmax_scale, state.state2.absmax) and torch.allclose(ours.absmax_mean, state.offset, rtol=1e-7)
        a, b = ours.scale.reshape(-1).long(), state.absmax.reshape(-1).long()
        # bitsandbytes' CPU kernel now and then takes the neighbour of the nearest entry; ours is the nearest
        centred = w.view(-1, 64).abs().amax(-1) - state.offset
        x = centred / state.state2.absmax.repeat_interleave(256)[: len(a)]
        assert ((x - state.state2.code[a]).abs() <= (x - state.state2.code[b]).abs()).all()
        assert (a - b).abs().max() <= 1 and (a != b).float().mean() < 0.005
        same = (a == b).view(96, 9).repeat_interleave(64, 1)
    else:
        assert torch.equal(ours.scale.reshape(-1), state.absmax.reshape(-1))
        same = torch.ones(96, 576, dtype=torch.bool)
    theirs = functional.dequantize_4bit(packed, state).view_as(w)
    assert torch.allclose(ours.dequantize()[same], theirs[same], rtol=1e-6, atol=1e-8)


def test_double_quantization_stores_4_127_bits_per_weight_plus_its_tables():
    packed = QuantizedLinear(quantize(torch.randn(512, 512), QuantSpec.parse("nf4dq")))
    stored = sum(b.numel() * b.element_size() for n, b in packed.named_buffers() if n != "_table") * 8 / 512**2
    assert stored == pytest.approx(4.127, abs=2e-3)


def test_gradient_passes_through_and_nothing_is_kept():
    layer = QuantizedLinear(quantize(_linear(6, 64).weight.detach(), QuantSpec.parse("nf4")), torch.randn(6))
    x = torch.randn(3, 64, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, (x,))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(x)
    assert kept == [] and list(layer.parameters()) == []


def test_forward_is_that_of_the_dequantized_linear():
    linear = _linear()
    layer = QuantizedLinear.from_linear(linear, QuantSpec.parse("w4g32"))
    x = torch.randn(2, 5, 128)
    assert torch.allclose(layer(x), torch.nn.functional.linear(x, layer.dequantize(), linear.bias), atol=1e-6)


def test_bad_weights_and_group_sizes_name_the_layer():
    model = torch.nn.Sequential()
    model.add_module("odd", torch.nn.Linear(48, 8))
    with pytest.raises(KaruiError, match="odd.*64"):
        quantize_linears(model, QuantSpec.parse("nf4"), set())
    with torch.no_grad():
        model.odd.weight[3, 5] = float("nan")
    with pytest.raises(KaruiError, match="odd.*NaN"):
        quantize_linears(model, QuantSpec.parse("w4g16"), set())
    with pytest.raises(KaruiError, match="no linear"):
        quantize_linears(torch.nn.Sequential(torch.nn.ReLU()), QuantSpec.parse("w4g16"), set())


@pytest.mark.parametrize("spec,bits", [("nvfp4", 4.5), ("mxfp4", 4.25), ("w1.58", 2), ("w3g64", 3.25), ("fp8", 8)])
def test_a_code_takes_the_bits_of_its_grid(spec, bits):
    packed = QuantizedLinear(quantize(torch.randn(256, 512), QuantSpec.parse(spec)))
    stored = sum(b.numel() * b.element_size() for n, b in packed.named_buffers() if n != "_table") * 8 / (256 * 512)
    assert stored == pytest.approx(bits, abs=0.07)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_cast_of_the_model_leaves_codes_and_scales_as_they_are(spec, dtype):
    linear = _linear()
    model = torch.nn.Sequential(QuantizedLinear.from_linear(linear, QuantSpec.parse(spec)))
    wanted, before = model[0].dequantize(), {name: b.clone() for name, b in model[0].named_buffers()}
    model.to(dtype)
    assert torch.equal(model[0].dequantize(), wanted) and model[0].bias.dtype == dtype
    for name, value in model[0].named_buffers():
        if name != "bias":
            assert value.dtype == before[name].dtype and torch.equal(value.view(torch.uint8), before[name].view(torch.uint8))
    x = torch.randn(3, 128)
    for inputs in (x.to(dtype), x):  # autocast hands over other dtypes than the bias has
        out = model(inputs)
        assert out.dtype == inputs.dtype
        assert torch.allclose(out.float(), torch.nn.functional.linear(x, wanted, linear.bias), atol=0.05)
    model.float()
    assert torch.equal(model[0].dequantize(), wanted)


def test_a_cast_still_moves_between_devices():
    layer = QuantizedLinear.from_linear(_linear(), QuantSpec.parse("nf4dq")).to("meta", torch.float16)
    assert {b.device.type for b in layer.buffers()} == {"meta"} and layer.scale.dtype == torch.uint8
    assert layer.absmax_scale.dtype == torch.float32
