"""Lookahead decoding (Fu et al., arXiv 2402.02057): the model guesses for itself, no draft model and no repetition needed.

One forward carries two things. The *window*: N - 1 levels of W columns of Jacobi guesses; the token drawn behind the last level
completes one N-gram per column for the pool. The *guesses*: up to G N-grams from the pool that begin with the root token,
which the same forward verifies.

    row of level 0, column i     sees the root and level 0 up to column i
    row of level j, column i     sees what level j - 1, column i sees, and itself

so the window is itself a tree (level j hangs from level j - 1 of its column), every position is the depth in that tree, and
the ordinary tree mask is the mask of the paper's figure. Window rows are offered to the verifier too: a right guess counts.
"""

from __future__ import annotations

from collections import OrderedDict

from karui.configs.errors import KaruiError
from karui.inference.speculative.base import NOTHING, Context, Draft, Observation
from karui.inference.speculative.random import DRAFT, uniform


class NgramPool:
    """At most `size` continuations per first token, the least recently seen forgotten first."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.entries: dict[int, OrderedDict[tuple[int, ...], None]] = {}

    def add(self, first: int, rest: tuple[int, ...]) -> None:
        known = self.entries.setdefault(first, OrderedDict())
        known[rest] = None
        known.move_to_end(rest)
        if len(known) > self.size:
            known.popitem(last=False)

    def get(self, first: int) -> list[tuple[int, ...]]:
        """Continuations of `first`, the most recent first."""
        return list(reversed(self.entries.get(first, ())))


def window_parents(n: int, w: int) -> list[int]:
    """Parents of the window's nodes: level 0's columns 1 .. w-1 (column 0 is the root), then levels 1 .. n-2 of w columns."""
    parents = list(range(-1, w - 2))
    for level in range(1, n - 1):
        above = [-1, *range(w - 1)] if level == 1 else list(range(len(parents) - w, len(parents)))
        parents += above
    return parents


class LookaheadProposer:
    """N-grams of `n` tokens, a window of `w` columns, at most `g` guesses verified per step: (n - 1) * (w + g) rows at most."""

    needs_hidden = False
    aux_layers: tuple[int, ...] = ()

    def __init__(self, n: int = 5, w: int = 7, g: int = 7) -> None:
        if n < 3 or w < 2 or g < 1:
            raise KaruiError(f"lookahead needs n >= 3, w >= 2 and g >= 1; got n={n}, w={w}, g={g}.")
        self.n, self.w, self.g = n, w, g
        self.parents = window_parents(n, w)
        self.reset()

    def reset(self) -> None:
        self.pool = NgramPool(self.g)
        self.levels: list[list[int]] = []

    def propose(self, context: Context) -> Draft:
        """The window, then the pool's n-grams merged into a trie; nothing when the limit is below the window's size."""
        size = len(self.parents)
        if context.limit < size or context.depth < 1:
            return NOTHING
        if not self.levels:
            self._fill(context)
        root = context.tokens[-1]
        self.levels[0][0] = root
        tokens = [token for level in self.levels for token in level][1:]
        parents = list(self.parents)
        trie: dict[tuple[int, ...], int] = {}
        for rest in self.pool.get(root):
            for depth in range(1, min(len(rest), context.depth) + 1):
                prefix = rest[:depth]
                if prefix not in trie:
                    if len(tokens) >= context.limit:
                        break
                    trie[prefix] = len(tokens)
                    tokens.append(prefix[-1])
                    parents.append(trie[prefix[:-1]] if depth > 1 else -1)
        return Draft(tokens=tokens, parents=parents)

    def observe(self, seen: Observation) -> None:
        """Harvest one n-gram per column, roll the levels up, and slide the columns by what was accepted."""
        if seen.draft is None or not self.levels or seen.row_tokens is None or len(seen.draft) < len(self.parents):
            return
        last_rows = range(len(self.parents) + 1 - self.w, len(self.parents) + 1)
        fresh = [seen.row_tokens[row] for row in last_rows]
        for column in range(self.w):
            gram = [level[column] for level in self.levels] + [fresh[column]]
            self.pool.add(gram[0], tuple(gram[1:]))
        self.levels = [*self.levels[1:], fresh]
        # A column stands for a position relative to the root; the root moved by len(emitted), of which the roll covers one.
        slide = min(len(seen.emitted) - 1, self.w - 1)
        if slide > 0:
            self.levels = [level[slide:] + level[:slide] for level in self.levels]

    def _fill(self, context: Context) -> None:
        """Any tokens do as a start; those of the sequence are likelier than random ones, and the choice is reproducible."""
        length = len(context.tokens)

        def pick(level: int, column: int) -> int:
            return context.tokens[int(uniform(context.seed, level, DRAFT, column) * length)]

        self.levels = [[pick(level, column) for column in range(self.w)] for level in range(self.n - 1)]
