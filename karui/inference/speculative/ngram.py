"""Prompt lookup: find the last place where the sequence's tail occurred before, and draft what followed it there.

Saxena, "Prompt Lookup Decoding" (2023). It costs no model and shines where the answer repeats its input: editing, summarising,
code, quoting. The index grows by one entry per n and token, so a proposal is a few dictionary look-ups at any context length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from karui.configs.errors import KaruiError
from karui.inference.speculative.base import NOTHING, Context, Draft, Observation
from karui.kernels.native.library import LOOKUP

ODDS = (0.25, 0.4, 0.6, 0.75, 0.85, 0.92)
"""How likely the token behind a match of 1, 2 to 3, 4 to 7, ... tokens is right, before anything was seen; ODDS of rounds.h."""


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
        self.odds = np.array([ODDS, [1.0] * len(ODDS)], dtype=np.float32) * 4
        self.native = {"method": LOOKUP, "nodes": k, "depth": k, "n_min": n_min, "n_max": n_max, "odds": self.odds.ctypes.data}
        self.reset()

    def reset(self) -> None:
        # Per n: the n-gram -> index just behind its latest occurrence that has a successor.
        self.behind: dict[tuple[int, ...], int] = {}
        self.indexed = 0
        self.history, self.written = np.empty(0, dtype=np.int32), 0

    def lend(self, tokens: Sequence[int], stream: Any, room: int) -> None:
        """The whole sequence, which native lookup scans, with room for more."""
        length = len(tokens)
        if length + room > len(self.history):
            self.history = np.resize(self.history, 2 * (length + room))
        self.history[self.written:length] = tokens[self.written:]
        stream.known, stream.tokens = length, self.history.ctypes.data

    def take_back(self, stream: Any) -> None:
        self.written = stream.length

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
