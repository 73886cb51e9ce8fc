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
from karui.distill.drafts.watched import Watched
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
    wanted = usable.nonzero()
    # Roots before it draft nothing that carries loss: pass 0 needs their keys, later passes nothing.
    first = max(0, int(wanted[0]) - steps) if len(wanted) else n
    spans: list[range] = []
    for i in range(min(steps, n - 1)):
        spans.append(range(first if i else 0, n - 1 - i))
        if not len(spans[-1]):
            break
        roots = torch.arange(spans[-1].start, spans[-1].stop, device=aux.device)
        mask = torch.cat([_sees(roots, torch.arange(s.start, s.stop, device=aux.device), settled=j == 0)
                          for j, s in enumerate(spans)], 1)
        stream, past = layer(embeddings[roots + 1 + i], stream[roots - (spans[i - 1].start if i else 0)], roots + i, past, mask)
        at = usable[1 + i : n].nonzero().squeeze(-1) + 1 + i
        term: Term = Logits(DenseRows(hidden[at], head), divergence("forward_kl")) if soft else Labels(index[at])
        watched = Watched(term, index[at])
        drafted = layer.norm(stream[at - 1 - i - spans[-1].start])
        part = head_loss(drafted, layer.lm_head.weight, {"draft": (decay**i, watched)}, chunk)
        total = total + part.loss_sum
        figures.append((part.terms["draft"], len(at), watched.right))
    return Passes(total, figures)


def _sees(roots: torch.Tensor, keys: torch.Tensor, *, settled: bool) -> torch.Tensor:
    """[n, m] bool: of pass 0 a root sees the settled rows up to its own, of later passes its own chain."""
    return keys <= roots[:, None] if settled else keys == roots[:, None]


def acceptance_length(by_pass: Sequence[tuple[float, int, int]]) -> float:
    """Expected tokens per verification of a greedy chain, from each pass's share of right tokens: 1 + a0 + a0 a1 + ..."""
    length, chance = 1.0, 1.0
    for _, rows, right in by_pass:
        chance *= right / max(1, rows)
        length += chance
    return length
