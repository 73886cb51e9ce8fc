"""Plain torch RMSNorm (arXiv 1910.07467), as transformers' llama writes it."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension, statistics in at least fp32."""
    exact = x if x.dtype == torch.float64 else x.float()
    normed = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)
