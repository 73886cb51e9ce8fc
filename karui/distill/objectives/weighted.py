"""Another term under a weight per row: a rollout's own weight, a mask, an advantage made elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from karui.distill.objectives import Term


@dataclass(eq=False)
class Weighted:
    """weights: [N], constants."""

    term: Term
    weights: torch.Tensor

    def __call__(self, start: int, stop: int, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        value, gradient = self.term(start, stop, logits)
        w = self.weights[start:stop].to(logits.dtype)
        return value * w, gradient.mul_(w.unsqueeze(1))
