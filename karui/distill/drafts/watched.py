"""A loss term that counts how often the likeliest token is the wanted one: what a draft's training reports."""

from __future__ import annotations

import torch

from karui.distill.objectives import Term


class Watched:
    """`term`, and `right`: rows so far whose likeliest token is the wanted one [N]."""

    def __init__(self, term: Term, wanted: torch.Tensor) -> None:
        self.term, self.wanted, self.right = term, wanted, 0

    def __call__(self, start: int, stop: int, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.right += int((logits.argmax(-1) == self.wanted[start:stop]).sum())
        return self.term(start, stop, logits)
