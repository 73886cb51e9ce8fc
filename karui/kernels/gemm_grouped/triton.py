"""Grouped products: a tile of the list that `document_attention.triton.tiles` makes of the experts' rows is one program's, so
nothing waits for the host to learn how rows fell; dW walks an expert's rows."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from karui.kernels.document_attention.triton import tiles
from karui.kernels.triton_support.offline import Case
from karui.kernels.triton_support.products import dot

_BM, _BN, _BK = 64, 128, 64


@triton.jit
def _forward(x_ptr, w_ptr, y_ptr, tiles_ptr, experts_ptr, K, N, stride_x, w_expert, w_n, w_k, BM: tl.constexpr, BN: tl.constexpr,
             BK: tl.constexpr):  # fmt: skip
    tile = tl.program_id(0)
    end, first = tl.load(tiles_ptr + 3 * tile + 1), tl.load(tiles_ptr + 3 * tile + 2)
    if first < end:
        expert = tl.load(experts_ptr + tile).to(tl.int64)
        t, n, k = first + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BK)
        x_at = x_ptr + t.to(tl.int64)[:, None] * stride_x + k[None, :]
        w_at = w_ptr + expert * w_expert + n[None, :] * w_n + k[:, None] * w_k
        acc = tl.zeros([BM, BN], tl.float32)
        for at in range(0, K, BK):
            x = tl.load(x_at + at, (t[:, None] < end) & (at + k[None, :] < K), 0.0)
            w = tl.load(w_at + at * w_k, (n[None, :] < N) & (at + k[:, None] < K), 0.0)
            acc = dot(x, w, acc)
        to = y_ptr + t.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(to, acc.to(y_ptr.dtype.element_ty), (t[:, None] < end) & (n[None, :] < N))


@triton.jit
def _weight(dy_ptr, x_ptr, dw_ptr, offsets_ptr, N, K, stride_dy, stride_x, BN: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr):
    """dW [E, N, K]: program (n tile, k tile, expert)."""
    n, k = tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(1) * BK + tl.arange(0, BK)
    expert = tl.program_id(2)
    end = tl.load(offsets_ptr + expert + 1).to(tl.int32)
    acc = tl.zeros([BN, BK], tl.float32)
    for at in range(tl.load(offsets_ptr + expert).to(tl.int32), end, BT):
        t = at + tl.arange(0, BT)
        dy = tl.load(dy_ptr + t.to(tl.int64)[:, None] * stride_dy + n[None, :], (t[:, None] < end) & (n[None, :] < N), 0.0)
        x = tl.load(x_ptr + t.to(tl.int64)[:, None] * stride_x + k[None, :], (t[:, None] < end) & (k[None, :] < K), 0.0)
        acc = dot(dy.T, x, acc)
    to = dw_ptr + (expert.to(tl.int64) * N + n[:, None]) * K + k[None, :]
    tl.store(to, acc.to(dw_ptr.dtype.element_ty), (n[:, None] < N) & (k[None, :] < K))


def _product(x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, strides: tuple[int, int], width: int) -> torch.Tensor:
    """y [T, width]; strides of W along its output and its input."""
    y = torch.empty(x.shape[0], width, dtype=x.dtype, device=x.device)
    if x.shape[0]:
        table = tiles(offsets.to(x.device), x.shape[0], _BM)
        experts = torch.searchsorted(offsets.to(x.device).to(torch.int32), table[:, 2].contiguous(),
                                     right=True).to(torch.int32) - 1
        _forward[(table.shape[0], triton.cdiv(width, _BN))](x, w, y, table, experts, x.shape[1], width, x.stride(0),
                                                            w.stride(0), *strides,
                                                           BM=_BM, BN=_BN, BK=_BK, num_warps=4, num_stages=4)  # fmt: skip
    return y


class Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        ctx.save_for_backward(x, weight, offsets)
        return _product(x, weight, offsets, (weight.stride(1), weight.stride(2)), weight.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, offsets = ctx.saved_tensors
        dy, (experts, n, k) = grads[0].contiguous(), weight.shape
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = _product(dy, weight, offsets, (weight.stride(2), weight.stride(1)), k)
        if ctx.needs_input_grad[1]:
            dw = torch.empty_like(weight)
            grid = (triton.cdiv(n, 64), triton.cdiv(k, 64), experts)
            _weight[grid](dy, x, dw, offsets.to(x.device), n, k, dy.stride(0), x.stride(0), BN=64, BK=64, BT=64, num_warps=4)
        return dx, dw, None


def offline_cases() -> list[Case]:
    bf16 = {80: r"mma\.sync[.a-z0-9]*bf16", 90: r"wgmma\.mma_async[.a-z0-9]*bf16", 100: r"tcgen05\.mma",
            120: r"mma\.sync[.a-z0-9]*bf16"}  # fmt: skip
    forward = {"x_ptr": "*bf16", "w_ptr": "*bf16", "y_ptr": "*bf16", "tiles_ptr": "*i32", "experts_ptr": "*i32", "K": "i32",
               "N": "i32", "stride_x": "i32", "w_expert": "i32", "w_n": "i32"}  # fmt: skip
    weight = {"dy_ptr": "*bf16", "x_ptr": "*bf16", "dw_ptr": "*bf16", "offsets_ptr": "*i64", "N": "i32", "K": "i32",
              "stride_dy": "i32", "stride_x": "i32"}  # fmt: skip
    return [Case("gemm_grouped", _forward, forward, {"w_k": 1, "BM": _BM, "BN": _BN, "BK": _BK}, bf16, 4, 4),
            Case("gemm_grouped dW", _weight, weight, {"BN": 64, "BK": 64, "BT": 64}, bf16, 4, 3, quick=())]  # fmt: skip
