"""The oracles of `karui.kernels.quantize`, once for x and once for its transpose."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from karui.kernels.quantize import elements
from karui.kernels.quantize.compat import Compat
from karui.kernels.quantize.elements import E2M1, E4M3, ELEMENTS
from karui.kernels.quantize.microscaling import quantize_mx
from karui.kernels.quantize.noise import noise_bits
from karui.kernels.quantize.nvfp4 import quantize_nvfp4, random_hadamard
from karui.kernels.quantize.scaled_float8 import quantize_float8

if TYPE_CHECKING:
    from karui.kernels.train_quantize import Coded, Noise


def quantize_both(x: torch.Tensor, kind: str, rows: bool, cols: bool, compat: Compat, power_of_two: bool | None,
                  scale: torch.Tensor | None, hadamard: bool, row_noise: Noise | None,
                  col_noise: Noise | None) -> tuple[Coded | None, Coded | None]:  # fmt: skip
    """As `karui.kernels.train_quantize.quantize_both`."""
    one = _one(x, kind, compat, power_of_two, scale, False, row_noise) if rows else None
    other = _one(x.t(), kind, compat, power_of_two, scale, hadamard, col_noise) if cols else None
    return one, other


def _one(x: torch.Tensor, kind: str, compat: Compat, power_of_two: bool | None, scale: torch.Tensor | None, hadamard: bool,
         noise: Noise | None) -> Coded:  # fmt: skip
    from karui.kernels.train_quantize import Coded

    x = random_hadamard(x) if hadamard else x
    shape = (x.shape[0], x.shape[1])
    bits = None
    if noise is not None:
        bits = noise_bits(x.shape, seed=noise.seed, step=noise.step, layer=noise.layer, tensor=noise.tensor, device=x.device)
    if kind.startswith(("e4m3", "e5m2")):
        element, tile = kind.split("-")
        q = quantize_float8(x, tile=tile, element=ELEMENTS[element], compat=compat, power_of_two=power_of_two, scale=scale)
        return Coded(q.codes, q.scale, q.tile, shape)
    if kind.startswith("mx"):
        m = quantize_mx(x, element=E4M3 if kind == "mxfp8" else E2M1, mode="rceil", compat=compat, noise=bits)
        codes = m.codes if kind == "mxfp8" else _packed(m.codes, 32)
        return Coded(codes, m.exponent, (1, 32), shape)
    n = quantize_nvfp4(x, tile="16x16" if kind.endswith("16x16") else "1x16", compat=compat, noise=bits)
    return Coded(_packed(n.codes, 16), n.scale, n.tile, shape, n.global_scale)


def _packed(codes: torch.Tensor, block: int) -> torch.Tensor:
    return elements.pack_pairs(torch.nn.functional.pad(codes, (0, -codes.shape[1] % block)))
