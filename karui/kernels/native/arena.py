"""Memory for what every step reads, on huge pages where the system gives them.

A decoded token reads all weights once. On 4 KB pages a virtual machine then walks two page tables for every 4 KB, and that, not
the memory, was the limit: the same read ran at 28 GB/s on 4 KB and at 53 GB/s on 2 MB pages. The system is asked with
`madvise(MADV_HUGEPAGE)`, which needs no rights and is ignored where it is not supported.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch

HUGE = 2 << 20
_CHUNK_BYTES = 64 << 20


class Arena:
    """Hands out zeroed tensors that lie one after the other in few large mappings.

    A mapping is returned to the system when the last tensor in it is gone. Pages that were never written cost nothing.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """[count] zeros of `dtype`, aligned to 64 bytes."""
        size = (count * dtype.itemsize + 63) // 64 * 64
        if self._used + size > self._chunk.numel():
            self._chunk, self._used = _mapping(max(size, _CHUNK_BYTES)), 0
        piece = self._chunk[self._used:self._used + size]
        self._used += size
        return piece[:count * dtype.itemsize].view(dtype)

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """A contiguous copy of `x` in the arena."""
        copy = self.zeros(x.numel(), x.dtype).view(x.shape)
        copy.copy_(x)
        return copy


def _mapping(size: int) -> torch.Tensor:
    """uint8 [at least size], zeroed, starting on a boundary of a huge page."""
    size = (size + HUGE - 1) // HUGE * HUGE
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(size, dtype=torch.uint8)
    area = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        with suppress(OSError):  # a kernel without transparent huge pages: the memory serves all the same
            area.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(area, dtype=torch.uint8)  # keeps `area` alive
    return whole[-whole.data_ptr() % HUGE:][:size]
