"""Medusa-1 (Cai et al., arXiv 2401.10774, eq. 1): head i learns the token i + 2 ahead of the last hidden state; target frozen.

    loss = sum_i decay^i sum_t cross entropy(head_i(h_t), x_{t+2+i})

Rows count where the token to be guessed carries loss, and can be drafted.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from karui.distill.drafts.watched import Watched
from karui.distill.objectives import head_loss
from karui.distill.objectives.labels import Labels


class Heads(Protocol):
    """What the loss needs of the module; `karui.inference.speculative.medusa.MedusaHeads` is one."""

    heads: Any

    def state(self, i: int, hidden: torch.Tensor) -> torch.Tensor: ...

    def rows(self, i: int) -> torch.Tensor: ...


def medusa_loss(heads: Heads, *, hidden: torch.Tensor, targets: torch.Tensor, supervised: torch.Tensor, decay: float,
                ids: torch.Tensor | None = None, chunk: int = 128) -> tuple[torch.Tensor, list[tuple[float, int, int, int]]]:
    """One document: the weighted sum; each head's loss, its rows, those whose likeliest token is right, and all supervised rows.

    Args:
        hidden: [n, H] the target's last hidden states (after the final norm).
        targets: [n] the token after each position; supervised: [n] bool, where that token carries loss.
        ids: [D] ascending, the tokens that can be drafted; None: all. Others carry no loss, and cannot be right.
    """
    total = hidden.new_zeros((), dtype=torch.float32)
    figures: list[tuple[float, int, int, int]] = []
    index = targets if ids is None else torch.searchsorted(ids, targets).clamp(max=len(ids) - 1)
    usable = supervised if ids is None else supervised & (ids[index] == targets)
    for i in range(len(heads.heads)):
        rows = usable[1 + i :].nonzero().squeeze(-1)
        wanted = index[rows + 1 + i]
        watched = Watched(Labels(wanted), wanted)
        part = head_loss(heads.state(i, hidden[rows]), heads.rows(i), {"draft": (decay**i, watched)}, chunk)
        total = total + part.loss_sum
        figures.append((part.terms["draft"], len(rows), watched.right, int(supervised[1 + i :].sum())))
    return total, figures
