"""MXFP8 and MXFP4: blocks of 32 values share a power of two, one E8M0 byte (OCP Microscaling specification v1.0).

    value = element * 2^(byte - 127)

How the byte follows from a block's amax (MAX = 448 or 6, emax = floor(log2 MAX)):
    floor   floor(log2 amax) - emax: the specification's; values up to 2 * 2^emax saturate at MAX
    ceil    ceil(log2 amax) - emax: never saturates, wastes up to one bit
    even    floor(log2 of amax rounded to the element's mantissa) - emax
    rceil   ceil(log2(amax / MAX)): the smallest power of two that does not saturate; TransformerEngine's and cuBLAS'

As a weight grid (`encode`, `decode` of the quantizer registry): MXFP8 with rceil, MXFP4 with even, scale dtype float8_e8m0fnu.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from karui.configs.errors import KaruiError, UnsupportedError
from karui.configs.quantspec import QuantSpec
from karui.kernels.qtensor import QTensor
from karui.kernels.quantize import elements
from karui.kernels.quantize.compat import AMAX_FLOOR, Compat, check_compat, divide, exponent_field, has_mantissa
from karui.kernels.quantize.elements import E2M1, E4M3, E5M2, Element

BLOCK = 32
Mode = Literal["floor", "rceil", "ceil", "even"]
_MODES: dict[str, tuple[str, ...]] = {"te": ("rceil",), "ao": ("floor", "rceil", "ceil", "even"), "deepgemm": ("rceil",)}
_DEFAULT_MODE: dict[str, Mode] = {"te": "rceil", "ao": "floor", "deepgemm": "rceil"}
_WEIGHT: dict[str, tuple[Element, Mode]] = {"mxfp8": (E4M3, "rceil"), "mxfp4": (E2M1, "even")}


@dataclass(frozen=True)
class Microscaled:
    """codes [M, K]: float8 (E4M3, E5M2) or uint8 0..15 (E2M1); exponent uint8 [M, ceil(K/32)], the E8M0 bytes."""

    codes: torch.Tensor
    exponent: torch.Tensor
    element: Element

    def dequantize(self) -> torch.Tensor:
        """fp32 [M, K]; a block whose byte is 0xFF is NaN."""
        value = elements.decode(self.codes, E2M1) if self.element is E2M1 else self.codes.float()
        return value * e8m0_value(self.exponent).repeat_interleave(BLOCK, -1)[:, : value.shape[1]]


def quantize_mx(
    x: torch.Tensor,
    *,
    element: Element = E4M3,
    mode: Mode | None = None,
    compat: Compat = "te",
    noise: torch.Tensor | None = None,
) -> Microscaled:
    """Quantize `x` [M, K], any float dtype, in blocks of 32 along K; a last block that is not full is padded with zeros.

    Args:
        element: E4M3 (MXFP8; also for gradients), E5M2 or E2M1 (MXFP4).
        mode: see the module; None takes the library's own (te, deepgemm: rceil, ao: floor).
        noise: int32 [M, K] from `noise_bits`: stochastic rounding (E2M1 only).

    Raises:
        KaruiError: not a matrix.
        UnsupportedError: a mode the named library does not have; noise with an 8-bit element.
    """
    check_compat(compat, ("te", "ao", "deepgemm"), "Microscaling")
    mode = mode or _DEFAULT_MODE[compat]
    if mode not in _MODES[compat]:
        raise UnsupportedError(
            f"{compat} knows the scale modes {', '.join(_MODES[compat])}, not {mode!r}; compat='ao' has all four."
        )
    if x.dim() != 2:
        raise KaruiError(f"Microscaling: expected a matrix, got shape {tuple(x.shape)}.")
    if noise is not None and element is not E2M1:
        raise UnsupportedError(f"stochastic rounding is for E2M1, not {element.name}.")
    width = x.shape[1]
    blocks = torch.nn.functional.pad(x.float(), (0, -width % BLOCK)).view(x.shape[0], -1, BLOCK)
    exponent = scale_exponent(blocks.abs().amax(-1), element, mode, compat)
    scaled = (blocks * multiplier(exponent, mode, compat).unsqueeze(-1)).reshape(x.shape[0], -1)[:, :width]
    if element is E2M1:
        codes = _deepgemm_e2m1(scaled) if compat == "deepgemm" and noise is None else elements.encode(scaled, E2M1, noise=noise)
    else:
        assert element.dtype is not None
        codes = scaled.clamp(-element.max, element.max).to(element.dtype)
    return Microscaled(codes, exponent.to(torch.uint8), element)


def scale_exponent(amax: torch.Tensor, element: Element, mode: Mode, compat: Compat) -> torch.Tensor:
    """E8M0 bytes (int32) of fp32 block maxima, any shape.

    Edges: te 0 -> 0x00, Inf -> 0xFE, NaN -> 0xFF; ao NaN -> 0xFF; deepgemm clamps to 1..254 (so NaN -> 254).
    """
    amax = amax.float()
    if mode == "rceil" and compat == "ao":
        log = torch.ceil(torch.log2(divide(amax, element.max))).clamp(-127, 127)
        return torch.where(torch.isnan(amax), 255, log.nan_to_num().int() + 127)
    if mode == "rceil":
        if compat == "deepgemm":
            ratio = divide(amax.clamp(min=AMAX_FLOOR["deepgemm"]), element.max)
            return (exponent_field(ratio) + has_mantissa(ratio).int()).clamp(1, 254)
        ratio = amax * torch.tensor(1.0 / element.max, dtype=torch.float32)
        byte = (exponent_field(ratio) + has_mantissa(ratio).int()).clamp(max=254)
        return torch.where(torch.isnan(amax), 255, byte)
    if mode == "even":
        # round the mantissa half up to the element's width; a carry moves the exponent
        bits = amax.contiguous().view(torch.int32) + (1 << (22 - element.mantissa_bits))
        field = (bits >> 23) & 0xFF
    else:
        field = exponent_field(amax) + (has_mantissa(amax).int() if mode == "ceil" else 0)
    return torch.where(torch.isnan(amax), 255, (field - element.max_exponent).clamp(0, 255))


def e8m0_value(byte: torch.Tensor) -> torch.Tensor:
    """fp32 2^(byte - 127) of uint8 or int bytes; 0xFF is NaN."""
    byte = byte.int()
    # 2^-127 is subnormal in fp32: its one bit is the mantissa's highest
    bits = torch.where(byte == 0, 1 << 22, byte << 23)
    return torch.where(byte == 255, float("nan"), bits.view(torch.float32))


def multiplier(byte: torch.Tensor, mode: Mode, compat: Compat) -> torch.Tensor:
    """What values are multiplied by before encoding: 2^(127 - byte), apart from ao's treatment of byte 0."""
    inverse = e8m0_value(254 - byte)
    if compat == "ao":
        inverse = torch.where(byte == 0, 1.0 if mode == "rceil" else 2.0**126, inverse)
    return torch.where(byte == 255, float("nan"), inverse)


def _deepgemm_e2m1(x: torch.Tensor) -> torch.Tensor:
    """DeepGEMM's E2M1: ties go down, and zero has no sign."""
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=x.device)
    index = torch.bucketize(x.abs().clamp(max=6.0).contiguous(), midpoints)
    return (index | torch.where((x < 0) & (index > 0), 8, 0)).to(torch.uint8)


def encode(rows: torch.Tensor, spec: QuantSpec) -> dict[str, Any]:
    """[R, in] fp32 -> codes (float8_e4m3fn, or uint8 0..15) and scale float8_e8m0fnu [R, in/32] of a `QTensor`."""
    _check_block(spec)
    element, mode = _WEIGHT[spec.format]
    q = quantize_mx(rows, element=element, mode=mode, compat="ao" if mode == "even" else "te")
    return {"codes": q.codes, "scale": q.exponent.view(torch.float8_e8m0fnu), "zero": None}


def decode(q: QTensor) -> torch.Tensor:
    """[R, in] fp32 values."""
    element = _WEIGHT[q.spec.format][0]
    return Microscaled(q.codes.reshape(-1, q.shape[-1]), q.scale.view(torch.uint8), element).dequantize()


def _check_block(spec: QuantSpec) -> None:
    if spec.group_size != BLOCK:
        raise KaruiError(f"{spec.format} has blocks of {BLOCK}, not {spec.group_size}.")


__all__ = ["BLOCK", "E2M1", "E4M3", "E5M2", "Microscaled", "decode", "e8m0_value", "encode", "quantize_mx", "scale_exponent"]
