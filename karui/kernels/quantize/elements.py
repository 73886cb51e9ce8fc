"""Encoders of the small floats E4M3, E5M2 and E2M1, in integer arithmetic, and the tables that decode them.

    code = sign | exponent field | mantissa field,   value = 2^(max(field, 1) - bias) * (mantissa / 2^m [+ 1 if field > 0])

A fp32 number is its 24-bit significand shifted right until it stands on the target's grid; what the shift drops decides the
rounding. No floating-point operation is involved, so the result is the same on every device, compiled or not.

Sources: FP8 formats (arXiv 2209.05433), OCP Microscaling v1.0 section 5.3 (E2M1), PTX `cvt.rn.satfinite`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True, kw_only=True)
class Element:
    """One small float. `max_code` and `nan_code` are magnitudes (without the sign bit); E2M1 has neither NaN nor Inf."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    max_code: int
    inf_code: int | None
    nan_code: int | None
    dtype: torch.dtype | None

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def max_exponent(self) -> int:
        """floor(log2(max))."""
        return {"e4m3": 8, "e5m2": 15, "e2m1": 2}[self.name]


E4M3 = Element(name="e4m3", exponent_bits=4, mantissa_bits=3, bias=7, max=448.0, max_code=0x7E, inf_code=None, nan_code=0x7F,
               dtype=torch.float8_e4m3fn)  # fmt: skip
E5M2 = Element(name="e5m2", exponent_bits=5, mantissa_bits=2, bias=15, max=57344.0, max_code=0x7B, inf_code=0x7C, nan_code=0x7E,
               dtype=torch.float8_e5m2)  # fmt: skip
E2M1 = Element(
    name="e2m1", exponent_bits=2, mantissa_bits=1, bias=1, max=6.0, max_code=0x7, inf_code=None, nan_code=None, dtype=None
)
ELEMENTS = {e.name: e for e in (E4M3, E5M2, E2M1)}

# The widest shift that leaves room for 24-bit significands plus noise in a signed 32-bit integer.
_MAX_SHIFT = 30


def encode(x: torch.Tensor, element: Element, *, saturate: bool = True, noise: torch.Tensor | None = None) -> torch.Tensor:
    """Codes (uint8, sign in the top used bit) of fp32 `x`, any shape.

    Args:
        saturate: beyond the largest value the code is the largest value (Inf too). Otherwise what rounds past it becomes
            Inf (E5M2) or NaN (E4M3); E2M1 always saturates.
        noise: None rounds to nearest, ties to even. Else int32 in [0, 2^31), the shape of `x`: stochastic rounding, up with
            the probability of the distance from below (E2M1 uses 22 of the bits, the others all 31).

    NaN keeps its sign bit away: code `nan_code`, and for E2M1 the largest value, as the hardware's conversion does.
    """
    if element is E2M1:
        return _encode_e2m1(x.float(), noise)
    e, m = element.exponent_bits, element.mantissa_bits
    bits = x.float().contiguous().view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    exponent = (magnitude >> 23) - 127
    significand = (magnitude & 0x7FFFFF) | 0x800000
    lowest = 1 - element.bias  # exponent of the smallest normal number
    shift = (23 - m) + (lowest - exponent).clamp(min=0)
    if noise is None:
        shift = shift.clamp(max=_MAX_SHIFT)
        rounded = significand >> shift
        rest = significand - (rounded << shift)
        half = torch.ones_like(shift) << (shift - 1)
        rounded = rounded + ((rest > half) | ((rest == half) & ((rounded & 1) == 1))).int()
    else:
        significand = significand >> (shift - _MAX_SHIFT).clamp(min=0, max=31)
        shift = shift.clamp(max=_MAX_SHIFT)
        rounded = (significand + (noise >> (31 - shift))) >> shift
    code = ((exponent.clamp(min=lowest, max=128) - lowest) << m) + rounded
    code = torch.where(magnitude == 0, 0, code)
    if saturate:
        code = code.clamp(max=element.max_code)
    else:
        over = element.inf_code if element.inf_code is not None else element.nan_code
        assert over is not None
        code = torch.where(code > element.max_code, over, code)
    is_nan = magnitude > 0x7F800000
    code = code | torch.where((bits < 0) & ~is_nan, 1 << (e + m), 0)
    assert element.nan_code is not None
    return torch.where(is_nan, element.nan_code, code).to(torch.uint8)


def _encode_e2m1(x: torch.Tensor, noise: torch.Tensor | None) -> torch.Tensor:
    """E2M1 in a third of the operations: below 2, 4 and 6 the step is 0.5, 1 and 2, and a division by it is exact.

    Codes along each stretch are consecutive and start at an even one, so rounding the quotient half to even rounds to even codes.
    """
    size = torch.fmin(x.abs(), torch.full_like(x, E2M1.max))  # fmin: NaN gives the largest value
    second, third = (size >= 2).float(), (size >= 4).float()
    steps = size * (2.0 - second - 0.5 * third)
    if noise is None:
        steps = steps.round_()
    else:
        # 22 bits: a whole number below 4 plus the noise is exact in fp32, so what lies on the grid stays there
        steps = (steps + (noise >> 9).float() * 2.0**-22).floor_()
    code = (steps + 2.0 * (second + third)).clamp_(max=E2M1.max_code).to(torch.uint8)
    negative = torch.signbit(x) & ~torch.isnan(x)
    return code | (negative.to(torch.uint8) << 3)


def decode(codes: torch.Tensor, element: Element) -> torch.Tensor:
    """fp32 values of uint8 `codes`, any shape."""
    return values(element).to(codes.device)[codes.int()]


@cache
def values(element: Element) -> torch.Tensor:
    """fp32 [2^bits]: the value of every code."""
    e, m = element.exponent_bits, element.mantissa_bits
    table = []
    for code in range(1 << element.bits):
        field, mantissa, sign = (code >> m) & ((1 << e) - 1), code & ((1 << m) - 1), -1.0 if code >> (e + m) else 1.0
        magnitude = code & ((1 << (e + m)) - 1)
        if magnitude > element.max_code:
            table.append(sign * float("inf") if magnitude == element.inf_code else float("nan"))
        else:
            table.append(sign * 2.0 ** (max(field, 1) - element.bias) * (mantissa / 2**m + (field > 0)))
    return torch.tensor(table, dtype=torch.float32)


def round_values(x: torch.Tensor, element: Element, *, noise: torch.Tensor | None = None) -> torch.Tensor:
    """`decode(encode(x))` in fp32: torch's own cast where there is one, which is equal bit for bit and faster."""
    if noise is None and element.dtype is not None:
        return x.float().clamp(-element.max, element.max).to(element.dtype).float()
    return decode(encode(x, element, noise=noise), element)


def pack_pairs(codes: torch.Tensor) -> torch.Tensor:
    """4-bit codes [..., K] (K even) -> bytes [..., K/2], the even element in the low nibble."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def unpack_pairs(packed: torch.Tensor) -> torch.Tensor:
    """Bytes [..., K/2] -> 4-bit codes [..., K]."""
    return torch.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)
