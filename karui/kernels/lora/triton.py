"""x W + low V with low = s x U in one pass over x: LoRA's forward product (W^T, A^T, B^T) and its gradient of x (W, B, A) alike.

A tile of x goes to two accumulators, [BM, BN] of the base and [BM, rank] of the update, and the second one ends in the first: y
is written once and never read. Each column of tiles computes low anew (rank / BN of the work); the first one stores it, rounded
as the second product reads it, for dA and dB. Over packed weights the same is done inside of `gemm_weight`'s kernels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from karui.kernels.gemm_fp8.triton import tile_of
from karui.kernels.gemm_weight import DEQUANTIZE_ROWS
from karui.kernels.gemm_weight import triton as packed_weight
from karui.kernels.lora import Weight, packed_of
from karui.kernels.triton_support import capability
from karui.kernels.triton_support.offline import Case
from karui.kernels.triton_support.products import dot
from karui.kernels.triton_support.tuning import Config, config, launch

_BAND = 8


@triton.jit
def _low_rank(x_ptr, w_ptr, u_ptr, v_ptr, bias_ptr, y_ptr, low_ptr, M, N, K, R, stride_x, w_k, w_n, u_k, u_r, v_r, v_n, scaling,
              BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
              BAND: tl.constexpr):  # fmt: skip
    """w [K, N], u [K, R], v [R, N] by their strides; low [M, R] and y [M, N] dense."""
    i, j = tile_of(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN), BAND)
    m, n = i * BM + tl.arange(0, BM), j * BN + tl.arange(0, BN)
    k, r = tl.arange(0, BK), tl.arange(0, BR)
    x_at = x_ptr + m.to(tl.int64)[:, None] * stride_x + k[None, :]
    w_at = w_ptr + k[:, None] * w_k + n.to(tl.int64)[None, :] * w_n
    u_at = u_ptr + k[:, None] * u_k + r[None, :] * u_r
    acc = tl.zeros([BM, BN], tl.float32)
    low = tl.zeros([BM, BR], tl.float32)
    for at in range(0, K, BK):
        inside = at + k < K
        x = tl.load(x_at + at, (m[:, None] < M) & inside[None, :], 0.0)
        w = tl.load(w_at, inside[:, None] & (n[None, :] < N), 0.0)
        u = tl.load(u_at, inside[:, None] & (r[None, :] < R), 0.0)
        acc = dot(x, w, acc)
        low = dot(x, u, low)
        w_at += BK * w_k
        u_at += BK * u_k
    rounded = (low * scaling).to(y_ptr.dtype.element_ty)
    if j == 0:
        tl.store(low_ptr + m.to(tl.int64)[:, None] * R + r[None, :], rounded, (m[:, None] < M) & (r[None, :] < R))
    v = tl.load(v_ptr + r[:, None] * v_r + n[None, :] * v_n, (r[:, None] < R) & (n[None, :] < N), 0.0)
    acc = dot(rounded, v, acc)
    if BIAS:
        acc += tl.load(bias_ptr + n, n < N, 0.0).to(tl.float32)[None, :]
    to = y_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(to, acc.to(y_ptr.dtype.element_ty), (m[:, None] < M) & (n[None, :] < N))


# Two products of torch's, for the shapes where timing prefers them.
_SPLIT = config(split=1)
WIDE = [config(8, 3, BM=128, BN=256, BK=64), config(8, 4, BM=128, BN=128, BK=64), config(4, 4, BM=64, BN=128, BK=64), _SPLIT]
WIDE_99K = [config(8, 2, BM=128, BN=128, BK=64), config(4, 3, BM=64, BN=64, BK=64), _SPLIT]
NARROW = [config(4, 4, BM=32, BN=64, BK=64), _SPLIT]
INTERPRETED = [config(4, 1, BM=16, BN=16, BK=16)]


def low_rank_matmul(x: torch.Tensor, w: torch.Tensor, u: torch.Tensor, v: torch.Tensor, scaling: float,
                    bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(x w + low v + bias, low = scaling x u) as `karui.kernels.matmul.low_rank_matmul`."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    (m, k), n, rank = x.shape, w.shape[1], u.shape[1]
    y, low = x.new_empty(m, n), x.new_empty(m, rank)
    if not m:
        return y, low

    def run(c: Config) -> None:
        if c is _SPLIT:
            torch.mm(x, u, out=low).mul_(scaling)
            torch.mm(x, w, out=y).addmm_(low, v)
            if bias is not None:
                y.add_(bias)
            return
        grid = (triton.cdiv(m, c["BM"]) * triton.cdiv(n, c["BN"]),)
        _low_rank[grid](x, w, u, v, y if bias is None else bias, y, low, m, n, k, rank, x.stride(0), *w.stride(), *u.stride(),
                        *v.stride(), scaling, BIAS=bias is not None, BR=_padded(rank), BAND=_BAND, **c())  # fmt: skip

    key = ("lora", triton.next_power_of_2(m), n, k, rank, w.stride(1) == 1, x.dtype)
    launch(key, _candidates(x, m), run, x.device)
    return y, low


def forward(rows: torch.Tensor, weight: Weight, bias: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor,
            scaling: float) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(x W^T + bias + low B^T [M, out], low = s x A^T [M, rank])."""
    packed = packed_of(weight) if rows.shape[0] < DEQUANTIZE_ROWS else None
    if packed is None:
        return low_rank_matmul(rows, weight(rows.dtype).T, a.T, b.T, scaling, bias)
    return packed_weight.gemm_lora(rows, packed, bias, a, b, scaling)


def dgrad(dy: torch.Tensor, weight: Weight, a: torch.Tensor, b: torch.Tensor,
          scaling: float) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dy W + pulled A [M, in], pulled = s dy B [M, rank])."""
    packed = packed_of(weight) if dy.shape[0] < DEQUANTIZE_ROWS else None
    if packed is None:
        return low_rank_matmul(dy, weight(dy.dtype), b, a, scaling)
    return packed_weight.dgrad_lora(dy, packed, a, b, scaling)


def _padded(rank: int) -> int:
    return max(16, triton.next_power_of_2(rank))


def _candidates(x: torch.Tensor, m: int) -> list[Config]:
    if x.device.type != "cuda":
        return INTERPRETED
    if m <= 64:
        return NARROW
    return WIDE if capability(x.device) in (90, 100, 103) else WIDE_99K


def offline_cases() -> list[Case]:
    mma = r"mma\.sync[.a-z0-9]*bf16"
    dot = {80: mma, 89: mma, 90: r"wgmma\.mma_async[.a-z0-9]*bf16", 100: r"tcgen05\.mma", 120: mma}
    types = {**{f"{x}_ptr": "*bf16" for x in ("x", "w", "u", "v", "bias", "y", "low")}, "scaling": "fp32",
             **{x: "i32" for x in ("M", "N", "K", "R", "stride_x", "w_k", "w_n", "u_k", "u_r", "v_r", "v_n")}}  # fmt: skip
    cases = []
    for rank in (16, 64):
        for name, big, ccs in (("", True, (90, 100)), (" small", False, (80, 89, 120))):
            c = (WIDE if big else WIDE_99K)[0]
            # forward: W [out, in] read as its transpose; backward: as it lies
            for step, strides in (("forward", {"w_k": 1, "u_k": 1, "v_r": 1}), ("dgrad", {"w_n": 1, "u_r": 1, "v_n": 1})):
                constants = {"BIAS": step == "forward", "BR": rank, "BAND": _BAND, **dict(c.blocks), **strides}
                kinds = {name: kind for name, kind in types.items() if name not in strides}
                cases.append(Case(f"lora {step} rank {rank}{name}", _low_rank, kinds, constants, {cc: dot[cc] for cc in ccs},
                                  c.num_warps, c.num_stages, ("M", "R"),
                                  quick=(90,) if big and (rank, step) == (64, "forward") else (),
                                  on="asked" if rank == 16 else "each"))  # fmt: skip
    return cases
