"""KVQuant caches: keys before their rotation and values as rows of `karui.kernels.kvquant`, the first token's in fp16.

A token's codes are a function of the token, so there is nothing to stage: writing, copying and rewinding go slot by slot. Keys
are rotated when they are read, by their positions. The first token of a text (the attention sink) lies in fp16 beside the first
slot of its block; every block has room for one, which is why blocks are large: `BLOCK` tokens or more.

Legend: N slots, T tokens, C keys seen, G kv heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from karui.configs.errors import UnsupportedError
from karui.kernels.kvquant import KVLevels

if TYPE_CHECKING:
    from karui.inference.models.step import Span

BLOCK = 64


class KVQuantStore:
    """Codes of `num_blocks` blocks in every layer.

    keys, values: uint8 [layers, N, bytes]. sinks: fp16 [2, layers, blocks, G * D].

    Args:
        turn: (keys [C, G, D], positions [C]) -> the rotated keys.
    """

    staged = False

    def __init__(self, levels: KVLevels, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int,
                 turn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], device: torch.device | str) -> None:
        if block_size % BLOCK:
            raise UnsupportedError(f"the kvquant formats keep a first token in full beside each block: block_size must be a "
                                   f"multiple of {BLOCK}, got {block_size}.")
        self.levels, self._size, self._heads, self._turn = levels, block_size, (num_kv_heads, head_dim), turn
        layers, slots = len(levels.key_low), num_blocks * block_size
        key, value = levels.row_bytes
        self.keys = torch.zeros(layers, slots, key, dtype=torch.uint8, device=device)
        self.values = torch.zeros(layers, slots, value, dtype=torch.uint8, device=device)
        self.sinks = torch.zeros(2, layers, num_blocks * levels.sinks, levels.channels, dtype=torch.float16, device=device)

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor) -> None:
        """Store k, not rotated, and v [T, G, D] at `slots` [T] int64."""
        k, v = k.flatten(-2), v.flatten(-2)
        self.keys[layer, slots] = self.levels.encode_keys(layer, k)
        self.values[layer, slots] = self.levels.encode_values(layer, v)
        if self.levels.sinks:
            first = positions == 0
            for side, x in enumerate((k, v)):
                self.sinks[side, layer, slots[first] // self._size] = x[first].float().clamp(-65504, 65504).half()

    def seen(self, layer: int, span: Span, dtype: torch.dtype) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
        """See `KVStore.seen`."""
        k = self.levels.decode_keys(layer, self.keys[layer, span.slots])
        v = self.levels.decode_values(layer, self.values[layer, span.slots])
        if self.levels.sinks and len(k) and int(span.key_positions[0]) == 0:
            k[0], v[0] = self.sinks[:, layer, span.slots[0] // self._size].float()
        k, v = (x.unflatten(-1, self._heads) for x in (k, v))
        yield span.start, span.stop, self._turn(k, span.key_positions).to(dtype), v.to(dtype)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy slot source[i] to target[i] in every layer; all are read before any is written."""
        for rows in (self.keys, self.values):
            rows[:, target] = rows[:, source]
        if self.levels.sinks:
            first = source % self._size == 0
            self.sinks[:, :, target[first] // self._size] = self.sinks[:, :, source[first] // self._size]

    def take(self, slots: torch.Tensor) -> tuple[torch.Tensor, None]:
        raise UnsupportedError("prefixes of a kvquant cache are not handed over; use kivi or int8.")

    def put(self, slots: torch.Tensor, data: torch.Tensor, scale: torch.Tensor | None) -> None:
        raise UnsupportedError("prefixes of a kvquant cache are not handed over; use kivi or int8.")


def bytes_per_token(levels: KVLevels) -> int:
    """Bytes of keys and values of one token over all layers, the room for first tokens included."""
    layers, sink = len(levels.key_low), 4 * levels.channels * levels.sinks
    return layers * sum(levels.row_bytes) + -(-layers * sink // BLOCK)
