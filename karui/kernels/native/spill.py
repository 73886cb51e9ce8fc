"""The file of the layers that do not stay in memory; spill.h reads it.

It has no name: the system frees it when the process ends, however it ends. Reads bypass the page cache where the file system
allows it, so that they cost neither memory nor what others keep there.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch

from karui.configs.errors import KaruiError
from karui.kernels.native.arena import Arena
from karui.kernels.native.library import address
from karui.kernels.native.weights import Packed

PAGE, LINE = 4096, 64  # of spill.h, and of what the kernels read
BUFFERS = 3  # of spill.h
_POINTERS = ("codes", "scales", "zeros", "bias", "table")


class SpillFile:
    """Takes packed layers one after the other.

    Args:
        folder: on a disk with room for them; the system's temporary one when None.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self._folder = Path(folder or tempfile.gettempdir())
        try:
            handle, path = tempfile.mkstemp(prefix="karui-", dir=self._folder)
        except OSError as error:
            raise KaruiError(f"layers cannot be put into {self._folder} ({error.strerror}); choose another folder "
                             "(offload_to).") from None
        try:
            self.fd = _open_for_reading(path)
        finally:
            os.unlink(path)
        self._handle = handle
        weakref.finalize(self, _close, (self.fd, handle)).atexit = False
        self.size = 0
        self._held: list[torch.Tensor] = []  # what was brought back

    def add(self, layer: Sequence[Packed]) -> tuple[int, int]:
        """Write a layer's tensors, and make the pointers of its linears offsets within what was written: (where, bytes).

        Raises:
            KaruiError: the disk is full.
        """
        at, end = self.size, LINE  # offset 0 stays unused: a null pointer is one
        parts: list[tuple[int, torch.Tensor]] = []
        for packed in layer:
            places = {}
            for t in packed.tensors:
                places[address(t)] = end
                parts.append((end, t))
                end = _up(end + t.numel() * t.element_size(), LINE)
            for name in _POINTERS:
                pointer = getattr(packed.linear, name)
                if pointer:
                    setattr(packed.linear, name, places[pointer])
        size = _up(end, PAGE)
        try:
            for offset, t in parts:
                _write(self._handle, _bytes(t), at + offset)
            os.truncate(self._handle, at + size)
        except OSError as error:
            free = shutil.disk_usage(self._folder).free
            raise KaruiError(f"{self._folder}: no room for a layer of {size:,} bytes, {free:,} are free ({error.strerror}); "
                             "choose another folder (offload_to), or give the weights more memory.") from None
        self.size = at + size
        return at, size

    def bring_back(self, layer: Sequence[Packed], at: int, size: int, arena: Arena) -> None:
        """A layer that was added goes into memory after all."""
        memory = arena.zeros(size, torch.uint8)
        into, base = _bytes(memory), memory.data_ptr()
        while into:
            done = os.preadv(self._handle, [into[: 1 << 30]], at + size - len(into))
            into = into[done:]
        for packed in layer:
            for name in _POINTERS:
                if offset := getattr(packed.linear, name):
                    setattr(packed.linear, name, base + offset)
        self._held.append(memory)


def _open_for_reading(path: str) -> int:
    direct = getattr(os, "O_DIRECT", 0)
    try:
        return os.open(path, os.O_RDONLY | direct)
    except OSError:  # a file system without direct reads
        return os.open(path, os.O_RDONLY)


def _write(fd: int, data: memoryview, at: int) -> None:
    while data:
        done = os.pwrite(fd, data[: 1 << 30], at)
        data, at = data[done:], at + done


def _close(handles: tuple[int, ...]) -> None:
    for handle in handles:
        os.close(handle)


def _bytes(t: torch.Tensor) -> memoryview:
    return t.contiguous().view(-1).view(torch.uint8).numpy().data


def _up(a: int, b: int) -> int:
    return (a + b - 1) // b * b
