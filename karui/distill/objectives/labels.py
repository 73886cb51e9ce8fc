"""Hard targets: cross entropy of given tokens, be they the data's or a teacher's own text (sequence-level distillation,
Kim & Rush, arXiv 1606.07947). d loss / d logits = softmax - one-hot."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(eq=False)
class Labels:
    """targets: [N] int64, inside the vocabulary."""

    targets: torch.Tensor

    def __call__(self, start: int, stop: int, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        log_p = logits.log_softmax(-1)
        target = self.targets[start:stop].unsqueeze(1)
        value = -log_p.gather(1, target).squeeze(1)
        return value, log_p.exp_().scatter_add_(1, target, torch.full_like(target, -1, dtype=log_p.dtype))
