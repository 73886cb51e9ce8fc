"""Skewed KL and skewed reverse KL (DistiLLM, Ko et al., arXiv 2402.03898, eq. 2 and 4): bounded gradients by mixing.

    skewed_kl:          KL(T || alpha T + (1 - alpha) S),    dD/dS = -(1 - alpha) T / M
    skewed_reverse_kl:  KL(S || (1 - alpha) T + alpha S),    dD/dS = log(S / M) + 1 - alpha S / M

alpha = 0 are the plain divergences.
"""

from __future__ import annotations

import math

import torch


def skewed_kl(log_t: torch.Tensor, log_s: torch.Tensor, alpha: float) -> tuple[torch.Tensor, torch.Tensor]:
    """See `divergences.Divergence`."""
    log_m = _mix(log_t, log_s, alpha)
    value = (log_t.exp() * (log_t - log_m)).sum(-1)
    return value, (log_t + log_s - log_m).exp_().mul_(alpha - 1)


def skewed_reverse_kl(log_t: torch.Tensor, log_s: torch.Tensor, alpha: float) -> tuple[torch.Tensor, torch.Tensor]:
    """See `divergences.Divergence`."""
    difference = log_s - _mix(log_s, log_t, alpha)
    s = log_s.exp()
    value = (s * difference).sum(-1)
    if alpha:  # difference <= -log alpha; at alpha = 0 it has no bound and the term is a constant 0
        difference = difference - alpha * difference.exp()
    return value, s * difference


def _mix(log_a: torch.Tensor, log_b: torch.Tensor, alpha: float) -> torch.Tensor:
    """log(alpha A + (1 - alpha) B), also at the ends."""
    if alpha in (0.0, 1.0):
        return log_a if alpha else log_b
    return torch.logaddexp(log_a + math.log(alpha), log_b + math.log1p(-alpha))
