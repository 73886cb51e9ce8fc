"""Prompt lookup: find the last place where the sequence's tail occurred before, and draft what followed it there.

Saxena, "Prompt Lookup Decoding" (2023). It costs no model and shines where the answer repeats its input: editing, summarising,
code, quoting. The index grows by one entry per n and token, so a proposal is a few dictionary look-ups at any context length.
"""

from __future__ import annotations

from collections.abc import Sequence

from karui.configs.errors import KaruiError
from karui.inference.speculative.base import NOTHING, Context, Draft, Observation


class NgramProposer:
    """Longest match first, from `n_max` down to `n_min` tokens; the most recent occurrence wins.

    A match near the end of the sequence has fewer than `k` tokens behind it; the draft then continues with its own tokens,
    which is the periodic continuation of a repeating text.
    """

    needs_hidden = False
    aux_layers: tuple[int, ...] = ()

    def __init__(self, k: int, n_max: int = 4, n_min: int = 2) -> None:
        if k < 1 or not 1 <= n_min <= n_max:
            raise KaruiError(f"prompt lookup needs k >= 1 and 1 <= n_min <= n_max; got k={k}, n_min={n_min}, n_max={n_max}.")
        self.k, self.n_max, self.n_min = k, n_max, n_min
        self.reset()

    def reset(self) -> None:
        # Per n: the n-gram -> index just behind its latest occurrence that has a successor.
        self.behind: dict[tuple[int, ...], int] = {}
        self.indexed = 0

    def observe(self, seen: Observation) -> None:
        """Nothing to learn: the sequence itself is the index."""

    def propose(self, context: Context) -> Draft:
        tokens, length = context.tokens, len(context.tokens)
        self._index(tokens)
        count = min(self.k, context.limit, context.depth)
        if count < 1:
            return NOTHING
        for n in range(min(self.n_max, length), self.n_min - 1, -1):
            start = self.behind.get(tuple(tokens[length - n:length]))
            if start is not None:
                draft = list(tokens[start:start + count])
                period = length - start
                while len(draft) < count:
                    draft.append(draft[len(draft) - period])
                return Draft(tokens=draft)
        return NOTHING

    def _index(self, tokens: Sequence[int]) -> None:
        """Enter every n-gram that ends before the last token."""
        if self.indexed > len(tokens):
            self.reset()
        for end in range(max(self.indexed, 1), len(tokens)):
            for n in range(self.n_min, min(self.n_max, end) + 1):
                self.behind[tuple(tokens[end - n:end])] = end
        self.indexed = len(tokens)
