"""Generalised Jensen-Shannon divergence (GKD, Agarwal et al., arXiv 2306.13649, eq. 1).

With M = (1 - beta) S + beta T:  D = beta KL(T || M) + (1 - beta) KL(S || M).

By definition beta = 0 is KL(T || S) and beta = 1 is KL(S || T): the formula itself is 0 at both ends. The derivative of every
other term cancels: dD/dS = (1 - beta) log(S / M).
"""

from __future__ import annotations

import math

import torch

from karui.distill.divergences.forward_kl import forward_kl
from karui.distill.divergences.reverse_kl import reverse_kl


def jsd(log_t: torch.Tensor, log_s: torch.Tensor, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """See `divergences.Divergence`."""
    if beta == 0:
        return forward_kl(log_t, log_s)
    if beta == 1:
        return reverse_kl(log_t, log_s)
    log_m = torch.logaddexp(log_s + math.log1p(-beta), log_t + math.log(beta))
    toward_teacher = (log_t.exp() * (log_t - log_m)).sum(-1)
    pull = log_s.exp().mul_(log_s - log_m).mul_(1 - beta)
    return beta * toward_teacher + pull.sum(-1), pull
