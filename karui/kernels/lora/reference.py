"""Plain torch: base product plus scaled low-rank product, differentiated by autograd."""

from __future__ import annotations

import torch


def lora_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor, scaling: float
) -> torch.Tensor:
    """y = x W^T + bias + s (x A^T) B^T; shapes as in `karui.kernels.lora`."""
    return torch.nn.functional.linear(x, weight, bias) + scaling * ((x @ a.T) @ b.T)
