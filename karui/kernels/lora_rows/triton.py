"""Two kernels, one program per row and tile: low = A x, then y = gain (y + B low)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from karui.kernels.lora_rows import Stack
from karui.kernels.triton_support.offline import Case

_NARROW, _WIDE = 16, 128


@triton.jit
def _shrink(x_ptr, slot_ptr, a_ptr, low_ptr, stride_x, WIDTH, K, BW: tl.constexpr, BK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + row)
    if slot >= 0:
        w, k = tl.program_id(1) * BW + tl.arange(0, BW), tl.arange(0, BK)
        a_row = a_ptr + (slot.to(tl.int64) * WIDTH + tl.minimum(w, WIDTH - 1))[:, None] * K
        acc = tl.zeros([BW], tl.float32)
        for first in range(0, K, BK):
            inside = first + k < K
            x = tl.load(x_ptr + row * stride_x + first + k, inside, 0.0).to(tl.float32)
            a = tl.load(a_row + (first + k)[None, :], inside[None, :], 0.0).to(tl.float32)
            acc += tl.sum(a * x[None, :], 1)
        tl.store(low_ptr + row * WIDTH + w, acc.to(low_ptr.dtype.element_ty), w < WIDTH)


@triton.jit
def _expand(y_ptr, slot_ptr, low_ptr, b_ptr, part_ptr, gain_ptr, stride_y, WIDTH, N, R, GAIN: tl.constexpr, BN: tl.constexpr,
            BR: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + row)
    if slot >= 0:
        n, r = tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BR)
        inside = n < N
        part = tl.load(part_ptr + n, inside, 0)
        both = inside[:, None] & (r < R)[None, :]
        at = slot.to(tl.int64) * N + n
        b = tl.load(b_ptr + at[:, None] * R + r[None, :], both, 0.0).to(tl.float32)
        low = tl.load(low_ptr + row * WIDTH + part[:, None] * R + r[None, :], both, 0.0).to(tl.float32)
        y = tl.load(y_ptr + row * stride_y + n, inside, 0.0).to(tl.float32) + tl.sum(b * low, 1)
        if GAIN:
            y *= tl.load(gain_ptr + at, inside, 0.0)
        tl.store(y_ptr + row * stride_y + n, y.to(y_ptr.dtype.element_ty), inside)


def lora_rows(y: torch.Tensor, x: torch.Tensor, slots: torch.Tensor, stack: Stack) -> None:
    """See `karui.kernels.lora_rows.lora_rows`."""
    (rows, n), (_, width, k), rank = y.shape, stack.a.shape, stack.b.shape[2]
    if not rows:
        return
    x = x if x.stride(-1) == 1 else x.contiguous()
    low = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    _shrink[(rows, triton.cdiv(width, _NARROW))](x, slots, stack.a, low, x.stride(0), width, k, BW=_NARROW,
                                                 BK=min(256, triton.next_power_of_2(k)))  # fmt: skip
    gain = y if stack.gain is None else stack.gain
    _expand[(rows, triton.cdiv(n, _WIDE))](y, slots, low, stack.b, stack.part, gain, y.stride(0), width, n, rank,
                                           GAIN=stack.gain is not None, BN=_WIDE,
                                           BR=max(2, triton.next_power_of_2(rank)))  # fmt: skip


def offline_cases() -> list[Case]:
    loads = {cc: r"ld\.global\.v[248]" for cc in (80, 90, 100, 120)}
    shrink = {"x_ptr": "*bf16", "slot_ptr": "*i32", "a_ptr": "*bf16", "low_ptr": "*bf16", "stride_x": "i32", "WIDTH": "i32",
              "K": "i32"}  # fmt: skip
    expand = {"y_ptr": "*bf16", "slot_ptr": "*i32", "low_ptr": "*bf16", "b_ptr": "*bf16", "part_ptr": "*i32", "gain_ptr": "*fp32",
              "stride_y": "i32", "WIDTH": "i32", "N": "i32", "R": "i32"}  # fmt: skip
    return [Case("lora_rows shrink", _shrink, shrink, {"BW": 16, "BK": 256}, loads),
            Case("lora_rows expand", _expand, expand, {"GAIN": True, "BN": 128, "BR": 16}, loads)]  # fmt: skip
