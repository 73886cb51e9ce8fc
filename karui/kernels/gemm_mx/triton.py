"""Block-scaled GEMMs: `tl.dot_scaled` on Blackwell, and a path that decodes to bf16 in registers for every other GPU.

The interpreter has no `dot_scaled` before Triton 3.8, and then reads NVFP4's E4M3 scales as E8M0, so there the decoding path
serves; what `dot_scaled` becomes is checked by compilation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from karui.kernels.gemm_fp8.triton import shape_class, tile_of
from karui.kernels.gemm_mx import row_scales
from karui.kernels.train_quantize import Coded
from karui.kernels.triton_support import capability
from karui.kernels.triton_support.codecs import decode_e2m1, decode_e4m3, e8m0_value
from karui.kernels.triton_support.offline import Case
from karui.kernels.triton_support.products import dot
from karui.kernels.triton_support.tuning import Config, config, launch

_BAND = 8
# constexpr, because the interpreter takes their value
_E4M3, _E2M1 = tl.constexpr("e4m3"), tl.constexpr("e2m1")


@triton.jit
def _codes(ptr, rows, num_rows, first, K_STORED, PAIRS: tl.constexpr, BK: tl.constexpr):
    """[rows, BK] codes (or BK / 2 bytes) beginning at element `first`; zero beyond the matrix."""
    at = first // 2 + tl.arange(0, BK // 2) if PAIRS else first + tl.arange(0, BK)
    inside = (rows[:, None] < num_rows) & (at[None, :] < K_STORED)
    return tl.load(ptr + rows.to(tl.int64)[:, None] * K_STORED + at[None, :], inside, 0)


@triton.jit
def _scales(ptr, rows, num_rows, first, num_blocks, BLOCKS: tl.constexpr):
    at = first + tl.arange(0, BLOCKS)
    return tl.load(ptr + rows[:, None] * num_blocks + at[None, :], (rows[:, None] < num_rows) & (at[None, :] < num_blocks), 0)


@triton.jit
def _scaled(a_ptr, b_ptr, y_ptr, a_scale_ptr, b_scale_ptr, a_global_ptr, b_global_ptr, M, N, K_STORED, num_blocks, stride_y,
            FORMAT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BAND: tl.constexpr):  # fmt: skip
    """FORMAT 0 mxfp8, 1 mxfp4, 2 nvfp4."""
    BLOCK: tl.constexpr = 16 if FORMAT == 2 else 32
    PAIRS: tl.constexpr = FORMAT > 0
    BLOCKS: tl.constexpr = BK // BLOCK
    i, j = tile_of(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN), BAND)
    m, n = i * BM + tl.arange(0, BM), j * BN + tl.arange(0, BN)
    acc = tl.zeros([BM, BN], tl.float32)
    for k in range(tl.cdiv(num_blocks, BLOCKS)):
        a = _codes(a_ptr, m, M, k * BK, K_STORED, PAIRS, BK)
        b = _codes(b_ptr, n, N, k * BK, K_STORED, PAIRS, BK)
        a_scale = _scales(a_scale_ptr, m, M, k * BLOCKS, num_blocks, BLOCKS)
        b_scale = _scales(b_scale_ptr, n, N, k * BLOCKS, num_blocks, BLOCKS)
        if FORMAT == 2:
            a_scale = a_scale.to(tl.float8e4nv, bitcast=True)
            b_scale = b_scale.to(tl.float8e4nv, bitcast=True)
        if FORMAT == 0:
            a = a.to(tl.float8e4nv, bitcast=True)
            b = b.to(tl.float8e4nv, bitcast=True)
            acc = tl.dot_scaled(a, a_scale, _E4M3, b.T, b_scale, _E4M3, acc)
        else:
            acc = tl.dot_scaled(a, a_scale, _E2M1, b.T, b_scale, _E2M1, acc)
    if FORMAT == 2:
        acc *= tl.div_rn(1.0, tl.load(a_global_ptr) * tl.load(b_global_ptr))
    at = m.to(tl.int64)[:, None] * stride_y + n[None, :]
    tl.store(y_ptr + at, acc.to(y_ptr.dtype.element_ty), (m[:, None] < M) & (n[None, :] < N))


@triton.jit
def _decode(codes, scale, FORMAT: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr, BLOCK: tl.constexpr):
    """bf16 values [ROWS, BK] of a tile's codes and scales; exact."""
    codes = codes.to(tl.int32)
    if FORMAT == 0:
        values = decode_e4m3(codes)
    else:
        values = tl.join(decode_e2m1(codes & 15), decode_e2m1(codes >> 4)).reshape([ROWS, BK])
    factor = decode_e4m3(scale.to(tl.int32)) if FORMAT == 2 else e8m0_value(scale.to(tl.int32))
    factor = tl.broadcast_to(factor[:, :, None], [ROWS, BK // BLOCK, BLOCK]).reshape([ROWS, BK])
    return (values * factor).to(tl.bfloat16)


@triton.jit
def _decoded(a_ptr, b_ptr, y_ptr, a_scale_ptr, b_scale_ptr, a_global_ptr, b_global_ptr, M, N, K_STORED, num_blocks, stride_y,
             FORMAT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BAND: tl.constexpr):  # fmt: skip
    BLOCK: tl.constexpr = 16 if FORMAT == 2 else 32
    PAIRS: tl.constexpr = FORMAT > 0
    BLOCKS: tl.constexpr = BK // BLOCK
    i, j = tile_of(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN), BAND)
    m, n = i * BM + tl.arange(0, BM), j * BN + tl.arange(0, BN)
    acc = tl.zeros([BM, BN], tl.float32)
    for k in range(tl.cdiv(num_blocks, BLOCKS)):
        a_scale = _scales(a_scale_ptr, m, M, k * BLOCKS, num_blocks, BLOCKS)
        b_scale = _scales(b_scale_ptr, n, N, k * BLOCKS, num_blocks, BLOCKS)
        a = _decode(_codes(a_ptr, m, M, k * BK, K_STORED, PAIRS, BK), a_scale, FORMAT, BM, BK, BLOCK)
        b = _decode(_codes(b_ptr, n, N, k * BK, K_STORED, PAIRS, BK), b_scale, FORMAT, BN, BK, BLOCK)
        acc = dot(a, b.T, acc)
    if FORMAT == 2:
        acc *= tl.div_rn(1.0, tl.load(a_global_ptr) * tl.load(b_global_ptr))
    at = m.to(tl.int64)[:, None] * stride_y + n[None, :]
    tl.store(y_ptr + at, acc.to(y_ptr.dtype.element_ty), (m[:, None] < M) & (n[None, :] < N))


# NVFP4 on sm_100 takes 128 rows and no fewer.
SCALED = [config(8, 3, BM=128, BN=128, BK=256), config(4, 4, BM=128, BN=128, BK=128), config(4, 2, BM=128, BN=64, BK=128)]
SCALED_99K = [config(8, 2, BM=128, BN=128, BK=128), config(4, 2, BM=64, BN=64, BK=128)]
DECODED = [config(8, 3, BM=128, BN=128, BK=64), config(4, 3, BM=64, BN=64, BK=64)]


def native(device: torch.device, form: str) -> bool:
    """Whether `tl.dot_scaled` serves the format here: Blackwell; in the interpreter, from Triton 3.8 on, all but NVFP4."""
    if device.type == "cuda":
        return capability(device) >= 100
    from triton.runtime.interpreter import InterpreterBuilder

    return form != "nvfp4" and hasattr(InterpreterBuilder, "create_dot_scaled")


def gemm_mx(a: Coded, b: Coded, out_dtype: torch.dtype, form: str, scaled: bool | None = None) -> torch.Tensor:
    """As `karui.kernels.gemm_mx.gemm_mx`; `scaled` forces one of the two paths."""
    (m, _), n = a.shape, b.shape[0]
    device = a.codes.device
    y = torch.empty(m, n, dtype=out_dtype, device=device)
    scaled = native(device, form) if scaled is None else scaled
    parts = (a.codes.contiguous(), b.codes.contiguous(), row_scales(a), row_scales(b))
    left, right, a_scale, b_scale = (t.view(torch.uint8) for t in parts)
    a_global, b_global = (q.global_scale if q.global_scale is not None else y for q in (a, b))
    kernel = _scaled if scaled else _decoded
    candidates = DECODED
    if scaled:
        candidates = SCALED if device.type == "cuda" and capability(device) < 120 else SCALED_99K
    if device.type != "cuda" or min(m, n) <= 64:
        candidates = candidates[-1:]

    def run(c: Config) -> None:
        grid = (triton.cdiv(m, c["BM"]) * triton.cdiv(n, c["BN"]),)
        kernel[grid](left, right, y, a_scale, b_scale, a_global, b_global, m, n, left.shape[1], a_scale.shape[1], y.stride(0),
                     FORMAT={"mxfp8": 0, "mxfp4": 1, "nvfp4": 2}[form], BAND=_BAND, **c())  # fmt: skip

    launch(("gemm_mx", form, scaled, *shape_class(m, n, a.shape[1]), out_dtype), candidates, run, device)
    return y


def offline_cases() -> list[Case]:
    native = {
        "mxfp8": {100: r"tcgen05\.mma[.:_a-z0-9]*block_scale", 120: r"mma\.sync[.:_a-z0-9]*block_scale"},
        "mxfp4": {100: r"tcgen05\.mma[.:_a-z0-9]*(mxf4|mxf8f6f4)", 120: r"mma\.sync[.:_a-z0-9]*block_scale"},
        "nvfp4": {100: r"tcgen05\.mma[.:_a-z0-9]*mxf4nvf4", 120: r"mma\.sync[.:_a-z0-9]*mxf4nvf4"},
    }
    decoded = {80: r"mma\.sync[.a-z0-9]*bf16", 90: r"wgmma\.mma_async[.a-z0-9]*bf16"}
    common = {"y_ptr": "*bf16", "a_global_ptr": "*fp32", "b_global_ptr": "*fp32", "M": "i32", "N": "i32", "K_STORED": "i32",
              "num_blocks": "i32", "stride_y": "i32"}  # fmt: skip
    cases = []
    for number, form in enumerate(("mxfp8", "mxfp4", "nvfp4")):
        types = common | {"a_ptr": "*u8", "b_ptr": "*u8", "a_scale_ptr": "*u8", "b_scale_ptr": "*u8"}
        for cc, c, size in ((100, SCALED[0], ""), (100, SCALED[-1], ", small"), (120, SCALED_99K[0], ""),
                            (120, SCALED_99K[-1], ", small")):  # fmt: skip
            constants = {"FORMAT": number, "BAND": 8, **dict(c.blocks)}
            cases.append(Case(f"gemm_mx {form} scaled sm_{cc}{size}", _scaled, types, constants, {cc: native[form][cc]},
                              c.num_warps, c.num_stages, odd=("num_blocks",),
                              quick=(cc,) if form == "nvfp4" and not size else (),
                              on="asked" if size and form != "nvfp4" else "each"))  # fmt: skip
        c = DECODED[0]
        cases.append(Case(f"gemm_mx {form} decoded", _decoded, types, {"FORMAT": number, "BAND": 8, **dict(c.blocks)}, decoded,
                          c.num_warps, c.num_stages, odd=("num_blocks",), quick=(90,) if form == "nvfp4" else ()))  # fmt: skip
    return cases
