"""Plain torch SwiGLU (arXiv 2002.05202, eq. 6)."""

from __future__ import annotations

import torch


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up."""
    return torch.nn.functional.silu(gate) * up
