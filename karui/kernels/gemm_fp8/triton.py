"""FP8 GEMMs on tensor descriptors with a persistent schedule: as many programs as the multiprocessors hold at once, each walking
output tiles in an order that keeps a band of A in the L2 cache.

`_whole` keeps one accumulator over K and scales in the epilogue; `_tiled` promotes every 128 along K. A program's promotion
leaves the tensor cores idle, as Triton waits for a product before its first use; small tiles lie two or three together.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from karui.kernels.quantize.scaled_float8 import ScaledFloat8
from karui.kernels.triton_support import capability, num_processors
from karui.kernels.triton_support.offline import SHARED_LIMIT, Case
from karui.kernels.triton_support.tuning import Config, config, launch

_BAND = 8


@triton.jit
def tile_of(number, num_m, num_n, BAND: tl.constexpr):
    """(row, column) of the output tile `number`: bands of BAND rows, column by column."""
    band = number // (BAND * num_n)
    first = band * BAND
    height = tl.minimum(num_m - first, BAND)
    inside = number % (BAND * num_n)
    return first + inside % height, inside // height


@triton.jit
def _whole(a_desc, b_desc, y_desc, a_scale_ptr, b_scale_ptr, M, N, K, A_ROWS: tl.constexpr, B_ROWS: tl.constexpr,
           BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BAND: tl.constexpr, PROGRAMS: tl.constexpr):  # fmt: skip
    num_m, num_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    for number in tl.range(tl.program_id(0), num_m * num_n, PROGRAMS, flatten=True):
        i, j = tile_of(number, num_m, num_n, BAND)
        acc = tl.zeros([BM, BN], tl.float32)
        for k in range(tl.cdiv(K, BK)):
            a = a_desc.load([i * BM, k * BK])
            b = b_desc.load([j * BN, k * BK])
            acc = tl.dot(a, b.T, acc)
        m, n = i * BM + tl.arange(0, BM), j * BN + tl.arange(0, BN)
        if A_ROWS:
            acc *= tl.load(a_scale_ptr + m, m < M, 0.0)[:, None]
        else:
            acc *= tl.load(a_scale_ptr)
        if B_ROWS:
            acc *= tl.load(b_scale_ptr + n, n < N, 0.0)[None, :]
        else:
            acc *= tl.load(b_scale_ptr)
        y_desc.store([i * BM, j * BN], acc.to(y_desc.dtype))


@triton.jit
def _tiled(a_desc, b_desc, y_desc, a_scale_ptr, b_scale_ptr, M, N, K, B_SQUARE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
           BAND: tl.constexpr, PROGRAMS: tl.constexpr):  # fmt: skip
    """a_scale [M, ceil(K/128)]; b_scale [ceil(N/128), ceil(K/128)] (B_SQUARE, BN divides 128) or [ceil(K/128), N]: each thread
    has a quarter of a tile's columns, whose scales then are neighbours."""
    num_m, num_n, num_k = tl.cdiv(M, BM), tl.cdiv(N, BN), tl.cdiv(K, 128)
    for number in tl.range(tl.program_id(0), num_m * num_n, PROGRAMS, flatten=True):
        i, j = tile_of(number, num_m, num_n, BAND)
        m, n = i * BM + tl.arange(0, BM), j * BN + tl.arange(0, BN)
        acc = tl.zeros([BM, BN], tl.float32)
        for k in range(num_k):
            a = a_desc.load([i * BM, k * 128])
            b = b_desc.load([j * BN, k * 128])
            a_scale = tl.load(a_scale_ptr + m * num_k + k, m < M, 0.0)
            product = tl.dot(a, b.T)
            if B_SQUARE:
                acc += product * (a_scale * tl.load(b_scale_ptr + (j * BN // 128) * num_k + k))[:, None]
            else:
                acc += product * a_scale[:, None] * tl.load(b_scale_ptr + k * N + n, n < N, 0.0)[None, :]
        y_desc.store([i * BM, j * BN], acc.to(y_desc.dtype))


# The first is what runs untimed. Blackwell's accumulators lie in tensor memory, so wide tiles cost no registers there.
WHOLE = [config(8, 3, BM=128, BN=256, BK=128), config(8, 4, BM=128, BN=128, BK=128), config(4, 4, BM=64, BN=128, BK=128)]
TILED = [config(8, 4, BM=128, BN=128), config(4, 2, BM=64, BN=128), config(4, 4, BM=64, BN=128)]
# An fp32 output's tile lies in shared memory too, and takes the room of a stage or of half the columns.
WHOLE_FP32 = WHOLE[1:]
# sm_89 and sm_120 have 99 KB of shared memory.
WHOLE_99K = [config(8, 3, BM=128, BN=128, BK=128), config(4, 3, BM=64, BN=64, BK=128)]
WHOLE_99K_FP32 = [config(8, 2, BM=128, BN=128, BK=128), WHOLE_99K[1]]
TILED_99K = [config(8, 2, BM=128, BN=128), config(4, 3, BM=64, BN=64)]


def gemm_fp8(a: ScaledFloat8, b: ScaledFloat8, out_dtype: torch.dtype, b_kind: str) -> torch.Tensor:
    """As `karui.kernels.gemm_fp8.gemm_fp8`."""
    (m, k), n = a.codes.shape, b.codes.shape[0]
    left, right = (aligned(q.codes) for q in (a, b))
    step = 16 // out_dtype.itemsize
    y = torch.empty(m, -(-n // step) * step, dtype=out_dtype, device=left.device)[:, :n]
    tiled = b_kind != "whole"
    roomy = left.device.type == "cuda" and capability(left.device) in (90, 100, 103)
    candidates = (TILED if roomy else TILED_99K) if tiled else whole(roomy, out_dtype.itemsize)
    if left.device.type != "cuda" or min(m, n) <= 64:
        candidates = candidates[-1:]
    scales = a.scale.contiguous(), (b.scale.t() if b_kind == "1x128" else b.scale).contiguous()

    def run(c: Config) -> None:
        # compiled for the device's programs, also where there are fewer tiles: a number per shape would compile anew for each
        every = num_processors(left.device) * together(c, out_dtype.itemsize, roomy)
        programs = min(every, triton.cdiv(m, c["BM"]) * triton.cdiv(n, c["BN"]))
        deep = 128 if tiled else c["BK"]
        args: tuple[Any, ...] = (
            TensorDescriptor.from_tensor(left, [c["BM"], deep]), TensorDescriptor.from_tensor(right, [c["BN"], deep]),
            TensorDescriptor(y, [m, n], [y.stride(0), 1], [c["BM"], c["BN"]]), *scales, m, n, k,
        )  # fmt: skip
        if tiled:
            _tiled[(programs,)](*args, B_SQUARE=b_kind == "128x128", BAND=_BAND, PROGRAMS=every, **c())
        else:
            _whole[(programs,)](*args, A_ROWS=a.scale.numel() > 1, B_ROWS=b.scale.numel() > 1, BAND=_BAND, PROGRAMS=every, **c())

    launch(("gemm_fp8", b_kind, *shape_class(m, n, k), out_dtype), candidates, run, left.device)
    return y


def whole(roomy: bool, out_bytes: int) -> list[Config]:
    """The candidates of `_whole`."""
    if out_bytes == 4:
        return WHOLE_FP32 if roomy else WHOLE_99K_FP32
    return WHOLE if roomy else WHOLE_99K


def together(c: Config, out_bytes: int, roomy: bool) -> int:
    """Programs that a multiprocessor's shared memory holds: stages of both operands, 128 bytes of each row, and the output."""
    held = c.num_stages * (c["BM"] + c["BN"]) * 128 + c["BM"] * c["BN"] * out_bytes + 1024
    return max(1, SHARED_LIMIT[90 if roomy else 120] // held)


def shape_class(*sizes: int) -> tuple[int, ...]:
    """What shapes are tuned as one: packed batches differ in their rows from step to step."""
    return tuple(triton.next_power_of_2(size) for size in sizes)


def aligned(codes: torch.Tensor) -> torch.Tensor:
    """Rows that a tensor descriptor can address: dense, on 16 bytes, a multiple of 16 bytes apart (padded with zeros)."""
    size = codes.element_size()
    if codes.stride(1) == 1 and codes.stride(0) * size % 16 == 0 and codes.data_ptr() % 16 == 0:
        return codes
    step = 16 // size
    wide = torch.zeros(codes.shape[0], -(-codes.shape[1] // step) * step, dtype=codes.dtype, device=codes.device)
    into, read = (t.view(torch.uint8) if size == 1 else t for t in (wide, codes))
    into[:, : codes.shape[1]] = read
    return wide


def offline_cases() -> list[Case]:
    dot = {89: r"mma\.sync[.a-z0-9]*e4m3", 90: r"wgmma\.mma_async[.a-z0-9]*e4m3", 100: r"tcgen05\.mma",
           120: r"mma\.sync[.a-z0-9]*e4m3"}
    cases = []
    for name, roomy, out, left, ccs, quick in [
        ("rows", True, "bf16", "fp8e4nv", (90, 100), (90, 100)), ("rows, fp32", True, "fp32", "fp8e4nv", (90, 100), (90,)),
        ("E5M2 x E4M3", True, "bf16", "fp8e5", (90, 100), ()), ("rows, small", False, "bf16", "fp8e4nv", (89, 120), (120,)),
        ("rows, small, fp32", False, "fp32", "fp8e4nv", (89, 120), ()),
    ]:  # fmt: skip
        c = whole(roomy, 4 if out == "fp32" else 2)[0]
        bm, bn = c["BM"], c["BN"]
        types = {"a_desc": f"tensordesc<{left}[{bm},128]>", "b_desc": f"tensordesc<fp8e4nv[{bn},128]>",
                 "y_desc": f"tensordesc<{out}[{bm},{bn}]>", "a_scale_ptr": "*fp32", "b_scale_ptr": "*fp32",
                 **dict.fromkeys(("M", "N", "K"), "i32")}  # fmt: skip
        rows = left == "fp8e4nv"
        constants = {"A_ROWS": rows, "B_ROWS": rows, "BAND": _BAND, "PROGRAMS": 132, **dict(c.blocks)}
        cases.append(Case(f"gemm_fp8 {name} {bm}x{bn}", _whole, types, constants, {cc: dot[cc] for cc in ccs}, c.num_warps,
                          c.num_stages, quick=quick, on="each" if rows and out == "bf16" else "one"))  # fmt: skip
    for square in (True, False):
        for big in (True, False):
            expects = {cc: dot[cc] for cc in ((90, 100) if big else (89, 120))}
            types = {"a_desc": "tensordesc<fp8e4nv[128,128]>", "b_desc": "tensordesc<fp8e4nv[128,128]>",
                     "y_desc": "tensordesc<bf16[128,128]>", "a_scale_ptr": "*fp32", "b_scale_ptr": "*fp32", "M": "i32",
                     "N": "i32", "K": "i32"}  # fmt: skip
            constants = {"B_SQUARE": square, "BM": 128, "BN": 128, "BAND": 8, "PROGRAMS": 132}
            cases.append(Case(f"gemm_fp8 {'128x128' if square else '1x128'} {'' if big else 'small'}".strip(), _tiled, types,
                              constants, expects, 8, 4 if big else 2, quick=(90,) if big and square else (),
                              on="each" if square else "one"))  # fmt: skip
    return cases
