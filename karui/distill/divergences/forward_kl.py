"""Forward KL, KL(T || S) = sum T (log T - log S) (Hinton et al., arXiv 1503.02531): covers every mode of the teacher.

dD/dS = -T / S, so the pull is -T.
"""

from __future__ import annotations

import torch


def forward_kl(log_t: torch.Tensor, log_s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `divergences.Divergence`."""
    t = log_t.exp()
    value = (t * log_t.sub_(log_s)).sum(-1)
    return value, t.neg_()
