"""From a matrix and an `Operand` to its codes, or to the values they stand for, by the one oracle in `karui.kernels.quantize`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from karui.kernels.quantize.compat import Compat
from karui.kernels.quantize.elements import E2M1, E4M3, ELEMENTS, Element
from karui.kernels.quantize.fused import NoiseKey, scaled_codes, scaled_values, tile_amax
from karui.kernels.quantize.microscaling import BLOCK, Microscaled, e8m0_value, multiplier, quantize_mx, scale_exponent
from karui.kernels.quantize.nvfp4 import TILES as FP4_TILES
from karui.kernels.quantize.nvfp4 import Nvfp4, block_scales, global_scale, quantize_nvfp4, random_hadamard
from karui.kernels.quantize.scaled_float8 import TILES as FP8_TILES
from karui.kernels.quantize.scaled_float8 import ScaledFloat8, quantize_float8, tile_scales
from karui.kernels.train_quantize import quantize_both
from karui.kernels.triton_support import obstacle
from karui.lowprec.precision import Operand


@dataclass(frozen=True)
class High:
    """A matrix that stays in its own dtype."""

    value: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        return self.value


@dataclass(frozen=True)
class Values:
    """What an operand's codes stand for, fp32: what emulation multiplies."""

    value: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        return self.value


Coded = High | Values | ScaledFloat8 | Microscaled | Nvfp4


def encode(
    x: torch.Tensor,
    operand: Operand,
    *,
    compat: Compat = "te",
    amax: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    noise: NoiseKey | None = None,
) -> Coded:
    """Quantize `x` [M, K] along K.

    Args:
        amax: largest magnitude of `x` (fp32, one element) where the caller has it already.
        scale: the encode scale of delayed scaling; 0 (no history yet) takes the current one.
        noise: where stochastic rounding draws its bits (for [M, K], K padded to 16 under `hadamard`).
    """
    if operand.format == "high":
        return High(x)
    if x.is_cuda and not obstacle(x.device) and operand.format in ("e4m3", "e5m2", "mxfp8"):
        return encode_by_kernel(x, operand, compat=compat, amax=amax, scale=scale)
    if operand.hadamard:
        x, amax = random_hadamard(x), None
    bits = None if noise is None else noise.bits(x.shape, x.device)
    if operand.format in ("e4m3", "e5m2"):
        element = ELEMENTS[operand.format]
        if operand.delayed and scale is not None:
            return quantize_float8(x, element=element, compat=compat, scale=_given(x, element, compat, amax, scale))
        return quantize_float8(x, tile=operand.tile, element=element, compat=compat)
    if operand.format == "nvfp4":
        return quantize_nvfp4(x, tile=operand.tile, compat=compat, amax=amax, noise=bits)  # type: ignore[arg-type]
    # training rounds the scale up whatever the library's default: a clipped peak is a bias no rounding repairs
    return quantize_mx(x, element=E4M3 if operand.format == "mxfp8" else E2M1, mode="rceil", compat=compat, noise=bits)


def _given(
    x: torch.Tensor, element: Element, compat: Compat, amax: torch.Tensor | None, scale: torch.Tensor
) -> torch.Tensor:
    """The encode scale of delayed scaling, or the current one where there is no history yet."""
    current, _ = tile_scales(largest(x) if amax is None else amax, element, compat, False)
    return torch.where(scale > 0, scale, current)


def encode_by_kernel(x: torch.Tensor, operand: Operand, *, compat: Compat, amax: torch.Tensor | None = None,
                     scale: torch.Tensor | None = None) -> Coded:  # fmt: skip
    """`encode` of 8-bit formats in one or two passes over `x` (`train_quantize`), the same bits."""
    given = None
    if operand.delayed and scale is not None:
        given = _given(x, ELEMENTS[operand.format], compat, amax, scale)
    kind = operand.format if operand.format == "mxfp8" else f"{operand.format}-{operand.tile}"
    coded, _ = quantize_both(x, kind, cols=False, compat=compat, scale=given)
    assert coded is not None
    if operand.format == "mxfp8":
        return Microscaled(coded.codes, coded.scale, E4M3)
    return ScaledFloat8(coded.codes, coded.scale, coded.tile)


def values(
    x: torch.Tensor,
    operand: Operand,
    *,
    compat: Compat = "te",
    amax: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    noise: NoiseKey | None = None,
    keep: bool = False,
) -> tuple[Values | High, Coded | None]:
    """(`encode(...).dequantize()`, bit for bit, without the codes between; the codes too where `keep` asks for them).

    Args as in `encode`. The values are fp32 [M, K], laid out in memory as `x`; an operand in high precision is `x` itself.
    """
    if operand.format == "high":
        return High(x), High(x)
    unlike = compat == "ao" if operand.format == "nvfp4" else compat == "deepgemm" and operand.format == "mxfp4"
    if unlike or x.numel() == 0 or (keep and operand.tile != "tensor"):
        coded = encode(x, operand, compat=compat, amax=amax, scale=scale, noise=noise)
        return Values(coded.dequantize()), coded
    if operand.hadamard:
        x, amax = random_hadamard(x), None
    if operand.format in ("e4m3", "e5m2"):
        element = ELEMENTS[operand.format]
        rows, cols = FP8_TILES[operand.tile]
        tile = (rows or x.shape[0], cols or x.shape[1])
        top = amax.reshape(1, 1) if amax is not None and operand.tile == "tensor" else tile_amax(x, *tile)
        enc, dec = tile_scales(top, element, compat, compat == "te" and "128" in operand.tile)
        if operand.delayed and scale is not None:
            enc = torch.where(scale > 0, scale, enc)
            dec = 1.0 / enc
        if keep:
            codes, out = scaled_codes(x, enc, dec, element)
            return Values(out), ScaledFloat8(codes, dec, tile)
        return Values(scaled_values(x, enc, dec, tile, element)), None
    if operand.format == "nvfp4":
        tile = FP4_TILES[operand.tile]
        top = tile_amax(x, *tile)
        whole = global_scale((top.amax() if amax is None else amax).reshape(1))
        stored, enc = block_scales(top, whole)
        return Values(scaled_values(x, enc, stored.float() / whole, tile, E2M1, noise)), None
    element = E4M3 if operand.format == "mxfp8" else E2M1
    exponent = scale_exponent(tile_amax(x, 1, BLOCK), element, "rceil", compat)
    enc, dec = multiplier(exponent, "rceil", compat), e8m0_value(exponent)
    return Values(scaled_values(x, enc, dec, (1, BLOCK), element, noise)), None


def transpose(coded: Coded) -> Coded:
    """The codes of the transpose, for operands whose `symmetric` is true."""
    if isinstance(coded, ScaledFloat8):
        return ScaledFloat8(coded.codes.t(), coded.scale.t(), (coded.tile[1], coded.tile[0]))
    if isinstance(coded, Nvfp4):
        return Nvfp4(coded.codes.t(), coded.scale.t(), coded.global_scale, coded.tile)
    assert isinstance(coded, High)
    return High(coded.value.t())


def tensors_of(coded: Coded) -> dict[str, torch.Tensor]:
    """The tensors that make up `coded`, by name."""
    if isinstance(coded, (High, Values)):
        return {"value": coded.value}
    if isinstance(coded, Microscaled):
        return {"codes": coded.codes, "exponent": coded.exponent}
    if isinstance(coded, Nvfp4):
        return {"codes": coded.codes, "scale": coded.scale, "global_scale": coded.global_scale}
    return {"codes": coded.codes, "scale": coded.scale}


def rebuild(like: Coded, tensors: dict[str, torch.Tensor]) -> Coded:
    """The inverse of `tensors_of`, with the kind and tile of `like`."""
    if isinstance(like, (High, Values)):
        return type(like)(tensors["value"])
    if isinstance(like, Microscaled):
        return Microscaled(tensors["codes"], tensors["exponent"], like.element)
    if isinstance(like, Nvfp4):
        return Nvfp4(tensors["codes"], tensors["scale"], tensors["global_scale"], like.tile)
    return ScaledFloat8(tensors["codes"], tensors["scale"], like.tile)


def largest(x: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of `x`, fp32 scalar; NaN if there is one, 0 for an empty tensor."""
    if x.numel() == 0:
        return torch.zeros((), device=x.device)
    low, high = torch.aminmax(x)
    return torch.maximum(-low, high).float()
