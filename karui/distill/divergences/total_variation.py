"""Total variation, sum |T - S| / 2 (Wen et al., f-divergence distillation, arXiv 2307.15190): symmetric, bounded by 1.

dD/dS = sign(S - T) / 2; where the two are equal the subgradient 0 is taken.
"""

from __future__ import annotations

import torch


def total_variation(log_t: torch.Tensor, log_s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `divergences.Divergence`."""
    s = log_s.exp()
    difference = s - log_t.exp_()
    return difference.abs().sum(-1) / 2, s.mul_(difference.sign_()).div_(2)
