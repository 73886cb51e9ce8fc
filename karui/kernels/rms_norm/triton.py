"""RMSNorm in Triton: one program per row forward; backward, a fixed number of programs walk the rows and each keeps its own sum
of dweight, added up in fp32 at the end (no atomics, so two runs give the same bits).

The residual form does h = x + residual in the same pass and returns h too: what a decoder does between two layers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from karui.kernels.triton_support import num_processors
from karui.kernels.triton_support.offline import WIDE_LOADS, Case


@triton.jit
def _forward(x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, rstd_ptr, stride, width, eps, RESIDUAL: tl.constexpr,
             KEEP: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < width
    x = tl.load(x_ptr + row * stride + cols, inside, 0.0)
    if RESIDUAL:
        x = (x.to(tl.float32) + tl.load(residual_ptr + row * width + cols, inside, 0.0).to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + row * width + cols, x, inside)
    exact = x.to(tl.float32)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(exact * exact) / width + eps)
    if KEEP:
        tl.store(rstd_ptr + row, rstd)
    weight = tl.load(weight_ptr + cols, inside, 0.0)
    # the normed value is rounded to x's dtype before the weight, as the reference does
    normed = (exact * rstd).to(x.dtype).to(tl.float32)
    tl.store(out_ptr + row * width + cols, (normed * weight.to(tl.float32)).to(out_ptr.dtype.element_ty), inside)


@triton.jit
def _backward(x_ptr, weight_ptr, rstd_ptr, dy_ptr, dx_ptr, dweight_ptr, num_rows, width, rows_per_program, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    inside = cols < width
    weight = tl.load(weight_ptr + cols, inside, 0.0).to(tl.float32)
    dweight = tl.zeros([BLOCK], tl.float32)
    first = program * rows_per_program
    start = first.to(tl.int64) * width
    for row in range(tl.minimum(rows_per_program, num_rows - first)):
        at = start + row * width
        x = tl.load(x_ptr + at + cols, inside, 0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at + cols, inside, 0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + first + row)
        normed = x * rstd
        g = dy * weight
        dx = rstd * (g - normed * (tl.sum(g * normed) / width))
        dweight += dy * normed
        tl.store(dx_ptr + at + cols, dx.to(dx_ptr.dtype.element_ty), inside)
    tl.store(dweight_ptr + program.to(tl.int64) * width + cols, dweight, inside)


def _warps(block: int) -> int:
    return 1 if block <= 256 else 4 if block <= 2048 else 8 if block <= 8192 else 16


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, out_dtype: torch.dtype,
                 keep: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """(normed, x + residual, rstd or None): rows of x [..., H]."""
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    num_rows, width = rows.shape
    out = torch.empty(rows.shape, dtype=out_dtype, device=x.device)
    total = rows if residual is None else torch.empty_like(rows, memory_format=torch.contiguous_format)
    rstd = torch.empty(num_rows, dtype=torch.float32, device=x.device) if keep else None
    block = triton.next_power_of_2(width)
    if num_rows:
        other = rows if residual is None else residual.reshape(-1, width).contiguous()
        _forward[(num_rows,)](rows, other, weight, out, total, rstd if keep else rows, rows.stride(0), width, eps,
                              RESIDUAL=residual is not None, KEEP=keep, BLOCK=block, num_warps=_warps(block))  # fmt: skip
    return out.view(x.shape), total.view(x.shape), rstd


class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out, _, rstd = add_rms_norm(x, None, weight, eps, torch.promote_types(x.dtype, weight.dtype), keep=True)
        ctx.save_for_backward(x, weight, rstd)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        num_rows, width = rows.shape
        block = triton.next_power_of_2(width)
        # a program waits for one row at a time: several on a multiprocessor, the more the narrower (norms of single heads)
        per_processor = max(2, min(16, 16_384 // block))
        programs = max(1, min(num_rows, num_processors(x.device) * per_processor))
        each = triton.cdiv(num_rows, programs)
        dx = torch.empty_like(rows)
        partial = torch.zeros(programs, width, dtype=torch.float32, device=x.device)
        if num_rows:
            dy = grads[0].reshape(-1, width).contiguous()
            _backward[(programs,)](rows, weight, rstd, dy, dx, partial, num_rows, width, each,
                                   BLOCK=block, num_warps=_warps(block))  # fmt: skip
        return dx.view(x.shape), partial.sum(0).to(weight.dtype), None


def offline_cases() -> list[Case]:
    forward = {"x_ptr": "*bf16", "residual_ptr": "*bf16", "weight_ptr": "*bf16", "out_ptr": "*bf16", "sum_ptr": "*bf16",
               "rstd_ptr": "*fp32", "stride": "i32", "width": "i32", "eps": "fp32"}  # fmt: skip
    backward = {"x_ptr": "*bf16", "weight_ptr": "*bf16", "rstd_ptr": "*fp32", "dy_ptr": "*bf16", "dx_ptr": "*bf16",
                "dweight_ptr": "*fp32", "num_rows": "i32", "width": "i32", "rows_per_program": "i32"}  # fmt: skip
    return [
        Case("rms_norm forward", _forward, forward, {"RESIDUAL": True, "KEEP": True, "BLOCK": 4096}, WIDE_LOADS, num_warps=8),
        Case("rms_norm backward", _backward, backward, {"BLOCK": 4096}, WIDE_LOADS, num_warps=8,
             odd=("num_rows", "rows_per_program")),  # fmt: skip
    ]
