"""FP8 with one scale per tensor, row, 1x128 or 128x128 tile, as training uses it; bit for bit what the named library does.

    encode   code = E(x * scale_enc),  scale_enc = MAX / amax(tile)           (deepgemm: x * (1 / (amax / MAX)))
    decode   value = code * scale,     scale = 1 / scale_enc                  (deepgemm: amax / MAX)

Sources: FP8 formats for deep learning (arXiv 2209.05433); DeepSeek-V3 (2412.19437, section 3.3.2) for the 1x128 and 128x128
tiles; TransformerEngine's, torchao's and DeepGEMM's quantizers (see `compat`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from karui.configs.errors import KaruiError
from karui.kernels.quantize.compat import (
    AMAX_FLOOR,
    FLT_MAX,
    Compat,
    check_compat,
    divide,
    exponent_field,
    has_mantissa,
    power_of_two_down,
    spread,
    tiled_amax,
)
from karui.kernels.quantize.elements import E4M3, Element

TILES = {"tensor": (None, None), "row": (1, None), "1x128": (1, 128), "128x128": (128, 128)}


@dataclass(frozen=True)
class ScaledFloat8:
    """codes [M, K] float8; scale fp32 [ceil(M/rows), ceil(K/cols)], value = code * scale; tile (rows, cols)."""

    codes: torch.Tensor
    scale: torch.Tensor
    tile: tuple[int, int]

    def dequantize(self) -> torch.Tensor:
        """fp32 [M, K]."""
        return self.codes.float() * spread(self.scale, *self.tile, self.codes.shape)


def quantize_float8(
    x: torch.Tensor,
    *,
    tile: str = "tensor",
    element: Element = E4M3,
    compat: Compat = "te",
    power_of_two: bool | None = None,
    scale: torch.Tensor | None = None,
) -> ScaledFloat8:
    """Quantize `x` [M, K], any float dtype, computed in fp32; values beyond the largest saturate.

    Args:
        tile: tensor, row, 1x128 or 128x128; edges that do not fill a tile are padded with zeros for the scale alone.
        power_of_two: scales are powers of two; None takes the library's habit (te: for tiles of 128; ao, deepgemm: no).
        scale: a given encode scale (fp32, one element; delayed scaling), tile "tensor" only.

    NaN stays NaN (te: code NaN with scale 1, the others: NaN scale or codes); nothing here raises on values.

    Raises:
        KaruiError: not a matrix, an unknown tile, a scale given for tiles.
    """
    if x.dim() != 2 or tile not in TILES:
        raise KaruiError(f"FP8: expected a matrix and a tile of {', '.join(TILES)}; got shape {tuple(x.shape)}, tile {tile!r}.")
    check_compat(compat, ("te", "ao", "deepgemm"), "FP8")
    rows, cols = TILES[tile]
    size = (rows or max(x.shape[0], 1), cols or max(x.shape[1], 1))
    x = x.float()
    if scale is not None:
        if tile != "tensor":
            raise KaruiError(f"FP8: a given scale works per tensor, not with tile {tile!r}.")
        encode_scale, decode_scale = scale.float().reshape(1, 1), 1.0 / scale.float().reshape(1, 1)
    else:
        pow2 = power_of_two if power_of_two is not None else compat == "te" and "128" in tile
        encode_scale, decode_scale = tile_scales(tiled_amax(x, *size), element, compat, pow2)
    codes = (x * spread(encode_scale, *size, x.shape)).clamp(-element.max, element.max).to(element.dtype)
    return ScaledFloat8(codes, decode_scale, size)


def tile_scales(amax: torch.Tensor, element: Element, compat: Compat, power_of_two: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale to multiply by when encoding, scale to multiply by when decoding), fp32, of each amax."""
    if compat == "te":
        scale = divide(element.max, amax)
        scale = torch.where(torch.isfinite(amax) & (amax > 0), scale.clamp(max=FLT_MAX), torch.ones_like(scale))
        scale = power_of_two_down(scale) if power_of_two else scale
        return scale, 1.0 / scale
    if compat == "ao":
        # fp32 here would differ between eager and compiled division
        scale = (element.max / amax.double().clamp(min=AMAX_FLOOR["ao"])).float()
        scale = torch.exp2(torch.floor(torch.log2(scale))) if power_of_two else scale
        return scale, 1.0 / scale
    decode_scale = divide(amax.clamp(min=AMAX_FLOOR["deepgemm"]), element.max)
    if power_of_two:
        exponent = (exponent_field(decode_scale) + has_mantissa(decode_scale).int()).clamp(1, 254)
        decode_scale = (exponent << 23).view(torch.float32)
    return 1.0 / decode_scale, decode_scale
