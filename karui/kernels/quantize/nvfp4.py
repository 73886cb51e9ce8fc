"""NVFP4: E2M1 values, an E4M3 scale for every 16 (or every 16x16), and one fp32 scale for the tensor.

    S_enc = min(2688 / amax, FLT_MAX)                2688 = 448 * 6; 1 where amax is 0
    S_blk = E4M3(min(amax_blk * (S_enc / 6), 448))
    code  = E2M1(clamp(x * min(1 / (S_blk / S_enc), FLT_MAX), -6, 6))
    value = code * S_blk / S_enc                     (TransformerEngine computes code * S_blk * amax / 2688)

Sources: Pretraining LLMs with NVFP4 (arXiv 2509.25149) and TransformerEngine's reference. torchao differs: S_blk is at least
2^-6 and values are divided by S_blk * (amax / 2688).

As a weight grid (`encode`, `decode` of the quantizer registry): 1x16 blocks, `extra["global_scale"]` = S_enc, fp32 [1], as
compressed-tensors stores it; value = code * scale / global_scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch

from karui.configs.errors import KaruiError
from karui.configs.quantspec import QuantSpec
from karui.kernels.qtensor import QTensor
from karui.kernels.quantize import elements
from karui.kernels.quantize.compat import FLT_MAX, Compat, check_compat, divide, spread, tiled_amax
from karui.kernels.quantize.elements import E2M1, E4M3
from karui.kernels.quantize.fused import hadamard_blocks

BLOCK = 16
LARGEST = 448.0 * 6.0
# The same signs on every rank and layer: the transform must cancel between the two operands of a product.
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
Tile = Literal["1x16", "16x16"]
TILES: dict[str, tuple[int, int]] = {"1x16": (1, 16), "16x16": (16, 16)}


@dataclass(frozen=True)
class Nvfp4:
    """codes uint8 [M, K] 0..15; scale float8_e4m3fn [ceil(M/r), ceil(K/16)]; global_scale fp32 [1] (S_enc); tile (r, 16)."""

    codes: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor
    tile: tuple[int, int]

    def dequantize(self) -> torch.Tensor:
        """fp32 [M, K]: code * (scale / global_scale)."""
        block = self.scale.float() / self.global_scale
        return elements.decode(self.codes, E2M1) * spread(block, *self.tile, self.codes.shape)


def quantize_nvfp4(
    x: torch.Tensor,
    *,
    tile: Tile = "1x16",
    compat: Compat = "te",
    amax: torch.Tensor | None = None,
    noise: torch.Tensor | None = None,
) -> Nvfp4:
    """Quantize `x` [M, K], any float dtype, computed in fp32; edges are padded with zeros for the scales alone.

    Args:
        tile: 1x16 along K, or 16x16 (weights: the same codes serve W and its transpose).
        amax: the tensor's largest magnitude (fp32, one element) when it is shared with other parts; None measures it.
        noise: int32 [M, K] from `noise_bits`: stochastic rounding.

    NaN or Inf in `x` gives NaN values in its blocks or everywhere; callers that care look at the amax.

    Raises:
        KaruiError: not a matrix, an unknown tile. UnsupportedError: compat="deepgemm".
    """
    check_compat(compat, ("te", "ao"), "NVFP4")
    if x.dim() != 2 or tile not in TILES:
        raise KaruiError(f"NVFP4: expected a matrix and a tile of {', '.join(TILES)}; got shape {tuple(x.shape)}, tile {tile!r}.")
    x = x.float()
    size = TILES[tile]
    block_amax = tiled_amax(x, *size)
    amax = (block_amax.amax() if amax is None else amax.float()).reshape(1)
    enc = global_scale(amax)
    if compat == "te":
        scale, multiplier = block_scales(block_amax, enc)
        scaled = x * spread(multiplier, *size, x.shape)
    else:
        per_tensor = torch.where(amax > 0, divide(amax, LARGEST), torch.ones_like(amax))
        scale = (
            (divide(block_amax, 6.0) / per_tensor).clamp(torch.finfo(torch.float8_e4m3fn).tiny, E4M3.max).to(torch.float8_e4m3fn)
        )
        scaled = x / spread(per_tensor * scale.float(), *size, x.shape)
    return Nvfp4(elements.encode(scaled, E2M1, noise=noise), scale, enc, size)


def block_scales(block_amax: torch.Tensor, enc: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(S_blk float8_e4m3fn, what values are multiplied by before encoding, fp32) of fp32 block maxima and S_enc [1]."""
    scale = (block_amax * divide(enc, 6.0)).clamp(max=E4M3.max).to(torch.float8_e4m3fn)
    return scale, (1.0 / (scale.float() / enc)).clamp(max=FLT_MAX)


def global_scale(amax: torch.Tensor) -> torch.Tensor:
    """S_enc of an fp32 amax; 1 for 0, and for NaN or Inf, whose blocks show it."""
    enc = divide(LARGEST, amax).clamp(max=FLT_MAX)
    return torch.where(torch.isfinite(amax) & (amax > 0), enc, torch.ones_like(enc))


def random_hadamard(x: torch.Tensor) -> torch.Tensor:
    """`x` [M, K] times diag(signs) Sylvester16 / 4 in pieces of 16 along K, padded with zeros to a multiple of 16; fp32.

    Orthogonal: (x H)(y H)^T = x y^T, so a product whose two operands are both transformed is unchanged, while outliers
    along the contraction are spread over 16 values.
    """
    if missing := -x.shape[1] % BLOCK:
        x = torch.nn.functional.pad(x.t(), (0, 0, 0, missing)).t()
    return hadamard_blocks(x, signs16())


@cache
def signs16() -> torch.Tensor:
    """fp32 [16]: `SIGNS`."""
    return torch.tensor(SIGNS, dtype=torch.float32)


@cache
def hadamard16() -> torch.Tensor:
    """fp32 [16, 16]: diag(SIGNS) @ Sylvester / 4, the matrix of `random_hadamard`; every entry is +-0.25, exact in bf16."""
    h = torch.ones(1, 1)
    while h.shape[0] < BLOCK:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return signs16().unsqueeze(1) * h / 4.0


def encode(rows: torch.Tensor, spec: QuantSpec) -> dict[str, Any]:
    """[R, in] fp32 -> codes uint8 0..15, scale float8_e4m3fn [R, in/16] and extra global_scale of a `QTensor`."""
    if spec.group_size != BLOCK:
        raise KaruiError(f"nvfp4 has blocks of {BLOCK}, not {spec.group_size}.")
    q = quantize_nvfp4(rows)
    return {"codes": q.codes, "scale": q.scale, "zero": None, "extra": {"global_scale": q.global_scale}}


def decode(q: QTensor) -> torch.Tensor:
    """[R, in] fp32 values."""
    assert q.extra is not None
    return Nvfp4(q.codes.reshape(-1, q.shape[-1]), q.scale, q.extra["global_scale"], (1, BLOCK)).dequantize()
