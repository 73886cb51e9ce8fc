"""Rotary embedding in Triton: one program per token, all its heads at once, so that cos and sin are read once."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from karui.kernels.triton_support.offline import WIDE_LOADS, Case


@triton.jit
def _rotate(x_ptr, cos_ptr, sin_ptr, out_ptr, stride_t, stride_h, stride_cos, heads, half, SIGN: tl.constexpr,
            HEADS: tl.constexpr, HALF: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, HALF)
    inside = (h[:, None] < heads) & (d[None, :] < half)
    at = x_ptr + token * stride_t + h[:, None] * stride_h + d[None, :]
    a = tl.load(at, inside, 0.0).to(tl.float32)
    b = tl.load(at + half, inside, 0.0).to(tl.float32)
    cos = tl.load(cos_ptr + token * stride_cos + d, d < half, 0.0).to(tl.float32)[None, :]
    sin = SIGN * tl.load(sin_ptr + token * stride_cos + d, d < half, 0.0).to(tl.float32)[None, :]
    to = out_ptr + (token * heads + h[:, None]) * (2 * half) + d[None, :]
    tl.store(to, (a * cos - b * sin).to(out_ptr.dtype.element_ty), inside)
    tl.store(to + half, (b * cos + a * sin).to(out_ptr.dtype.element_ty), inside)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: float = 1.0) -> torch.Tensor:
    """x [T, heads, D] by the angles of cos, sin [T, D/2] (one row stride for both); sign -1 rotates back."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    if cos.stride(-1) != 1 or cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    tokens, heads, width = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        block = min(triton.next_power_of_2(heads), 16)
        _rotate[(tokens, triton.cdiv(heads, block))](x, cos, sin, out, x.stride(0), x.stride(1), cos.stride(0), heads, width // 2,
                                                     SIGN=sign, HEADS=block, HALF=triton.next_power_of_2(width // 2))  # fmt: skip
    return out


class Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return rotate(grads[0], cos, sin, -1.0), None, None


def offline_cases() -> list[Case]:
    signature = {"x_ptr": "*bf16", "cos_ptr": "*fp32", "sin_ptr": "*fp32", "out_ptr": "*bf16", "stride_t": "i32",
                 "stride_h": "i32", "stride_cos": "i32", "heads": "i32", "half": "i32"}  # fmt: skip
    return [Case("rope", _rotate, signature, {"SIGN": 1.0, "HEADS": 16, "HALF": 64}, WIDE_LOADS)]
