"""Beam search on top of the scheduler: beams are forks that share their blocks until they write to them.

Semantics are those of transformers' `generate(num_beams=B)` with early_stopping=False: of the 2B best continuations those that
end become hypotheses if they rank among the first B, the others make the next B beams; scores are sum(logprob) / length^penalty.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Hypothesis:
    """A finished beam: `tokens` generated, `score` normalized by length, whether an end token closed it."""

    score: float
    tokens: list[int]
    ended: bool


@dataclass(frozen=True)
class Branch:
    """The next beam: `parent` (index into the current beams), its new token, its summed logprob."""

    parent: int
    token: int
    total: float


class BeamSearch:
    """The bookkeeping of one request; token lists and floats only."""

    def __init__(self, beams: int, ends: frozenset[int], max_tokens: int, length_penalty: float) -> None:
        self.beams, self.ends, self.max_tokens, self.length_penalty = beams, ends, max_tokens, length_penalty
        self.hypotheses: list[Hypothesis] = []
        self.totals: list[float] = [0.0]
        self.length = 0

    def candidates(self, logits: np.ndarray) -> list[tuple[int, float]]:
        """The 2B likeliest (token, logprob) of one beam's logits [V], best first."""
        wide = logits.astype(np.float64)
        wide -= wide.max()
        wide -= np.log(np.exp(wide).sum())
        count = min(2 * self.beams, len(wide))
        ids = np.argpartition(-wide, count - 1)[:count]
        return [(int(i), float(wide[i])) for i in ids[np.lexsort((ids, -wide[ids]))]]

    def advance(self, beams: list[list[int]], candidates: list[list[tuple[int, float]]]) -> list[Branch]:
        """The next beams; empty when the search is over.

        Args:
            beams: generated tokens of each current beam; candidates: what `candidates` said for each.
        """
        every = [Branch(b, token, self.totals[b] + logprob) for b, found in enumerate(candidates) for token, logprob in found]
        ranked = sorted(every, key=lambda c: (-c.total, c.parent, c.token))[:2 * self.beams]
        self.length += 1
        branches: list[Branch] = []
        for rank, c in enumerate(ranked):
            if c.token in self.ends:
                if rank < self.beams:
                    self._finish([*beams[c.parent], c.token], c.total, True)
            elif len(branches) < self.beams:
                branches.append(c)
        if self.length >= self.max_tokens:
            for c in branches:
                self._finish([*beams[c.parent], c.token], c.total, False)
            branches = []
        elif len(self.hypotheses) == self.beams and branches:
            attainable = branches[0].total / self.length**self.length_penalty
            if self.hypotheses[-1].score >= attainable:
                branches = []
        self.totals = [c.total for c in branches]
        return branches

    def _finish(self, tokens: list[int], total: float, ended: bool) -> None:
        self.hypotheses.append(Hypothesis(total / len(tokens)**self.length_penalty, tokens, ended))
        self.hypotheses.sort(key=lambda h: -h.score)
        del self.hypotheses[self.beams:]
