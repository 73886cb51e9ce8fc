"""The block pool of paged attention (vLLM, Kwon et al., arXiv 2309.06180, section 4): reference counts, and a free list that
forgets cached prefixes only when their block is needed (lazy LRU)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from karui.inference.cache.groups import num_dead
from karui.inference.cache.prefix import PrefixIndex

DEAD = -1
"""In place of a block that no later query sees."""


def group_name(name: Any, group: int) -> Any:
    """What the index calls the block that a group of layers has under a prefix's name."""
    return (group, name) if group else name


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens. A free block keeps its cached contents until it is handed out again.

    `num_evicted` counts cached blocks that were overwritten. `settled`: blocks that became full of verified tokens, or nobody's,
    since it was last cleared: what a runner keeps of unfinished blocks besides can go. `on_forget` is told the name of each block
    that is not findable any more.
    """

    def __init__(self, num_blocks: int, block_size: int, index: PrefixIndex) -> None:
        self.num_blocks, self.block_size, self.index = num_blocks, block_size, index
        self.references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # next to be handed out first
        self._cached: set[int] = set()
        self.num_evicted = 0
        self.on_forget: Callable[[Any], None] | None = None
        self.settled: set[int] = set()

    @property
    def num_free(self) -> int:
        """Blocks nobody holds, cached ones included."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks whose contents can be found by prefix."""
        return len(self._cached)

    def take(self) -> int:
        """A block to write to, held once. The caller has checked `num_free`."""
        block, _ = self._free.popitem(last=False)
        if block in self._cached:
            self.forget(block)
            self.num_evicted += 1
        self.references[block] = 1
        self.settled.discard(block)
        return block

    def share(self, block: int) -> None:
        """One more holder; a free block leaves the free list."""
        if self.references[block] == 0:
            del self._free[block]
        self.references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One holder less for each. Later blocks of a sequence are reused first, so that what stays cached is its beginning."""
        for block in reversed(blocks):
            self.references[block] -= 1
            assert self.references[block] >= 0, f"block {block} released more often than held"
            if self.references[block] == 0:
                self._free[block] = None
                self.settled.add(block)
                if block not in self._cached:
                    self._free.move_to_end(block, last=False)

    def enter(self, name: Any, block: int) -> None:
        """Make a full block's contents findable."""
        self.settled.add(block)
        if block not in self._cached and self.index.enter(name, block):
            self._cached.add(block)

    def forget(self, block: int) -> None:
        name = self.index.drop(block)
        self._cached.discard(block)
        if self.on_forget is not None and name is not None:
            self.on_forget(name)

    def forget_all(self) -> None:
        """Empty the prefix index (new weights); blocks in use stay in use."""
        for block in list(self._cached):
            self.forget(block)

    def match(self, tokens: Sequence[int], namespace: Hashable) -> tuple[list[int], list[Any]]:
        """(blocks, names) of the longest cached prefix. Never the whole text: the last token must be run for its logits."""
        (blocks,), names = self.match_groups(tokens, namespace, (None,))
        return blocks, names

    def match_groups(self, tokens: Sequence[int], namespace: Hashable,
                     windows: Sequence[int | None]) -> tuple[list[list[int]], list[Any]]:
        """The same for groups of layers with these windows: each group's blocks, `DEAD` where what follows does not see them. Of
        a group with a window only those at the end of the prefix need to be there."""
        names: list[Any] = []
        found: list[list[int]] = [[] for _ in windows]
        runs = [0] * len(windows)  # found one after the other, up to here
        longest, keeps_all = 0, None in windows
        name = self.index.root(namespace)
        for i in range((len(tokens) - 1) // self.block_size):
            name = self.index.name(name, tokens[i * self.block_size:(i + 1) * self.block_size])
            names.append(name)
            for group, blocks in enumerate(found):
                block = self.index.find(group_name(name, group))
                blocks.append(DEAD if block is None else block)
                runs[group] = 0 if block is None else runs[group] + 1
            if keeps_all and any(w is None and not run for w, run in zip(windows, runs)):
                break
            if all(run >= i + 1 - num_dead(w, (i + 1) * self.block_size, self.block_size) for w, run in zip(windows, runs)):
                longest = i + 1
        for window, blocks in zip(windows, found):
            dead = num_dead(window, longest * self.block_size, self.block_size)
            blocks[:] = [DEAD] * dead + blocks[dead:longest]
        return found, names[:longest]

    def check(self, holders: Sequence[Sequence[int]]) -> None:
        """Assert that the books agree with what `holders` (the block lists of all sequences) say. For idle times and tests."""
        counts = [0] * self.num_blocks
        for blocks in holders:
            for block in blocks:
                counts[block] += 1
        wrong = [(b, self.references[b], counts[b]) for b in range(self.num_blocks) if self.references[b] != counts[b]]
        assert not wrong, f"reference counts differ from the holders (block, counted, held): {wrong[:8]}"
        free = {b for b in range(self.num_blocks) if counts[b] == 0}
        assert free == set(self._free), f"free list off by {sorted(free ^ set(self._free))[:8]}"
        assert self._cached == self.index.blocks(), "the prefix index and the pool know different blocks"
