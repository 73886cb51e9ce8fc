"""Small floats inside kernels, in integers: the same codes from the interpreter, from every GPU and from `quantize.elements`.

The hardware's own conversions begin with sm_89 and differ in NaN's sign; Triton's interpreter drops the carry of fp32 -> fp8
(7.93 becomes 4.0). These need neither. Codes are int32 0..255 (E2M1: 0..15); the sign is the top used bit. `float8_bytes` takes
the hardware's conversion where there is one: seven instructions for four values, not ten for each.
"""

from __future__ import annotations

import triton
import triton.language as tl

from karui.kernels.triton_support import interpreting

_INTERPRETED = tl.constexpr(interpreting())


def _float8_asm(element: str) -> str:
    """Four fp32 in $1 to $4 -> their bytes in $0, saturated, NaN as 0x7F; the signs are set once more, for NaN's."""
    lines = [".reg .b16 l, h;", ".reg .b32 t, s, u;", f"cvt.rn.satfinite.{element}x2.f32 l, $2, $1;",
             f"cvt.rn.satfinite.{element}x2.f32 h, $4, $3;", "mov.b32 t, {l, h};", "prmt.b32 s, $1, $2, 0x0073;",
             "prmt.b32 u, $3, $4, 0x0073;", "prmt.b32 s, s, u, 0x5410;", "lop3.b32 $0, s, 0x80808080, t, 0xea;"]  # fmt: skip
    return "{\n" + "\n".join(lines) + "\n}"


_E4M3_ASM, _E5M2_ASM = tl.constexpr(_float8_asm("e4m3")), tl.constexpr(_float8_asm("e5m2"))


@triton.jit
def encode_e4m3(x):
    """fp32 -> E4M3, nearest even, saturating; NaN is 0x7F with its sign, as torch's cast."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960  # 960 = (127 - 7) << 3
    # below 2^-6 the grid is 2^-9: adding 2^14 leaves the multiple of 2^-9 in the low bits, rounded by the addition
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.minimum(tl.where(size < 0x3C800000, small, normal), 0x7E)
    return tl.where(size > 0x7F800000, 0x7F, code) | ((bits >> 24) & 0x80)


@triton.jit
def encode_e5m2(x):
    """fp32 -> E5M2, nearest even, saturating; NaN is 0x7F with its sign, as torch's cast."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0xFFFFF + ((size >> 21) & 1)) >> 21) - 448  # (127 - 15) << 2
    small = (size.to(tl.float32, bitcast=True) + 128.0).to(tl.int32, bitcast=True) - 0x43000000
    code = tl.minimum(tl.where(size < 0x38800000, small, normal), 0x7B)
    return tl.where(size > 0x7F800000, 0x7F, code) | ((bits >> 24) & 0x80)


@triton.jit
def float8_bytes(x, E5M2: tl.constexpr, HARD: tl.constexpr):
    """fp32 -> E4M3 or E5M2 as uint8, the bits of `encode_e4m3` and `encode_e5m2`. HARD: by the chip's own conversion."""
    if HARD and not _INTERPRETED:
        return tl.inline_asm_elementwise(_E5M2_ASM if E5M2 else _E4M3_ASM, "=r,r,r,r,r", [x.to(tl.int32, bitcast=True)],
                                         dtype=tl.uint8, is_pure=True, pack=4)  # fmt: skip
    elif E5M2:
        return encode_e5m2(x).to(tl.uint8)
    else:
        return encode_e4m3(x).to(tl.uint8)


@triton.jit
def decode_e4m3(code):
    """E4M3 codes (int32) -> fp32; 0x7F is NaN."""
    size = code & 0x7F
    normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)
    value = tl.where(size == 0x7F, float("nan"), value)
    return tl.where((code & 0x80) != 0, -value, value)


@triton.jit
def encode_e2m1(x):
    """fp32 -> E2M1, nearest, ties to the even code, saturating; NaN is the largest value."""
    size = tl.abs(x)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32) + (size >= 1.75).to(tl.int32)
    code += (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32) + (size > 5.0).to(tl.int32)
    sign = (x.to(tl.int32, bitcast=True) >> 28) & 8
    return tl.where(x == x, code | sign, 7)


@triton.jit
def encode_e2m1_noisy(x, noise):
    """fp32 and int32 noise in [0, 2^31) -> E2M1, rounded up with the probability of the distance from below."""
    size = tl.minimum(tl.where(x == x, tl.abs(x), 6.0), 6.0)
    second = (size >= 2.0).to(tl.float32)
    third = (size >= 4.0).to(tl.float32)
    steps = tl.floor(size * (2.0 - second - 0.5 * third) + (noise >> 9).to(tl.float32) * 0.0000002384185791015625)
    code = tl.minimum((steps + 2.0 * (second + third)).to(tl.int32), 7)
    sign = (x.to(tl.int32, bitcast=True) >> 28) & 8
    return tl.where(x == x, code | sign, code)


@triton.jit
def decode_e2m1(code):
    """E2M1 codes (int32 0..15) -> fp32."""
    size = code & 7
    # 0 .5 1 1.5 2 3 4 6: below 2 the step is one half; above, exponent and mantissa
    low = size.to(tl.float32) * 0.5
    high = ((size << 22) + (126 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(size < 2, low, high)
    return tl.where((code & 8) != 0, -value, value)


@triton.jit
def e8m0_value(byte):
    """E8M0 bytes (int32) -> fp32 2^(byte - 127); 0xFF is NaN."""
    bits = tl.where(byte == 0, 1 << 22, byte << 23)
    return tl.where(byte == 255, float("nan"), bits.to(tl.float32, bitcast=True))


@triton.jit
def scale_value(scale):
    """fp32 of scales; bytes are E8M0, of which 0 is taken for 0 and not for 2^-127."""
    if scale.dtype == tl.uint8:
        return (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    else:
        return scale.to(tl.float32)


@triton.jit
def noise_tile(seed, step, layer, tensor, first_row, first_col, width, ROWS: tl.constexpr, COLS: tl.constexpr):
    """`quantize.noise.noise_bits` of a matrix of `width` columns (a multiple of 4) at one tile: int32 [ROWS, COLS]."""
    rows = first_row + tl.arange(0, ROWS)
    quads = first_col // 4 + tl.arange(0, COLS // 4)
    index = rows[:, None] * (width // 4) + quads[None, :]
    fill = index * 0
    w0, w1, w2, w3 = tl.philox(seed, index, fill + step, fill + layer, fill + tensor)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape([ROWS, COLS])
    return (words >> 1).to(tl.int32)
