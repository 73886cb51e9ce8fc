"""Whole [T, T] matrices of scores under one mask, differentiable by autograd; quadratic in the row; for tests."""

from __future__ import annotations

import torch


def sparse_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, iq: torch.Tensor, ik: torch.Tensor, iw: torch.Tensor,
                     cu_seqlens: torch.Tensor, scaling: float, weight: torch.Tensor, top: int | None,
                     ) -> tuple[torch.Tensor, torch.Tensor]:
    """(output [1, T, A, Dv], loss); shapes as in `karui.kernels.sparse_attention`; `top` None: attention over all keys."""
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).to(torch.int64)
    document = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    at = torch.arange(len(document))
    seen = (document[:, None] == document) & (at <= at[:, None])
    index = torch.einsum("th,ths->ts", iw, torch.einsum("thd,sd->ths", iq, ik).relu() * ik.shape[-1] ** -0.5)
    if top is not None:
        for t in range(len(at)):
            keys = seen[t].nonzero()[:, 0]
            best = keys[index[t, keys].argsort(descending=True)[:top]]
            seen[t] = False
            seen[t, best] = True
    shares = (q @ k.mT * scaling).masked_fill(~seen, float("-inf")).softmax(-1)
    wanted = shares[0].detach().sum(0)
    wanted = wanted / wanted.sum(-1, keepdim=True)
    logs = index.masked_fill(~seen, float("-inf")).log_softmax(-1)
    rows = torch.stack([(wanted[t, m] * (wanted[t, m].log() - logs[t, m])).sum() for t, m in enumerate(seen)])
    return (shares @ v).transpose(1, 2), (rows * weight).sum()
