"""Grouped products: a program takes a tile of one expert's rows from the list that `_group` makes on the device; dW walks an
expert's rows."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from karui.kernels.gemm_grouped import Groups
from karui.kernels.gemm_grouped.reference import max_tiles
from karui.kernels.triton_support.offline import Case
from karui.kernels.triton_support.products import dot


@triton.jit
def _group(chosen_ptr, order_ptr, place_ptr, offsets_ptr, tiles_ptr, R, num_experts, num_tiles, EP: tl.constexpr,
           BM: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Program e places the rows of expert e: counts of all experts first, then its own rows in their order."""
    own, at, experts = tl.program_id(0), tl.arange(0, BLOCK), tl.arange(0, EP)
    counts = tl.zeros([EP], tl.int32)
    for row in range(0, R, BLOCK):
        counts += tl.histogram(tl.load(chosen_ptr + row + at, row + at < R, 0).to(tl.int32), EP, row + at < R)
    tiles = (counts + BM - 1) // BM
    start, end = tl.sum(tl.where(experts < own, counts, 0)), tl.sum(tl.where(experts <= own, counts, 0))
    tl.store(offsets_ptr + own, start)
    to = tiles_ptr + 3 * tl.sum(tl.where(experts < own, tiles, 0))
    for first in range(start, end, BM):
        tl.store(to, own)
        tl.store(to + 1, first)
        tl.store(to + 2, tl.minimum(first + BM, end))
        to += 3
    if own == num_experts - 1:
        tl.store(offsets_ptr + num_experts, R)
        for _ in range(tl.sum(tiles), num_tiles):
            tl.store(to, 0)
            tl.store(to + 1, 0)
            tl.store(to + 2, 0)
            to += 3
    for row in range(0, R, BLOCK):
        mine = tl.load(chosen_ptr + row + at, row + at < R, -1).to(tl.int32) == own
        place = start + tl.cumsum(mine.to(tl.int32)) - 1
        tl.store(place_ptr + row + at, place.to(tl.int64), mine)
        tl.store(order_ptr + place, (row + at).to(tl.int64), mine)
        start += tl.sum(mine.to(tl.int32))


def group_rows(chosen: torch.Tensor, num_experts: int, block: int) -> tuple[torch.Tensor, ...]:
    """(order, place, offsets, tiles) of `Groups`."""
    (rows,), device = chosen.shape, chosen.device
    order, place = (torch.empty(rows, dtype=torch.int64, device=device) for _ in range(2))
    offsets = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    tiles = torch.empty(max_tiles(rows, num_experts, block), 3, dtype=torch.int32, device=device)
    _group[(num_experts,)](chosen.contiguous(), order, place, offsets, tiles, rows, num_experts, tiles.shape[0],
                           EP=max(32, triton.next_power_of_2(num_experts)), BM=block,
                           BLOCK=min(max(128, triton.next_power_of_2(rows)), 1024), num_warps=4)  # fmt: skip
    return order, place, offsets, tiles


@triton.jit
def _forward(x_ptr, w_ptr, y_ptr, tiles_ptr, K, N, stride_x, w_expert, w_n, w_k, BM: tl.constexpr, BN: tl.constexpr,
             BK: tl.constexpr):  # fmt: skip
    tiles_ptr += 3 * tl.program_id(0)
    expert, first, end = tl.load(tiles_ptr).to(tl.int64), tl.load(tiles_ptr + 1), tl.load(tiles_ptr + 2)
    if first < end:
        t, n, k = first + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BK)
        x_at = x_ptr + t.to(tl.int64)[:, None] * stride_x + k[None, :]
        w_at = w_ptr + expert * w_expert + n[None, :] * w_n + k[:, None] * w_k
        acc = tl.zeros([BM, BN], tl.float32)
        for at in range(0, K, BK):
            x = tl.load(x_at + at, (t[:, None] < end) & (at + k[None, :] < K), 0.0)
            w = tl.load(w_at + at * w_k, (n[None, :] < N) & (at + k[:, None] < K), 0.0)
            acc = dot(x, w, acc, "ieee")
        to = y_ptr + t.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(to, acc.to(y_ptr.dtype.element_ty), (t[:, None] < end) & (n[None, :] < N))


@triton.jit
def _weight(dy_ptr, x_ptr, dw_ptr, offsets_ptr, N, K, stride_dy, stride_x, BN: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr):
    """dW [E, N, K]: program (n tile, k tile, expert)."""
    n, k = tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(1) * BK + tl.arange(0, BK)
    expert = tl.program_id(2)
    end = tl.load(offsets_ptr + expert + 1)
    acc = tl.zeros([BN, BK], tl.float32)
    for at in range(tl.load(offsets_ptr + expert), end, BT):
        t = at + tl.arange(0, BT)
        dy = tl.load(dy_ptr + t.to(tl.int64)[:, None] * stride_dy + n[None, :], (t[:, None] < end) & (n[None, :] < N), 0.0)
        x = tl.load(x_ptr + t.to(tl.int64)[:, None] * stride_x + k[None, :], (t[:, None] < end) & (k[None, :] < K), 0.0)
        acc = dot(dy.T, x, acc, "ieee")
    to = dw_ptr + (expert.to(tl.int64) * N + n[:, None]) * K + k[None, :]
    tl.store(to, acc.to(dw_ptr.dtype.element_ty), (n[:, None] < N) & (k[None, :] < K))


def _product(x: torch.Tensor, w: torch.Tensor, groups: Groups, strides: tuple[int, int], width: int) -> torch.Tensor:
    """y [R, width]; strides of W along its output and its input."""
    y = torch.empty(x.shape[0], width, dtype=x.dtype, device=x.device)
    if x.shape[0]:
        # few rows read weights and little else: narrow tiles, so that many programs read at once
        bn, bk = (32, 128) if groups.block == 16 else (128, 64)
        _forward[(groups.tiles.shape[0], triton.cdiv(width, bn))](
            x, w, y, groups.tiles, x.shape[1], width, x.stride(0), w.stride(0), *strides, BM=groups.block, BN=bn,
            BK=bk if x.element_size() == 2 else 32, num_warps=4, num_stages=4)  # fmt: skip
    return y


class Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, groups: Groups) -> torch.Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        ctx.groups = groups
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return _product(x, weight, groups, (weight.stride(1), weight.stride(2)), weight.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy, (experts, n, k) = grads[0].contiguous(), weight.shape
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = _product(dy, weight, ctx.groups, (weight.stride(2), weight.stride(1)), k)
        if ctx.needs_input_grad[1]:
            dw = torch.empty_like(weight)
            grid = (triton.cdiv(n, 64), triton.cdiv(k, 64), experts)
            _weight[grid](dy, x, dw, ctx.groups.offsets, n, k, dy.stride(0), x.stride(0), BN=64, BK=64,
                          BT=64 if x.element_size() == 2 else 32, num_warps=4)  # fmt: skip
        return dx, dw, None


def offline_cases() -> list[Case]:
    mma = {cc: r"mma\.sync[.a-z0-9]*bf16" for cc in (80, 90, 120)} | {100: r"tcgen05\.mma|mma\.sync"}
    wide = {80: mma[80], 90: r"wgmma\.mma_async[.a-z0-9]*bf16", 100: r"tcgen05\.mma", 120: mma[120]}
    ieee = {cc: r"fma\.rn\.f32" for cc in (80, 90, 100, 120)}
    forward = {"x_ptr": "*bf16", "w_ptr": "*bf16", "y_ptr": "*bf16", "tiles_ptr": "*i32", "K": "i32", "N": "i32",
               "stride_x": "i32", "w_expert": "i32", "w_n": "i32"}  # fmt: skip
    weight = {"dy_ptr": "*bf16", "x_ptr": "*bf16", "dw_ptr": "*bf16", "offsets_ptr": "*i32", "N": "i32", "K": "i32",
              "stride_dy": "i32", "stride_x": "i32"}  # fmt: skip
    group = {"chosen_ptr": "*i64", "order_ptr": "*i64", "place_ptr": "*i64", "offsets_ptr": "*i32", "tiles_ptr": "*i32",
             "R": "i32", "num_experts": "i32", "num_tiles": "i32"}  # fmt: skip
    single = {name: "*fp32" for name in ("x_ptr", "w_ptr", "y_ptr")}
    return [Case("gemm_grouped", _forward, forward, {"w_k": 1, "BM": 64, "BN": 128, "BK": 64}, wide, 4, 4),
            Case("gemm_grouped few rows", _forward, forward, {"w_k": 1, "BM": 16, "BN": 32, "BK": 128}, mma, 4, 4),
            Case("gemm_grouped fp32", _forward, forward | single, {"w_k": 1, "BM": 64, "BN": 128, "BK": 32}, ieee, 4, 4,
                 quick=(), on="one"),
            Case("gemm_grouped dW", _weight, weight, {"BN": 64, "BK": 64, "BT": 64}, wide, 4, 3, quick=()),
            Case("gemm_grouped rows", _group, group, {"EP": 128, "BM": 64, "BLOCK": 1024},
                 {cc: r"atom[.a-z]*\.shared[.a-z0-9]*add" for cc in wide}, odd=("R", "num_experts", "num_tiles"))]  # fmt: skip
