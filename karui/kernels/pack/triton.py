"""Pairs of 4-bit codes turned: the bytes of a matrix's transpose, without its codes between."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from karui.kernels.triton_support.offline import Case


@triton.jit
def _turn(data_ptr, out_ptr, N, K, row_bytes, out_bytes, BK: tl.constexpr, BJ: tl.constexpr):
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    j = tl.program_id(1) * BJ + tl.arange(0, BJ)
    shift = (k % 2 * 4)[:, None]
    at = data_ptr + (2 * j).to(tl.int64)[None, :] * row_bytes + (k // 2)[:, None]
    even = (k < K)[:, None] & (2 * j < N)[None, :]
    odd = (k < K)[:, None] & (2 * j + 1 < N)[None, :]
    low = (tl.load(at, even, 0).to(tl.int32) >> shift) & 15
    high = (tl.load(at + row_bytes, odd, 0).to(tl.int32) >> shift) & 15
    to = out_ptr + k.to(tl.int64)[:, None] * out_bytes + j[None, :]
    tl.store(to, (low | (high << 4)).to(tl.uint8), (k < K)[:, None] & (j < out_bytes)[None, :])


def transpose_pairs(data: torch.Tensor, k: int, fill: int) -> torch.Tensor:
    """See `karui.kernels.pack.transpose_pairs`."""
    n, row_bytes = data.shape
    out = torch.empty(k, (n + fill - 1) // fill * fill // 2, dtype=torch.uint8, device=data.device)
    _turn[(triton.cdiv(k, 64), triton.cdiv(out.shape[1], 64))](data, out, n, k, row_bytes, out.shape[1], BK=64, BJ=64)
    return out


def offline_cases() -> list[Case]:
    signature = {"data_ptr": "*u8", "out_ptr": "*u8", **{name: "i32" for name in ("N", "K", "row_bytes", "out_bytes")}}
    stores = {cc: r"st\.global" for cc in (80, 90, 100, 120)}
    return [Case("transpose of packed pairs", _turn, signature, {"BK": 64, "BJ": 64}, stores, odd=("N", "K"))]
