"""Plain torch: all logits at once, log-softmax, sum. Differentiable on any device; what the chunked form is tested against."""

from __future__ import annotations

import torch


def linear_cross_entropy(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Sum of -log softmax(hidden @ weight.T)[target]; shapes as in `karui.kernels.cross_entropy`, result fp32 (fp64 for fp64)."""
    logits = hidden @ weight.T
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
