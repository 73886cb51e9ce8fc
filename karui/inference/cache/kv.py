"""The bytes of the KV cache for the torch and Triton runners: one slot per token and layer, in fp32, fp16, bf16, int8, fp8, int4.

Legend: N slots, T tokens, G kv heads, D head_dim.
int8 and fp8 (E4M3) keep one scale per token and head, absmax / 127 and absmax / 448, as codes never move once written. int4 keeps
a step and a min per 32 dimensions of a token's head beside its codes (`affine.py`). The KIVI formats code whole blocks, in
`kivi.py`; those of KVQuant are in `kvquant.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from karui.configs.errors import UnsupportedError, nearest
from karui.inference.cache import kivi
from karui.inference.cache.affine import decode, encode, group_of, row_bytes
from karui.kernels import kvquant

if TYPE_CHECKING:
    from karui.inference.models.step import Span

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "int8": torch.int8,
          "fp8": torch.float8_e4m3fn, **dict.fromkeys(("int4", *kivi.BITS, *kvquant.BITS), torch.uint8)}
_LARGEST = {"int8": 127.0, "fp8": 448.0}
SCALED = frozenset(_LARGEST)
"""The formats that keep scales."""
PACKED = frozenset(name for name, kind in DTYPES.items() if kind == torch.uint8)
"""The formats of fewer than 8 bits, whose codes lie packed with their steps."""
STAGED = frozenset(kivi.BITS)
"""The formats that code whole blocks and keep the tokens of unfinished ones in fp16."""


def check_dtype(kv_dtype: str) -> str:
    """`kv_dtype` when it is one of `DTYPES`. Raises `UnsupportedError` otherwise."""
    if kv_dtype not in DTYPES:
        raise UnsupportedError(
            f"kv_dtype {kv_dtype!r} is not supported; use one of {', '.join(DTYPES)}.{nearest(kv_dtype, DTYPES)}")
    return kv_dtype


def default_block_size(kv_dtype: str) -> int:
    """Tokens per block where none is asked for."""
    return kivi.BLOCK if kv_dtype in STAGED else 64 if kv_dtype in kvquant.BITS else 16


def bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, kv_dtype: str) -> int:
    """Bytes for keys and values of one token over all layers, scales included."""
    if check_dtype(kv_dtype) in STAGED:
        return kivi.code_bytes_per_token(num_layers, num_kv_heads, head_dim, kv_dtype)
    if kv_dtype == "int4":
        return 2 * num_layers * num_kv_heads * row_bytes(head_dim, 4, group_of(head_dim))
    item = torch.empty(0, dtype=DTYPES[kv_dtype]).element_size()
    return 2 * num_layers * num_kv_heads * (head_dim * item + (4 if kv_dtype in _LARGEST else 0))


def stored_width(head_dim: int, kv_dtype: str) -> int:
    """Entries per token, head and side as `KVStore.take` gives them: dimensions, or bytes of packed formats."""
    if kv_dtype in STAGED:
        return kivi.stored_width(head_dim, kivi.BITS[kv_dtype])
    return row_bytes(head_dim, 4, group_of(head_dim)) if kv_dtype == "int4" else head_dim


def staged_bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, kv_dtype: str) -> int:
    """Bytes that a token of an unfinished block needs besides: in fp16 for `STAGED` formats, else 0."""
    return 4 * num_layers * num_kv_heads * head_dim if check_dtype(kv_dtype) in STAGED else 0


class KVStore:
    """Keys and values of `num_slots` tokens in every layer: data [2, layers, N, G, D]; int8 and fp8: scale [2, layers, N, G];
    int4: data uint8 [2, layers, N, G, bytes]."""

    staged = False

    def __init__(self, num_layers: int, num_slots: int, num_kv_heads: int, head_dim: int, kv_dtype: str,
                 device: torch.device | str) -> None:
        shape = (2, num_layers, num_slots, num_kv_heads)
        self._int4 = (head_dim, 4, group_of(head_dim)) if check_dtype(kv_dtype) == "int4" else None
        self.data = torch.zeros(*shape, row_bytes(*self._int4) if self._int4 else head_dim, dtype=DTYPES[kv_dtype], device=device)
        self._largest = _LARGEST.get(kv_dtype, 0.0)
        self.scale = torch.zeros(shape, device=device) if self._largest else None

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k and v [T, G, D] at `slots` [T] int64."""
        for side, x in enumerate((k, v)):
            if self._int4:
                self.data[side, layer, slots] = encode(x, *self._int4[1:])
                continue
            if self.scale is None:
                self.data[side, layer, slots] = x.to(self.data.dtype)
                continue
            scale = x.float().abs().amax(-1).clamp_min(1e-12) / self._largest
            self.scale[side, layer, slots] = scale
            codes = x.float() / scale[..., None]
            codes = codes.round() if self.data.dtype == torch.int8 else codes
            self._bytes[side, layer, slots] = codes.to(self.data.dtype).view(self._bytes.dtype)

    def read(self, layer: int, slots: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [*slots.shape, G, D] at `slots` in `dtype`."""
        if self._int4:
            k, v = (decode(self.data[side, layer, slots], *self._int4, dtype) for side in (0, 1))
            return k, v
        k, v = (self._bytes[side, layer, slots].view(self.data.dtype).to(dtype) for side in (0, 1))
        if self.scale is None:
            return k, v
        ks, vs = (self.scale[side, layer, slots].to(dtype)[..., None] for side in (0, 1))
        return k * ks, v * vs

    def seen(self, layer: int, span: Span, dtype: torch.dtype) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
        """(first row, last + 1, keys, values [C, G, D]) of rows that see the same C tokens, as far as the mask lets them."""
        yield span.start, span.stop, *self.read(layer, span.slots, dtype)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy slot source[i] to target[i] in every layer; all are read before any is written."""
        self._bytes[:, :, target] = self._bytes[:, :, source]
        if self.scale is not None:
            self.scale[:, :, target] = self.scale[:, :, source]

    def take(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What lies at `slots` [T] int64: data [2, layers, T, G, D], and scale [2, layers, T, G] or None; on the CPU."""
        data = self._bytes[:, :, slots].view(self.data.dtype).cpu()
        return data, None if self.scale is None else self.scale[:, :, slots].cpu()

    def put(self, slots: torch.Tensor, data: torch.Tensor, scale: torch.Tensor | None) -> None:
        """The inverse of `take`."""
        self._bytes[:, :, slots] = data.to(self.data.device).view(self._bytes.dtype)
        if self.scale is not None:
            assert scale is not None
            self.scale[:, :, slots] = scale.to(self.scale.device)

    @property
    def _bytes(self) -> torch.Tensor:
        """The same memory in a dtype that torch can index on every device."""
        return self.data.view(torch.uint8) if self.data.dtype == torch.float8_e4m3fn else self.data
