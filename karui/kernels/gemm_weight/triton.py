"""Products with packed weights.

`_gemm` computes y^T = W x^T, so that W, decoded in registers,
is the tall operand of the tensor core and a few rows of x the narrow
one. Codes of one byte belong to neighbouring inputs; instead of interleaving them, each position in the byte is a product of its
own with every second (fourth) input. A 4-bit code becomes bf16 by placing it in the mantissa of 128 (one `lop3` for two codes);
the 128 and the zero point leave through the sum of the inputs, once per group, where the scale is applied in fp32.

Few rows do not fill a GPU with tiles of N alone: K is split too, and the parts are added in a fixed order by `_add_parts`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from karui.kernels.gemm_weight import PackedWeight
from karui.kernels.triton_support import interpreting, num_processors
from karui.kernels.triton_support.offline import WIDE_LOADS, Case
from karui.kernels.triton_support.products import dot
from karui.kernels.triton_support.tuning import Config, config, launch

_INTERPRETED = tl.constexpr(interpreting())
_ASM = tl.constexpr("""{
.reg .b32 a, b, c, d;
prmt.b32 a, $4, 0, 0x4140;
prmt.b32 b, $4, 0, 0x4342;
lop3.b32 $0, a, 0x000f000f, 0x43004300, 0xea;
lop3.b32 $1, b, 0x000f000f, 0x43004300, 0xea;
shr.u32 c, a, 4;
shr.u32 d, b, 4;
lop3.b32 $2, c, 0x000f000f, 0x43004300, 0xea;
lop3.b32 $3, d, 0x000f000f, 0x43004300, 0xea;
}""")


@triton.jit
def _halves(packed):
    """bf16 128 + low code and 128 + high code of uint8 bytes."""
    if _INTERPRETED:
        wide = packed.to(tl.int16)
        low = (wide & 15) | 0x4300
        high = (wide >> 4) | 0x4300
        return low.to(tl.bfloat16, bitcast=True), high.to(tl.bfloat16, bitcast=True)
    return tl.inline_asm_elementwise(_ASM, "=r,=r,=r,=r,r", [packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4)


@triton.jit
def _value(packed, PLACE: tl.constexpr, BITS: tl.constexpr, table_ptr, TABLE: tl.constexpr):
    """fp32 table entries, or codes as fp32, of position PLACE in each byte."""
    code = (packed.to(tl.int32) >> (PLACE * BITS)) & ((1 << BITS) - 1)
    if TABLE:
        return tl.load(table_ptr + code)
    return code.to(tl.float32)


@triton.jit
def _gemm(x_ptr, w_ptr, scale_ptr, zero_ptr, table_ptr, bias_ptr, y_ptr, M, N, K, stride_x, num_groups, group, steps,
          MIDDLE: tl.constexpr,
          BITS: tl.constexpr, HIGH_FIRST: tl.constexpr, ZERO: tl.constexpr, TABLE: tl.constexpr, BIAS: tl.constexpr,
          PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Steps of BK inputs, a step within one group; program (n, m, part)."""
    EACH: tl.constexpr = 8 // BITS
    WIDE: tl.constexpr = BK // EACH
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    part = tl.program_id(2)
    num_bytes = K // EACH
    j = tl.arange(0, WIDE)
    # unmasked reads of rows beyond N or M go to the last one, and are never stored
    w_row = w_ptr + tl.minimum(n, N - 1).to(tl.int64)[:, None] * num_bytes + j[None, :]
    x_row = x_ptr + tl.minimum(m, M - 1).to(tl.int64)[None, :] * stride_x + EACH * j[:, None]
    scale_row = scale_ptr + tl.minimum(n, N - 1) * num_groups
    acc = tl.zeros([BN, BM], tl.float32)
    MAGIC: tl.constexpr = BITS == 4 and not TABLE and x_ptr.dtype.element_ty == tl.bfloat16
    for step in range(part * steps, tl.minimum((part + 1) * steps, tl.cdiv(K, BK))):
        inside = step * WIDE + j < num_bytes
        packed = tl.load(w_row + step * WIDE, inside[None, :], 0)
        product = tl.zeros([BN, BM], tl.float32)
        total = tl.zeros([BM], tl.float32)
        if MAGIC:
            low, high = _halves(packed)
            for place in tl.static_range(2):
                x = tl.load(x_row + step * BK + place, inside[:, None], 0.0)
                product = dot(high if (place == 0) == HIGH_FIRST else low, x, product)
                total += tl.sum(x.to(tl.float32), 0)
        else:
            for place in tl.static_range(EACH):
                x = tl.load(x_row + step * BK + place, inside[:, None], 0.0)
                value = _value(packed, EACH - 1 - place if HIGH_FIRST else place, BITS, table_ptr, TABLE)
                product = dot(value.to(x.dtype), x, product)
                total += tl.sum(x.to(tl.float32), 0)
        at = step * BK // group
        scale = tl.load(scale_row + at).to(tl.float32)
        if not TABLE:
            shift = tl.zeros([BN], tl.float32) + (MIDDLE + (128 if MAGIC else 0))
            if ZERO:
                shift += tl.load(zero_ptr + tl.minimum(n, N - 1) * num_groups + at).to(tl.float32)
            product -= shift[:, None] * total[None, :]
        acc += product * scale[:, None]
    keep = (n[:, None] < N) & (m[None, :] < M)
    if PARTS:
        tl.store(y_ptr + (part.to(tl.int64) * M + m[None, :]) * N + n[:, None], acc, keep)
    else:
        if BIAS:
            acc += tl.load(bias_ptr + n, n < N, 0.0).to(tl.float32)[:, None]
        tl.store(y_ptr + m.to(tl.int64)[None, :] * N + n[:, None], acc.to(y_ptr.dtype.element_ty), keep)


@triton.jit
def _add_parts(part_ptr, bias_ptr, y_ptr, size, N, num_parts, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for _ in range(num_parts):
        total += tl.load(part_ptr + at, at < size, 0.0)
        part_ptr += size
    if BIAS:
        total += tl.load(bias_ptr + at % N).to(tl.float32)
    tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), at < size)


@triton.jit
def _dequantize(w_ptr, scale_ptr, zero_ptr, table_ptr, y_ptr, N, K, num_groups, group, MIDDLE: tl.constexpr, BITS: tl.constexpr,
                HIGH_FIRST: tl.constexpr, ZERO: tl.constexpr, TABLE: tl.constexpr, BN: tl.constexpr,
                BK: tl.constexpr):  # fmt: skip
    EACH: tl.constexpr = 8 // BITS
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    j = tl.program_id(1) * (BK // EACH) + tl.arange(0, BK // EACH)
    keep = (n[:, None] < N) & (j[None, :] < K // EACH)
    packed = tl.load(w_ptr + n.to(tl.int64)[:, None] * (K // EACH) + j[None, :], keep, 0)
    at = n[:, None] * num_groups + j[None, :] * EACH // group
    scale = tl.load(scale_ptr + at, keep, 0.0).to(tl.float32)
    zero = tl.zeros([BN, BK // EACH], tl.float32) + MIDDLE
    if ZERO:
        zero = tl.load(zero_ptr + at, keep, 0).to(tl.float32)
    for place in tl.static_range(EACH):
        value = _value(packed, EACH - 1 - place if HIGH_FIRST else place, BITS, table_ptr, TABLE)
        if not TABLE:
            value -= zero
        to = y_ptr + n.to(tl.int64)[:, None] * K + j[None, :] * EACH + place
        tl.store(to, (value * scale).to(y_ptr.dtype.element_ty), keep)


@triton.jit
def _dgrad(dy_ptr, w_ptr, scale_ptr, zero_ptr, table_ptr, dx_ptr, M, N, K, stride_dy, num_groups, group, MIDDLE: tl.constexpr,
           BITS: tl.constexpr, HIGH_FIRST: tl.constexpr, ZERO: tl.constexpr, TABLE: tl.constexpr, BM: tl.constexpr,
           BN: tl.constexpr, BJ: tl.constexpr):  # fmt: skip
    """dx [M, K] = dy [M, N] W for one position in the byte: program (j tile, m tile, place); W rounded to dy's dtype first."""
    EACH: tl.constexpr = 8 // BITS
    j = tl.program_id(0) * BJ + tl.arange(0, BJ)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    place = tl.program_id(2)
    shift = (EACH - 1 - place if HIGH_FIRST else place) * BITS
    acc = tl.zeros([BM, BJ], tl.float32)
    for first in range(0, N, BN):
        n = first + tl.arange(0, BN)
        dy = tl.load(dy_ptr + m.to(tl.int64)[:, None] * stride_dy + n[None, :], (m[:, None] < M) & (n[None, :] < N), 0.0)
        keep = (n[:, None] < N) & (j[None, :] < K // EACH)
        packed = tl.load(w_ptr + n.to(tl.int64)[:, None] * (K // EACH) + j[None, :], keep, 0)
        at = n[:, None] * num_groups + j[None, :] * EACH // group
        scale = tl.load(scale_ptr + at, keep, 0.0).to(tl.float32)
        code = (packed.to(tl.int32) >> shift) & ((1 << BITS) - 1)
        if TABLE:
            value = tl.load(table_ptr + code)
        elif ZERO:
            value = code.to(tl.float32) - tl.load(zero_ptr + at, keep, 0).to(tl.float32)
        else:
            value = code.to(tl.float32) - MIDDLE
        acc = dot(dy, (value * scale).to(dy.dtype), acc)
    to = dx_ptr + m.to(tl.int64)[:, None] * K + j[None, :] * EACH + place
    tl.store(to, acc.to(dx_ptr.dtype.element_ty), (m[:, None] < M) & (j[None, :] < K // EACH))


@triton.jit
def _int8_rows(x_ptr, codes_ptr, scale_ptr, stride_x, K, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride_x + k, k < K, 0.0).to(tl.float32)
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(x)), 1e-12), 127.0)
    steps = tl.div_rn(x, scale)
    # adding 1.5 * 2^23 leaves the nearest whole number, ties to even
    whole = (steps + 12582912.0) - 12582912.0
    tl.store(codes_ptr + row * K + k, whole.to(tl.int8), k < K)
    tl.store(scale_ptr + row, scale)


@triton.jit
def _gemm_int8(x_ptr, w_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, y_ptr, M, N, K, MIDDLE: tl.constexpr, BITS: tl.constexpr,
               BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    EACH: tl.constexpr = 8 // BITS
    WIDE: tl.constexpr = BK // EACH
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    j = tl.arange(0, WIDE)
    w_row = w_ptr + tl.minimum(n, N - 1).to(tl.int64)[:, None] * (K // EACH) + j[None, :]
    x_row = x_ptr + tl.minimum(m, M - 1).to(tl.int64)[None, :] * K + EACH * j[:, None]
    acc = tl.zeros([BN, BM], tl.int32)
    for step in range(tl.cdiv(K, BK)):
        inside = step * WIDE + j < K // EACH
        packed = tl.load(w_row + step * WIDE, inside[None, :], 0).to(tl.int32)
        for place in tl.static_range(EACH):
            x = tl.load(x_row + step * BK + place, inside[:, None], 0)
            code = ((packed >> (place * BITS)) & ((1 << BITS) - 1)) - MIDDLE
            acc = tl.dot(code.to(tl.int8), x, acc, out_dtype=tl.int32)
    y = acc.to(tl.float32) * tl.load(x_scale_ptr + m, m < M, 0.0)[None, :]
    y *= tl.load(w_scale_ptr + n, n < N, 0.0).to(tl.float32)[:, None]
    if BIAS:
        y += tl.load(bias_ptr + n, n < N, 0.0).to(tl.float32)[:, None]
    tl.store(y_ptr + m.to(tl.int64)[None, :] * N + n[:, None], y.to(y_ptr.dtype.element_ty), (n[:, None] < N) & (m[None, :] < M))


def gemm(x: torch.Tensor, w: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """y [M, N] of x [M, K]."""
    (m, k), n = x.shape, w.shape[0]
    x = x if x.stride(-1) == 1 else x.contiguous()
    y = torch.empty(m, n, dtype=x.dtype, device=x.device)
    if not m:
        return y
    step = min(w.group, 128) if w.group < k else 128
    bm = min(max(16, triton.next_power_of_2(m)), 64)
    candidates = [config(4, 4, BM=bm, BN=64), config(4, 5, BM=bm, BN=32), config(8, 4, BM=bm, BN=128)]
    processors = num_processors(x.device)

    def run(c: Config) -> None:
        tiles = triton.cdiv(n, c["BN"]) * triton.cdiv(m, bm)
        num_steps = triton.cdiv(k, step)
        # about four programs per multiprocessor hide each other's waits; below four steps a part is mostly start and end
        parts = max(1, min(4 * processors // tiles, num_steps // 4))
        steps = triton.cdiv(num_steps, parts)
        parts = triton.cdiv(num_steps, steps)
        out = torch.empty(parts, m, n, dtype=torch.float32, device=x.device) if parts > 1 else y
        _gemm[(triton.cdiv(n, c["BN"]), triton.cdiv(m, bm), parts)](
            x, w.data, w.scale, w.data if w.zero is None else w.zero, w.scale if w.table is None else w.table,
            x if bias is None else bias, out, m, n, k, x.stride(0), w.scale.shape[1], w.group, steps, MIDDLE=w.middle,
            BITS=w.bits,
            HIGH_FIRST=w.high_first, ZERO=w.zero is not None, TABLE=w.table is not None, BIAS=bias is not None, PARTS=parts > 1,
            BK=step, **c())  # fmt: skip
        if parts > 1:
            _add_parts[(triton.cdiv(m * n, 1024),)](out, x if bias is None else bias, y, m * n, n, parts, BIAS=bias is not None,
                                                    BLOCK=1024)  # fmt: skip

    launch(("gemm_weight", w.bits, w.table is not None, w.group, bm, n, k, x.dtype), candidates, run, x.device)
    return y


def dequantize(w: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """W [N, K] in `dtype`."""
    y = torch.empty(w.shape, dtype=dtype, device=w.data.device)
    n, k = w.shape
    _dequantize[(triton.cdiv(n, 16), triton.cdiv(k, 512))](
        w.data, w.scale, w.data if w.zero is None else w.zero, w.scale if w.table is None else w.table, y, n, k, w.scale.shape[1],
        w.group, MIDDLE=w.middle, BITS=w.bits, HIGH_FIRST=w.high_first, ZERO=w.zero is not None, TABLE=w.table is not None, BN=16,
        BK=512)  # fmt: skip
    return y


def dgrad(dy: torch.Tensor, w: PackedWeight) -> torch.Tensor:
    """dx [M, K] of dy [M, N]."""
    dy = dy if dy.stride(-1) == 1 else dy.contiguous()
    m, (n, k) = dy.shape[0], w.shape
    dx = torch.empty(m, k, dtype=dy.dtype, device=dy.device)
    if not m:
        return dx
    each = 8 // w.bits
    bm = min(max(16, triton.next_power_of_2(m)), 64)
    _dgrad[(triton.cdiv(k // each, 64), triton.cdiv(m, bm), each)](
        dy, w.data, w.scale, w.data if w.zero is None else w.zero, w.scale if w.table is None else w.table, dx, m, n, k,
        dy.stride(0), w.scale.shape[1], w.group, MIDDLE=w.middle, BITS=w.bits, HIGH_FIRST=w.high_first, ZERO=w.zero is not None,
        TABLE=w.table is not None, BM=bm, BN=32, BJ=64, num_warps=4)  # fmt: skip
    return dx


def gemm_int8(x: torch.Tensor, w: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """y [M, N] of x [M, K] rounded to int8 per row."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    (m, k), n = x.shape, w.shape[0]
    y = torch.empty(m, n, dtype=x.dtype, device=x.device)
    if not m:
        return y
    codes = torch.empty(m, k, dtype=torch.int8, device=x.device)
    scale = torch.empty(m, dtype=torch.float32, device=x.device)
    _int8_rows[(m,)](x, codes, scale, x.stride(0), k, BLOCK=triton.next_power_of_2(k), num_warps=8 if k > 2048 else 4)
    bm = min(max(16, triton.next_power_of_2(m)), 64)
    _gemm_int8[(triton.cdiv(n, 64), triton.cdiv(m, bm))](
        codes, w.data, scale, w.scale, x if bias is None else bias, y, m, n, k, MIDDLE=w.middle, BITS=w.bits,
        BIAS=bias is not None, BM=bm, BN=64, BK=128, num_warps=4, num_stages=4)  # fmt: skip
    return y


def offline_cases() -> list[Case]:
    types = {"x_ptr": "*bf16", "w_ptr": "*u8", "scale_ptr": "*fp16", "zero_ptr": "*u8", "table_ptr": "*fp32", "bias_ptr": "*bf16",
             "y_ptr": "*fp32", "M": "i32", "N": "i32", "K": "i32", "stride_x": "i32", "num_groups": "i32", "group": "i32",
             "steps": "i32"}  # fmt: skip
    bf16 = {80: r"mma\.sync[.a-z0-9]*bf16", 90: r"(wgmma\.mma_async|mma\.sync)[.a-z0-9]*bf16",
            100: r"(tcgen05\.mma|mma\.sync)", 120: r"mma\.sync[.a-z0-9]*bf16"}  # fmt: skip
    odd = ("M", "steps", "num_groups")
    cases = []
    for name, bits, table, zero, bk, expects in [
        ("int4 g128", 4, False, False, 128, {cc: r"lop3\.b32[^;]*43004300|lop3\.b32[^;]*1124089600" for cc in bf16}),
        ("int4 affine g32", 4, False, True, 32, bf16), ("nf4 g64", 4, True, False, 64, bf16), ("ternary", 2, False, False,
                                                                                               128, bf16),
        ("int8", 8, False, False, 128, bf16),
    ]:  # fmt: skip
        constants = {"MIDDLE": 0 if zero or table else 2 ** (bits - 1), "BITS": bits, "HIGH_FIRST": table, "ZERO": zero,
                     "TABLE": table, "BIAS": False, "PARTS": True, "BM": 16, "BN": 64, "BK": bk}  # fmt: skip
        cases.append(Case(f"gemm_weight {name}", _gemm, types, constants, expects, 4, 4, odd,
                          (90,) if bits == 4 and bk > 32 else ()))
    back = {"dy_ptr": "*bf16", **{k: types[k] for k in ("w_ptr", "scale_ptr", "zero_ptr", "table_ptr", "M", "N", "K",
                                                        "num_groups",
            "group")}, "dx_ptr": "*bf16", "stride_dy": "i32"}  # fmt: skip
    constants = {"MIDDLE": 0, "BITS": 4, "HIGH_FIRST": True, "ZERO": False, "TABLE": True, "BM": 64, "BN": 32, "BJ": 64}
    cases.append(Case("gemm_weight dgrad nf4", _dgrad, back, constants, bf16, 4, 3, odd, (90,)))
    out = {k: types[k] for k in ("w_ptr", "scale_ptr", "zero_ptr", "table_ptr", "N", "K", "num_groups",
                                 "group")} | {"y_ptr": "*bf16"}
    constants = {"MIDDLE": 0, "BITS": 4, "HIGH_FIRST": True, "ZERO": False, "TABLE": True, "BN": 16, "BK": 512}
    cases.append(Case("gemm_weight dequantize nf4", _dequantize, out, constants,
                      WIDE_LOADS | {cc: r"ld\.global" for cc in WIDE_LOADS}, odd=odd, quick=()))  # fmt: skip
    whole = {"x_ptr": "*i8", "w_ptr": "*u8", "x_scale_ptr": "*fp32", "w_scale_ptr": "*fp32", "bias_ptr": "*bf16",
             "y_ptr": "*bf16", "M": "i32", "N": "i32", "K": "i32"}  # fmt: skip
    for bits in (8, 2):
        constants = {"MIDDLE": 128 if bits == 8 else 1, "BITS": bits, "BIAS": False, "BM": 16, "BN": 64, "BK": 128}
        expects = {80: r"mma\.sync[.a-z0-9]*s8", 90: r"(wgmma\.mma_async|mma\.sync)[.a-z0-9]*s8", 120: r"mma\.sync[.a-z0-9]*s8"}
        cases.append(Case(f"gemm_int8 {bits} bit", _gemm_int8, whole, constants, expects, 4, 4, ("M",),
                          (90,) if bits == 8 else ()))
    return cases
