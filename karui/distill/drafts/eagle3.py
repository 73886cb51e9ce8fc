"""Training-time test of an EAGLE-3 layer (Li et al., arXiv 2503.01840, section 3.2): it learns on its own outputs.

Pass 0 is what inference does with settled rows: row t reads the target's streams g_t and the embedding of x_{t+1}, sees the rows
before it, and predicts x_{t+2}. Pass i is the i-th drafted token behind root t: it reads its own output a of pass i - 1,
undetached, in place of g, and the embedding of x_{t+1+i}; it sees the true rows up to t and its own chain. So

    loss = sum_i decay^i sum_t KL(target's distribution of x_{t+2+i} || the layer's)

over the draft vocabulary, the target's distribution renormalised there. Rows whose most likely target token is outside the draft
vocabulary are left out, as nothing the layer could draft would be accepted.

Legend: n tokens of one document, H hidden size, D draft vocabulary, L layers that are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from karui.distill.divergences import divergence
from karui.distill.objectives import Term, head_loss
from karui.distill.objectives.labels import Labels
from karui.distill.objectives.logits import Logits
from karui.distill.teacher_rows import DenseRows

KV = tuple[torch.Tensor, torch.Tensor]


class DraftLayer(Protocol):
    """What the loss needs of the module; `karui.inference.speculative.eagle3.Eagle3` is one."""

    norm: Any
    lm_head: Any

    def __call__(self, embedding: torch.Tensor, stream: torch.Tensor, positions: torch.Tensor, past: KV,
                 mask: torch.Tensor) -> tuple[torch.Tensor, KV]: ...

    def fuse(self, aux: torch.Tensor) -> torch.Tensor: ...

    def empty_kv(self) -> KV: ...


@dataclass
class Passes:
    """loss_sum: differentiable; by_pass: (unweighted loss, rows, rows whose likeliest draft is the target's)."""

    loss_sum: torch.Tensor
    by_pass: list[tuple[float, int, int]]


def eagle3_loss(
    layer: DraftLayer, *, aux: torch.Tensor, embeddings: torch.Tensor, hidden: torch.Tensor, head: torch.Tensor,
    ids: torch.Tensor, best: torch.Tensor, supervised: torch.Tensor, steps: int, decay: float, soft: bool = True,
    chunk: int = 128,
) -> Passes:
    """One document.

    Args:
        aux: [n, L * H] the target's streams; embeddings: [n, H] of its tokens; hidden: [n, H] its last hidden states.
        head: [D, H] rows of the target's head for the draft vocabulary; ids: [D] their target ids, ascending.
        best: [n] the target's likeliest next token at each position.
        supervised: [n] bool, positions whose next token carries loss.
        soft: the target's distribution; False: its likeliest token.
    """
    n = len(aux)
    total = aux.new_zeros((), dtype=torch.float32)
    figures: list[tuple[float, int, int]] = []
    index = torch.searchsorted(ids, best).clamp(max=len(ids) - 1)
    usable = supervised & (ids[index] == best)
    stream, past = layer.fuse(aux), layer.empty_kv()
    past = (past[0].to(aux.device), past[1].to(aux.device))
    sizes: list[int] = []
    for i in range(min(steps, n - 1)):
        size = n - 1 - i
        blocks = [torch.ones(size, s, dtype=torch.bool).tril() if j == 0 else torch.eye(size, s, dtype=torch.bool)
                  for j, s in enumerate([*sizes, size])]
        mask = torch.cat(blocks, 1).to(aux.device)
        positions = torch.arange(size, device=aux.device) + i
        stream, past = layer(embeddings[1 + i : n], stream[:size], positions, past, mask)
        sizes.append(size)
        rows = usable[1 + i : n].nonzero().squeeze(-1)
        at = rows + 1 + i
        term: Term = Logits(DenseRows(hidden[at], head), divergence("forward_kl")) if soft else Labels(index[at])
        watched = _Watched(term, index[at])
        part = head_loss(layer.norm(stream[rows]), layer.lm_head.weight, {"draft": (decay**i, watched)}, chunk)
        total = total + part.loss_sum
        figures.append((part.terms["draft"], len(rows), watched.right))
    return Passes(total, figures)


def acceptance_length(by_pass: Sequence[tuple[float, int, int]]) -> float:
    """Expected tokens per verification of a greedy chain, from each pass's share of right tokens: 1 + a0 + a0 a1 + ..."""
    length, chance = 1.0, 1.0
    for _, rows, right in by_pass:
        chance *= right / max(1, rows)
        length += chance
    return length


class _Watched:
    """A term, counting rows whose likeliest token is the wanted one."""

    def __init__(self, term: Term, wanted: torch.Tensor) -> None:
        self.term, self.wanted, self.right = term, wanted, 0

    def __call__(self, start: int, stop: int, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.right += int((logits.argmax(-1) == self.wanted[start:stop]).sum())
        return self.term(start, stop, logits)
