"""Rotary position embedding: the angles of every scaling that the supported models use, written out plainly.

A token at position m turns pair i of a head (elements i and i + D/2) by the angle m * f_i, where without scaling
f_i = theta^(-2i/D) (RoFormer, arXiv 2104.09864, eq. 15). Scalings change f_i:

    linear    f_i / s                                                        position interpolation, arXiv 2306.15595
    dynamic   theta grows with the length once it exceeds the trained one    NTK-aware, as transformers computes it
    llama3    long wavelengths / s, short ones kept, a ramp between          Llama 3.1
    yarn      the same with a ramp over dimensions, and cos/sin scaled       YaRN, arXiv 2309.00071, eq. 17-23
"""

from __future__ import annotations

import math

import torch

from karui.configs.errors import UnsupportedError, nearest
from karui.inference.models.config import ModelConfig

KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


def kind_of(config: ModelConfig) -> str:
    """The scaling's name. Raises `UnsupportedError` for one karui lacks."""
    kind = config.rope_scaling.get("rope_type") or config.rope_scaling.get("type") or "default"
    if kind not in KINDS:
        raise UnsupportedError(f"rope scaling {kind!r} is not supported; supported: {', '.join(KINDS)}.{nearest(kind, KINDS)}")
    return kind


def context_limit(config: ModelConfig) -> int:
    """Tokens the positions are meant for: dynamic scaling stretches the trained length by its factor."""
    if kind_of(config) == "dynamic":
        return int(config.max_context * config.rope_scaling["factor"])
    return config.max_context


def inverse_frequencies(config: ModelConfig) -> tuple[torch.Tensor, float]:
    """(f [head_dim/2] fp32, the factor on cos and sin). For `dynamic` these are the frequencies up to the trained length."""
    kind, rope = kind_of(config), config.rope_scaling
    f = _plain(config.rotary_dim or config.head_dim, config.rope_theta)
    if kind == "linear":
        return f / rope["factor"], 1.0
    if kind == "llama3":
        return _llama3(f, config), 1.0
    if kind == "yarn":
        return _yarn(f, config)
    return f, 1.0


def cos_sin(config: ModelConfig, positions: torch.Tensor,
            frequencies: tuple[torch.Tensor, float]) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each [T, head_dim/2] fp32, of `positions` [T]; `frequencies` comes from `inverse_frequencies`.

    `dynamic` takes each token's own position + 1 as the length its base is computed from, as a decoding step does. The
    result then does not depend on how a prompt is cut into chunks or on what a prefix cache holds; a prompt longer than
    the trained length, given to transformers in one piece, would use the whole prompt's length for all its tokens.
    """
    f, factor = frequencies
    if kind_of(config) == "dynamic":
        scale, length, dim = config.rope_scaling["factor"], config.max_context, config.rotary_dim or config.head_dim
        # on the device, for all rows: a CUDA graph records this too
        seen = (positions + 1).clamp_min(length).double()
        grown = config.rope_theta * (scale * seen / length - (scale - 1)) ** (dim / (dim - 2))
        f = 1.0 / grown.float()[:, None] ** (torch.arange(0, dim, 2, dtype=torch.float32, device=positions.device) / dim)
    angles = positions.to(torch.float32)[:, None] * f
    return angles.cos() * factor, angles.sin() * factor


def _plain(dim: int, theta: float) -> torch.Tensor:
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def _llama3(f: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    rope = config.rope_scaling
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    old = rope.get("original_max_position_embeddings") or config.max_context
    wavelength = 2 * math.pi / f
    smooth = (old / wavelength - low) / (high - low)
    ramp = (1 - smooth) * f / factor + smooth * f
    scaled = torch.where(wavelength > old / low, f / factor, ramp)
    return torch.where(wavelength < old / high, f, scaled)


def _yarn(f: torch.Tensor, config: ModelConfig) -> tuple[torch.Tensor, float]:
    rope, dim = config.rope_scaling, config.rotary_dim or config.head_dim
    old = rope.get("original_max_position_embeddings") or config.max_context
    scale = rope.get("factor") or config.max_context / old

    def mscale(weight: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    def dimension(rotations: float) -> float:
        return dim * math.log(old / (rotations * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low, high = dimension(rope.get("beta_fast") or 32), dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    factor = rope.get("attention_factor")
    if factor is None:
        both = rope.get("mscale") and rope.get("mscale_all_dim")
        factor = mscale(rope["mscale"]) / mscale(rope["mscale_all_dim"]) if both else mscale()
    return f / scale * ramp + f * (1 - ramp), float(factor)


def halves(x: torch.Tensor, rotated: int | None) -> torch.Tensor:
    """x [.., D] whose pairs are (2i, 2i + 1) with the pairs (i, i + R/2) of `rotate`, R the part that is rotated, None: all.
    Queries and keys so reordered have the same dot products, so nothing puts them back."""
    turned, rest = x[..., :rotated], x[..., x.shape[-1] if rotated is None else rotated:]
    return torch.cat([turned[..., 0::2], turned[..., 1::2], rest], -1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D] with cos, sin [T, 1, R/2]; pairs are (i, i + R/2), what lies behind R <= D stays."""
    if (rotated := 2 * cos.shape[-1]) < x.shape[-1]:
        return torch.cat([rotate(x[..., :rotated], cos, sin), x[..., rotated:]], -1)
    a, b = x.to(cos.dtype).chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
