"""Reverse KL, KL(S || T) = sum S (log S - log T) (MiniLLM, arXiv 2306.08543): keeps to the teacher's main modes.

dD/dS = log S - log T + 1; a constant does not pass a softmax, so the pull is S (log S - log T).
"""

from __future__ import annotations

import torch


def reverse_kl(log_t: torch.Tensor, log_s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `divergences.Divergence`."""
    pull = log_t.neg_().add_(log_s).mul_(log_s.exp())
    return pull.sum(-1), pull
