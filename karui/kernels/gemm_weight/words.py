"""Products with weights whose codes lie in words of 32 bits (`PackedWeight.span`): 4 and 2 bits, NF4, MXFP4, NVFP4.

As in `triton`, W is decoded in registers and is the tall operand; but a word holds codes of inputs that are a whole part of a
step apart, so those of one place in the words belong to neighbouring inputs: x goes to the tensor cores as it lies in memory, and
a thread reads whole words. With the codes of a byte side by side, gathering bytes and splitting x took most of a step, and the
instructions were the limit, not the memory: by count of the machine code int4 in groups of 32 and of 128 reached 27 and 57 % of
an H200's bandwidth, ternary 23 %, NVFP4 26 %. So int4 reaches all of it with 8 rows or fewer, NF4 96 %, MXFP4 92 %, ternary 89 %
(all with int8 inputs), NVFP4, whose values take a scale for every 16 inputs, 69 % (`triton_support.count`).

Two words of neighbouring inputs give pairs of bf16: integers where bf16 keeps its smallest numbers, which one `fma` brings to
size; E2M1 with its exponent and mantissa where bf16 has them, which one `fma` scales by 2^126. int8 inputs: four words give four
bytes of each place. NF4 looks its 16 entries up by `prmt`, four codes at a time. Up to 8 rows are a product 8 wide.
"""

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl

from karui.kernels.gemm_grouped import Groups
from karui.kernels.gemm_weight import PackedWeight
from karui.kernels.gemm_weight.triton import (
    add_parts,
    bf16_bits,
    by_row,
    row_tiles,
    rows_and_output,
    split_steps,
    store_tile,
    tile_at,
)
from karui.kernels.quantize.nf4 import codebook
from karui.kernels.triton_support import interpreting, num_processors
from karui.kernels.triton_support.codecs import decode_e2m1, e8m0_value, scale_value
from karui.kernels.triton_support.offline import Case
from karui.kernels.triton_support.products import dot
from karui.kernels.triton_support.tuning import Config, config, launch

_INTERPRETED = tl.constexpr(interpreting())


def _integers_asm(bits: int, middle: int | None) -> str:
    """Two words, the last operands -> the bf16 pairs of each place: (code - middle) / 64.

    Bits 0 to 7 of a bf16 number without others are 2^-133 times the integer that they are; so the codes of a byte are taken as
    they lie, and one `fma` brings them to the same size. Without a middle they are left as they lie, for `_less`.
    """
    places, each = 32 // bits, 8 // bits
    lines = [f".reg .b32 l, h, s, less, up<{each}>;", f"prmt.b32 l, ${places}, ${places + 1}, 0x5410;",
             f"prmt.b32 h, ${places}, ${places + 1}, 0x7632;"]  # fmt: skip
    if middle is not None:
        lines += [f"mov.b32 up{i}, 0x{(254 - i * bits << 7) * 0x10001:08x};" for i in range(each)]
        lines.append(f"mov.b32 less, 0x{_bits(-middle / 64) * 0x10001:08x};")
    for place in range(places):
        half, (byte, i) = "lh"[place * 2 // places], divmod(place % (places // 2), each)
        if byte and not i:
            lines.append(f"shr.u32 s, {half}, 8;")
        lines.append(f"and.b32 ${place}, {'s' if byte else half}, 0x{(2**bits - 1 << i * bits) * 0x10001:08x};")
        if middle is not None:
            lines.append(f"fma.rn.bf16x2 ${place}, ${place}, up{i}, less;")
    return "{\n" + "\n".join(lines) + "\n}"


def _less_asm(shift: int) -> str:
    """A pair of codes as they lie, `shift` bits high, and a pair of zero points / -64 -> the pair of (code - zero point) / 64."""
    return f"{{\n.reg .b32 up;\nmov.b32 up, 0x{(254 - shift << 7) * 0x10001:08x};\nfma.rn.bf16x2 $0, $1, up, $2;\n}}"


def _bits(value: float) -> int:
    """Of a bf16 number."""
    return struct.unpack("<I", struct.pack("<f", value))[0] >> 16


def _e2m1_asm() -> str:
    """Two words -> the bf16 pairs of each of their 8 places. One product moves a code's sign to bit 15, its exponent and
    mantissa to bits 8..7 and 6: 2^-126 of the value, below 1 as a number without a hidden one, in both formats."""
    lines = [".reg .b32 l, h, s, c, up, none;", "prmt.b32 l, $8, $9, 0x5410;", "prmt.b32 h, $8, $9, 0x7632;",
             "mov.b32 up, 0x7e807e80;", "mov.b32 none, 0x80008000;"]  # fmt: skip
    for place in range(8):
        half, (byte, high) = "lh"[place // 4], divmod(place % 4, 2)
        if byte and not high:
            lines.append(f"shr.u32 s, {half}, 8;")
        lines += [f"and.b32 c, {'s' if byte else half}, 0x{0x000F000F << 4 * high:08x};",
                  f"mul.lo.u32 c, c, 0x{0x1040 >> 4 * high:x};", "and.b32 c, c, 0x81c081c0;",
                  f"fma.rn.bf16x2 ${place}, c, up, none;"]  # fmt: skip
    return "{\n" + "\n".join(lines) + "\n}"


def _table_asm(entries: list[int]) -> str:
    """Two words, $8 and $9 -> the bf16 table entries of each of their 8 places.

    The words' codes are interleaved first: those of the even places in one register, of the odd ones in another, the first word's
    and the second's in turn. Four codes of a half of it are then a selector as in `triton._lookup_asm`, and give two places'
    pairs. One operand of a `prmt` may be a constant; the others are kept in registers by a bit that is 0 in every lane, which the
    assembler does not know: else it would move them anew for each use.
    """
    words = [sum((e >> shift & 0xFF) << 8 * i for i, e in enumerate(entries[at : at + 4]))
             for shift in (0, 8) for at in range(0, 16, 4)]  # fmt: skip
    table = {"l": [f"r{n}" for n in range(4)], "h": [f"r{n}" for n in range(4, 8)]}
    lines = [".reg .b32 w<2>, o<8>, r<8>, z, i, c, j, p, q, l, h;", "mov.u32 z, %lanemask_lt;", "and.b32 z, z, 0x80000000;"]
    lines += [f"xor.b32 r{n}, z, 0x{word:08x};" if n % 2 == 0 else f"mov.b32 r{n}, 0x{word:08x};" for n, word in enumerate(words)]
    lines += ["shl.b32 i, $9, 4;", "lop3.b32 w0, $8, i, 0x0f0f0f0f, 0xe4;",
              "shr.u32 i, $8, 4;", "lop3.b32 w1, i, $9, 0x0f0f0f0f, 0xe4;"]  # fmt: skip
    for odd in (0, 1):
        lines += [f"and.b32 j, w{odd}, 0x77777777;", f"shr.u32 c, w{odd}, 1;", "lop3.b32 c, c, 0x44444444, 0x32103210, 0xea;"]
        for half in (0, 1):
            if half:
                lines += ["shr.u32 j, j, 16;", "shr.u32 c, c, 16;"]
            for side, (a, b, c, d) in table.items():
                lines += [f"prmt.b32 p, {a}, {b}, j;", f"prmt.b32 q, {c}, {d}, j;", f"prmt.b32 {side}, p, q, c;"]
            lines += [f"prmt.b32 o{4 * half + odd}, l, h, 0x5140;", f"prmt.b32 o{4 * half + 2 + odd}, l, h, 0x7362;"]
    lines += [f"mov.b32 ${place}, o{place};" for place in range(8)]  # an output may have an input's register
    return "{\n" + "\n".join(lines) + "\n}"


def _bytes_asm() -> str:
    """Four words of 2-bit codes, $16 to $19 -> the four bytes of each of their 16 places. All words are read before the first
    place is written, because an output may have an input's register."""
    lines = [".reg .b32 a, b, c, t<4>;"]
    for byte in range(4):
        pick = f"0x{0x0040 + byte * 0x11:04x}"
        lines += [f"prmt.b32 a, $16, $17, {pick};", f"prmt.b32 b, $18, $19, {pick};", f"prmt.b32 t{byte}, a, b, 0x5410;"]
    for byte in range(4):
        for place in range(4):
            if place:
                lines.append(f"shr.u32 c, t{byte}, {2 * place};")
            lines.append(f"and.b32 ${4 * byte + place}, {'c' if place else f't{byte}'}, 0x03030303;")
    return "{\n" + "\n".join(lines) + "\n}"


_OUT8, _OUT16 = tl.constexpr(",".join(["=r"] * 8 + ["r"] * 2)), tl.constexpr(",".join(["=r"] * 16 + ["r"] * 2))
_BYTES = tl.constexpr(",".join(["=r"] * 16 + ["r"] * 4))
_INT4, _INT4_CENTRED = tl.constexpr(_integers_asm(4, None)), tl.constexpr(_integers_asm(4, 8))
_INT2, _INT2_CENTRED, _TERNARY = (tl.constexpr(_integers_asm(2, middle)) for middle in (None, 2, 1))
_E2M1, _CODES2 = tl.constexpr(_e2m1_asm()), tl.constexpr(_bytes_asm())
_NF4 = tl.constexpr(_table_asm(bf16_bits(codebook(torch.device("cpu")))))
_LESS0, _LESS2, _LESS4, _LESS6 = (tl.constexpr(_less_asm(shift)) for shift in (0, 2, 4, 6))
_TIMES = tl.constexpr("{\n.reg .b32 none;\nmov.b32 none, 0x80008000;\nfma.rn.bf16x2 $0, $1, $2, none;\n}")


@triton.jit
def _values(words, near, BITS: tl.constexpr, FORM: tl.constexpr, MIDDLE: tl.constexpr, ZERO: tl.constexpr):
    """bf16 values of each place in int32 words: (code - MIDDLE) / 64, with ZERO what `_less` takes; FORM 1 NF4, 3 and 4 E2M1.
    near: pointer to NF4's table, for the interpreter."""
    if _INTERPRETED:
        if BITS == 4:
            return (_value(words, 0, near, 4, FORM, MIDDLE, ZERO), _value(words, 1, near, 4, FORM, MIDDLE, ZERO),
                    _value(words, 2, near, 4, FORM, MIDDLE, ZERO), _value(words, 3, near, 4, FORM, MIDDLE, ZERO),
                    _value(words, 4, near, 4, FORM, MIDDLE, ZERO), _value(words, 5, near, 4, FORM, MIDDLE, ZERO),
                    _value(words, 6, near, 4, FORM, MIDDLE, ZERO), _value(words, 7, near, 4, FORM, MIDDLE, ZERO))  # fmt: skip
        return (_value(words, 0, near, 2, FORM, MIDDLE, ZERO), _value(words, 1, near, 2, FORM, MIDDLE, ZERO),
                _value(words, 2, near, 2, FORM, MIDDLE, ZERO), _value(words, 3, near, 2, FORM, MIDDLE, ZERO),
                _value(words, 4, near, 2, FORM, MIDDLE, ZERO), _value(words, 5, near, 2, FORM, MIDDLE, ZERO),
                _value(words, 6, near, 2, FORM, MIDDLE, ZERO), _value(words, 7, near, 2, FORM, MIDDLE, ZERO),
                _value(words, 8, near, 2, FORM, MIDDLE, ZERO), _value(words, 9, near, 2, FORM, MIDDLE, ZERO),
                _value(words, 10, near, 2, FORM, MIDDLE, ZERO), _value(words, 11, near, 2, FORM, MIDDLE, ZERO),
                _value(words, 12, near, 2, FORM, MIDDLE, ZERO), _value(words, 13, near, 2, FORM, MIDDLE, ZERO),
                _value(words, 14, near, 2, FORM, MIDDLE, ZERO), _value(words, 15, near, 2, FORM, MIDDLE, ZERO))  # fmt: skip
    # one `return` for each kind: Triton 3.6 takes those behind another one for this call's too, and they differ
    if FORM == 1:
        return tl.inline_asm_elementwise(_NF4, _OUT8, [words], dtype=(tl.bfloat16,) * 8, is_pure=True, pack=2)
    elif FORM > 1:
        return tl.inline_asm_elementwise(_E2M1, _OUT8, [words], dtype=(tl.bfloat16,) * 8, is_pure=True, pack=2)
    elif BITS == 4:
        return tl.inline_asm_elementwise(_INT4 if ZERO else _INT4_CENTRED, _OUT8, [words], dtype=(tl.bfloat16,) * 8, is_pure=True,
                                         pack=2)  # fmt: skip
    else:
        centred: tl.constexpr = _TERNARY if MIDDLE == 1 else _INT2_CENTRED
        return tl.inline_asm_elementwise(_INT2 if ZERO else centred, _OUT16, [words], dtype=(tl.bfloat16,) * 16, is_pure=True,
                                         pack=2)  # fmt: skip


@triton.jit
def _value(words, place: tl.constexpr, table_ptr, BITS: tl.constexpr, FORM: tl.constexpr, MIDDLE: tl.constexpr,
           ZERO: tl.constexpr):  # fmt: skip
    code = (words >> (BITS * place)) & ((1 << BITS) - 1)
    if FORM == 1:
        return tl.load(table_ptr + code).to(tl.bfloat16)
    if FORM > 1:
        return decode_e2m1(code).to(tl.bfloat16)
    return ((code - (0 if ZERO else MIDDLE)).to(tl.float32) / 64).to(tl.bfloat16)


@triton.jit
def _less(value, zero, SHIFT: tl.constexpr):
    """(code - zero) / 64 of what `_values` made of codes that lie SHIFT bits high in their byte."""
    zero = (zero.to(tl.float32) * -0.015625).to(tl.bfloat16)
    if _INTERPRETED:
        return (value.to(tl.float32) + zero.to(tl.float32)).to(tl.bfloat16)
    value, zero = tl.broadcast(value, zero)
    asm: tl.constexpr = _LESS0 if SHIFT == 0 else _LESS2 if SHIFT == 2 else _LESS4 if SHIFT == 4 else _LESS6
    return tl.inline_asm_elementwise(asm, "=r,r,r", [value, zero], dtype=tl.bfloat16, is_pure=True, pack=2)


@triton.jit
def _times(value, factor):
    """value * factor of bf16."""
    if _INTERPRETED:
        return (value.to(tl.float32) * factor.to(tl.float32)).to(tl.bfloat16)
    value, factor = tl.broadcast(value, factor)
    return tl.inline_asm_elementwise(_TIMES, "=r,r,r", [value, factor], dtype=tl.bfloat16, is_pure=True, pack=2)


@triton.jit
def _scale_of(byte):
    """E4M3 bytes that are not negative -> fp32: its bits where fp32 has them are 2^-120 of it."""
    return (byte.to(tl.int32) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def _group_at(step, place: tl.constexpr, SPAN: tl.constexpr, WIDE: tl.constexpr, GROUP: tl.constexpr):
    """The group within a row that a place of a step belongs to."""
    if GROUP == 0:
        return step * 0
    elif GROUP >= SPAN:
        return step // (GROUP // SPAN)
    else:
        return step * (SPAN // GROUP) + place * WIDE // GROUP


@triton.jit(do_not_specialize=["M", "steps"])
def _gemm(x_ptr, w_ptr, scale_ptr, zero_ptr, divisor_ptr, bias_ptr, y_ptr, tiles_ptr, M, N, K, stride_x, num_groups, steps,
          BITS: tl.constexpr, FORM: tl.constexpr, MIDDLE: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr,
          ZERO: tl.constexpr, BIAS: tl.constexpr, PARTS: tl.constexpr, GROUPED: tl.constexpr, BM: tl.constexpr,
          BN: tl.constexpr):  # fmt: skip
    """As `triton._gemm` for x in bf16: steps of SPAN inputs; GROUP 0: one scale per row. FORM 3: an E4M3 scale for each place;
    FORM 1: `divisor_ptr` is NF4's table."""
    PLACES: tl.constexpr = 32 // BITS
    WIDE: tl.constexpr = SPAN // PLACES
    TOGETHER: tl.constexpr = PLACES if GROUP == 0 or GROUP > SPAN or FORM == 3 else GROUP // WIDE
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    expert, first, end = tile_at(tiles_ptr, M, BM, GROUPED)
    m = first + tl.arange(0, BM)
    part = tl.program_id(2)
    j = tl.arange(0, WIDE)
    row = expert * N + tl.minimum(n, N - 1)
    w_row = w_ptr + row.to(tl.int64)[:, None] * (K // PLACES) + j[None, :]
    x_row = x_ptr + tl.minimum(m, end - 1).to(tl.int64)[:, None] * stride_x + j[None, :]
    scale_row, zero_row = scale_ptr + row * num_groups, zero_ptr + row * num_groups
    acc = tl.zeros([BN, BM], tl.float32)
    stop = tl.minimum((part + 1) * steps, K // SPAN)
    if GROUPED:
        stop = tl.where(first < end, stop, 0)
    for step in range(part * steps, stop):
        values = _values(tl.load(w_row + step * WIDE), divisor_ptr, BITS, FORM, MIDDLE, ZERO)
        product = tl.zeros([BN, BM], tl.float32)
        for place in tl.static_range(PLACES):
            at = _group_at(step, place, SPAN, WIDE, GROUP)
            value = values[place]
            if FORM == 3:  # 6 bits together: exact
                value = _times(value, _scale_of(tl.load(scale_row + at)).to(tl.bfloat16)[:, None])
            if ZERO:
                value = _less(value, tl.load(zero_row + at)[:, None], place * BITS % 8)
            product = dot(value, tl.trans(tl.load(x_row + (step * SPAN + place * WIDE))), product)
            if (place + 1) % TOGETHER == 0:
                if FORM == 3:
                    acc += product
                else:
                    acc += product * scale_value(tl.load(scale_row + at))[:, None]
                product = tl.zeros([BN, BM], tl.float32)
    if FORM == 3:
        acc = tl.div_rn(acc, tl.broadcast_to(tl.load(divisor_ptr + row)[:, None], [BN, BM]))
    elif FORM == 0:
        acc *= 64.0
    store_tile(y_ptr, bias_ptr, acc, m, n, end, M, N, part, BIAS, PARTS)


@triton.jit
def _codes(words):
    """The 2-bit codes of each place in int32 words, as bytes."""
    if _INTERPRETED:
        return (_code(words, 0), _code(words, 1), _code(words, 2), _code(words, 3), _code(words, 4), _code(words, 5),
                _code(words, 6), _code(words, 7), _code(words, 8), _code(words, 9), _code(words, 10), _code(words, 11),
                _code(words, 12), _code(words, 13), _code(words, 14), _code(words, 15))  # fmt: skip
    return tl.inline_asm_elementwise(_CODES2, _BYTES, [words], dtype=(tl.int8,) * 16, is_pure=True, pack=4)


@triton.jit
def _code(words, place: tl.constexpr):
    return ((words >> (2 * place)) & 3).to(tl.int8)


@triton.jit(do_not_specialize=["M", "steps"])
def _gemm_codes(x_ptr, w_ptr, x_scale_ptr, x_sum_ptr, w_scale_ptr, bias_ptr, y_ptr, tiles_ptr, M, N, K, steps,
                MIDDLE: tl.constexpr, SPAN: tl.constexpr, BIAS: tl.constexpr, PARTS: tl.constexpr, GROUPED: tl.constexpr,
                BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """2-bit codes times int8 codes in int32; MIDDLE leaves through the sum of each row's codes, with the first part."""
    WIDE: tl.constexpr = SPAN // 16
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    expert, first, end = tile_at(tiles_ptr, M, BM, GROUPED)
    m = first + tl.arange(0, BM)
    part = tl.program_id(2)
    j = tl.arange(0, WIDE)
    row = expert * N + tl.minimum(n, N - 1)
    w_row = w_ptr + row.to(tl.int64)[:, None] * (K // 16) + j[None, :]
    x_row = x_ptr + tl.minimum(m, end - 1).to(tl.int64)[:, None] * K + j[None, :]
    acc = tl.zeros([BN, BM], tl.int32)
    stop = tl.minimum((part + 1) * steps, K // SPAN)
    if GROUPED:
        stop = tl.where(first < end, stop, 0)
    for step in range(part * steps, stop):
        codes = _codes(tl.load(w_row + step * WIDE))
        for place in tl.static_range(16):
            x = tl.load(x_row + (step * SPAN + place * WIDE))
            acc = tl.dot(codes[place], tl.trans(x), acc, out_dtype=tl.int32)
    if part == 0:
        acc -= MIDDLE * tl.load(x_sum_ptr + m, m < end, 0)[None, :]
    y = acc.to(tl.float32) * tl.load(x_scale_ptr + m, m < end, 0.0)[None, :]
    y *= tl.load(w_scale_ptr + row).to(tl.float32)[:, None]
    store_tile(y_ptr, bias_ptr, y, m, n, end, M, N, part, BIAS, PARTS)


@triton.jit
def _dequantize(w_ptr, scale_ptr, zero_ptr, divisor_ptr, y_ptr, N, K, num_groups, group, BITS: tl.constexpr, FORM: tl.constexpr,
                MIDDLE: tl.constexpr, SPAN: tl.constexpr, ZERO: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    PLACES: tl.constexpr = 32 // BITS
    WIDE: tl.constexpr = SPAN // PLACES
    n, j = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, WIDE)
    inside = n < N
    words = tl.load(w_ptr + n.to(tl.int64)[:, None] * (K // PLACES) + (tl.program_id(1) * WIDE + j)[None, :], inside[:, None], 0)
    for place in tl.static_range(PLACES):
        first = tl.program_id(1) * SPAN + place * WIDE
        at = n * num_groups + first // group
        code = (words >> (BITS * place)) & ((1 << BITS) - 1)
        if FORM == 1:
            value = tl.load(divisor_ptr + code)
        else:
            value = decode_e2m1(code) if FORM > 1 else code.to(tl.float32)
        if ZERO:
            value -= tl.load(zero_ptr + at, inside, 0).to(tl.float32)[:, None]
        elif FORM == 0:
            value -= MIDDLE
        if FORM == 3:
            scale = tl.div_rn(_scale_of(tl.load(scale_ptr + at, inside, 0)), tl.load(divisor_ptr + n, inside, 1.0))
        elif FORM == 4:
            scale = e8m0_value(tl.load(scale_ptr + at, inside, 0).to(tl.int32))
        else:
            scale = tl.load(scale_ptr + at, inside, 0.0).to(tl.float32)
        to = y_ptr + n.to(tl.int64)[:, None] * K + (first + j)[None, :]
        tl.store(to, (value * scale[:, None]).to(y_ptr.dtype.element_ty), inside[:, None])


_FORMS = {"int": 0, "nf4": 1, "nvfp4": 3, "e2m1": 4}


def _tensors(w: PackedWeight) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Words, scales, zero points, divisors (NF4: its table); what is not there is anything."""
    scale = w.scale.view(torch.uint8) if w.form == "nvfp4" else w.scale
    divisor = codebook(w.data.device) if w.form == "nf4" else scale if w.divisor is None else w.divisor
    return w.data.view(torch.int32), scale, w.data if w.zero is None else w.zero, divisor


def gemm(x: torch.Tensor, w: PackedWeight, bias: torch.Tensor | None, groups: Groups | None = None) -> torch.Tensor:
    """y [M, N] of x [M, K] in bf16."""
    x, y = rows_and_output(x, w, groups)
    (m, k), n = x.shape, y.shape[1]
    if not m:
        return y
    bm, tiles, tiles_of = row_tiles(x, groups, 8)
    if bm <= 16:
        least = config(2, 3, BM=bm, BN=64) if w.form == "nf4" else config(2, 4, BM=bm, BN=32)
        candidates = [least, config(4, 3, BM=bm, BN=128)]
    elif w.bits == 4:  # larger ones ask for more tensor memory than sm_100 has, which Triton answers with a trap
        candidates = [config(4, 3, BM=bm, BN=64), config(8, 3, BM=bm, BN=64)]
    else:
        candidates = [config(4, 2, BM=bm, BN=32)]
    words, (data, scale, zero, divisor) = w.span, _tensors(w)
    processors = num_processors(x.device)

    def run(c: Config) -> None:
        parts, steps = split_steps(triton.cdiv(n, c["BN"]) * tiles, k // words, processors, least=2)
        out = torch.empty(parts, m, n, dtype=torch.float32, device=x.device) if parts > 1 else y
        _gemm[(triton.cdiv(n, c["BN"]), tiles, parts)](
            x, data, scale, zero, divisor, x if bias is None else bias, out, tiles_of, m, n, k, x.stride(0), scale.shape[1],
            steps, BITS=w.bits, FORM=_FORMS[w.form], MIDDLE=w.middle, SPAN=words, GROUP=0 if w.group == k else w.group,
            ZERO=w.zero is not None, BIAS=bias is not None, PARTS=parts > 1, GROUPED=groups is not None, **c())  # fmt: skip
        if parts > 1:
            add_parts(out, bias, y)

    launch(("gemm_words", w.bits, w.form, w.group, words, w.zero is None, bm, n, k, groups is None), candidates, run, x.device)
    return y


def gemm_int8(x: torch.Tensor, w: PackedWeight, bias: torch.Tensor | None, groups: Groups | None = None) -> torch.Tensor:
    """y [M, N] of x [M, K] rounded to int8 per row; W ternary."""
    x, y = rows_and_output(x, w, groups)
    (m, k), n = x.shape, y.shape[1]
    if not m:
        return y
    codes = torch.empty(m, k, dtype=torch.int8, device=x.device)
    scale, total = torch.empty(m, device=x.device), torch.empty(m, dtype=torch.int32, device=x.device)
    by_row(x, codes, scale, total)
    bm, tiles, tiles_of = row_tiles(x, groups, 8)
    processors, data = num_processors(x.device), w.data.view(torch.int32)

    def run(c: Config) -> None:
        parts, steps = split_steps(triton.cdiv(n, c["BN"]) * tiles, k // w.span, processors, least=2)
        out = torch.empty(parts, m, n, dtype=torch.float32, device=x.device) if parts > 1 else y
        _gemm_codes[(triton.cdiv(n, c["BN"]), tiles, parts)](
            codes, data, scale, total, w.scale, x if bias is None else bias, out, tiles_of, m, n, k, steps, MIDDLE=w.middle,
            SPAN=w.span, BIAS=bias is not None, PARTS=parts > 1, GROUPED=groups is not None, **c())  # fmt: skip
        if parts > 1:
            add_parts(out, bias, y)

    candidates = [config(2, 4, BM=bm, BN=32) if bm <= 16 else config(4, 3, BM=bm, BN=64), config(4, 3, BM=bm, BN=64)]
    launch(("gemm_codes_words", w.span, bm, n, k, groups is None, x.dtype), candidates, run, x.device)
    return y


def dequantize(w: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """W [N, K] in `dtype`."""
    y = torch.empty(w.shape, dtype=dtype, device=w.data.device)
    (n, k), (data, scale, zero, divisor) = w.shape, _tensors(w)
    _dequantize[(triton.cdiv(n, 16), k // w.span)](
        data, scale, zero, divisor, y, n, k, scale.shape[1], w.group, BITS=w.bits, FORM=_FORMS[w.form], MIDDLE=w.middle,
        SPAN=w.span, ZERO=w.zero is not None, BN=16)  # fmt: skip
    return y


def offline_cases() -> list[Case]:
    kinds = {"x_ptr": "*bf16", "w_ptr": "*i32", "scale_ptr": "*fp16", "zero_ptr": "*u8", "divisor_ptr": "*fp32",
             "bias_ptr": "*bf16", "y_ptr": "*fp32", "tiles_ptr": "*i32", "x_scale_ptr": "*fp32", "x_sum_ptr": "*i32",
             "w_scale_ptr": "*fp32",
             **{name: "i32" for name in ("M", "N", "K", "stride_x", "num_groups", "group", "steps")}}  # fmt: skip
    mma = r"mma\.sync[.a-z0-9]*bf16"
    bf16 = {80: mma, 90: r"(wgmma\.mma_async|mma\.sync)[.a-z0-9]*bf16", 100: r"(tcgen05\.mma|mma\.sync)", 120: mma}
    odd, cases = ("M", "steps", "num_groups"), []
    for name, bits, form, middle, span, group, zero, bm, bn, warps, stages in [
        ("int4 g128, few rows", 4, 0, 8, 256, 128, False, 8, 32, 2, 4), ("int4 g128", 4, 0, 8, 256, 128, False, 64, 64, 4, 3),
        ("int4 g32", 4, 0, 8, 256, 32, False, 8, 32, 2, 4), ("int4 affine g32", 4, 0, 0, 256, 32, True, 8, 32, 2, 4),
        ("int4 experts", 4, 0, 8, 256, 128, False, 16, 128, 4, 3), ("ternary", 2, 0, 1, 512, 0, False, 8, 32, 2, 4),
        ("int4 g128, 16 rows", 4, 0, 8, 256, 128, False, 16, 32, 2, 4),
        ("ternary, many rows", 2, 0, 1, 512, 0, False, 64, 32, 4, 2), ("mxfp4", 4, 4, 0, 256, 32, False, 8, 32, 2, 4),
        ("nf4, few rows", 4, 1, 0, 256, 64, False, 8, 64, 2, 3), ("nf4", 4, 1, 0, 256, 64, False, 64, 64, 4, 3),
        ("int2 affine g32", 2, 0, 0, 512, 32, True, 8, 32, 2, 4), ("nvfp4", 4, 3, 0, 128, 16, False, 8, 32, 2, 4),
    ]:  # fmt: skip
        changed = {"scale_ptr": "*u8"} if form > 2 else {"scale_ptr": "*fp32"} if form == 1 else {}
        signature = {n: (kinds | changed)[n] for n in _gemm.arg_names if n in kinds}
        constants = {"BITS": bits, "FORM": form, "MIDDLE": middle, "SPAN": span, "GROUP": group, "ZERO": zero,
                     "BIAS": False, "PARTS": "few" in name, "GROUPED": "experts" in name, "BM": bm, "BN": bn}  # fmt: skip
        scales = (span // group) * ({0: 2, 1: 4}.get(form, 1) + zero) if group else 0
        cases.append(Case(f"gemm_weight words {name}", _gemm, signature, constants, bf16, warps, stages, odd,
                          (90,) if "few" in name or name == "nvfp4" else (),
                          on="one" if name in ("int4 affine g32", "int4 experts", "nf4, few rows") else
                          "asked" if name in ("int4 g32", "int4 g128, 16 rows", "ternary", "int2 affine g32") else "each",
                          reads=bn * (span * bits // 8 + scales) if bm <= 16 else 0))  # fmt: skip
    signature = {n: (kinds | {"x_ptr": "*i8"})[n] for n in _gemm_codes.arg_names if n in kinds}
    constants = {"MIDDLE": 1, "SPAN": 512, "BIAS": False, "PARTS": False, "GROUPED": False, "BM": 8, "BN": 32}
    cases.append(Case("gemm_weight words ternary x int8", _gemm_codes, signature, constants,
                      {cc: r"mma\.sync[.a-z0-9]*s8" for cc in (80, 90, 100, 120)}, 2, 4, ("M", "steps"),
                      reads=32 * 512 // 4))  # fmt: skip
    signature = {n: (kinds | {"y_ptr": "*bf16"})[n] for n in _dequantize.arg_names if n in kinds}
    constants = {"BITS": 4, "FORM": 0, "MIDDLE": 8, "SPAN": 256, "ZERO": False, "BN": 16}
    cases.append(Case("gemm_weight words dequantize int4", _dequantize, signature, constants,
                      {cc: r"st\.global\.v[24]" for cc in bf16}, odd=("num_groups",), quick=(), on="one"))  # fmt: skip
    return cases
