"""From a matrix and an `Operand` to its codes, or to the values they stand for, by the one oracle in `karui.kernels.quantize`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from karui.kernels.quantize.compat import Compat, has_mantissa, spread
from karui.kernels.quantize.elements import E2M1, E4M3, ELEMENTS, Element
from karui.kernels.quantize.elements import decode as decode_codes
from karui.kernels.quantize.fused import NoiseKey, scaled_codes, scaled_values, tile_amax
from karui.kernels.quantize.microscaling import BLOCK, Microscaled, e8m0_value, multiplier, quantize_mx, scale_exponent
from karui.kernels.quantize.nvfp4 import LARGEST as NVFP4_LARGEST
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
    """What emulation multiplies: fp32 `value` [M, K], and what its rows are multiplied by after the GEMM, fp32 [M, 1] or [1, 1].

    exact: every value is a bf16 number. It is for codes times powers of two, and for NVFP4's codes times their E4M3 scales.
    """

    value: torch.Tensor
    scale: torch.Tensor | None = None
    exact: bool = True

    def dequantize(self) -> torch.Tensor:
        return self.value if self.scale is None else self.value * self.scale


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
    if not operand.tensor_scale:
        amax = _no_tensor_scale(x)
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


def _given(x: torch.Tensor, element: Element, compat: Compat, amax: torch.Tensor | None, scale: torch.Tensor) -> torch.Tensor:
    """The encode scale of delayed scaling, or the current one where there is no history yet."""
    current, _ = tile_scales(largest(x) if amax is None else amax, element, compat, False)
    return torch.where(scale > 0, scale, current)


def _no_tensor_scale(x: torch.Tensor) -> torch.Tensor:
    """The amax that makes NVFP4's tensor scale 1."""
    return torch.full((), NVFP4_LARGEST, device=x.device)


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
    """(what `encode(...)` stands for, without the codes between; the codes too where `keep` asks for them).

    Args as in `encode`. `dequantize()` of the first is that of the codes, bit for bit (NVFP4: but for the last bit, as the
    tensor's scale is multiplied with last). The values lie in memory as `x` does; an operand in high precision is `x` itself.
    """
    if operand.format == "high":
        return High(x), High(x)
    unlike = compat == "ao" if operand.format == "nvfp4" else compat == "deepgemm" and operand.format == "mxfp4"
    if unlike or x.numel() == 0 or (keep and operand.tile != "tensor"):
        coded = encode(x, operand, compat=compat, amax=amax, scale=scale, noise=noise)
        return Values(coded.dequantize(), exact=False), coded
    if operand.hadamard:
        x, amax = random_hadamard(x), None
    if not operand.tensor_scale:
        amax = _no_tensor_scale(x)
    if operand.format in ("e4m3", "e5m2"):
        element = ELEMENTS[operand.format]
        rows, cols = FP8_TILES[operand.tile]
        tile = (rows or x.shape[0], cols or x.shape[1])
        top = amax.reshape(1, 1) if amax is not None and operand.tile == "tensor" else tile_amax(x, *tile)
        powers = compat == "te" and "128" in operand.tile
        enc, dec = tile_scales(top, element, compat, powers)
        if operand.delayed and scale is not None:
            enc = torch.where(scale > 0, scale, enc)
            dec = 1.0 / enc
        if "128" in operand.tile:
            return Values(scaled_values(x, enc, dec, tile, element), exact=powers), None
        one = torch.ones_like(dec)
        if keep:
            codes, out = scaled_codes(x, enc, one, element)
            return Values(out, dec), ScaledFloat8(codes, dec, tile)
        return Values(scaled_values(x, enc, one, tile, element), dec), None
    if operand.format == "nvfp4":
        tile = FP4_TILES[operand.tile]
        top = tile_amax(x, *tile)
        whole = global_scale((top.amax() if amax is None else amax).reshape(1))
        stored, enc = block_scales(top, whole)
        return Values(scaled_values(x, enc, stored.float(), tile, E2M1, noise), (1.0 / whole).view(1, 1)), None
    element = E4M3 if operand.format == "mxfp8" else E2M1
    exponent = scale_exponent(tile_amax(x, 1, BLOCK), element, "rceil", compat)
    enc, dec = multiplier(exponent, "rceil", compat), e8m0_value(exponent)
    return Values(scaled_values(x, enc, dec, (1, BLOCK), element, noise)), None


def as_values(coded: Coded) -> Values:
    """Codes as `values` gives them; a matrix in high precision is not exact."""
    if isinstance(coded, Values):
        return coded
    if isinstance(coded, High):
        return Values(coded.value.float(), exact=False)
    if isinstance(coded, Nvfp4):
        value = decode_codes(coded.codes, E2M1) * spread(coded.scale.float(), *coded.tile, coded.codes.shape)
        return Values(value, (1.0 / coded.global_scale).view(1, 1))
    if isinstance(coded, ScaledFloat8) and coded.scale.shape in ((1, 1), (coded.codes.shape[0], 1)):
        return Values(coded.codes.float(), coded.scale)
    return Values(coded.dequantize(), exact=isinstance(coded, Microscaled) or not bool(has_mantissa(coded.scale).any()))


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
