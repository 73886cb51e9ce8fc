"""The hashed prefix index: which block holds the keys of which prefix (shared as in SGLang, arXiv 2312.07104, found by hash as in
vLLM).

A block is named by H(name of the block before it, its tokens), a chain whose start is the namespace (weight version, adapter,
salt): equal names mean equal everything that the block's keys depend on. Only full blocks of verified tokens are entered.
`naive.py` does the same by comparing tokens; one test suite holds for both.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from hashlib import blake2b
from typing import Any, Protocol


class PrefixIndex(Protocol):
    """Names of full blocks and where they lie. A name is opaque; it is made from its parent's name and the block's tokens."""

    def root(self, namespace: Hashable) -> Any:
        """The name that the first block of a sequence has as parent."""

    def name(self, parent: Any, tokens: Sequence[int]) -> Any:
        """The name of the block of `tokens` behind `parent`."""

    def find(self, name: Any) -> int | None:
        """The block of that name, or None."""

    def enter(self, name: Any, block: int) -> bool:
        """Remember `block` under `name`; False when another block already has the name (the first one stays)."""

    def drop(self, block: int) -> Any:
        """Forget the block, if it is known; returns the name that it had, or None."""

    def blocks(self) -> set[int]:
        """All known blocks."""


class HashedIndex:
    """Names are 16-byte BLAKE2b digests: a collision needs about 2^64 blocks."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}

    def root(self, namespace: Hashable) -> bytes:
        return blake2b(repr(namespace).encode(), digest_size=16).digest()

    def name(self, parent: bytes, tokens: Sequence[int]) -> bytes:
        return blake2b(array("q", tokens).tobytes(), digest_size=16, key=parent).digest()

    def find(self, name: bytes) -> int | None:
        return self._block_of.get(name)

    def enter(self, name: bytes, block: int) -> bool:
        if name in self._block_of:
            return False
        assert block not in self._name_of, f"block {block} already has a name"
        self._block_of[name], self._name_of[block] = block, name
        return True

    def drop(self, block: int) -> bytes | None:
        name = self._name_of.pop(block, None)
        if name is not None:
            del self._block_of[name]
        return name

    def blocks(self) -> set[int]:
        return set(self._name_of)
