"""Losses of the student's logits as *terms*: several share one pass over the logits, each under its own weight.

A term is called with a chunk of logits and returns each row's loss with its gradient. `combined` is what
`kernels.linear_loss` takes. Terms return sums over rows; whoever holds the whole step divides (docs/design.md, rule 3), so the
gradient is the same for every chunk and micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from karui.kernels.linear_loss import linear_loss


class Term(Protocol):
    """One loss of logits."""

    def __call__(self, start: int, stop: int, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows start..stop: logits [c, V] (not to be changed) -> losses [c], d loss / d logits [c, V]."""


@dataclass
class Sums:
    """What a pass over the rows gave.

    Attributes:
        loss_sum: differentiable, weights applied.
        count: rows.
        terms: each term's own sum, unweighted, detached.
    """

    loss_sum: torch.Tensor
    count: int
    terms: dict[str, float] = field(default_factory=dict)


def head_loss(
    hidden: torch.Tensor, weight: torch.Tensor, terms: Mapping[str, tuple[float, Term]], chunk: int = 128,
    softcap: float | None = None,
) -> Sums:
    """The weighted sum of terms over the rows of `hidden @ weight.T`, whose logits may have a soft cap.

    Args:
        hidden: [N, H] at supervised positions only; weight: [V, H].
        terms: name -> (weight, term); a term of weight 0 is left out.
    """
    active = [(name, w, term) for name, (w, term) in terms.items() if w]
    totals = {name: torch.zeros((), dtype=torch.float64, device=hidden.device) for name, _, _ in active}

    def rows(start: int, stop: int, logits: torch.Tensor) -> torch.Tensor:
        loss = torch.zeros(stop - start, dtype=logits.dtype, device=logits.device)
        pull: torch.Tensor | None = None
        for name, w, term in active:
            value, gradient = term(start, stop, logits)
            totals[name] += value.sum(dtype=torch.float64)
            loss.add_(value, alpha=w)
            pull = gradient.mul_(w) if pull is None else pull.add_(gradient, alpha=w)
        if pull is None:
            logits.zero_()
        else:
            logits.copy_(pull)
        return loss

    loss_sum, _ = linear_loss(hidden, weight, rows, chunk, softcap)
    return Sums(loss_sum, hidden.shape[0], {name: float(value) for name, value in totals.items()})
