"""The naive prefix index: a list of whole prefixes, searched from the front. Slow, obviously right, the hashed one's measure."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

Name = tuple[Hashable, tuple[int, ...]]


class NaiveIndex:
    """A `PrefixIndex` whose names are (namespace, every token up to the block's end)."""

    def __init__(self) -> None:
        self._entries: list[tuple[Name, int]] = []

    def root(self, namespace: Hashable) -> Name:
        return namespace, ()

    def name(self, parent: Name, tokens: Sequence[int]) -> Name:
        return parent[0], (*parent[1], *tokens)

    def find(self, name: Name) -> int | None:
        return next((block for known, block in self._entries if known == name), None)

    def enter(self, name: Name, block: int) -> bool:
        if self.find(name) is not None:
            return False
        assert block not in self.blocks(), f"block {block} already has a name"
        self._entries.append((name, block))
        return True

    def drop(self, block: int) -> Name | None:
        dropped = next((name for name, known in self._entries if known == block), None)
        self._entries = [entry for entry in self._entries if entry[1] != block]
        return dropped

    def blocks(self) -> set[int]:
        return {block for _, block in self._entries}
