"""KIVI: keys per channel and values per token in 2 or 4 bits, the latest tokens in full precision (arXiv 2402.02750).

Keys have channels that are large in every token, so a step shared along a token's head drowns the others; one step per
channel over a group of 32 tokens does not. Values have none, and each token's are in groups along the head. Codes as in
`affine.py`.

What a query sees is a function of its position alone, so that it does not matter how its text was cut into steps: the tokens
of its own cache block in fp16, all blocks before as codes. The paper's residual length R is thus the engine's `block_size`: as
there, keys stay in full precision until R of them are there. The paper keeps the last R values besides; here the values of a
block become codes with its keys.

A block is coded from its fp16 rows when its last row is written, and anew when that row is written again after a rejected
draft. The fp16 rows lie in pages that blocks borrow. Once a block's tokens are verified nothing reads its rows, and the engine
says so (`settle`); so there is one page per running sequence, and those that the rows of a step fill.

Legend: N blocks, B tokens of a block, T tokens, G kv heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from karui.configs.errors import UnsupportedError
from karui.inference.cache.affine import GROUP, LARGEST, decode, encode, group_of, row_bytes

if TYPE_CHECKING:
    from karui.inference.models.step import Span

BITS = {"kivi4": 4, "kivi2": 2}
BLOCK = 64
"""Tokens per block where none is asked for."""


def check_block(block_size: int, kv_dtype: str) -> None:
    """Raise `UnsupportedError` unless blocks of this size hold whole groups."""
    if block_size % GROUP:
        raise UnsupportedError(f"kv_dtype {kv_dtype!r} codes keys in groups of {GROUP} tokens: block_size must be a multiple "
                               f"of that, got {block_size}.")


class KiviStore:
    """Codes of N blocks in every layer, and fp16 pages for `num_pages` of them.

    keys: uint8 [layers, N, G, D, bytes of B tokens]. values: uint8 [layers, N * B, G, bytes of D dimensions].
    pages: fp16 [2, layers, num_pages * B, G, D]. Which block has which is known on the device `paged_at`, None: on the same.
    """

    staged = True

    def __init__(self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, kv_dtype: str,
                 device: torch.device | str, num_pages: int | None = None, paged_at: str | None = None) -> None:
        check_block(block_size, kv_dtype)
        self.block_size, self.head_dim, self.bits, self.group = block_size, head_dim, BITS[kv_dtype], group_of(head_dim)
        key_bytes, value_bytes = row_bytes(block_size, self.bits, GROUP), row_bytes(head_dim, self.bits, self.group)
        num_pages = num_blocks if num_pages is None else min(num_pages, num_blocks)

        def zeros(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
            return torch.zeros(num_layers, *shape, dtype=dtype, device=device)

        self.keys = zeros(num_blocks, num_kv_heads, head_dim, key_bytes)
        self.values = zeros(num_blocks * block_size, num_kv_heads, value_bytes)
        self.pages = torch.stack([zeros(num_pages * block_size, num_kv_heads, head_dim, dtype=torch.float16) for _ in range(2)])
        self._page = torch.full((num_blocks,), -1, dtype=torch.long, device=device if paged_at is None else paged_at)
        self._free = list(range(num_pages))[::-1]

    @property
    def num_free_pages(self) -> int:
        return len(self._free)

    # -- rows in full precision

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k and v [T, G, D] at `slots` [T] int64, the rows of each sequence in order; blocks that they fill are coded."""
        rows = self.place(slots) if layer == 0 else self._rows(slots)
        for side, x in enumerate((k, v)):
            self.pages[side, layer, rows] = x.float().clamp(-LARGEST, LARGEST).half()
        full = slots[slots % self.block_size == self.block_size - 1] // self.block_size
        if not len(full):
            return
        inside = self._rows(full[:, None] * self.block_size + torch.arange(self.block_size, device=full.device))
        k, v = (self.pages[side, layer, inside] for side in (0, 1))  # [blocks, B, G, D]
        self.keys[layer, full] = encode(k.permute(0, 2, 3, 1), self.bits, GROUP)
        self.values[layer].view(-1, self.block_size, *self.values.shape[2:])[full] = encode(v, self.bits, self.group)

    def place(self, slots: torch.Tensor) -> torch.Tensor:
        """Where rows at `slots` [T] lie in the pages; blocks that have none borrow one."""
        self._borrow(slots)
        return self._rows(slots)

    def settle(self, blocks: Iterable[int]) -> None:
        """The rows of these blocks are final, or nobody's: their pages, if they have any, are free."""
        for block in blocks:
            page = int(self._page[block])
            if page >= 0:
                self._page[block] = -1
                self._free.append(page)

    def _borrow(self, slots: torch.Tensor) -> None:
        blocks = (slots.to(self._page.device) // self.block_size).unique()
        for block in blocks[self._page[blocks] < 0].tolist():
            if not self._free:
                raise RuntimeError(f"all {self.pages.shape[2] // self.block_size} pages of the KV cache are taken: blocks were "
                                   "not settled.")
            self._page[block] = self._free.pop()

    def _rows(self, slots: torch.Tensor) -> torch.Tensor:
        slots = slots.to(self._page.device)
        pages = self._page[slots // self.block_size]
        assert bool((pages >= 0).all()), "rows in full precision are read of a block that has none"
        return pages * self.block_size + slots % self.block_size

    # -- what is seen

    def seen(self, layer: int, span: Span, dtype: torch.dtype) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
        """(first row, last + 1, keys, values [C, G, D]): the rows of a block see the same C tokens, as far as the mask lets."""
        size, context = self.block_size, len(span.slots)
        first = context - (span.stop - span.start)  # position of the span's first row
        coded = self._decoded(layer, span.slots[:(context - 1) // size * size:size] // size, dtype)
        for at in range(first // size * size, context, size):
            end = min(at + size, context)
            own = self._rows(span.slots[at:end])
            k, v = (torch.cat([coded[side][:at], self.pages[side, layer, own].to(dtype)]) for side in (0, 1))
            yield span.start + max(at - first, 0), span.start + end - first, k, v

    def _decoded(self, layer: int, blocks: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [len(blocks) * B, G, D]."""
        k = decode(self.keys[layer, blocks], self.block_size, self.bits, GROUP, dtype)  # [blocks, G, D, B]
        v = self.values[layer].view(-1, self.block_size, *self.values.shape[2:])[blocks]
        return k.permute(0, 3, 1, 2).flatten(0, 1), decode(v, self.head_dim, self.bits, self.group, dtype).flatten(0, 1)

    # -- moving

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy the fp16 rows at slot source[i] to target[i] in every layer; all are read before any is written."""
        rows = self.pages[:, :, self._rows(source).to(self.pages.device)]
        self.pages[:, :, self.place(target).to(self.pages.device)] = rows

    def take(self, slots: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The codes of whole blocks at `slots` [T], on the CPU: uint8 [2, layers, T, G, bytes]; keys' are dealt out evenly."""
        blocks = self._whole(slots)
        k = self.keys[:, blocks].flatten(-2).unflatten(-1, (self.block_size, -1))  # [layers, blocks, G, B, bytes]
        k, v = k.transpose(2, 3).flatten(1, 2), self.values[:, slots]
        return torch.stack([torch.nn.functional.pad(x, (0, self._width - x.shape[-1])) for x in (k, v)]).cpu(), None

    def put(self, slots: torch.Tensor, data: torch.Tensor, scale: torch.Tensor | None) -> None:
        """The inverse of `take`."""
        blocks = self._whole(slots)
        k, v = data.to(self.keys.device)
        size = self.keys[0, 0, 0].numel() // self.block_size
        k = k[..., :size].unflatten(1, (len(blocks), self.block_size)).transpose(2, 3).flatten(-2)
        self.keys[:, blocks] = k.unflatten(-1, self.keys.shape[-2:])
        self.values[:, slots] = v[..., :self.values.shape[-1]]

    def _whole(self, slots: torch.Tensor) -> torch.Tensor:
        blocks = slots.view(-1, self.block_size)[:, 0] // self.block_size
        index = torch.arange(self.block_size, device=slots.device)
        assert torch.equal(slots, (blocks[:, None] * self.block_size + index).flatten()), "only whole blocks have codes"
        return blocks

    @property
    def _width(self) -> int:
        return stored_width(self.head_dim, self.bits)


def stored_width(head_dim: int, bits: int) -> int:
    """Bytes per token and head, of keys or values, the larger of the two."""
    return max(head_dim * bits // 8 + head_dim * 4 // GROUP, row_bytes(head_dim, bits, group_of(head_dim)))


def code_bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, kv_dtype: str) -> int:
    """Bytes of the codes of one token over all layers, steps and mins included."""
    bits = BITS[kv_dtype]
    key, value = head_dim * bits // 8 + head_dim * 4 // GROUP, row_bytes(head_dim, bits, group_of(head_dim))
    return num_layers * num_kv_heads * (key + value)
