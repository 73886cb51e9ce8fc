"""A set of 64-bit hashes in one flat array: 8 bytes an entry at most 60 % full, so that millions of rows cost megabytes, and once
these are more than a few they are a file's, which the system may write out.

Two different samples share a hash with probability n^2 / 2^65: 7e-7 for five million.
"""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

_PIECE = 1 << 16
_IN_MEMORY = 1 << 20  # slots: 8 MB


class Seen:
    """Hashes of what was added; 0 marks a free slot.

    Args:
        folder: where a large set keeps its file, which has no name and is gone with the set; None: everything stays in memory.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._table = self._slots(1 << 12)
        self._count = 0

    def _slots(self, count: int) -> Any:
        if self._folder is None or count <= _IN_MEMORY:
            return np.zeros(count, np.uint64)
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self._folder) as file:
            file.truncate(8 * count)
            return np.memmap(file, np.uint64, "r+", shape=(count,)).view(np.ndarray)

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
        old = self._table
        self._table = self._slots(len(old) * 2)
        for at in range(0, len(old), _PIECE):  # Python's integers take four times the array's bytes
            piece = old[at : at + _PIECE]
            for value in piece[piece != 0].tolist():
                self._insert(value)
