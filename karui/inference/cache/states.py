"""Recurrent states of hybrid models: one page per sequence, whatever its length, and the pages that the prefix cache keeps.

A page holds the states of all recurrent layers behind one token of one text, and is never changed once it is written: a step
reads one page of a sequence and writes another. So nothing is ever copied or undone:

    a fork (samples, beams)      shares its parent's page
    a step that fails            has changed nothing; the page before it is still there
    a rejected draft             each of its rows wrote a page; the last accepted one is kept
    preemption                   gives the page back
    the prefix cache             keeps a page behind the block that ends there, under the block's name

The price is a second page per running sequence while a step runs. Pages are counted like blocks (`pool.py`): one that nobody
holds but that has a name stays findable until it is needed, the longest unused first, or until its block is forgotten.

A prefix-cache hit needs both the blocks and a page. Pages are kept (`scheduler.py`) at the last full block of a prompt, at the
last full block of what a sequence has generated, and where a prompt leaves a text whose blocks are cached: the branch is then
proven to be shared (the admission of Marconi, arXiv 2411.19379).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from karui.inference.models.recurrent import Recurrent, State

ZERO = 0
"""The page that every text begins with; it is never written and never counted."""


class StatePool:
    """Books of the pages 1 .. num_pages; who they belong to, and which prefix (the name of its last block) they stand behind."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.references = [0] * (num_pages + 1)
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_pages + 1))  # next to be handed out first
        self._page_of: dict[Hashable, int] = {}
        self._name_of: dict[int, Hashable] = {}

    @property
    def num_free(self) -> int:
        """Pages nobody holds, findable ones included."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Pages that can be found by prefix."""
        return len(self._name_of)

    def take(self) -> int:
        """A page to write to, held once. The caller has checked `num_free`."""
        page, _ = self._free.popitem(last=False)
        name = self._name_of.pop(page, None)
        if name is not None:
            del self._page_of[name]
        self.references[page] = 1
        return page

    def share(self, page: int) -> int:
        """One more holder; returns the page."""
        if page != ZERO:
            if self.references[page] == 0:
                del self._free[page]
            self.references[page] += 1
        return page

    def release(self, page: int) -> None:
        """One holder less."""
        if page == ZERO:
            return
        self.references[page] -= 1
        assert self.references[page] >= 0, f"page {page} released more often than held"
        if self.references[page] == 0:
            self._free[page] = None
            if page not in self._name_of:
                self._free.move_to_end(page, last=False)

    def find(self, name: Hashable) -> int | None:
        return self._page_of.get(name)

    def enter(self, name: Hashable, page: int) -> bool:
        """Make a held page findable; False when the prefix has one already (which stays) or the page a name."""
        if name in self._page_of or page in self._name_of:
            return False
        self._page_of[name], self._name_of[page] = page, name
        return True

    def forget(self, name: Hashable) -> None:
        """The prefix has no page any more, if it had one."""
        page = self._page_of.pop(name, None)
        if page is not None:
            del self._name_of[page]
            if self.references[page] == 0:
                self._free.move_to_end(page, last=False)

    def check(self, held: Sequence[int]) -> None:
        """Assert that the books agree with the pages that all sequences hold. For idle times and tests."""
        counts = [0] * (self.num_pages + 1)
        for page in held:
            counts[page] += page != ZERO
        wrong = [(p, self.references[p], n) for p, n in enumerate(counts) if self.references[p] != n]
        assert not wrong, f"reference counts differ from the holders (page, counted, held): {wrong[:8]}"
        assert set(self._free) == {p for p, n in enumerate(counts) if p and not n}, "the free list of states is off"
        assert {p: n for n, p in self._page_of.items()} == self._name_of, "names and pages of states disagree"


def page_bytes(kind: Recurrent, dtype: torch.dtype, wide: torch.dtype) -> int:
    """Bytes of one sequence's states over all recurrent layers."""
    return sum(kind.layers) * sum(math.prod(shape) * (wide if is_wide else dtype).itemsize for shape, is_wide in kind.parts())


class StateStore:
    """The bytes: for each part of a state [recurrent layers, 1 + num_pages, *shape]."""

    def __init__(self, kind: Recurrent, num_pages: int, dtype: torch.dtype, wide: torch.dtype, device: torch.device) -> None:
        self._parts = [torch.zeros(sum(kind.layers), 1 + num_pages, *shape, dtype=wide if is_wide else dtype, device=device)
                       for shape, is_wide in kind.parts()]

    def read(self, layer: int, pages: torch.Tensor) -> State:
        """The states [S, *shape] of the layer (counted among the recurrent ones) at pages [S]."""
        return tuple(part[layer, pages] for part in self._parts)

    def write(self, layer: int, pages: torch.Tensor, state: State) -> None:
        """The inverse of `read`."""
        for part, new in zip(self._parts, state, strict=True):
            part[layer, pages] = new.to(part.dtype)
