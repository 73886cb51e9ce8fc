"""L1 between sorted probabilities (ULD, Boizard et al., arXiv 2402.12030, eq. 4): for vocabularies that share no ids.

The r-th likeliest token of the one is compared with the r-th likeliest of the other, which is the Wasserstein-1 distance under a
uniform transport cost. The smaller vocabulary is padded with zeros. dD/dS = sign(S - T) at each rank.
"""

from __future__ import annotations

import torch


def sorted_l1(log_t: torch.Tensor, log_s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `divergences.Divergence`; here the two may have different numbers of buckets."""
    s = log_s.exp()
    by_rank, order = s.sort(-1, descending=True)
    t = log_t.exp().sort(-1, descending=True).values
    common = min(s.shape[-1], t.shape[-1])
    difference = by_rank.clone()
    difference[:, :common] -= t[:, :common]
    value = difference.abs().sum(-1) + t[:, common:].sum(-1)
    pull = torch.empty_like(s).scatter_(-1, order, by_rank * difference.sign())
    return value, pull
