"""Groups of layers whose keys have the same life: layers with a window give blocks back that no later query sees.

A sequence has a table of blocks for each group, and all groups take their blocks out of one pool, as vLLM's hybrid KV cache
manager does: a block is `size` layers of `block_size` tokens, whichever group holds it. A model whose layers all have one window
(Mistral 7B v0.1, Phi-3) is one group; one of Gemma 2 (26 layers, every second with a window) is two of 13, one of Gemma 3 (26
layers, 4 without a window) seven of 4, the last of them not full.

A query at position p sees the keys p - window + 1 to p. Behind `computed` tokens the next query is at that position, and none
comes before it again: a rejected draft was never computed. So block i is dead when its last key, (i + 1) * block_size - 1, is at
most computed - window. The last full block is kept in any case: tables have the number of the first that is not dead in place of
dead ones, so that what a kernel reads there unasked is the sequence's own and complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MOST = 8
"""Groups at most: each is a table more for every sequence and step."""


def num_dead(window: int | None, computed: int, block_size: int) -> int:
    """Leading blocks that no query behind `computed` tokens sees."""
    if window is None:
        return 0
    return max(0, min((computed - window + 1) // block_size, computed // block_size - 1))


def most_blocks(window: int | None, tokens: int, chunk: int, block_size: int) -> int:
    """Blocks that a sequence holds at once, at most, while `tokens` tokens are computed, `chunk` in a step at most."""
    whole = -(-tokens // block_size)
    if window is None:
        return whole
    return min(whole, max(-(-(window - 1 + chunk) // block_size) + 1, -(-chunk // block_size) + 2))


@dataclass(frozen=True)
class LayerGroups:
    """windows: of each group, None: it keeps all keys. places: (group, number within it) of each layer that caches keys. size:
    layers of a group, and thus of a block."""

    windows: tuple[int | None, ...]
    places: tuple[tuple[int, int], ...]
    size: int

    def __len__(self) -> int:
        return len(self.windows)

    def layers(self, group: int) -> list[int]:
        """The layers of a group, in order."""
        return [layer for layer, (g, _) in enumerate(self.places) if g == group]

    def most_blocks(self, tokens: int, chunk: int, block_size: int) -> int:
        """`most_blocks` of all groups together."""
        return sum(most_blocks(window, tokens, chunk, block_size) for window in self.windows)

    def capacity(self, num_blocks: int, chunk: int, block_size: int, wanted: int) -> int:
        """Tokens that one sequence can have, `wanted` at most."""
        low, high = 0, wanted
        while low < high:
            middle = (low + high + 1) // 2
            if self.most_blocks(middle, chunk, block_size) <= num_blocks:
                low = middle
            else:
                high = middle - 1
        return low


def one_group(num_layers: int, window: int | None = None) -> LayerGroups:
    """All layers together."""
    return LayerGroups((window,), tuple((0, i) for i in range(num_layers)), num_layers)


def groups_of(windows: Sequence[int | None], max_context: int, most: int = MOST) -> LayerGroups:
    """Groups of layers with these windows; a window of `max_context` or more is none.

    Groups are of one size, so the last of a kind may not be full; of the sizes that make `most` groups or fewer, the one that
    wastes least is taken, the largest of equals. Where layers with a window are so few that a long context would not be held in
    fewer bytes, or kinds so many, all layers keep all keys.
    """
    kept = [None if w is not None and w >= max_context else w for w in windows]
    kinds = {w: [i for i, own in enumerate(kept) if own == w] for w in sorted({*kept}, key=lambda w: w or 0)}
    if len(kinds) <= 1:
        return one_group(len(kept), next(iter(kinds), None))
    if len(kinds) > most:
        return one_group(len(kept))

    def count(size: int) -> int:
        return sum(-(-len(layers) // size) for layers in kinds.values())

    size = min((s for s in range(1, len(kept) + 1) if count(s) <= most), key=lambda s: (count(s) * s, -s))
    if -(-len(kinds.get(None, ())) // size) * size >= len(kept):
        return one_group(len(kept))
    found: list[int | None] = []
    places = [(0, 0)] * len(kept)
    for window, layers in kinds.items():
        for at, layer in enumerate(layers):
            places[layer] = len(found) + at // size, at % size
        found += [window] * -(-len(layers) // size)
    return LayerGroups(tuple(found), tuple(places), size)
