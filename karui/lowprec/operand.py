"""From a matrix and an `Operand` to its codes, by the one oracle in `karui.kernels.quantize`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from karui.kernels.quantize.compat import Compat
from karui.kernels.quantize.elements import E2M1, E4M3, ELEMENTS
from karui.kernels.quantize.microscaling import Microscaled, quantize_mx
from karui.kernels.quantize.nvfp4 import Nvfp4, quantize_nvfp4, random_hadamard
from karui.kernels.quantize.scaled_float8 import ScaledFloat8, quantize_float8, tile_scales
from karui.lowprec.precision import Operand


@dataclass(frozen=True)
class High:
    """A matrix that stays in its own dtype."""

    value: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        return self.value


Coded = High | ScaledFloat8 | Microscaled | Nvfp4


def encode(
    x: torch.Tensor,
    operand: Operand,
    *,
    compat: Compat = "te",
    amax: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    noise: torch.Tensor | None = None,
) -> Coded:
    """Quantize `x` [M, K] along K.

    Args:
        amax: largest magnitude of `x` (fp32, one element) where the caller has it already.
        scale: the encode scale of delayed scaling; 0 (no history yet) takes the current one.
        noise: int32 bits for stochastic rounding, [M, K] (K padded to 16 under `hadamard`).
    """
    if operand.format == "high":
        return High(x)
    if operand.hadamard:
        x, amax = random_hadamard(x), None
    if operand.format in ("e4m3", "e5m2"):
        element = ELEMENTS[operand.format]
        if operand.delayed and scale is not None:
            current, _ = tile_scales(largest(x) if amax is None else amax, element, compat, False)
            return quantize_float8(x, element=element, compat=compat, scale=torch.where(scale > 0, scale, current))
        return quantize_float8(x, tile=operand.tile, element=element, compat=compat)
    if operand.format == "nvfp4":
        return quantize_nvfp4(x, tile=operand.tile, compat=compat, amax=amax, noise=noise)  # type: ignore[arg-type]
    # training rounds the scale up whatever the library's default: a clipped peak is a bias no rounding repairs
    return quantize_mx(x, element=E4M3 if operand.format == "mxfp8" else E2M1, mode="rceil", compat=compat, noise=noise)


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
    if isinstance(coded, High):
        return {"value": coded.value}
    if isinstance(coded, Microscaled):
        return {"codes": coded.codes, "exponent": coded.exponent}
    if isinstance(coded, Nvfp4):
        return {"codes": coded.codes, "scale": coded.scale, "global_scale": coded.global_scale}
    return {"codes": coded.codes, "scale": coded.scale}


def rebuild(like: Coded, tensors: dict[str, torch.Tensor]) -> Coded:
    """The inverse of `tensors_of`, with the kind and tile of `like`."""
    if isinstance(like, High):
        return High(tensors["value"])
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
