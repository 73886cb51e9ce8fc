"""Reference: base product and low-rank update in one kernel, values and gradients, against float64 autograd, over dense and packed W."""

import pytest
import torch

from karui.adapters.quantized_linear import BaseWeight, QuantizedLinear
from karui.configs.errors import UnsupportedError
from karui.configs.quantspec import QuantSpec
from karui.kernels.lora import gated_lora_linear, lora_linear
from karui.kernels.lora import reference as lora_reference
from karui.kernels.quantize import quantize

# the interpreter cuts fp32 -> bf16 off where hardware rounds: twice the error, in the update (rounded twice) as in the output
BOUND = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def check(fast, exact, inputs, dtype, rng):
    """Outputs and gradients of `fast` against those of `exact` in float64, grad_output scaled by 3."""
    mine = [x.detach().to(dtype).requires_grad_() for x in inputs]
    theirs = [x.detach().double().requires_grad_() for x in mine]
    got, want = fast(*mine), exact(*theirs)
    assert got.dtype == dtype
    grad = (3 * torch.randn(got.shape, generator=rng, device=got.device)).to(dtype)
    got.backward(grad)
    want.backward(grad.double())
    for a, b in [(got, want), *[(m.grad, t.grad) for m, t in zip(mine, theirs)]]:
        assert a.shape == b.shape
        assert (a.detach().double() - b.detach()).abs().max() <= BOUND[dtype] * b.abs().max()


def factors(rows, width, out, rank, device, rng):
    return [torch.randn(s, generator=rng, device=device) for s in ((*rows, width), (rank, width), (out, rank))]


@pytest.mark.parametrize(("dtype", "rows", "width", "out", "rank"), [
    (torch.float32, (1,), 7, 5, 1), (torch.float32, (3, 11), 50, 33, 18), (torch.bfloat16, (19,), 40, 24, 8),
    (torch.float16, (17,), 33, 20, 3)], ids=str)  # fmt: skip
def test_a_dense_base(dtype, rows, width, out, rank, device, rng):
    if device.type == "cuda" and dtype == torch.float32:
        pytest.skip("fp32 runs in torch on a GPU")
    w = torch.randn(out, width, generator=rng, device=device).to(dtype)
    bias = torch.randn(out, generator=rng, device=device).to(dtype) if rank > 1 else None
    wide = w.double(), None if bias is None else bias.double()
    check(lambda x, a, b: lora_linear(x, lambda d: w.to(d), bias, a, b, 1.5, "triton"),
          lambda x, a, b: lora_reference.lora_linear(x, *wide, a, b, 1.5), factors(rows, width, out, rank, device, rng), dtype, rng)


@pytest.mark.parametrize("rows", [3, 21])
@pytest.mark.parametrize("spec", ["nf4dq", "w4g32", "w4"])
def test_a_packed_base(spec, rows, device, rng):
    base = QuantizedLinear(quantize(torch.randn(35, 640 if rows == 3 else 64, generator=rng, device=device), QuantSpec.parse(spec)),
                           torch.randn(35, generator=rng, device=device))  # fmt: skip
    w = base.dequantize(torch.float64)
    check(lambda x, a, b: lora_linear(x, BaseWeight(base), base.bias, a, b, 0.5, "triton"),
          lambda x, a, b: lora_reference.lora_linear(x, w, base.bias.double(), a, b, 0.5),
          factors((rows,), base.in_features, 35, 5, device, rng), torch.bfloat16, rng)  # fmt: skip


def test_a_base_that_no_kernel_reads_is_dequantized(device, rng):
    base = QuantizedLinear(quantize(torch.randn(9, 32, generator=rng, device=device), QuantSpec.parse("w4g16")))
    assert BaseWeight(base).packed() is None
    check(lambda x, a, b: lora_linear(x, BaseWeight(base), None, a, b, 2.0, "triton"),
          lambda x, a, b: lora_reference.lora_linear(x, base.dequantize(torch.float64), None, a, b, 2.0),
          factors((5,), 32, 9, 4, device, rng), torch.bfloat16, rng)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_behind_a_gate(dtype, device, rng):
    w = torch.randn(12, 40, generator=rng, device=device).to(dtype)
    x, a, b = factors((6,), 40, 12, 4, device, rng)
    gate = torch.randn(6, 40, generator=rng, device=device)
    check(lambda g, u, a, b: gated_lora_linear(g, u, lambda d: w, None, a, b, 0.7, "triton"),
          lambda g, u, a, b: lora_reference.lora_linear(torch.nn.functional.silu(g) * u, w.double(), None, a, b, 0.7),
          [gate, x, a, b], dtype, rng)  # fmt: skip


def test_no_rows(device):
    a, b = torch.zeros(4, 8, device=device, requires_grad=True), torch.zeros(6, 4, device=device, requires_grad=True)
    x = torch.zeros(0, 8, device=device).half()
    out = lora_linear(x, lambda d: torch.ones(6, 8, device=device, dtype=d), None, a.half(), b.half(), 1.0, "triton")
    out.sum().backward()
    assert out.shape == (0, 6) and not a.grad.any() and not b.grad.any()


def test_refusals(device):
    def run(rank, dtype):
        x, a, b = (torch.zeros(s, device=device, dtype=dtype) for s in ((2, 8), (rank, 8), (6, rank)))
        lora_linear(x, lambda d: torch.ones(6, 8, device=device, dtype=d), None, a, b, 1.0, "triton")

    with pytest.raises(UnsupportedError, match="a rank of 200, more than 128"):
        run(200, torch.bfloat16)
    with pytest.raises(UnsupportedError, match=r"dtype torch.float64"):
        run(4, torch.float64)
