"""A set of 64-bit hashes in one flat array: 8 bytes an entry at most 60 % full, so that millions of rows cost megabytes.

Two different samples share a hash with probability n^2 / 2^65: 7e-7 for five million.
"""

from __future__ import annotations

import hashlib

import numpy as np

_PIECE = 1 << 16


class Seen:
    """Hashes of what was added; 0 marks a free slot."""

    def __init__(self) -> None:
        self._table = np.zeros(1 << 12, np.uint64)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, data: bytes) -> bool:
        """Whether it was there already; it is afterwards."""
        value = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") or 1
        if (self._count + 1) * 5 > len(self._table) * 3:
            self._grow()
        found = self._insert(value)
        self._count += not found
        return found

    def _insert(self, value: int) -> bool:
        mask = len(self._table) - 1
        at = value & mask
        while (there := int(self._table[at])) != 0:
            if there == value:
                return True
            at = (at + 1) & mask
        self._table[at] = value
        return False

    def _grow(self) -> None:
        old = self._table[self._table != 0]
        self._table = np.zeros(len(self._table) * 2, np.uint64)
        for at in range(0, len(old), _PIECE):  # Python's integers take four times the array's bytes
            for value in old[at : at + _PIECE].tolist():
                self._insert(value)
