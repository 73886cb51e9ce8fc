"""Reference: packed-weight products against float64 over the dequantized weight, on odd shapes and every grid.

No float conversion of codes is involved: 4-bit codes become bf16 by their bits in the interpreter as on hardware (there in two
instructions of inline assembly, which the interpreter cannot run: the compile test looks for them, a GPU runs this same test). E4M3 codes,
and the E4M3 scales of NVFP4, are made and read by integers (`codecs`): the interpreter's fp32 -> fp8 drops carries, and its `dot_scaled`
would read NVFP4's scales as powers of two. The products of `gemm_float8` are the interpreter's own; fp8 -> fp32, which they rest on, is right.
"""

from dataclasses import replace

import pytest
import torch

from karui.configs.errors import KaruiError, UnsupportedError
from karui.configs.quantspec import QuantSpec
from karui.kernels.gemm_weight import (
    dequantize_weight,
    gemm_float8,
    gemm_int8,
    gemm_weight,
    gemm_weight_dgrad,
    pack_weight,
    reference,
)
from karui.kernels.quantize import quantize

SPECS = ["w4g32", "w4g128", "w4g64a", "w8g64", "w2g32a", "w3g32a", "w6g64", "nf4", "mxfp4", "w1.58", "w8", "fp8", "mxfp8", "nvfp4"]
# the interpreter cuts fp32 -> bf16 off where hardware rounds: twice the error
BOUND = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def weight(spec, n, k, device, rng):
    q = quantize(torch.randn(n, k, generator=rng, device=device), QuantSpec.parse(spec))
    return q, pack_weight(q)


def close(got, want, dtype):
    assert got.dtype == dtype and got.shape == want.shape
    assert (got.double() - want).abs().max() <= BOUND[dtype] * want.abs().max()


@pytest.mark.parametrize(("m", "n", "steps"), [(1, 70, 2), (5, 33, 9), (70, 16, 1)])  # 9 steps along K are split into parts
@pytest.mark.parametrize("spec", SPECS)
def test_forward(spec, m, n, steps, device, rng):
    k = steps * (32 if "g32" in spec or spec.startswith("mxfp") else 112 if spec == "nvfp4" else 64 if "g64" in spec or spec == "nf4" else 128)
    q, w = weight(spec, n, k, device, rng)
    for dtype in (torch.bfloat16, torch.float16, torch.float32) if spec == "w4g32" else (torch.bfloat16,):
        x = torch.randn(m, k, generator=rng, device=device).to(dtype)
        close(gemm_weight(x, w, backend="triton"), x.double() @ q.dequantize().double().t(), dtype)


@pytest.mark.parametrize("spec", SPECS)
def test_backward_and_dequantize(spec, device, rng):
    q, w = weight(spec, 37, 256, device, rng)
    assert torch.equal(dequantize_weight(w, torch.float32, "triton"), q.dequantize())
    for dtype in (torch.bfloat16, torch.float16):
        dy = torch.randn(19, 37, generator=rng, device=device).to(dtype)
        close(gemm_weight_dgrad(dy, w, "triton"), dy.double() @ q.dequantize(dtype).double(), dtype)


def test_bias_leading_dimensions_and_the_other_order_of_halves(device, rng):
    q, w = weight("nf4", 24, 64, device, rng)
    turned = replace(w, data=(w.data >> 4) | (w.data << 4), high_first=True)
    x, bias = torch.randn(2, 3, 64, generator=rng, device=device), torch.randn(24, generator=rng, device=device)
    want = torch.nn.functional.linear(x.double(), q.dequantize().double(), bias.double())
    for packed in (w, turned):
        close(gemm_weight(x, packed, bias, "triton"), want, torch.float32)
        close(gemm_weight(x, packed, bias, "torch"), want, torch.float32)
        assert torch.equal(dequantize_weight(packed, torch.float32, "triton"), q.dequantize())
    q4, w4 = weight("w4g32", 24, 64, device, rng)
    swapped = replace(w4, data=(w4.data >> 4) | (w4.data << 4), high_first=True)
    x = x.bfloat16()
    close(gemm_weight(x, swapped, backend="triton"), x.double() @ q4.dequantize().double().t(), torch.bfloat16)


@pytest.mark.parametrize("spec", ["nf4", "nf4dq", "w4g32"])
def test_the_bytes_of_a_frozen_base_of_qlora(spec, device, rng):
    from karui.adapters.quantized_linear import QuantizedLinear

    layer = QuantizedLinear(quantize(torch.randn(20, 128, generator=rng, device=device), QuantSpec.parse(spec)))
    assert torch.equal(dequantize_weight(layer.packed(), torch.float32, "triton"), layer.qtensor().dequantize())


@pytest.mark.parametrize("spec", ["w8", "w1.58"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 70, 260), (20, 17, 96)])
def test_int8(spec, m, n, k, device, rng):
    q, w = weight(spec, n, k, device, rng)
    x, bias = torch.randn(m, k, generator=rng, device=device), torch.randn(n, generator=rng, device=device)
    torch.testing.assert_close(gemm_int8(x, w, bias, "triton"), gemm_int8(x, w, bias, "torch"), rtol=1e-5, atol=1e-5)
    codes, scale = reference.quantize_rows(x)
    want = (codes.double() * scale.double()) @ q.dequantize().double().t() + bias.double()
    close(gemm_int8(x, w, bias, "triton"), want, torch.float32)


@pytest.mark.parametrize(("spec", "m", "n", "k"), [("fp8", 1, 70, 1300), ("fp8t", 20, 17, 96)])
def test_float8(spec, m, n, k, device, rng):
    q, w = weight(spec, n, k, device, rng)
    x, bias = torch.randn(m, k, generator=rng, device=device), torch.randn(n, generator=rng, device=device)
    got, want = gemm_float8(x, w, bias, "triton"), gemm_float8(x, w, bias, "torch")
    # hardware sums FP8 products in fewer bits than fp32; the interpreter does not
    assert got.dtype == torch.float32
    assert (got - want).abs().max() <= (BOUND[torch.float32] if device.type == "cpu" else 2e-3) * want.abs().max()
    whole = x.double() @ q.dequantize().double().t() + bias
    assert 0 < (got.double() - whole).abs().max() < 0.1 * whole.abs().max()  # x is rounded to E4M3


def test_parts_with_scales_of_their_own_are_one_weight(device, rng):
    """q, k and v of an NVFP4 layer: three tensors' scales in one product."""
    from karui.inference.models.gpu import _concatenated

    made = [weight("nvfp4", n, 96, device, rng) for n in (9, 4)]
    assert float(made[0][1].divisor[0]) != float(made[1][1].divisor[0])
    whole = torch.cat([q.dequantize() for q, _ in made])
    joined = _concatenated([w for _, w in made])
    assert torch.equal(dequantize_weight(joined, torch.float32, "triton"), whole)
    x = torch.randn(3, 96, generator=rng, device=device)
    close(gemm_weight(x, joined, backend="triton"), x.double() @ whole.double().t(), torch.float32)


def experts(spec, counts, n, k, device, rng):
    """A weight of experts one after the other, and the groups of rows that were sent to them."""
    from karui.kernels.gemm_grouped import group_rows

    q, w = weight(spec, n * len(counts), k, device, rng)
    chosen = torch.arange(len(counts), device=device).repeat_interleave(torch.tensor(counts, device=device))
    return q.dequantize().view(len(counts), n, k), w, group_rows(chosen, len(counts), "triton")


@pytest.mark.parametrize(("spec", "counts", "steps"), [
    ("w4g32", (1, 0, 2, 0), 9), ("w4g128", (0, 70, 19), 2), ("w4g64a", (3, 1), 2), ("w8", (40, 0, 30), 1), ("w1.58", (1,), 2), ("nf4", (2, 17), 3),
    ("mxfp4", (0, 1), 9), ("fp8", (5, 0, 4), 1), ("nvfp4", (0, 0, 20, 3), 2)])  # fmt: skip
def test_experts(spec, counts, steps, device, rng):
    k = steps * (32 if spec in ("w4g32", "mxfp4") else 64 if "g64" in spec or spec == "nf4" else 128)
    dense, w, groups = experts(spec, counts, 37, k, device, rng)
    x = torch.randn(sum(counts), k, generator=rng, device=device)
    for dtype in (torch.float32, torch.bfloat16) if spec == "w4g32" else (torch.bfloat16,):
        rows = x.to(dtype)
        want = torch.cat([part.double() @ e.double().t() for part, e in zip(rows.split(list(counts)), dense)])
        close(gemm_weight(rows, w, backend="triton", groups=groups), want, dtype)
    close(gemm_weight(x, w, backend="torch", groups=groups), torch.cat([p.double() @ e.double().t() for p, e in zip(x.split(list(counts)), dense)]), torch.float32)


@pytest.mark.parametrize(("spec", "product"), [("w8", gemm_int8), ("w1.58", gemm_int8), ("fp8", gemm_float8)])
def test_experts_on_codes(spec, product, device, rng):
    _, w, groups = experts(spec, (3, 0, 18), 37, 640, device, rng)
    x = torch.randn(21, 640, generator=rng, device=device)
    got, want = (product(x, w, backend=backend, groups=groups) for backend in ("triton", "torch"))
    assert (got - want).abs().max() <= (2e-3 if product is gemm_float8 and device.type == "cuda" else 1e-5) * want.abs().max()


def test_experts_are_decoded_once_for_many_rows(device, rng, monkeypatch):
    """As on a GPU, where `auto` decodes all of W and multiplies dense experts."""
    from karui.kernels import gemm_weight as module

    dense, w, groups = experts("w4g32", (5, 3), 37, 64, device, rng)
    x = torch.randn(8, 64, generator=rng, device=device)
    monkeypatch.setattr(module, "use_triton", lambda *a, **k: True)
    monkeypatch.setattr(module, "DEQUANTIZE_ROWS", 4)
    want = torch.cat([part.double() @ e.double().t() for part, e in zip(x.split([5, 3]), dense)])
    close(gemm_weight(x, w, groups=groups), want, torch.float32)


def test_experts_refused(device, rng):
    _, w, groups = experts("w8", (3, 1), 10, 32, device, rng)
    for x, bias in ((torch.ones(5, 32, device=device), None), (torch.ones(4, 32, device=device), torch.ones(10, device=device))):
        with pytest.raises(KaruiError, match=r"a product of 2 experts takes x \[4, K\]"):
            gemm_weight(x, w, bias, groups=groups)


def test_refusals(device, rng):
    with pytest.raises(UnsupportedError, match=r"no packed kernel for w4g32 of shape \(2, 4, 32\)"):
        pack_weight(quantize(torch.ones(2, 4, 32), QuantSpec.parse("w4g32")))
    with pytest.raises(UnsupportedError, match="groups of 16"):
        weight("w4g16", 4, 32, device, rng)
    _, w = weight("w4g32", 4, 32, device, rng)
    with pytest.raises(KaruiError, match="last dimension of 32"):
        gemm_weight(torch.ones(3, 8, device=device), w)
    with pytest.raises(UnsupportedError, match="takes E4M3 weights"):
        gemm_float8(torch.ones(3, 32, device=device), w)
    with pytest.raises(UnsupportedError, match="use gemm_weight"):
        gemm_int8(torch.ones(3, 32, device=device), w)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_on_the_int8_grid_of_their_rows(dtype, device, rng):
    from karui.kernels.gemm_weight import on_int8_rows

    x = torch.randn(3, 5, 70, generator=rng, device=device).to(dtype)
    x[0, 1] = 0
    got, want = (on_int8_rows(part, backend) for part in (x[..., :66],) for backend in ("triton", "torch"))
    assert torch.equal(got.float(), want.float()) if dtype == torch.float32 else (got - want).abs().max() <= 2**-7 * want.abs().max()
    assert torch.equal(got[0, 1], torch.zeros_like(got[0, 1])) and got.dtype == dtype


@pytest.mark.parametrize(("spec", "k", "span"), [
    ("w4g32", 512, 256), ("w4g32a", 384, 128), ("w4g128", 768, 256), ("w4", 640, 128), ("w4g64a", 1024, 256), ("mxfp4", 512, 256),
    ("mxfp4", 384, 128), ("nvfp4", 384, 128), ("w1.58", 1024, 512), ("w2g32a", 1024, 512), ("w2g64", 768, 256), ("w2g32", 512, 512),
    ("w1", 512, 512), ("nf4", 512, 256), ("nf4dq", 384, 128)])  # fmt: skip
def test_codes_in_words(spec, k, span, device, rng):
    q, w = weight(spec, 50, k, device, rng)
    assert w.span == span and torch.equal(reference.dequantize(w), q.dequantize())
    assert torch.equal(dequantize_weight(w, torch.float32, "triton"), q.dequantize())
    bias = torch.randn(50, generator=rng, device=device)
    for m, dtype in ((1, torch.bfloat16), (1, torch.float32), (21, torch.float32), (70, torch.bfloat16)):
        x = torch.randn(m, k, generator=rng, device=device).to(dtype)
        close(gemm_weight(x, w, bias, "triton"), x.double() @ q.dequantize().double().t() + bias.double(), dtype)
    some = torch.tensor([3, 49, 3], device=device)
    assert torch.equal(dequantize_weight(w.rows(some), torch.float32, "triton"), q.dequantize()[some])


@pytest.mark.parametrize("m", [1, 21])
def test_ternary_words_and_int8(m, device, rng):
    q, w = weight("w1.58", 50, 1024, device, rng)
    assert w.span == 512
    x = torch.randn(m, 1024, generator=rng, device=device)
    assert torch.equal(gemm_int8(x, w, backend="triton"), gemm_int8(x, w, backend="torch"))
    many = replace(w, data=w.data[:, :256].repeat(1, 64).contiguous(), shape=(50, 64 * 1024))  # long enough to be split into parts
    x = torch.randn(m, many.shape[1], generator=rng, device=device)
    close(gemm_int8(x, many, backend="triton"), gemm_int8(x, many, backend="torch").double(), torch.float32)
