"""Products with packed weights.

`_gemm` computes y^T = W x^T, so that W, decoded in registers, is the tall operand of the tensor core and a few rows of x the
narrow one. Codes of one byte belong to neighbouring inputs; instead of interleaving them, each position in the byte is a product
of its own with every second (fourth) input; x is read whole and split in registers. A 4-bit code becomes bf16 by placing it in
the mantissa of 128 (one `lop3` for two codes); the 128 and the zero point leave through the sum of the inputs, once per group,
where the scale is applied in fp32. NVFP4's groups of 16 are too short for a product each (a tensor core takes 16 inputs at
least): their scales, E4M3, go onto the decoded values, exactly; so do those of 2-bit codes in groups of 32, rounded to x's dtype.

Weights whose codes lie in words of 32 bits have kernels of their own (`words`), which take fewer instructions.

Few rows do not fill a GPU with tiles of N alone: K is split too, and the parts are added in a fixed order by `_add_parts`.

Experts: the rows of x are sorted by expert, and W [E * N, K] is their weights one after the other. A tile of rows then comes from
the list of `gemm_grouped.group_rows`; programs of its unused places have no steps and no rows to store.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from karui.kernels.gemm_grouped import Groups
from karui.kernels.gemm_weight import PackedWeight
from karui.kernels.quantize.elements import E2M1, values
from karui.kernels.quantize.nf4 import codebook
from karui.kernels.triton_support import capability, interpreting, num_processors
from karui.kernels.triton_support.codecs import decode_e2m1, decode_e4m3, e8m0_value, encode_e4m3, scale_value
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


def _lookup_asm(entries: list[int]) -> str:
    """Four bytes of two 4-bit codes each -> bf16 table entries: low codes in $0, $1, high codes in $2, $3.

    `prmt` picks four bytes out of eight by four indices of 3 bits, so 16 entries take two picks for their low bytes and two for
    their high ones; the code's fourth bit chooses between the two (its own index plus 4), and a last pair joins the bytes.
    """

    def words(shift: int) -> list[str]:
        each = [entry >> shift & 0xFF for entry in entries]
        return [f"0x{sum(e << 8 * i for i, e in enumerate(each[at : at + 4])):08x}" for at in range(0, 16, 4)]

    (l0, l1, l2, l3), (h0, h1, h2, h3) = words(0), words(8)
    lines = [".reg .b32 w, s, i, c, p, q, l, h;", "mov.b32 w, $4;"]  # an output may have the input's register
    for half, (low, high) in enumerate((("$0", "$2"), ("$1", "$3"))):
        lines += [
            f"shr.u32 s, w, {16 * half};", "and.b32 i, s, 0x7777;", "shr.u32 c, s, 1;", "lop3.b32 c, c, 0x4444, 0x3210, 0xea;",
            f"mov.b32 p, {l0};", f"mov.b32 q, {l1};", "prmt.b32 l, p, q, i;",
            f"mov.b32 p, {l2};", f"mov.b32 q, {l3};", "prmt.b32 h, p, q, i;", "prmt.b32 l, l, h, c;",
            f"mov.b32 p, {h0};", f"mov.b32 q, {h1};", "prmt.b32 h, p, q, i;",
            f"mov.b32 p, {h2};", f"mov.b32 q, {h3};", "prmt.b32 p, p, q, i;", "prmt.b32 h, h, p, c;",
            f"prmt.b32 {low}, l, h, 0x6240;", f"prmt.b32 {high}, l, h, 0x7351;",
        ]  # fmt: skip
    return "{\n" + "\n".join(lines) + "\n}"


def bf16_bits(table: torch.Tensor) -> list[int]:
    return [int(b) & 0xFFFF for b in table.to(torch.bfloat16).view(torch.int16).tolist()]


_NF4_ASM = tl.constexpr(_lookup_asm(bf16_bits(codebook(torch.device("cpu")))))
_E2M1_ASM = tl.constexpr(_lookup_asm(bf16_bits(values(E2M1))))


@triton.jit
def _entries(packed, table_ptr, NF4: tl.constexpr):
    """bf16 table entries of the low and of the high codes of uint8 bytes."""
    if _INTERPRETED:
        low, high = (packed & 15).to(tl.int32), (packed >> 4).to(tl.int32)
        if NF4:
            return tl.load(table_ptr + low).to(tl.bfloat16), tl.load(table_ptr + high).to(tl.bfloat16)
        return decode_e2m1(low).to(tl.bfloat16), decode_e2m1(high).to(tl.bfloat16)
    if NF4:
        return tl.inline_asm_elementwise(_NF4_ASM, "=r,=r,=r,=r,r", [packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True,
                                         pack=4)  # fmt: skip
    return tl.inline_asm_elementwise(_E2M1_ASM, "=r,=r,=r,=r,r", [packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True,
                                     pack=4)  # fmt: skip


@triton.jit
def _value(packed, place, BITS: tl.constexpr, table_ptr, FORM: tl.constexpr, HARD: tl.constexpr):
    """fp32 of position `place` in each byte: codes, table entries, E4M3 or E2M1 values. HARD: by the chip's own conversion."""
    code = (packed.to(tl.int32) >> (place * BITS)) & ((1 << BITS) - 1)
    if FORM == 1:
        return tl.load(table_ptr + code)
    if FORM == 2:
        if HARD:
            return packed.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        return decode_e4m3(code)
    if FORM == 3 or FORM == 4:
        return decode_e2m1(code)
    return code.to(tl.float32)


@triton.jit
def _factor(scale_ptr, at, keep, divisor, FORM: tl.constexpr):
    """fp32 scales; nvfp4's are E4M3 bytes over what their tensor was multiplied by, other bytes E8M0."""
    if FORM == 3:
        return tl.div_rn(decode_e4m3(tl.load(scale_ptr + at, keep, 0).to(tl.int32)), divisor)
    elif scale_ptr.dtype.element_ty == tl.uint8:
        return e8m0_value(tl.load(scale_ptr + at, keep, 0).to(tl.int32))
    else:
        return tl.load(scale_ptr + at, keep, 0.0).to(tl.float32)


@triton.jit
def _every(x, place: tl.constexpr, EACH: tl.constexpr):
    """The inputs place, place + EACH, ... of x [BM, BK] as [BK / EACH, BM]."""
    BM: tl.constexpr = x.shape[0]
    WIDE: tl.constexpr = x.shape[1] // EACH
    if EACH == 1:
        part = x
    elif EACH == 2:
        first, second = tl.split(x.reshape([BM, WIDE, 2]))
        part = first if place == 0 else second
    else:
        even, odd = tl.split(x.reshape([BM, WIDE, 2, 2]))
        first, second = tl.split(even if place % 2 == 0 else odd)
        part = first if place < 2 else second
    return tl.trans(part)


@triton.jit
def tile_at(tiles_ptr, M, BM: tl.constexpr, GROUPED: tl.constexpr):
    """(expert, first row, end of the rows) of this program."""
    at = tl.program_id(1)
    if GROUPED:
        return tl.load(tiles_ptr + 3 * at), tl.load(tiles_ptr + 3 * at + 1), tl.load(tiles_ptr + 3 * at + 2)
    else:
        return at * 0, at * BM, M


@triton.jit
def store_tile(y_ptr, bias_ptr, y, m, n, end, M, N, part, BIAS: tl.constexpr, PARTS: tl.constexpr):
    """A tile [BN, BM], plus bias, into y [M, N]; or as one of the fp32 parts [parts, M, N] that `_add_parts` sums."""
    keep = (n[:, None] < N) & (m[None, :] < end)
    if PARTS:
        tl.store(y_ptr + (part.to(tl.int64) * M + m[None, :]) * N + n[:, None], y, keep)
    else:
        if BIAS:
            y += tl.load(bias_ptr + n, n < N, 0.0).to(tl.float32)[:, None]
        tl.store(y_ptr + m.to(tl.int64)[None, :] * N + n[:, None], y.to(y_ptr.dtype.element_ty), keep)


@triton.jit(do_not_specialize=["M", "R", "steps"])
def _gemm(x_ptr, w_ptr, scale_ptr, zero_ptr, table_ptr, divisor_ptr, bias_ptr, a_ptr, b_ptr, y_ptr, low_ptr, tiles_ptr, M, N, K,
          R, stride_x, row_bytes, num_groups, group, steps, scaling, MIDDLE: tl.constexpr, BITS: tl.constexpr,
          FORM: tl.constexpr, HARD: tl.constexpr, HIGH_FIRST: tl.constexpr, ZERO: tl.constexpr, SPREAD: tl.constexpr,
          BIAS: tl.constexpr, LORA: tl.constexpr, PARTS: tl.constexpr, GROUPED: tl.constexpr, BM: tl.constexpr,
          BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr):  # fmt: skip
    """Steps of BK inputs, a step within one group (SPREAD: of several, whose scales go onto the values); program (n, m, part).

    LORA: y += B low, low = scaling A x [R, M] of the same reading of x; A [R, K] and B [N, R] dense, low_ptr [parts, M, R].
    """
    EACH: tl.constexpr = 8 // BITS
    WIDE: tl.constexpr = BK // EACH
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    expert, first, end = tile_at(tiles_ptr, M, BM, GROUPED)
    m = first + tl.arange(0, BM)
    part = tl.program_id(2)
    j, k = tl.arange(0, WIDE), tl.arange(0, BK)
    # unmasked reads of rows beyond N or M go to the last one, and are never stored
    row = expert * N + tl.minimum(n, N - 1)
    w_row = w_ptr + row.to(tl.int64)[:, None] * row_bytes + j[None, :]
    x_row = x_ptr + tl.minimum(m, end - 1).to(tl.int64)[:, None] * stride_x + k[None, :]
    acc = tl.zeros([BN, BM], tl.float32)
    r = tl.arange(0, BR)
    a_row = a_ptr + r[:, None] * K + k[None, :]
    low = tl.zeros([BR, BM], tl.float32)
    MAGIC: tl.constexpr = BITS == 4 and FORM == 0 and x_ptr.dtype.element_ty == tl.bfloat16
    TABLE: tl.constexpr = BITS == 4 and FORM > 0 and x_ptr.dtype.element_ty == tl.bfloat16
    stop = tl.minimum((part + 1) * steps, tl.cdiv(K, BK))
    if GROUPED:
        stop = tl.where(first < end, stop, 0)
    for step in range(part * steps, stop):
        inside = step * WIDE + j < row_bytes
        packed = tl.load(w_row + step * WIDE, inside[None, :], 0)
        x = tl.load(x_row + step * BK, (step * BK + k < K)[None, :], 0.0)
        product = tl.zeros([BN, BM], tl.float32)
        if MAGIC or TABLE:
            if MAGIC:
                low_half, high_half = _halves(packed)
            else:
                low_half, high_half = _entries(packed, table_ptr, FORM == 1)
            if HIGH_FIRST:
                low_half, high_half = high_half, low_half
        if FORM == 3:
            block = step * (BK // 16) + tl.arange(0, BK // 16)
            byte = tl.load(scale_ptr + row[:, None] * num_groups + block[None, :], block[None, :] < num_groups, 0)
            factor = decode_e4m3(byte.to(tl.int32))
            factor = tl.broadcast_to(factor[:, :, None], [BN, BK // 16, 16 // EACH]).reshape([BN, WIDE])
        elif SPREAD:
            near = row[:, None] * num_groups + ((step * BK + EACH * j) // group)[None, :]
            factor = tl.load(scale_ptr + near, inside[None, :], 0.0).to(tl.float32)
            shift = tl.zeros([BN, WIDE], tl.float32) + MIDDLE
            if ZERO:
                shift = tl.load(zero_ptr + near, inside[None, :], 0).to(tl.float32)
        for place in tl.static_range(EACH):
            if MAGIC or TABLE:
                value = low_half if place == 0 else high_half
            else:
                value = _value(packed, EACH - 1 - place if HIGH_FIRST else place, BITS, table_ptr, FORM, HARD)
            if FORM == 3:
                value = value.to(tl.float32) * factor  # an E2M1 value times an E4M3 scale has 6 bits: exact in x's dtype
            elif SPREAD:
                value = (value - shift) * factor
            value = value.to(x.dtype)
            product = dot(value, _every(x, place, EACH), product, "tf32x3")
        if LORA:
            a = tl.load(a_row + step * BK, (r[:, None] < R) & (step * BK + k < K)[None, :], 0.0)
            low = dot(a, tl.trans(x), low)
        if FORM == 3 or SPREAD:
            acc += product
        else:
            at = step * BK // group
            if FORM == 0:
                shift = tl.zeros([BN], tl.float32) + (MIDDLE + (128 if MAGIC else 0))
                if ZERO:
                    shift += tl.load(zero_ptr + row * num_groups + at).to(tl.float32)
                product -= shift[:, None] * tl.sum(x.to(tl.float32), 1)[None, :]
            acc += product * scale_value(tl.load(scale_ptr + row * num_groups + at))[:, None]
    if FORM == 3:
        acc = tl.div_rn(acc, tl.broadcast_to(tl.load(divisor_ptr + row)[:, None], [BN, BM]))
    if LORA:
        # parts of K are rounded one by one and added in fp32
        rounded = (low * scaling).to(x_ptr.dtype.element_ty)
        if tl.program_id(0) == 0:
            to = low_ptr + (part.to(tl.int64) * M + m[None, :]) * R + r[:, None]
            tl.store(to, rounded, (r[:, None] < R) & (m[None, :] < M))
        b = tl.load(b_ptr + row[:, None] * R + r[None, :], r[None, :] < R, 0.0)
        acc = dot(b, rounded, acc)
    store_tile(y_ptr, bias_ptr, acc, m, n, end, M, N, part, BIAS, PARTS)


@triton.jit(do_not_specialize=["size", "num_parts"])
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
def _dequantize(w_ptr, scale_ptr, zero_ptr, table_ptr, divisor_ptr, y_ptr, N, K, row_bytes, num_groups, group,
                MIDDLE: tl.constexpr, BITS: tl.constexpr, FORM: tl.constexpr, HARD: tl.constexpr, HIGH_FIRST: tl.constexpr,
                ZERO: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    EACH: tl.constexpr = 8 // BITS
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    j = tl.program_id(1) * (BK // EACH) + tl.arange(0, BK // EACH)
    keep = (n[:, None] < N) & (j[None, :] < row_bytes)
    packed = tl.load(w_ptr + n.to(tl.int64)[:, None] * row_bytes + j[None, :], keep, 0)
    at = n[:, None] * num_groups + j[None, :] * EACH // group
    divisor = tl.full([BN, BK // EACH], 1.0, tl.float32)
    if FORM == 3:
        divisor *= tl.load(divisor_ptr + n, n < N, 1.0)[:, None]
    scale = _factor(scale_ptr, at, keep, divisor, FORM)
    zero = tl.zeros([BN, BK // EACH], tl.float32) + MIDDLE
    if ZERO:
        zero = tl.load(zero_ptr + at, keep, 0).to(tl.float32)
    for place in tl.static_range(EACH):
        value = _value(packed, EACH - 1 - place if HIGH_FIRST else place, BITS, table_ptr, FORM, HARD)
        if FORM == 0:
            value -= zero
        to = y_ptr + n.to(tl.int64)[:, None] * K + j[None, :] * EACH + place
        tl.store(to, (value * scale).to(y_ptr.dtype.element_ty), keep)


@triton.jit(do_not_specialize=["M", "R"])
def _dgrad(dy_ptr, w_ptr, scale_ptr, zero_ptr, table_ptr, divisor_ptr, a_ptr, b_ptr, dx_ptr, low_ptr, M, N, K, R, stride_dy,
           row_bytes, num_groups, group, scaling, MIDDLE: tl.constexpr, BITS: tl.constexpr, FORM: tl.constexpr,
           HARD: tl.constexpr, HIGH_FIRST: tl.constexpr, ZERO: tl.constexpr, LORA: tl.constexpr, BM: tl.constexpr,
           BN: tl.constexpr, BJ: tl.constexpr, BR: tl.constexpr):  # fmt: skip
    """dx [M, K] = dy [M, N] W for one position in the byte: program (j tile, m tile, place); W rounded to dy's dtype first.

    LORA: dx += low A, low [M, R] = scaling dy B; A [R, K] and B [N, R] dense.
    """
    EACH: tl.constexpr = 8 // BITS
    j = tl.program_id(0) * BJ + tl.arange(0, BJ)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    place = tl.program_id(2)
    slot = EACH - 1 - place if HIGH_FIRST else place
    acc = tl.zeros([BM, BJ], tl.float32)
    r = tl.arange(0, BR)
    low = tl.zeros([BM, BR], tl.float32)
    for first in range(0, N, BN):
        n = first + tl.arange(0, BN)
        dy = tl.load(dy_ptr + m.to(tl.int64)[:, None] * stride_dy + n[None, :], (m[:, None] < M) & (n[None, :] < N), 0.0)
        keep = (n[:, None] < N) & (j[None, :] < row_bytes)
        packed = tl.load(w_ptr + n.to(tl.int64)[:, None] * row_bytes + j[None, :], keep, 0)
        at = n[:, None] * num_groups + j[None, :] * EACH // group
        divisor = tl.full([BN, BJ], 1.0, tl.float32)
        if FORM == 3:
            divisor *= tl.load(divisor_ptr + n, n < N, 1.0)[:, None]
        value = _value(packed, slot, BITS, table_ptr, FORM, HARD)
        if FORM == 0:
            if ZERO:
                value -= tl.load(zero_ptr + at, keep, 0).to(tl.float32)
            else:
                value -= MIDDLE
        value *= _factor(scale_ptr, at, keep, divisor, FORM)
        acc = dot(dy, value.to(dy.dtype), acc)
        if LORA:
            b = tl.load(b_ptr + n[:, None] * R + r[None, :], (n[:, None] < N) & (r[None, :] < R), 0.0)
            low = dot(dy, b, low)
    if LORA:
        rounded = (low * scaling).to(dx_ptr.dtype.element_ty)
        if (tl.program_id(0) == 0) & (place == 0):
            tl.store(low_ptr + m.to(tl.int64)[:, None] * R + r[None, :], rounded, (m[:, None] < M) & (r[None, :] < R))
        a = tl.load(a_ptr + r[:, None] * K + j[None, :] * EACH + place, (r[:, None] < R) & (j[None, :] < row_bytes), 0.0)
        acc = dot(rounded, a, acc)
    to = dx_ptr + m.to(tl.int64)[:, None] * K + j[None, :] * EACH + place
    tl.store(to, acc.to(dx_ptr.dtype.element_ty), (m[:, None] < M) & (j[None, :] < row_bytes))


@triton.jit
def _code_rows(x_ptr, codes_ptr, scale_ptr, sum_ptr, stride_x, K, FLOAT8: tl.constexpr, VALUES: tl.constexpr,
               SUM: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """A row as int8 (scale absmax / 127) or as E4M3 bytes (absmax / 448); VALUES: what its int8 codes stand for, no scales. SUM:
    the sum of its codes too."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride_x + k, k < K, 0.0).to(tl.float32)
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(x)), 1e-12), 448.0 if FLOAT8 else 127.0)
    steps = tl.div_rn(x, scale)
    if FLOAT8:
        codes = encode_e4m3(steps).to(tl.uint8)
    else:
        # adding 1.5 * 2^23 leaves the nearest whole number, ties to even
        steps = (steps + 12582912.0) - 12582912.0
        codes = (steps * scale).to(codes_ptr.dtype.element_ty) if VALUES else steps.to(tl.int8)
    tl.store(codes_ptr + row * K + k, codes, k < K)
    if not VALUES:
        tl.store(scale_ptr + row, scale)
    if SUM:
        tl.store(sum_ptr + row, tl.sum(codes.to(tl.int32)))


@triton.jit(do_not_specialize=["M", "steps"])
def _gemm_codes(x_ptr, w_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, y_ptr, tiles_ptr, M, N, K, row_bytes, steps,
                MIDDLE: tl.constexpr, BITS: tl.constexpr, FLOAT8: tl.constexpr, BIAS: tl.constexpr, PARTS: tl.constexpr,
                GROUPED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Codes times codes, scales at the end: int8 or ternary in int32, E4M3 in fp32; program (n, m, part of K)."""
    EACH: tl.constexpr = 8 // BITS
    WIDE: tl.constexpr = BK // EACH
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    expert, first, end = tile_at(tiles_ptr, M, BM, GROUPED)
    m = first + tl.arange(0, BM)
    part = tl.program_id(2)
    j, k = tl.arange(0, WIDE), tl.arange(0, BK)
    row = expert * N + tl.minimum(n, N - 1)
    w_row = w_ptr + row.to(tl.int64)[:, None] * row_bytes + j[None, :]
    x_row = x_ptr + tl.minimum(m, end - 1).to(tl.int64)[:, None] * K + k[None, :]
    acc = tl.zeros([BN, BM], tl.float32 if FLOAT8 else tl.int32)
    stop = tl.minimum((part + 1) * steps, tl.cdiv(K, BK))
    if GROUPED:
        stop = tl.where(first < end, stop, 0)
    for step in range(part * steps, stop):
        packed = tl.load(w_row + step * WIDE, (step * WIDE + j < row_bytes)[None, :], 0)
        x = tl.load(x_row + step * BK, (step * BK + k < K)[None, :], 0)
        if FLOAT8:
            # Hopper adds FP8 products in 14 bits; every step's sum is added to the others in fp32
            acc += tl.dot(packed.to(tl.float8e4nv, bitcast=True), tl.trans(x.to(tl.float8e4nv, bitcast=True)))
        else:
            for place in tl.static_range(EACH):
                code = ((packed.to(tl.int32) >> (place * BITS)) & ((1 << BITS) - 1)) - MIDDLE
                acc = tl.dot(code.to(tl.int8), _every(x, place, EACH), acc, out_dtype=tl.int32)
    y = acc.to(tl.float32) * tl.load(x_scale_ptr + m, m < end, 0.0)[None, :]
    y *= tl.load(w_scale_ptr + row).to(tl.float32)[:, None]
    store_tile(y_ptr, bias_ptr, y, m, n, end, M, N, part, BIAS, PARTS)


_FORMS = {"int": 0, "nf4": 1, "e4m3": 2, "nvfp4": 3, "e2m1": 4}


def _parts_of(w: PackedWeight) -> dict[str, Any]:
    """What every kernel over `w` is given, by argument."""
    scale = w.scale.view(torch.uint8) if w.form == "nvfp4" else w.scale
    hard = w.data.is_cuda and capability(w.data.device) >= 89
    table = codebook(w.data.device) if w.form == "nf4" else scale
    return {"w_ptr": w.data, "scale_ptr": scale, "zero_ptr": w.data if w.zero is None else w.zero,
            "table_ptr": table, "divisor_ptr": scale if w.divisor is None else w.divisor,
            "N": w.shape[0], "K": w.shape[1], "row_bytes": w.data.shape[1], "num_groups": scale.shape[1], "group": w.group,
            "MIDDLE": w.middle, "BITS": w.bits, "FORM": _FORMS[w.form], "HARD": hard, "HIGH_FIRST": w.high_first,
            "ZERO": w.zero is not None}  # fmt: skip


def gemm(x: torch.Tensor, w: PackedWeight, bias: torch.Tensor | None, groups: Groups | None = None) -> torch.Tensor:
    """y [M, N] of x [M, K]."""
    return _product(x, w, bias, None, groups)[0]


def gemm_lora(x: torch.Tensor, w: PackedWeight, bias: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor,
              scaling: float) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(x W^T + bias + low B^T [M, N], low = scaling x A^T [M, R]) of A [R, K] and B [N, R], in x's dtype."""
    y, low = _product(x, w, bias, (a, b, scaling))
    assert low is not None
    return y, low


def _product(x: torch.Tensor, w: PackedWeight, bias: torch.Tensor | None, lora: tuple[torch.Tensor, torch.Tensor, float] | None,
             groups: Groups | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    x, y = rows_and_output(x, w, groups)
    (m, k), n = x.shape, y.shape[1]
    a, b, scaling = (x, x, 0.0) if lora is None else (lora[0].contiguous(), lora[1].contiguous(), lora[2])
    rank = 0 if lora is None else a.shape[0]
    if not m:
        return y, None if lora is None else x.new_empty(0, rank)
    spread = w.bits == 2 and w.group == 32  # 16 inputs of each place in the byte are the least that a tensor core takes
    step = 128 if w.form == "nvfp4" or w.group == k else 64 if spread else min(w.group, 128)
    bm, tiles, tiles_of = row_tiles(x, groups)
    # x in fp32 takes twice the shared memory for each stage
    deep = 2 if x.dtype == torch.float32 else 4
    candidates = [config(4, deep, BM=bm, BN=64), config(4, deep + 1, BM=bm, BN=32), config(8, deep, BM=bm, BN=128)]
    processors = num_processors(x.device)
    lows: list[torch.Tensor] = []

    def run(c: Config) -> None:
        parts, steps = split_steps(triton.cdiv(n, c["BN"]) * tiles, triton.cdiv(k, step), processors)
        out = torch.empty(parts, m, n, dtype=torch.float32, device=x.device) if parts > 1 else y
        lows[:] = [x.new_empty(parts, m, rank)] if rank else [y]
        _gemm[(triton.cdiv(n, c["BN"]), tiles, parts)](
            x_ptr=x, **(_parts_of(w) | {"N": n}), bias_ptr=x if bias is None else bias, a_ptr=a, b_ptr=b, y_ptr=out,
            low_ptr=lows[0], tiles_ptr=tiles_of, M=m, R=rank, stride_x=x.stride(0), steps=steps, scaling=scaling,
            SPREAD=spread, BIAS=bias is not None, LORA=rank > 0, PARTS=parts > 1, GROUPED=groups is not None, BK=step,
            BR=max(16, triton.next_power_of_2(rank)), **c())  # fmt: skip
        if parts > 1:
            add_parts(out, bias, y)

    launch(("gemm_weight", w.bits, w.form, w.group, bm, n, k, rank, groups is None, x.dtype), candidates, run, x.device)
    if not rank:
        return y, None
    return y, lows[0][0] if lows[0].shape[0] == 1 else lows[0].sum(0)


def rows_and_output(x: torch.Tensor, w: PackedWeight, groups: Groups | None) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] with neighbours side by side, and room for its product [M, N]."""
    n = w.shape[0] // (1 if groups is None else groups.num_experts)
    return x if x.stride(-1) == 1 else x.contiguous(), torch.empty(x.shape[0], n, dtype=x.dtype, device=x.device)


def row_tiles(x: torch.Tensor, groups: Groups | None, least: int = 16) -> tuple[int, int, torch.Tensor]:
    """(rows of a tile, number of such tiles, the list that they are taken from: anything without groups)."""
    if groups is not None:
        return groups.block, groups.tiles.shape[0], groups.tiles
    rows = min(max(least, triton.next_power_of_2(x.shape[0])), 64)
    return rows, triton.cdiv(x.shape[0], rows), x


def split_steps(tiles: int, num_steps: int, processors: int, least: int = 4) -> tuple[int, int]:
    """(parts of K, steps of each): about four programs per multiprocessor hide each other's waits; a part has `least` steps or
    more, else it is mostly start and end."""
    parts = max(1, min(4 * processors // tiles, num_steps // least))
    steps = triton.cdiv(num_steps, parts)
    return triton.cdiv(num_steps, steps), steps


def add_parts(parts: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor) -> None:
    """y [M, N] = the sum of fp32 parts [P, M, N], plus bias."""
    num_parts, m, n = parts.shape
    _add_parts[(triton.cdiv(m * n, 1024),)](parts, parts if bias is None else bias, y, m * n, n, num_parts,
                                            BIAS=bias is not None, BLOCK=1024)  # fmt: skip


def dequantize(w: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """W [N, K] in `dtype`."""
    y = torch.empty(w.shape, dtype=dtype, device=w.data.device)
    n, k = w.shape
    _dequantize[(triton.cdiv(n, 16), triton.cdiv(k, 512))](y_ptr=y, **_parts_of(w), BN=16, BK=512)
    return y


def dgrad(dy: torch.Tensor, w: PackedWeight) -> torch.Tensor:
    """dx [M, K] of dy [M, N]."""
    return _pulled(dy, w, None)[0]


def dgrad_lora(dy: torch.Tensor, w: PackedWeight, a: torch.Tensor, b: torch.Tensor,
               scaling: float) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dy W + low A [M, K], low = scaling dy B [M, R]) of A [R, K] and B [N, R], in dy's dtype."""
    return _pulled(dy, w, (a, b, scaling))


def _pulled(dy: torch.Tensor, w: PackedWeight,
            lora: tuple[torch.Tensor, torch.Tensor, float] | None) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    dy = dy if dy.stride(-1) == 1 else dy.contiguous()
    m, k = dy.shape[0], w.shape[1]
    a, b, scaling = (dy, dy, 0.0) if lora is None else (lora[0].contiguous(), lora[1].contiguous(), lora[2])
    rank = 0 if lora is None else a.shape[0]
    dx, low = dy.new_empty(m, k), dy.new_empty(m, rank)
    if not m:
        return dx, low
    each = 8 // w.bits
    bm = min(max(16, triton.next_power_of_2(m)), 64)
    _dgrad[(triton.cdiv(k // each, 64), triton.cdiv(m, bm), each)](
        dy_ptr=dy, **_parts_of(w), a_ptr=a, b_ptr=b, dx_ptr=dx, low_ptr=low if rank else dx, M=m, R=rank, stride_dy=dy.stride(0),
        scaling=scaling, LORA=rank > 0, BM=bm, BN=32, BJ=64, BR=max(16, triton.next_power_of_2(rank)), num_warps=4)  # fmt: skip
    return dx, low


def gemm_int8(x: torch.Tensor, w: PackedWeight, bias: torch.Tensor | None, groups: Groups | None = None) -> torch.Tensor:
    """y [M, N] of x [M, K] rounded to int8 per row."""
    return _coded(x, w, bias, groups, float8=False)


def gemm_float8(x: torch.Tensor, w: PackedWeight, bias: torch.Tensor | None, groups: Groups | None = None) -> torch.Tensor:
    """y [M, N] of x [M, K] rounded to E4M3 per row."""
    return _coded(x, w, bias, groups, float8=True)


def _coded(x: torch.Tensor, w: PackedWeight, bias: torch.Tensor | None, groups: Groups | None, float8: bool) -> torch.Tensor:
    x, y = rows_and_output(x, w, groups)
    (m, k), n = x.shape, y.shape[1]
    if not m:
        return y
    codes = torch.empty(m, k, dtype=torch.uint8 if float8 else torch.int8, device=x.device)
    scale = torch.empty(m, dtype=torch.float32, device=x.device)
    by_row(x, codes, scale)
    bm, tiles, tiles_of = row_tiles(x, groups)
    processors = num_processors(x.device)

    def run(c: Config) -> None:
        grid = triton.cdiv(n, c["BN"]), tiles
        parts, steps = split_steps(grid[0] * grid[1], triton.cdiv(k, 128), processors)
        out = torch.empty(parts, m, n, dtype=torch.float32, device=x.device) if parts > 1 else y
        _gemm_codes[(*grid, parts)](codes, w.data, scale, w.scale, x if bias is None else bias, out, tiles_of, m, n, k,
                                    w.data.shape[1], steps, MIDDLE=w.middle, BITS=w.bits, FLOAT8=float8, BIAS=bias is not None,
                                    PARTS=parts > 1, GROUPED=groups is not None, BK=128, **c())  # fmt: skip
        if parts > 1:
            add_parts(out, bias, y)

    candidates = [config(4, 4, BM=bm, BN=64), config(4, 4, BM=bm, BN=128)]
    launch(("gemm_codes", float8, w.bits, bm, n, k, groups is None, x.dtype), candidates, run, x.device)
    return y


def on_int8_rows(x: torch.Tensor) -> torch.Tensor:
    """x [M, K] rounded to the int8 grid of each row, in x's dtype."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    by_row(x, y, y)
    return y


def by_row(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, total: torch.Tensor | None = None) -> None:
    """Fill `codes` (int8, E4M3 in uint8, or x's dtype for the values of int8 codes), `scale` and `total`, the codes' sums."""
    m, k = x.shape
    if m:
        _code_rows[(m,)](x, codes, scale, scale if total is None else total, x.stride(0), k, FLOAT8=codes.dtype == torch.uint8,
                         VALUES=codes.is_floating_point(), SUM=total is not None, BLOCK=triton.next_power_of_2(k),
                         num_warps=8 if k > 2048 else 4)  # fmt: skip


def offline_cases() -> list[Case]:
    pointers = {"x_ptr": "*bf16", "w_ptr": "*u8", "scale_ptr": "*fp16", "zero_ptr": "*u8", "table_ptr": "*fp32",
                "divisor_ptr": "*fp32", "bias_ptr": "*bf16", "a_ptr": "*bf16", "b_ptr": "*bf16", "y_ptr": "*fp32",
                "low_ptr": "*bf16", "tiles_ptr": "*i32", "dy_ptr": "*bf16", "dx_ptr": "*bf16", "scaling": "fp32"}  # fmt: skip
    every = pointers | {n: "i32" for n in ("M", "N", "K", "R", "stride_x", "stride_dy", "row_bytes",
                                                   "num_groups", "group", "steps")}

    def types(kernel: Any, **changed: str) -> dict[str, str]:
        return {k: (every | changed)[k] for k in kernel.arg_names if k in every}

    mma = r"mma\.sync[.a-z0-9]*bf16"
    bf16 = {80: mma, 90: r"(wgmma\.mma_async|mma\.sync)[.a-z0-9]*bf16", 100: r"(tcgen05\.mma|mma\.sync)", 120: mma}
    tf32 = {cc: r"(wgmma\.mma_async|mma\.sync)[.a-z0-9]*tf32" for cc in (80, 89, 90, 120)}
    lop3 = {cc: r"lop3\.b32[^;]*43004300|lop3\.b32[^;]*1124089600" for cc in bf16}
    # the last pick of `_lookup_asm`
    prmt = {cc: r"prmt\.b32[^;]*(0x7351|29521)" for cc in bf16}
    # the chip's own conversion where it has one, integers before
    e4m3 = {cc: r"cvt\.rn\.f16x2\.e4m3x2" for cc in (90, 100, 120)}
    odd = ("M", "steps", "num_groups", "R")
    cases = []
    for name, bits, form, zero, bk, lora, expects in [
        ("int4 g128", 4, 0, False, 128, 0, lop3), ("int4 affine g32", 4, 0, True, 32, 0, bf16),
        ("nf4 g64", 4, 1, False, 64, 0, prmt), ("mxfp4", 4, 4, False, 32, 0, prmt),
        ("ternary", 2, 0, False, 128, 0, bf16), ("int8", 8, 0, False, 128, 0, bf16),
        ("int2 g32 affine", 2, 0, True, 64, 0, bf16),
        ("fp8", 8, 2, False, 128, 0, e4m3), ("fp8 by integers", 8, 2, False, 128, 0, {80: mma}),
        ("nvfp4", 4, 3, False, 128, 0, prmt),
        ("nf4 lora", 4, 1, False, 64, 16, prmt), ("int4 lora", 4, 0, False, 64, 64, lop3),
        ("int4 g128 experts", 4, 0, False, 128, 0, lop3), ("nvfp4 experts", 4, 3, False, 128, 0, bf16),
        ("int8 fp32", 8, 0, False, 128, 0, tf32),
    ]:  # fmt: skip
        single = dict.fromkeys(("x_ptr", "a_ptr", "b_ptr", "low_ptr") if "fp32" in name else (), "*fp32")
        signature = types(_gemm, **single, **({"scale_ptr": "*u8"} if form > 2 else {}))
        constants = {"MIDDLE": 2 ** (bits - 1) if form == 0 and not zero else 0, "BITS": bits, "FORM": form,
                     "HARD": name == "fp8", "HIGH_FIRST": form == 1, "ZERO": zero, "SPREAD": "int2 g32" in name, "BIAS": False,
                     "LORA": lora > 0, "PARTS": lora == 0, "GROUPED": "experts" in name,
                     "BM": 64 if lora or "fp32" in name else 16, "BN": 64, "BK": bk, "BR": max(16, lora)}  # fmt: skip
        # most shapes of the other grids have their codes in words
        each = name in ("int8", "fp8", "fp8 by integers", "int4 g128 experts")
        cases.append(Case(f"gemm_weight {name}", _gemm, signature, constants, expects, 4, 2 if "fp32" in name else 4, odd,
                          (90,) if name in ("int4 g128", "nf4 lora", "int4 g128 experts") else (), on="each" if each else "one",
                          reads=64 * bk if name in ("int8", "fp8") else 0))  # fmt: skip
    shared = {"MIDDLE": 0, "BITS": 4, "FORM": 1, "HARD": False, "HIGH_FIRST": True, "ZERO": False}
    for lora in (0, 16):
        constants = shared | {"LORA": lora > 0, "BM": 64, "BN": 32, "BJ": 64, "BR": 16}
        cases.append(Case(f"gemm_weight dgrad nf4{' lora' if lora else ''}", _dgrad, types(_dgrad), constants, bf16, 4, 3, odd,
                          (90,) if lora else (), on="each" if lora else "one"))  # fmt: skip
    cases.append(Case("gemm_weight dequantize nf4", _dequantize, types(_dequantize, y_ptr="*bf16"),
                      shared | {"BN": 16, "BK": 512}, {cc: r"ld\.global" for cc in WIDE_LOADS}, odd=odd, quick=(),
                      on="one"))  # fmt: skip
    cases.append(Case("gemm_weight add parts", _add_parts, {"part_ptr": "*fp32", "bias_ptr": "*bf16", "y_ptr": "*bf16",
                      "size": "i32", "N": "i32", "num_parts": "i32"}, {"BIAS": True, "BLOCK": 1024}, dict(WIDE_LOADS),
                      odd=("num_parts",), quick=(), on="one"))  # fmt: skip
    rows = {**dict.fromkeys(("x_ptr", "codes_ptr", "scale_ptr", "sum_ptr"), "*bf16"), "stride_x": "i32", "K": "i32"}
    constants = {"FLOAT8": False, "VALUES": True, "SUM": False, "BLOCK": 4096}
    cases.append(Case("on_int8_rows", _code_rows, rows, constants, WIDE_LOADS, 8))
    whole = {"x_ptr": "*i8", "w_ptr": "*u8", "x_scale_ptr": "*fp32", "w_scale_ptr": "*fp32", "bias_ptr": "*bf16",
             "y_ptr": "*bf16", "tiles_ptr": "*i32", **{n: "i32" for n in ("M", "N", "K", "row_bytes", "steps")}}  # fmt: skip
    for bits, float8, grouped in ((8, False, False), (2, False, False), (8, True, False), (8, False, True)):
        kind, at_90, ccs = ("e4m3", r"(wgmma\.mma_async|mma\.sync)", (89, 90, 100, 120)) if float8 else (
            "s8", r"(wgmma\.mma_async|mma\.sync)", (80, 90, 100, 120))
        patterns = {cc: (at_90 if cc == 90 else r"mma\.sync") + rf"[.a-z0-9]*{kind}" for cc in ccs}
        if float8:
            patterns[100] = r"tcgen05\.mma|mma\.sync[.a-z0-9]*e4m3"
        constants = {"MIDDLE": 0 if float8 else 128 if bits == 8 else 1, "BITS": bits, "FLOAT8": float8, "BIAS": False,
                     "PARTS": False, "GROUPED": grouped, "BM": 16, "BN": 64, "BK": 128}  # fmt: skip
        cases.append(Case(f"gemm_{'float8' if float8 else 'int8'} {bits} bit{' experts' if grouped else ''}", _gemm_codes,
                          whole | ({"x_ptr": "*u8"} if float8 else {}), constants, patterns, 4, 4, ("M", "steps"),
                          (90,) if float8 else (), on="one" if bits == 2 or grouped else "each",
                          reads=64 * 128 * bits // 8))  # fmt: skip
    return cases
