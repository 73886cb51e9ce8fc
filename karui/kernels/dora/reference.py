"""DoRA as its paper writes it, by autograd: form W + s B A, take its row norms, rescale."""

from __future__ import annotations

import torch


def dora_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
    magnitude: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """y [..., out] = x (m (W + s B A) / ||W + s B A||)^T + bias, each row's norm detached (arXiv 2402.09353, eq. 5, 11)."""
    merged = weight + scaling * (b @ a)
    norm = merged.norm(dim=1).detach()
    return torch.nn.functional.linear(x, (magnitude / norm).unsqueeze(1) * merged, bias)
