"""Medusa-1 (Cai et al., arXiv 2401.10774, eq. 1): head i learns the token i + 2 ahead of the last hidden state; target frozen.

    loss = sum_i decay^i sum_t cross entropy(head_i(h_t), x_{t+2+i})

Rows count where the token to be guessed carries loss.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from karui.distill.objectives import head_loss
from karui.distill.objectives.labels import Labels


class Heads(Protocol):
    """`karui.inference.speculative.medusa.MedusaHeads` is one: head i is (residual block, vocabulary projection)."""

    heads: Any


def medusa_loss(heads: Heads, *, hidden: torch.Tensor, targets: torch.Tensor, supervised: torch.Tensor, decay: float,
                chunk: int = 128) -> tuple[torch.Tensor, list[tuple[float, int]]]:
    """One document: the weighted sum, and each head's (loss, rows).

    Args:
        hidden: [n, H] the target's last hidden states (after the final norm).
        targets: [n] the token after each position; supervised: [n] bool, where that token carries loss.
    """
    total = hidden.new_zeros((), dtype=torch.float32)
    figures: list[tuple[float, int]] = []
    for i, head in enumerate(heads.heads):
        rows = supervised[1 + i :].nonzero().squeeze(-1)
        part = head_loss(head[0](hidden[rows]), head[1].weight, {"draft": (decay**i, Labels(targets[rows + 1 + i]))}, chunk)
        total = total + part.loss_sum
        figures.append((part.terms["draft"], len(rows)))
    return total, figures
