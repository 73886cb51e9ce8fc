"""Paged attention and the cache's writer.

A program holds a tile of (rows x heads of one key head) of one sequence and walks a part of its keys, a block table look-up per
key; with several parts `_merge` adds their softmaxes (Flash-Decoding). The number of parts depends on the shapes of the step
alone, not on contexts, so a CUDA graph replays it with any contexts.

int8 and fp8 keys are multiplied as codes; their scales, one per token and head, go onto the columns of the scores, the values'
onto the probabilities. fp8 codes are decoded in integers on chips without a conversion of their own.

Where rows are few (decoding) these codes are read as words of 32 bits, four neighbouring dimensions of a key each. The codes of
one place in the words are a product of their own with every fourth dimension of q, whose rows are read that way once; of the
values likewise, every fourth dimension of the output. Two words, neighbours in a key or of neighbouring keys, then give the pairs
of bf16 that a tensor core takes, and no bytes are gathered: by count of the machine code 27 bytes a cycle, not 16.

int4 rows are read so for any number of rows, in words of 16 bits, and decoded to fp16 by packed arithmetic (`decoded`), which
rounds code * step + min once; q is brought to fp16 by a power of two per row. Where rows-times-heads are 8 or fewer, keys and
values are the tall operands and these the narrow one: nothing is computed for rows that are not there. By count of the machine
code 26 bytes a cycle, not 11 as decoding in fp32 took.

What differs from step to step (rows, parts, widths of tables) is no compile-time value: each new one would be compiled anew.
"""

from __future__ import annotations

import math
import struct

import torch
import triton
import triton.language as tl

from karui.kernels.paged_attention import Cache, Plan
from karui.kernels.triton_support import capability, interpreting, num_processors
from karui.kernels.triton_support.codecs import decode_e4m3, encode_e4m3
from karui.kernels.triton_support.offline import WIDE_LOADS, Case
from karui.kernels.triton_support.products import dot

LOG2E = math.log2(math.e)
_INTERPRETED = tl.constexpr(interpreting())


def _int8_asm() -> str:
    """Two words, $4 and $5 -> the bf16 pairs of each of their 4 places, of int8 codes: 128 + the low 7 bits, less 128, or 256
    where the sign is set."""
    lines = [".reg .b32 t<4>, s, one;", "mov.b32 one, 0x3f803f80;"]
    lines += [f"prmt.b32 t{place}, $4, $5, 0x{(4 + place) * 0x1100 + place * 0x11:04x};" for place in range(4)]
    for place in range(4):
        lines += [f"lop3.b32 s, t{place}, 0x00800080, 0xc300c300, 0xea;",
                  f"lop3.b32 t{place}, t{place}, 0x007f007f, 0x43004300, 0xea;",
                  f"fma.rn.bf16x2 ${place}, t{place}, one, s;"]  # fmt: skip
    return "{\n" + "\n".join(lines) + "\n}"


def _e4m3_asm() -> str:
    """The same of E4M3 codes: exponent and mantissa where bf16 has them are 2^-120 of the value. A code goes into the high byte
    of its half; below the upper one lies the lower one's sign eight times, so that shifting by 4 leaves both signs in place."""
    lines = [".reg .b32 t<4>, up, none;", "mov.b32 up, 0x7b807b80;", "mov.b32 none, 0x80008000;"]
    lines += [f"prmt.b32 t{place}, $4, $5, 0x{(4 + place) * 0x1000 + (8 + place) * 0x100 + place * 0x11:04x};"
              for place in range(4)]  # fmt: skip
    for place in range(4):
        lines += [f"shr.s32 t{place}, t{place}, 4;", f"and.b32 t{place}, t{place}, 0x87f087f0;",
                  f"fma.rn.bf16x2 ${place}, t{place}, up, none;"]  # fmt: skip
    return "{\n" + "\n".join(lines) + "\n}"


def _half(value: float) -> str:
    """A pair of one fp16 value."""
    return f"0x{struct.unpack('<H', struct.pack('<e', value))[0] * 0x10001:08x}"


def _halves4_asm() -> str:
    """Two words of four 4-bit codes in $4, a step for each in $5, half a min in $6 -> the fp16 pairs code / 2 * step + half a min
    of each place, rounded once. In the mantissa of 1024 a code is itself, or 16 times as much; both leave exactly."""
    lines = [".reg .b32 h, t<4>, f<2>, l<2>;", "shr.u32 h, $4, 8;"]
    for high, size in enumerate((1.0, 16.0)):
        lines += [f"mov.b32 f{high}, {_half(0.5 / size)};", f"mov.b32 l{high}, {_half(-512.0 / size)};"]
    for place in range(4):
        high = place % 2
        mask = 0x00F000F0 if high else 0x000F000F
        lines += [f"lop3.b32 t{place}, {'h' if place > 1 else '$4'}, 0x{mask:08x}, 0x64006400, 0xea;",
                  f"fma.rn.f16x2 t{place}, t{place}, f{high}, l{high};",
                  f"fma.rn.f16x2 t{place}, t{place}, $5, $6;"]  # fmt: skip
    lines += [f"mov.b32 ${place}, t{place};" for place in range(4)]  # an output may have an input's register
    return "{\n" + "\n".join(lines) + "\n}"


def _halves2_asm() -> str:
    """The same of words of eight 2-bit codes, in $8 to $10. A code goes to the highest bits of the mantissa of 2 or 8, where it
    is code / 2 more; the 2 or 8 leaves with the min: two roundings, of which the first is 2^-8 of a step at most."""
    lines = [".reg .b32 c, t<8>, less, l<2>;"]
    for high, size in ((1, 2.0), (0, 8.0)):
        lines += [f"mov.b32 less, {_half(-size)};", f"fma.rn.f16x2 l{high}, $9, less, $10;"]
    for place in range(8):
        high, by = place % 2, 6 - 4 * (place // 2)
        if not high:
            lines.append(f"{'shl' if by > 0 else 'shr'}.b32 c, $8, {abs(by)};")
        mask, size = (0x03000300, 0x40004000) if high else (0x00C000C0, 0x48004800)
        lines += [f"lop3.b32 t{place}, c, 0x{mask:08x}, 0x{size:08x}, 0xea;", f"fma.rn.f16x2 t{place}, t{place}, $9, l{high};"]
    lines += [f"mov.b32 ${place}, t{place};" for place in range(8)]
    return "{\n" + "\n".join(lines) + "\n}"


_INT8, _E4M3 = tl.constexpr(_int8_asm()), tl.constexpr(_e4m3_asm())
_HALVES4, _HALVES2 = tl.constexpr(_halves4_asm()), tl.constexpr(_halves2_asm())


@triton.jit
def _places(words, KIND: tl.constexpr, like):
    """The values of each place in int32 words of codes, as bf16 (like q in the interpreter); of E4M3 no NaN: the scale is it."""
    if _INTERPRETED:
        return (_place(words, 0, KIND).to(like.dtype), _place(words, 1, KIND).to(like.dtype),
                _place(words, 2, KIND).to(like.dtype), _place(words, 3, KIND).to(like.dtype))  # fmt: skip
    return tl.inline_asm_elementwise(_INT8 if KIND == 1 else _E4M3, "=r,=r,=r,=r,r,r", [words], dtype=(tl.bfloat16,) * 4,
                                     is_pure=True, pack=2)  # fmt: skip


@triton.jit
def _place(words, place: tl.constexpr, KIND: tl.constexpr):
    code = (words >> (8 * place)) & 255
    if KIND == 1:
        return ((code ^ 128) - 128).to(tl.float32)
    return tl.where((code & 127) == 127, tl.where(code < 128, 480.0, -480.0), decode_e4m3(code))


@triton.jit
def along(x, AXIS: tl.constexpr):
    """x [N] as a column [N, 1] (AXIS 0) or a row [1, N]."""
    return x[:, None] if AXIS == 0 else x[None, :]


@triton.jit
def exp2(x):
    """2^x, 0 below 2^-126: what lies there costs `tl.exp2` three instructions more."""
    if _INTERPRETED:
        return tl.exp2(x)
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def power(size):
    """The power of two that brings fp32 `size` from 2^-63 on to [2^14, 2^15), and its inverse: a row of bf16 with this largest
    value is then one of fp16, exactly but for what is 2^28 times smaller."""
    exponent = tl.maximum(size.to(tl.int32, bitcast=True) >> 23, 64)
    return ((268 - exponent) << 23).to(tl.float32, bitcast=True), ((exponent - 14) << 23).to(tl.float32, bitcast=True)


@triton.jit
def largest(q):
    """fp32 [R] of q [R, C]: each row's largest absolute value."""
    return tl.max(tl.abs(q.to(tl.float32)), 1)


@triton.jit
def in_halves(q, up):
    """q [R, C] times `up` [R], in fp16."""
    return (q.to(tl.float32) * up[:, None]).to(tl.float16)


@triton.jit
def _stored(x, scale, to_ptr, KIND: tl.constexpr):
    """fp32 values as the cache keeps them. KIND 0: a plain dtype, 1: int8, 2: E4M3 (as bytes)."""
    if KIND == 0:
        kept = x.to(to_ptr.dtype.element_ty)
    elif KIND == 1:
        # adding 1.5 * 2^23 leaves the nearest whole number, ties to even
        kept = ((tl.div_rn(x, scale) + 12582912.0) - 12582912.0).to(tl.int8)
    else:
        kept = encode_e4m3(tl.div_rn(x, scale)).to(tl.uint8)
    return kept


@triton.jit
def _scale_of(x, KIND: tl.constexpr):
    """fp32 scale of a row of values, NaN where one of them is."""
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(x)), 1e-12), 127.0 if KIND == 1 else 448.0)
    return tl.where(tl.sum((x != x).to(tl.int32)) > 0, float("nan"), scale)


@triton.jit
def _write(k_ptr, v_ptr, slots_ptr, keys_ptr, values_ptr, key_scale_ptr, value_scale_ptr, k_token, k_head, v_token, v_head,
           slot_stride, head_stride, scale_slot, KIND: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):  # fmt: skip
    t, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots_ptr + t).to(tl.int64)
    if slot >= 0:
        d = tl.arange(0, DP)
        k = tl.load(k_ptr + t * k_token + g * k_head + d, d < D, 0.0).to(tl.float32)
        v = tl.load(v_ptr + t * v_token + g * v_head + d, d < D, 0.0).to(tl.float32)
        k_scale, v_scale = _scale_of(k, KIND), _scale_of(v, KIND)
        at = slot * slot_stride + g * head_stride + d
        tl.store(keys_ptr + at, _stored(k, k_scale, keys_ptr, KIND), d < D)
        tl.store(values_ptr + at, _stored(v, v_scale, values_ptr, KIND), d < D)
        if KIND != 0:
            tl.store(key_scale_ptr + slot * scale_slot + g, k_scale)
            tl.store(value_scale_ptr + slot * scale_slot + g, v_scale)


@triton.jit
def _enter(qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, slots_ptr, q_ptr, keys_ptr, values_ptr, key_scale_ptr,
           value_scale_ptr, qkv_token, slot_stride, head_stride, scale_slot, eps, A: tl.constexpr, G: tl.constexpr,
           NORM: tl.constexpr, KIND: tl.constexpr, APART: tl.constexpr, HALF: tl.constexpr, HP: tl.constexpr):  # fmt: skip
    """Program (row, head of q, k and v one after the other): norm, rotation, and into q or the cache, with APART its row t."""
    t, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, HP)
    inside = d < HALF
    at = qkv_ptr + t * qkv_token + head * (2 * HALF) + d
    a, b = tl.load(at, inside, 0.0), tl.load(at + HALF, inside, 0.0)
    low, high = a.to(tl.float32), b.to(tl.float32)
    is_value = head >= A + G
    if NORM:  # noqa: SIM102 (one is known when compiling, the other is not)
        if head < A + G:
            rstd = 1.0 / tl.sqrt_rn((tl.sum(low * low) + tl.sum(high * high)) / (2 * HALF) + eps)
            weight = q_norm_ptr if head < A else k_norm_ptr
            # rounded where the separate kernels round: before the weight, after it, and after the rotation
            low = (low * rstd).to(a.dtype).to(tl.float32) * tl.load(weight + d, inside, 0.0).to(tl.float32)
            high = (high * rstd).to(a.dtype).to(tl.float32) * tl.load(weight + HALF + d, inside, 0.0).to(tl.float32)
            low, high = low.to(a.dtype).to(tl.float32), high.to(a.dtype).to(tl.float32)
    if head < A + G:
        cos, sin = tl.load(cos_ptr + t * HALF + d, inside, 0.0), tl.load(sin_ptr + t * HALF + d, inside, 0.0)
        turned = low * cos - high * sin
        high = (high * cos + low * sin).to(a.dtype).to(tl.float32)
        low = turned.to(a.dtype).to(tl.float32)
    if head < A:
        to = q_ptr + (t * A + head) * (2 * HALF) + d
        tl.store(to, low.to(a.dtype), inside)
        tl.store(to + HALF, high.to(a.dtype), inside)
    else:
        slot = t if APART else tl.load(slots_ptr + t).to(tl.int64)
        if slot >= 0:
            g = tl.where(is_value, head - A - G, head - A)
            cache_ptr = values_ptr if is_value else keys_ptr
            scale = _scale_of(tl.join(low, high), KIND)
            to = cache_ptr + slot * slot_stride + g * head_stride + d
            tl.store(to, _stored(low, scale, keys_ptr, KIND), inside)
            tl.store(to + HALF, _stored(high, scale, keys_ptr, KIND), inside)
            if KIND != 0:
                scales = value_scale_ptr if is_value else key_scale_ptr
                tl.store(scales + slot * scale_slot + g, scale)


@triton.jit
def coded(x, BITS: tl.constexpr):
    """(bytes [R, Q * BITS / 8], steps [R], mins [R] in fp16) of the rows of x [R, Q], fp32; a byte's first code is in its lowest
    bits. A row with a NaN has no number for step and min."""
    R: tl.constexpr = x.shape[0]
    Q: tl.constexpr = x.shape[1]
    EACH: tl.constexpr = 8 // BITS
    LAST: tl.constexpr = (1 << BITS) - 1
    bad = tl.sum((x != x).to(tl.int32), 1) > 0
    x = tl.minimum(tl.maximum(x, -65504.0), 65504.0)
    low = tl.where(bad, float("nan"), tl.min(x, 1)).to(tl.float16)
    high, near = tl.max(x, 1), low.to(tl.float32)
    step = tl.div_rn(high - near, tl.full([R], LAST, tl.float32)).to(tl.float16)
    wide = tl.broadcast_to(step.to(tl.float32)[:, None], [R, Q])
    code = tl.div_rn(x - near[:, None], tl.where(wide == 0.0, 1.0, wide))
    code = tl.minimum(tl.maximum((code + 12582912.0) - 12582912.0, 0.0), LAST)  # to the nearest, ties to even
    code = tl.where((wide == 0.0) | bad[:, None], 0.0, code).to(tl.int32).reshape([R, Q // EACH, EACH])
    return tl.sum(code << (BITS * tl.arange(0, EACH))[None, None, :], 2).to(tl.uint8), step, low


@triton.jit
def _write4(x_ptr, slots_ptr, bytes_ptr, halves_ptr, x_token, x_head, slot_stride, head_stride, D: tl.constexpr, Q: tl.constexpr,
            GP: tl.constexpr):  # fmt: skip
    """Program (row, head): its row of an int4 cache, which `bytes_ptr` and, as fp16, `halves_ptr` point to; strides in bytes."""
    t, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots_ptr + t).to(tl.int64)
    if slot >= 0:
        group, i = tl.arange(0, GP), tl.arange(0, Q)
        inside = group < D // Q
        x = tl.load(x_ptr + t * x_token + g * x_head + group[:, None] * Q + i[None, :], inside[:, None], 0.0).to(tl.float32)
        code, step, low = coded(x, 4)
        at = slot * slot_stride + g * head_stride
        tl.store(bytes_ptr + at + group[:, None] * (Q // 2) + tl.arange(0, Q // 2)[None, :], code, inside[:, None])
        to = halves_ptr + at // 2 + D // 4 + group
        tl.store(to, step, inside)
        tl.store(to + D // Q, low, inside)


@triton.jit
def loaded(at, place, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """What `at` points to, 0 where a `place` in the row is behind its WIDTH; a condition only where rows are padded."""
    if WIDTH == PADDED:
        return tl.load(at)
    else:
        return tl.load(at, place < WIDTH, 0)


@triton.jit
def _nibbles(row, D: tl.constexpr, Q: tl.constexpr, DP: tl.constexpr, KEYS: tl.constexpr, like):
    """As `decoded`, of int4 rows, whose keys lie along axis KEYS; `row` [BN] points to their beginnings as int16."""
    e, group = along(tl.arange(0, DP // 4), 1 - KEYS), along(tl.arange(0, DP // Q), 1 - KEYS)
    row = along(row, KEYS)
    near = row + D // 4 + group
    step = loaded(near, group, D // Q, DP // Q).to(tl.float16, bitcast=True)
    low = loaded(near + D // Q, group, D // Q, DP // Q).to(tl.float16, bitcast=True)
    return decoded(loaded(row + e, e, D // 4, DP // 4), step, low, Q // 4, 1 - KEYS, 4, like)


@triton.jit
def decoded(words, step, low, TIMES: tl.constexpr, AXIS: tl.constexpr, BITS: tl.constexpr, like):
    """What each place in words of codes stands for: code * step + low, of which TIMES words along AXIS share one. For `like` in
    fp32 in fp32, of words of four codes. Else in fp16 and half of it, because a largest code can mean more than 65504."""
    if like.dtype == tl.float16:
        step, low = spread(step, TIMES, AXIS), spread(low * 0.5, TIMES, AXIS)
        if _INTERPRETED:
            step, low = step.to(tl.float32) * 0.5, low.to(tl.float32)
        elif BITS == 4:
            return tl.inline_asm_elementwise(_HALVES4, "=r,=r,=r,=r,r,r,r", [words, step, low], dtype=(tl.float16,) * 4,
                                             is_pure=True, pack=2)  # fmt: skip
        else:
            return tl.inline_asm_elementwise(_HALVES2, "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r", [words, step, low],
                                             dtype=(tl.float16,) * 8, is_pure=True, pack=2)  # fmt: skip
    else:
        step, low = spread(step.to(tl.float32), TIMES, AXIS), spread(low.to(tl.float32), TIMES, AXIS)
    values = ()
    for place in tl.static_range(words.dtype.primitive_bitwidth // BITS):
        code = (words.to(tl.int32) >> (BITS * place)) & ((1 << BITS) - 1)
        values = values + ((code.to(tl.float32) * step + low).to(like.dtype),)  # type: ignore[assignment]
    return values


@triton.jit
def spread(x, TIMES: tl.constexpr, AXIS: tl.constexpr):
    """A matrix with each place along AXIS so many times."""
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    if AXIS == 0:
        return tl.broadcast_to(x[:, None, :], [R, TIMES, C]).reshape([R * TIMES, C])
    else:
        return tl.broadcast_to(x[:, :, None], [R, C, TIMES]).reshape([R, C * TIMES])


@triton.jit
def _operand(x, KIND: tl.constexpr, HARD: tl.constexpr, like):
    """Codes or values as something a product with `like` takes; exact. HARD: by the chip's own conversion."""
    if KIND == 2:
        if HARD:
            return x.to(tl.float8e4nv, bitcast=True).to(tl.float32).to(like.dtype)
        return decode_e4m3(x.to(tl.int32)).to(like.dtype)
    if KIND == 1 and _INTERPRETED:  # which takes integers for the bits of bf16
        return x.to(tl.float32).to(like.dtype)
    return x.to(like.dtype)


@triton.jit(do_not_specialize=["T", "table_stride", "window", "rows", "tiles", "parts"])
def _attend(q_ptr, keys_ptr, values_ptr, key_scale_ptr, value_scale_ptr, starts_ptr, contexts_ptr, tables_ptr, tree_ptr,
            positions_ptr, out_ptr, top_ptr, sum_ptr, T, q_token, q_head, slot_stride, head_stride, scale_slot, table_stride,
            factor, window, rows, tiles, parts, BLOCK: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, KIND: tl.constexpr,
            HARD: tl.constexpr, TREE: tl.constexpr, WINDOW: tl.constexpr, POSITIONS: tl.constexpr, SPLIT: tl.constexpr,
            WORDS: tl.constexpr, TURNED: tl.constexpr, Q: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr,
            BN: tl.constexpr):  # fmt: skip
    """Program (sequence and tile of `rows` rows, key head, part); tile row r is row r // GROUP of the tile, head r % GROUP.

    WORDS: keys and values are words of four codes, int32, or int16 of an int4 cache (KIND 3), and their strides in words. Q:
    dimensions that share a step in an int4 cache. TURNED: scores lie as [keys, rows], sums as [dimensions, rows].
    """
    EACH: tl.constexpr = 4 if WORDS else 1
    ROWS: tl.constexpr = 1 if TURNED else 0  # axes of the scores
    KEYS: tl.constexpr = 1 - ROWS
    s, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    g, part = tl.program_id(1), tl.program_id(2)
    start = tl.load(starts_ptr + s)
    num_rows = tl.load(starts_ptr + s + 1) - start
    first = tile * rows
    if first < num_rows:
        context = tl.load(contexts_ptr + s)
        before = context - num_rows
        r, d = tl.arange(0, BM), tl.arange(0, DP // EACH)
        i = first + r // GROUP
        real = (i < num_rows) & (r < rows * GROUP)
        head = g * GROUP + r % GROUP
        row = (start + i).to(tl.int64)
        mask = real[:, None] & (d[None, :] < D // EACH)
        q_row = q_ptr + row[:, None] * q_token + head[:, None] * q_head + d[None, :] * EACH
        q = tl.load(q_row, mask, 0.0)
        if WORDS:
            q1, q2, q3 = tl.load(q_row + 1, mask, 0.0), tl.load(q_row + 2, mask, 0.0), tl.load(q_row + 3, mask, 0.0)
        if KIND == 3 and q.dtype != tl.float32:
            up, down = power(tl.maximum(tl.maximum(largest(q), largest(q1)), tl.maximum(largest(q2), largest(q3))))
            q, q1, q2, q3 = in_halves(q, up), in_halves(q1, up), in_halves(q2, up), in_halves(q3, up)
            rate = factor * 2.0 * down  # of halves of keys
        else:
            rate = tl.zeros([BM], tl.float32) + factor
        word = i * 0
        if TREE:
            word = tl.load(tree_ptr + row, real, 0)
        place = before + i
        if POSITIONS:
            place = tl.load(positions_ptr + row, real, 0)
        top = tl.full([BM], float("-inf"), tl.float32)
        total = tl.zeros([BM], tl.float32)
        acc = tl.zeros([DP // EACH, BM] if TURNED else [BM, DP // EACH], tl.float32)
        if WORDS:
            acc1, acc2, acc3 = acc, acc, acc
        # the keys that any row of the tile sees, in equal parts of whole tiles
        begin = 0
        end = context if TREE else tl.minimum(before + first + rows, context)
        if WINDOW:
            # a row of a tree is at its depth, which may be 0
            begin = tl.maximum(before + (0 if POSITIONS else first) - window + 1, 0) // BN * BN
        each = tl.cdiv(tl.cdiv(end - begin, BN), parts) * BN
        begin += part * each
        for at in range(begin, tl.minimum(begin + each, end), BN):
            j = at + tl.arange(0, BN)
            # beyond the last key it is read again: no row sees it there, and reads without a condition take fewer instructions
            near = tl.minimum(j, end - 1).to(tl.uint32)
            slot = tl.load(tables_ptr + s * table_stride + near // BLOCK).to(tl.int64) * BLOCK + near % BLOCK
            where = slot[:, None] * slot_stride + g * head_stride + d[None, :]
            # strides that are known when compiling tell how far a row is aligned
            line = (slot * (HEADS // GROUP) + g) * (D // 4 + 2 * (D // Q))
            if WORDS:
                if KIND == 3:
                    k, k1, k2, k3 = _nibbles(keys_ptr + line, D, Q, DP, 0, q)
                else:
                    k, k1, k2, k3 = _places(loaded(keys_ptr + where, d[None, :], D // EACH, DP // EACH), KIND, q)
                if TURNED:
                    scores = dot(k1, q1.T, dot(k, q.T, tl.zeros([BN, BM], tl.float32), "tf32x3"), "tf32x3")
                    scores = dot(k3, q3.T, dot(k2, q2.T, scores, "tf32x3"), "tf32x3")
                else:
                    scores = dot(q1, k1.T, dot(q, k.T, tl.zeros([BM, BN], tl.float32), "tf32x3"), "tf32x3")
                    scores = dot(q3, k3.T, dot(q2, k2.T, scores, "tf32x3"), "tf32x3")
            else:
                k = loaded(keys_ptr + where, d[None, :], D // EACH, DP // EACH)
                scores = dot(q, _operand(k, KIND, HARD, q).T, tl.zeros([BM, BN], tl.float32), "tf32x3")
            if KIND == 1 or KIND == 2:
                scores *= tl.load(key_scale_ptr + slot * scale_slot + g)[None, :]
            if TREE:
                own, bits = along(j - before, KEYS), along(word, ROWS)
                bit = (bits >> tl.minimum(tl.maximum(own, 0), 31)) & 1
                seen = tl.where(bits == 0, own <= along(i, ROWS), (own < 0) | (bit == 1)) & (own < end - before)
            else:  # what a row of padding sees is never stored
                seen = along(tl.arange(0, BN), KEYS) <= along(i + (before - at), ROWS)
            if WINDOW:
                key_place = j
                if POSITIONS:
                    key_place = tl.where(j < before, j, tl.load(positions_ptr + start + j - before, (j >= before) & (j < end), 0))
                seen = seen & (along(key_place, KEYS) > along(place - window, ROWS))
            scores = tl.where(seen, scores, float("-inf"))
            bigger = tl.maximum(top, tl.max(scores, KEYS))
            # a part or a window can begin with keys that a row does not see: -inf minus -inf would be NaN
            base = tl.where(bigger == float("-inf"), 0.0, bigger) * rate
            p = exp2(scores * along(rate, ROWS) - along(base, ROWS))
            shrink = exp2(top * rate - base)
            total = total * shrink + tl.sum(p, KEYS)
            if KIND == 1 or KIND == 2:
                p *= tl.load(value_scale_ptr + slot * scale_slot + g)[None, :]
            if WORDS:
                p = p.to(q.dtype)
                if KIND == 3:
                    v, v1, v2, v3 = _nibbles(values_ptr + line, D, Q, DP, 1 if TURNED else 0, q)
                else:
                    v, v1, v2, v3 = _places(loaded(values_ptr + where, d[None, :], D // EACH, DP // EACH), KIND, q)
                if TURNED:
                    acc, acc1 = dot(v, p, acc * shrink[None, :], "tf32x3"), dot(v1, p, acc1 * shrink[None, :], "tf32x3")
                    acc2, acc3 = dot(v2, p, acc2 * shrink[None, :], "tf32x3"), dot(v3, p, acc3 * shrink[None, :], "tf32x3")
                else:
                    acc, acc1 = dot(p, v, acc * shrink[:, None], "tf32x3"), dot(p, v1, acc1 * shrink[:, None], "tf32x3")
                    acc2, acc3 = dot(p, v2, acc2 * shrink[:, None], "tf32x3"), dot(p, v3, acc3 * shrink[:, None], "tf32x3")
            else:
                v = _operand(loaded(values_ptr + where, d[None, :], D // EACH, DP // EACH), KIND, HARD, q)
                acc = dot(p.to(v.dtype), v, acc * shrink[:, None], "tf32x3")
            top = bigger
        if KIND == 3 and q.dtype == tl.float16:
            total *= 0.5
        if TURNED:
            acc, acc1, acc2, acc3 = acc.T, acc1.T, acc2.T, acc3.T
        if WORDS:  # the places side by side: dimension 4 e + place
            acc = tl.join(tl.join(acc, acc2), tl.join(acc1, acc3)).reshape([BM, DP])
            d = tl.arange(0, DP)
            mask = real[:, None] & (d[None, :] < D)
        if not SPLIT:
            out = out_ptr + (row[:, None] * HEADS + head[:, None]) * D + d[None, :]
            tl.store(out, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask)
        else:
            at = (part.to(tl.int64) * T + row) * HEADS + head
            tl.store(out_ptr + at[:, None] * D + d[None, :], acc, mask)
            tl.store(top_ptr + at, top * rate, real)
            tl.store(sum_ptr + at, total, real)


@triton.jit(do_not_specialize=["size", "parts"])
def _merge(part_ptr, top_ptr, sum_ptr, out_ptr, size, parts, PARTS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Program per (row, head): the parts' accumulators, each scaled to the largest maximum; PARTS >= parts, a power of two."""
    at = tl.program_id(0).to(tl.int64)
    d, part = tl.arange(0, DP), tl.arange(0, PARTS)
    real, places = part < parts, part.to(tl.int64) * size + at
    top = tl.load(top_ptr + places, real, float("-inf"))
    weight = tl.exp2(top - tl.max(top))
    total = tl.sum(weight * tl.load(sum_ptr + places, real, 0.0))
    acc = tl.load(part_ptr + places[:, None] * D + d[None, :], real[:, None] & (d[None, :] < D), 0.0)
    acc = tl.sum(weight[:, None] * acc, 0)
    tl.store(out_ptr + at * D + d, (acc / total).to(out_ptr.dtype.element_ty), d < D)


_KINDS = {torch.int8: 1, torch.float8_e4m3fn: 2, torch.uint8: 3}


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def write_kv(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, cache: Cache) -> None:
    """As `karui.kernels.paged_attention.write_kv`."""
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    tokens, heads, width = k.shape
    if cache.packed is not None:
        group = cache.packed[1]
        for x, to in ((k, cache.keys), (v, cache.values)) if tokens else ():
            _write4[(tokens, heads)](x, slots, to, to.view(torch.float16), x.stride(0), x.stride(1), to.stride(0), to.stride(1),
                                     D=width, Q=group, GP=triton.next_power_of_2(width // group), num_warps=1)  # fmt: skip
        return
    keys, values = _bytes(cache.keys), _bytes(cache.values)
    key_scale, value_scale = (keys, values) if cache.key_scale is None else (cache.key_scale, cache.value_scale)
    assert value_scale is not None
    if tokens:
        _write[(tokens, heads)](k, v, slots, keys, values, key_scale, value_scale, k.stride(0), k.stride(1), v.stride(0),
                                v.stride(1), keys.stride(0), keys.stride(1), key_scale.stride(0),
                                KIND=_KINDS.get(cache.keys.dtype, 0), D=width, DP=triton.next_power_of_2(width),
                                num_warps=1)  # fmt: skip


def enter(qkv: torch.Tensor, heads: int, cos: torch.Tensor, sin: torch.Tensor, slots: torch.Tensor, cache: Cache,
          norms: tuple[torch.Tensor, ...] | None, eps: float) -> torch.Tensor:  # fmt: skip
    """As `karui.kernels.paged_attention.enter`."""
    qkv = qkv if qkv.stride(-1) == 1 else qkv.contiguous()
    kv_heads, width = cache.keys.shape[1], cache.head_dim
    q = torch.empty(len(qkv), heads, width, dtype=qkv.dtype, device=qkv.device)
    int4 = cache if cache.packed is not None else None
    if int4 is not None:  # a step and a min need both halves of a head: keys and values go through memory once more
        k, v = (torch.empty(len(qkv), kv_heads, width, dtype=qkv.dtype, device=qkv.device) for _ in range(2))
        cache = Cache(k, v)
    keys, values = _bytes(cache.keys), _bytes(cache.values)
    key_scale, value_scale = (keys, values) if cache.key_scale is None else (cache.key_scale, cache.value_scale)
    assert value_scale is not None
    q_norm, k_norm = (qkv, qkv) if norms is None else norms
    if len(qkv):
        _enter[(len(qkv), heads + 2 * kv_heads)](
            qkv, q_norm, k_norm, cos.contiguous(), sin.contiguous(), slots, q, keys, values, key_scale, value_scale,
            qkv.stride(0), keys.stride(0), keys.stride(1), key_scale.stride(0), eps, A=heads, G=kv_heads, NORM=norms is not None,
            KIND=_KINDS.get(cache.keys.dtype, 0), APART=int4 is not None, HALF=width // 2,
            HP=triton.next_power_of_2(width // 2), num_warps=1)  # fmt: skip
    if int4 is not None:
        write_kv(cache.keys, cache.values, slots, int4)
    return q


def num_parts(sequences: int, tiles: int, kv_heads: int, max_context: int, device: torch.device, warps: int = 4) -> int:
    """Into how many parts keys are split: enough programs for eight warps per multiprocessor, parts of 256 keys or more, at most
    32 of four warps or 128 of one."""
    programs = sequences * tiles * kv_heads
    return max(1, min(8 // warps * num_processors(device) // programs, max_context // 256, 128 // warps))


def paged_attention(q: torch.Tensor, cache: Cache, plan: Plan, scaling: float, window: int | None,
                    parts: int | None = None) -> torch.Tensor:  # fmt: skip
    """As `karui.kernels.paged_attention.paged_attention`; `parts` forces the split."""
    q = q if q.stride(-1) == 1 else q.contiguous()
    tokens, heads, width = q.shape
    out = torch.empty(tokens, heads, width, dtype=q.dtype, device=q.device)
    if not tokens:
        return out
    kv_heads = cache.keys.shape[1]
    group = heads // kv_heads
    # few rows: one tile holds them all; many: tiles of rows-times-heads that leave room for keys and values in shared memory
    padded = max(triton.next_power_of_2(width), 16 if cache.packed is None else 64)
    most, bn, stages = _tiles(padded, q.dtype == torch.float32)
    rows = plan.max_rows if plan.max_rows * group <= most else min(plan.max_rows, max(1, min(most, 64) // group))
    # int4 decoding: 8 rows-times-heads are the narrow side of a product, which has 16 at least on the other
    turned = cache.packed is not None and rows * group <= 8
    bm = 8 if turned else max(16, triton.next_power_of_2(rows * group))
    sequences, tiles = plan.contexts.shape[0], triton.cdiv(plan.max_rows, rows)
    reach = plan.block_tables.shape[1] * plan.block_size
    kind, on_gpu = _KINDS.get(cache.keys.dtype, 0), q.device.type == "cuda"
    # the products of the places are 16 columns wide with heads of 64, which more than one warp would share by doing it all
    narrow = padded == 64 and bm <= 16
    words = kind > 0 and bm <= _FEW and (padded > 64 or narrow) and width % 4 == 0 and (q.dtype == torch.bfloat16 or not on_gpu)
    if kind == 3:
        words = True
        assert cache.keys.is_contiguous() and cache.values.is_contiguous(), "rows of an int4 cache lie one after the other"
    # more keys of a step: a row takes half of the bytes or less
    wider = 1 if bm <= _FEW and words and not (narrow or turned) else 0
    warps = 1 if turned or words and narrow else 4
    parts = parts or num_parts(sequences, tiles, kv_heads, reach, q.device, warps)
    partial = torch.empty(parts, tokens, heads, width, device=q.device) if parts > 1 else out
    # each from an allocation of its own: where it begins is then known to be aligned
    top, total = (torch.empty(parts, tokens, heads, device=q.device) if parts > 1 else partial for _ in range(2))
    as_words = torch.int16 if kind == 3 else torch.int32
    keys, values = (x.view(as_words) if words else _bytes(x) for x in (cache.keys, cache.values))
    key_scale, value_scale = (keys, values) if cache.key_scale is None else (cache.key_scale, cache.value_scale)
    _attend[(sequences * tiles, kv_heads, parts)](
        q, keys, values, key_scale, value_scale, plan.query_starts, plan.contexts, plan.block_tables,
        plan.query_starts if plan.tree is None else plan.tree,
        plan.query_starts if plan.positions is None else plan.positions, partial, top, total, tokens, q.stride(0), q.stride(1),
        keys.stride(0), keys.stride(1), key_scale.stride(0), plan.block_tables.stride(0), scaling * LOG2E, window or 0, rows,
        tiles, parts, BLOCK=plan.block_size, GROUP=group, HEADS=heads, KIND=kind,
        HARD=kind == 2 and on_gpu and capability(q.device) >= 89, TREE=plan.tree is not None, WINDOW=window is not None,
        POSITIONS=window is not None and plan.positions is not None, SPLIT=parts > 1, WORDS=words,
        TURNED=turned, Q=4 if cache.packed is None else cache.packed[1], D=width, DP=padded, BM=bm,
        BN=bn << wider if on_gpu else 16, num_warps=warps, num_stages=stages)  # fmt: skip
    if parts > 1:
        merge_parts(partial, top, total, out)
    return out


def merge_parts(partial: torch.Tensor, top: torch.Tensor, total: torch.Tensor, out: torch.Tensor) -> None:
    """out [T, H, D] of the parts' sums [parts, T, H, D], largest scores and sums of weights [parts, T, H]."""
    (parts, tokens, heads), width = top.shape, out.shape[-1]
    padded, wide = triton.next_power_of_2(parts), triton.next_power_of_2(width)
    _merge[(tokens * heads,)](partial, top, total, out, tokens * heads, parts, PARTS=padded, D=width, DP=wide,
                              num_warps=4 if padded * wide <= 8192 else 8)  # fmt: skip


_FEW = 32  # rows-times-heads of a tile that reads codes as words: below what Hopper's products of four warps take


def _tiles(width: int, single: bool) -> tuple[int, int, int]:
    """(most rows-times-heads of a tile, keys of a step, pipeline stages) for heads of `width`: what fits into the 99 KiB of the
    chips with the least shared memory. A product in fp32 keeps each operand in two parts."""
    row_bytes = width * (8 if single else 2)
    return (128, 64, 3) if row_bytes <= 256 else (64, 32, 2) if row_bytes <= 512 else (32 if row_bytes <= 1024 else 16, 16, 2)


def offline_cases() -> list[Case]:
    bf16 = {80: r"mma\.sync[.a-z0-9]*bf16", 90: r"(wgmma\.mma_async|mma\.sync)[.a-z0-9]*bf16", 100: r"(tcgen05\.mma|mma\.sync)",
            120: r"mma\.sync[.a-z0-9]*bf16"}  # fmt: skip
    bf16[89] = bf16[80]
    halves = {cc: pattern.replace("bf16", r"f32\.f16") for cc, pattern in bf16.items()}
    tf32 = {cc: r"(wgmma\.mma_async|mma\.sync)[.a-z0-9]*tf32" for cc in (80, 89, 90, 120)}
    odd = ("T", "table_stride", "window", "rows", "tiles", "parts", "scale_slot")
    names = ("q_token", "q_head", "slot_stride", "head_stride", *odd)
    base = {"q_ptr": "*bf16", "key_scale_ptr": "*fp32", "value_scale_ptr": "*fp32", "out_ptr": "*fp32", "top_ptr": "*fp32",
            "sum_ptr": "*fp32", "factor": "fp32", **{f"{n}_ptr": "*i32" for n in ("starts", "contexts", "tables", "tree",
                                                                                  "positions")},
            **{n: "i32" for n in names}}  # fmt: skip
    cases = []
    for name, kind, dtype, rows, tree, split in [
        ("decode bf16", 0, "*bf16", 1, False, True), ("decode int8", 1, "*i32", 1, False, True),
        ("decode fp8", 2, "*i32", 1, False, True), ("verify 8 rows fp8", 2, "*i32", 8, True, True),
        ("decode int8, heads of 64", 1, "*i32", 1, False, True), ("decode fp8, heads of 256", 2, "*i32", 4, False, True),
        ("prefill int8", 1, "*i8", 16, False, False), ("decode int4", 3, "*i16", 1, False, True),
        ("decode int4, heads of 64", 3, "*i16", 1, False, True), ("decode int4, heads of 256", 3, "*i16", 1, False, True),
        ("verify 2 rows int4", 3, "*i16", 2, True, True), ("verify 8 rows int4", 3, "*i16", 8, True, True),
        ("prefill int4", 3, "*i16", 16, False, False), ("widest tile int4", 3, "*i16", 32, False, False),
        ("int4, heads of 256", 3, "*i16", 16, False, False), ("verify 16 rows", 0, "*bf16", 16, True, True),
        ("prefill", 0, "*bf16", 16, False, False), ("widest tile", 2, "*u8", 32, False, False),
        ("heads of 256", 2, "*u8", 16, False, False), ("fp32", 0, "*fp32", 8, False, False),
        ("fp32, heads of 256", 0, "*fp32", 4, False, False), ("fp32 int4", 3, "*i16", 1, False, True),
    ]:  # fmt: skip
        query, width = "*fp32" if "fp32" in name else "*bf16", 256 if "256" in name else 64 if "64" in name else 128
        _, bn, stages = _tiles(width, query == "*fp32")
        types = base | {"q_ptr": query, "keys_ptr": dtype, "values_ptr": dtype} | ({} if split else {"out_ptr": query})
        words, turned = dtype in ("*i32", "*i16"), kind == 3 and rows <= 2
        narrow = turned or words and width == 64 and rows == 1
        bn <<= words and rows <= 8 and not narrow
        key_bytes = width // 2 + width // 8 if kind == 3 else width + 4 if kind else 2 * width
        for hard in (False, True) if kind == 2 and not words else (False,):
            constants = {"BLOCK": 16, "GROUP": 4, "HEADS": 32, "KIND": kind, "HARD": hard, "TREE": tree, "WINDOW": False,
                         "POSITIONS": False, "SPLIT": split, "WORDS": words, "TURNED": turned, "Q": 32, "D": width, "DP": width,
                         "BM": 8 if turned else max(16, 4 * rows), "BN": bn}  # fmt: skip
            wanted = tf32 if query == "*fp32" else halves if kind == 3 else bf16
            at = {cc: p for cc, p in wanted.items() if kind != 2 or words or (cc >= 89) == hard}
            quick = (90,) if name in ("decode int8", "decode int4", "verify 16 rows") else ()
            each = name in ("decode bf16", "decode int8", "decode fp8", "decode int4", "prefill")
            wide = name in ("decode int4", "int4, heads of 256")
            less = name == "verify 8 rows fp8" or ("int4" in name and not wide)
            cases.append(Case(f"paged_attention {name}{' by the chip' if hard else ''}", _attend, types, constants, at,
                              1 if narrow else 4, stages, odd, quick, on="each" if each else "asked" if less else "one",
                              reads=2 * bn * key_bytes if name.startswith("decode") else 0))  # fmt: skip
    merged = {f"{n}_ptr": "*fp32" for n in ("part", "top", "sum")} | {"out_ptr": "*bf16", "size": "i32", "parts": "i32"}
    for parts, width in ((32, 128), (128, 256)):
        cases.append(Case(f"paged_attention merge {parts} parts", _merge, merged, {"PARTS": parts, "D": width, "DP": width},
                          {cc: r"ld\.global[.a-z]*\.v[24]" for cc in WIDE_LOADS}, 4 if parts == 32 else 8, 1, ("size", "parts"),
                          (), on="asked" if parts == 32 else "one"))  # fmt: skip
    strides = {n: "i32" for n in ("slot_stride", "head_stride", "scale_slot")}
    caches = {"slots_ptr": "*i32", "keys_ptr": "*u8", "values_ptr": "*u8", "key_scale_ptr": "*fp32", "value_scale_ptr": "*fp32"}
    write = {"k_ptr": "*bf16", "v_ptr": "*bf16", **caches, **{n: "i32" for n in ("k_token", "k_head", "v_token", "v_head")},
             **strides}  # fmt: skip
    cases.append(Case("paged_attention write fp8", _write, write, {"KIND": 2, "D": 128, "DP": 128},
                      {cc: r"st\.global" for cc in WIDE_LOADS}, 1, 1, ("scale_slot",)))  # fmt: skip
    write4 = {"x_ptr": "*bf16", "slots_ptr": "*i32", "bytes_ptr": "*u8", "halves_ptr": "*fp16",
              **{n: "i32" for n in ("x_token", "x_head", "slot_stride", "head_stride")}}  # fmt: skip
    cases.append(Case("paged_attention write int4", _write4, write4, {"D": 128, "Q": 32, "GP": 4},
                      {cc: r"st\.global" for cc in WIDE_LOADS}, 1, 1))  # fmt: skip
    entering = {**caches, **{f"{n}_ptr": "*bf16" for n in ("qkv", "q_norm", "k_norm", "q")}, "cos_ptr": "*fp32",
                "sin_ptr": "*fp32", "qkv_token": "i32", "eps": "fp32", **strides}  # fmt: skip
    for name, kind, dtype in (("bf16", 0, "*bf16"), ("int8", 1, "*i8"), ("fp8", 2, "*u8")):
        cases.append(Case(f"paged_attention enter {name}", _enter, entering | {"keys_ptr": dtype, "values_ptr": dtype},
                          {"A": 32, "G": 8, "NORM": kind < 2, "KIND": kind, "APART": False, "HALF": 64, "HP": 64},
                          dict(WIDE_LOADS), 1, 3, ("scale_slot",), (90,) if kind == 2 else (),
                          on="each" if kind == 2 else "asked"))  # fmt: skip
    return cases
