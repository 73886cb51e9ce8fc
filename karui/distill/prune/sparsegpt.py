"""SparseGPT (Frantar & Alistarh, arXiv 2301.00774, algorithm 1): zero weights in one pass and let the others make up for it.

Per linear with inputs X: H = X X^T + damping, and Hinv its inverse's upper Cholesky factor. Columns go in blocks; a weight's
saliency is w^2 / Hinv_jj^2, the least salient are zeroed (a share of each block, or n of every m neighbours in a row), and the
error w / Hinv_jj is taken off the columns to the right.
"""

from __future__ import annotations

import torch

from karui.configs.errors import KaruiError

BLOCK = 128


@torch.no_grad()
def prune_matrix(weight: torch.Tensor, hessian: torch.Tensor, share: float, n: int = 0, m: int = 0,
                 damping: float = 0.01) -> torch.Tensor:
    """Prune a weight [out, in] in place, given X X^T [in, in]; returns the mask of kept weights, bool [out, in]."""
    w, h = weight.float().clone(), hessian.double().clone()
    if m and w.shape[1] % m:
        raise KaruiError(f"prune: a width of {w.shape[1]} does not divide into groups of {m}.")
    dead = h.diagonal() == 0
    h.diagonal()[dead] = 1
    w[:, dead] = 0
    h.diagonal().add_(damping * h.diagonal().mean())
    factor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(h)), upper=True).float()
    kept = torch.ones_like(w, dtype=torch.bool)
    for a in range(0, w.shape[1], BLOCK):
        b = min(a + BLOCK, w.shape[1])
        block, inner = w[:, a:b], factor[a:b, a:b]
        errors = torch.zeros_like(block)
        if not m:
            saliency = (block / inner.diagonal()).pow(2)
            count = round(share * saliency.numel())
            if count:
                flat = torch.ones(saliency.numel(), dtype=torch.bool, device=w.device)
                flat[saliency.flatten().argsort(stable=True)[:count]] = False
                kept[:, a:b] = flat.view_as(block)
        for j in range(b - a):
            if m and (a + j) % m == 0:
                group = (block[:, j : j + m] / inner.diagonal()[j : j + m]).pow(2)
                kept[:, a + j : a + j + m].scatter_(1, group.argsort(dim=1, stable=True)[:, :n], False)
            pruned = torch.where(kept[:, a + j], block[:, j], 0.0)
            error = (block[:, j] - pruned) / inner[j, j]
            block[:, j] = pruned
            block[:, j + 1 :] -= error.unsqueeze(1) * inner[j, j + 1 :]
            errors[:, j] = error
        w[:, b:] -= errors @ factor[a:b, b:]
    w.mul_(kept)
    weight.copy_(w.to(weight.dtype))
    return kept
