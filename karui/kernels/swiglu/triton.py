"""SwiGLU in Triton: one pass forward, one pass backward that reads gate, up and dy and writes both gradients."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from karui.kernels.triton_support.offline import WIDE_LOADS, Case

_BLOCK = 1024


@triton.jit
def _forward(gate_ptr, up_ptr, out_ptr, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(gate_ptr + at, inside, 0.0).to(tl.float32)
    up = tl.load(up_ptr + at, inside, 0.0)
    # silu is rounded to the input's dtype before the product, as the reference does
    silu = (gate * tl.sigmoid(gate)).to(up.dtype).to(tl.float32)
    tl.store(out_ptr + at, (silu * up.to(tl.float32)).to(out_ptr.dtype.element_ty), inside)


@triton.jit
def _backward(gate_ptr, up_ptr, dy_ptr, dgate_ptr, dup_ptr, out_ptr, size, AGAIN: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(gate_ptr + at, inside, 0.0).to(tl.float32)
    up = tl.load(up_ptr + at, inside, 0.0).to(tl.float32)
    dy = tl.load(dy_ptr + at, inside, 0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    if AGAIN:
        tl.store(out_ptr + at, ((gate * s).to(out_ptr.dtype.element_ty).to(tl.float32) * up).to(out_ptr.dtype.element_ty), inside)
    tl.store(dup_ptr + at, (dy * gate * s).to(dup_ptr.dtype.element_ty), inside)
    tl.store(dgate_ptr + at, (dy * up * s * (1.0 + gate * (1.0 - s))).to(dgate_ptr.dtype.element_ty), inside)


@triton.jit
def _halves(both_ptr, out_ptr, stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(both_ptr + row * stride + at, inside, 0.0).to(tl.float32)
    up = tl.load(both_ptr + row * stride + width + at, inside, 0.0)
    silu = (gate * tl.sigmoid(gate)).to(up.dtype).to(tl.float32)
    tl.store(out_ptr + row * width + at, (silu * up.to(tl.float32)).to(out_ptr.dtype.element_ty), inside)


def of_halves(both: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up [R, F] of both side by side [R, 2 F], without a copy of either."""
    both = both if both.stride(-1) == 1 else both.contiguous()
    rows, width = both.shape[0], both.shape[1] // 2
    out = torch.empty(rows, width, dtype=both.dtype, device=both.device)
    if rows:
        _halves[(rows, triton.cdiv(width, _BLOCK))](both, out, both.stride(0), width, BLOCK=_BLOCK)
    return out


def product(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    if out.numel():
        _forward[(triton.cdiv(out.numel(), _BLOCK),)](gate, up, out, out.numel(), BLOCK=_BLOCK)
    return out


def gradients(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, again: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(dgate, dup, and with `again` the product, as the forward pass rounded it)."""
    dy, gate, up = dy.contiguous(), gate.contiguous(), up.contiguous()
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    out = torch.empty_like(gate) if again else None
    if gate.numel():
        _backward[(triton.cdiv(gate.numel(), _BLOCK),)](gate, up, dy, dgate, dup, dgate if out is None else out, gate.numel(),
                                                        AGAIN=again, BLOCK=_BLOCK)  # fmt: skip
    return dgate, dup, out


class SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return product(gate, up)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        return gradients(grads[0], gate, up, again=False)[:2]


def offline_cases() -> list[Case]:
    one = {"gate_ptr": "*bf16", "up_ptr": "*bf16", "out_ptr": "*bf16", "size": "i32"}
    two = {**one, "dy_ptr": "*bf16", "dgate_ptr": "*bf16", "dup_ptr": "*bf16"}
    return [Case("swiglu forward", _forward, one, {"BLOCK": _BLOCK}, WIDE_LOADS),
            Case("swiglu of halves", _halves, {"both_ptr": "*bf16", "out_ptr": "*bf16", "stride": "i32", "width": "i32"},
                 {"BLOCK": _BLOCK}, WIDE_LOADS, quick=(), on="one"),
            Case("swiglu backward", _backward, two, {"AGAIN": True, "BLOCK": _BLOCK}, WIDE_LOADS, quick=(),
                 on="one")]  # fmt: skip
