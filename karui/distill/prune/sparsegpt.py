"""SparseGPT (Frantar & Alistarh, arXiv 2301.00774, algorithm 1): zero weights in one pass and let the others make up for it.

Per linear with inputs X: H = X X^T + damping, and Hinv its inverse's upper Cholesky factor. Columns go in blocks; a weight's
saliency is w^2 / Hinv_jj^2, the least salient are zeroed (a share of each block, or n of every m neighbours in a row), and the
error w / Hinv_jj is taken off the columns to the right.
"""

from __future__ import annotations

import torch

from karui.configs.errors import KaruiError
from karui.configs.steps.prune import BLOCK


@torch.no_grad()
def prune_matrix(weight: torch.Tensor, hessian: torch.Tensor, share: float, n: int = 0, m: int = 0,
                 damping: float = 0.01) -> torch.Tensor:
    """Prune a weight [out, in] in place, given X X^T [in, in]; returns the mask of kept weights, bool [out, in]."""
    w, h = weight.float().T.contiguous(), hessian.double().clone()  # [in, out]: a column of the weight is one contiguous row
    width = len(w)
    if m and width % m:
        raise KaruiError(f"prune: a width of {width} does not divide into groups of {m}.")
    dead = h.diagonal() == 0
    h.diagonal()[dead] = 1
    w[dead] = 0
    h.diagonal().add_(damping * h.diagonal().mean())
    factor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(h)), upper=True).float()
    kept = torch.ones_like(w, dtype=torch.bool)
    for a in range(0, width, BLOCK):
        b = min(a + BLOCK, width)
        block, inner = w[a:b], factor[a:b, a:b]
        prices = inner.diagonal().unsqueeze(1)
        errors = torch.zeros_like(block)
        if not m and (count := round(share * block.numel())):
            least = (block / prices).square().flatten().topk(count, largest=False, sorted=False).indices
            kept[a:b] = torch.ones(block.numel(), dtype=torch.bool, device=w.device).index_fill_(0, least, False).view_as(block)
        for j in range(b - a):
            if m and (a + j) % m == 0:
                group = (block[j : j + m] / prices[j : j + m]).square()
                kept[a + j : a + j + m].scatter_(0, group.argsort(dim=0, stable=True)[:n], False)
            pruned = torch.where(kept[a + j], block[j], 0.0)
            errors[j] = (block[j] - pruned) / inner[j, j]
            block[j] = pruned
            block[j + 1 :].addr_(inner[j, j + 1 :], errors[j], alpha=-1.0)
        w[b:].addmm_(factor[a:b, b:].T, errors, alpha=-1.0)
    w.mul_(kept)
    weight.copy_(w.T.to(weight.dtype))
    return kept.T.contiguous()
