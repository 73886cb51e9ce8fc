"""What becomes of freed memory: glibc's heap. With other C libraries nothing happens."""

from __future__ import annotations

import contextlib
import ctypes

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # of malloc.h


def keep_freed() -> None:
    """From now on, keep freed memory for what comes next. glibc hands it back to the kernel after every training step and faults
    it in again in the next, which takes a good part of a step on a CPU."""
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(MMAP_THRESHOLD, 32 << 20)  # the largest it takes; larger pieces are mapped one by one
        mallopt(TRIM_THRESHOLD, -1)


def give_back() -> None:
    """Hand what was freed back now, pages within the heap too."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
