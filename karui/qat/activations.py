"""Fake quantization of activations: dynamic per token or static per tensor, int8 symmetric, and hooks that put it before linears.

    dynamic   scale = absmax of the token's row / 127, fp32, found at run time (nothing is stored)
    static    scale = absmax over the calibration rows / 127, one number per linear

Straight through: the gradient of rounding is the identity inside the range (clipped values get none).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from karui.configs.errors import KaruiError

LEVELS = 127.0


def fake_quantize_tokens(x: torch.Tensor, bits: int = 8, outlier: float = 0.0) -> torch.Tensor:
    """x [..., in] rounded to symmetric int codes with one scale per row, and back, in x's dtype; computed in fp32.

    outlier > 0: columns with any value beyond it stay as they are (LLM.int8()).
    """
    high = float(2 ** (bits - 1) - 1)
    value = x.detach().float()
    whole = (value.abs() > outlier).flatten(0, -2).any(0) if outlier > 0 else None
    if whole is not None:
        value = value.masked_fill(whole, 0.0)
    scale = value.abs().amax(-1, keepdim=True) / high
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    rounded = (torch.round(value / scale).clamp_(-high, high) * scale).to(x.dtype)
    if whole is not None:
        rounded = torch.where(whole, x, rounded)
    return x + (rounded - x).detach()


def fake_quantize_static(x: torch.Tensor, scale: float) -> torch.Tensor:
    """x rounded to int8 codes of one given scale, saturating; in x's dtype."""
    clipped = x.clamp(-LEVELS * scale, LEVELS * scale)
    rounded = (torch.round(clipped.detach().float() / scale) * scale).to(x.dtype)
    return clipped + (rounded - clipped).detach()


def attach(model: nn.Module, names: Mapping[str, float | None], outlier: float = 0.0) -> list[Any]:
    """Quantize the inputs of the named weights' linears from now on: None dynamic, a number static. Returns the hooks to remove.

    outlier: see `fake_quantize_tokens`; of dynamic ones.

    Raises:
        KaruiError: a name that is no linear of the model.
    """
    linears = {f"{n}.weight": m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    unknown = [n for n in names if n not in linears]
    if unknown:
        raise KaruiError(f"{unknown[0]} is not the weight of a linear of this model, so its input cannot be quantized.")

    def hook(scale: float | None) -> Any:
        def before(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            x = fake_quantize_tokens(args[0], outlier=outlier) if scale is None else fake_quantize_static(args[0], scale)
            return (x, *args[1:])

        return before

    return [linears[n].register_forward_pre_hook(hook(s)) for n, s in names.items()]
