"""A packed batch without the rows that change nothing: the loss and its gradients stay exactly what they were.

    the end of a document   rows after its last supervised position: no loss looks back at them (attention is causal)
    a shared beginning      a system prompt or few-shot preamble that every document of the row opens with: its states are the
                            same in each, so they are computed once and seen by all; its gradient is the sum over the documents

Both are exact because a row's state depends on earlier rows of its own document only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from karui.trainers.data import IGNORE

SHORTEST = 4  # a shared beginning of fewer rows is not worth its bookkeeping


@dataclass(frozen=True, kw_only=True, eq=False)
class Compact:
    """A ragged row; with `shared` the first document is a prefix of all others (see `document_attention`).

    Attributes:
        tokens, positions, targets: [T'], T' at most the batch's T.
        cu_seqlens: [documents + 1].
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    cu_seqlens: torch.Tensor
    targets: torch.Tensor
    shared: bool


def compact(tokens: torch.Tensor, positions: torch.Tensor, cu_seqlens: torch.Tensor, targets: torch.Tensor) -> Compact:
    """Leave out what has no part in the loss. A batch without any supervised row comes back as it is."""
    bounds = cu_seqlens.tolist()
    supervised = (targets != IGNORE).tolist()
    kept: list[tuple[int, int]] = []  # begin, and one past the last supervised row
    quiet: list[int] = []  # rows before the first supervised one
    for begin, end in zip(bounds, bounds[1:]):
        marked = [t for t in range(begin, end) if supervised[t]]
        if marked:
            kept.append((begin, marked[-1] + 1))
            quiet.append(marked[0] - begin)
    if not kept:
        return Compact(tokens=tokens, positions=positions, cu_seqlens=cu_seqlens, targets=targets, shared=False)
    # looked at on the host: from a GPU they are fetched once, not document by document
    prefix = _common(tokens.cpu(), positions.cpu(), kept, min(quiet)) if len(kept) > 1 else 0
    spans = [(begin + prefix, end) for begin, end in kept]
    if prefix:
        spans.insert(0, (kept[0][0], kept[0][0] + prefix))
    rows = torch.cat([torch.arange(a, b) for a, b in spans]).to(tokens.device)
    sizes = torch.tensor([0] + [b - a for a, b in spans], dtype=cu_seqlens.dtype)
    return Compact(tokens=tokens[rows], positions=positions[rows],
                   cu_seqlens=sizes.cumsum(0).to(cu_seqlens.device, cu_seqlens.dtype), targets=targets[rows], shared=prefix > 0)


def _common(tokens: torch.Tensor, positions: torch.Tensor, kept: list[tuple[int, int]], limit: int) -> int:
    """Rows that all documents begin with alike, at most `limit` (every document keeps its supervised rows)."""
    first = kept[0][0]
    for begin, _ in kept[1:]:
        same = (tokens[begin : begin + limit] == tokens[first : first + limit]) & (
            positions[begin : begin + limit] == positions[first : first + limit])
        limit = int(same.long().cumprod(0).sum())
    return limit if limit >= SHORTEST else 0
