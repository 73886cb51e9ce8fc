"""Wanda (Sun et al., arXiv 2306.11695, eq. 1) and plain magnitude: zero weights by a score, leave the others as they are.

    wanda      S_ij = |W_ij| * ||X_j||_2, compared within an output row: each row loses the same share (section 3)
    magnitude  S_ij = |W_ij|, compared within the whole matrix (Han et al., arXiv 1506.02626)

Of n:m both zero the n least of every m neighbours in a row.
"""

from __future__ import annotations

import torch

from karui.configs.errors import KaruiError


@torch.no_grad()
def prune_matrix(weight: torch.Tensor, norms: torch.Tensor | None, share: float, n: int = 0, m: int = 0) -> torch.Tensor:
    """Prune a weight [out, in] in place; returns the mask of kept weights, bool [out, in].

    Args:
        norms: the L2 norm of each input over all tokens, [in], or None for magnitude.
        share: of zeros; n, m: n zeros of every m neighbours in place of a free choice.
    """
    score = weight.float().abs()
    if norms is not None:
        score = score * norms
    if m:
        if score.shape[1] % m:
            raise KaruiError(f"prune: a width of {score.shape[1]} does not divide into groups of {m}.")
        groups, count = score.view(len(score), -1, m), n
    else:
        groups = score if norms is not None else score.view(1, -1)
        count = round(share * groups.shape[-1])
    least = groups.argsort(dim=-1, stable=True)[..., :count]
    kept = torch.ones_like(groups, dtype=torch.bool).scatter_(-1, least, False).view_as(weight)
    weight.mul_(kept)
    return kept
