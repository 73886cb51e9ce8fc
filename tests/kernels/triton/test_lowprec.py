"""Reference: operands of the low-precision linears coded by kernel, bit for bit what the oracles give."""

import pytest
import torch

from karui.lowprec.operand import encode, encode_by_kernel, tensors_of
from karui.lowprec.precision import Operand


@pytest.mark.parametrize("fields", [{"format": "e4m3", "tile": "1x128"}, {"format": "e4m3", "tile": "128x128"}, {"format": "mxfp8"},
                                    {"format": "e5m2", "tile": "tensor", "delayed": True}], ids=str)  # fmt: skip
def test_the_same_bits(fields, device, rng, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1" if device.type == "cpu" else "0")
    x = torch.randn(33, 160, generator=rng, device=device)
    operand = Operand(**fields)
    scale = torch.tensor([3.0], device=device) if operand.delayed else None
    # on a CPU "auto" takes the oracle: the kernel's path is forced by its own name and backend
    import karui.lowprec.operand as module

    real = module.quantize_both
    monkeypatch.setattr(module, "quantize_both", lambda *a, **k: real(*a, **k, backend="triton"))
    got, want = encode_by_kernel(x, operand, compat="te", scale=scale), encode(x.cpu(), operand, compat="te", scale=scale)
    assert type(got) is type(want)
    for a, b in zip(tensors_of(got).values(), tensors_of(want).values()):
        assert torch.equal(a.cpu().contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
