"""Plain torch rotation by angles; differentiated by autograd."""

from __future__ import annotations

import torch


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D] with cos, sin [T, D/2]."""
    exact = x if x.dtype == torch.float64 else x.float()
    a, b = exact.chunk(2, -1)
    cos, sin = cos.to(exact.dtype).unsqueeze(1), sin.to(exact.dtype).unsqueeze(1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
