"""Attention of a step's rows over keys and values that lie in blocks, and writing those keys and values.

    write_kv(k, v, slots, cache)     store a step's keys and values, quantized if the cache is (int8, fp8, int4)
    enter(qkv, ...)                  q, k and v as one product leaves them: norms, rotation, keys and values into the cache
    paged_attention(q, cache, plan)  decoding, verification of a tree of drafts, prefill: one kernel, rows of any mixture

The heads that share a key head are packed into one tile with the rows (grouped-query attention, arXiv 2305.13245); where rows are
few the keys are split over programs whose partial softmaxes are merged (Flash-Decoding). No [rows, keys] mask exists.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from karui.configs.errors import KaruiError
from karui.kernels.paged_attention import reference
from karui.kernels.triton_support import Backend, use_triton

TREE_ROWS = 32  # a tree's mask is one 32-bit word per row
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.uint8)


@dataclass(frozen=True)
class Cache:
    """keys, values [slots, G, D] of one layer; scales fp32 [slots, G] for int8 and fp8 (value = code * scale), else None.

    int4: uint8 [slots, G, D / 2 + 4 * D / g] and `packed` = (D, g): of each row the codes, the first of a pair in the low half,
    then a step for each g dimensions, then a min, in fp16; value = code * step + min.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None
    packed: tuple[int, int] | None = None

    @property
    def head_dim(self) -> int:
        return self.keys.shape[-1] if self.packed is None else self.packed[0]


@dataclass(frozen=True)
class KiviCache:
    """One layer of a KIVI cache (`kivi`, Triton's only): keys uint8 [N, G, D, bytes of a block's tokens], values uint8 [N * B, G,
    bytes of D dimensions], both as codes, steps and mins of `group` neighbours (keys: 32) one after the other; pages fp16
    [pages * B, G, D] of unfinished blocks."""

    keys: torch.Tensor
    values: torch.Tensor
    key_pages: torch.Tensor
    value_pages: torch.Tensor
    bits: int
    block_size: int
    group: int


@dataclass(frozen=True)
class Plan:
    """What a step's sequences are; int32 on the cache's device.

    query_starts: [S + 1], rows of sequence s are query_starts[s] : query_starts[s + 1].
    contexts: [S] keys each sequence has, its own rows of this step included (they are the last ones).
    block_tables: [S, B] block ids; slot of key j = block_tables[s, j // block_size] * block_size + j % block_size.
    max_rows: most rows of one sequence.
    tree: [T] words or None: bit j of row i is set if row i sees its sequence's row j; no bit, or None: causal.
    positions: [T] of the rows; needed with `window` and a tree, else None: keys before the window are then not looked at.
    """

    query_starts: torch.Tensor
    contexts: torch.Tensor
    block_tables: torch.Tensor
    block_size: int
    max_rows: int
    tree: torch.Tensor | None = None
    positions: torch.Tensor | None = None


def row_bytes(width: int, group: int) -> int:
    """Bytes of a row of an int4 cache, see `Cache`. Raises `KaruiError` for groups that do not fill words of 16 bits."""
    if group < 8 or group & (group - 1) or width % group:
        raise KaruiError(f"int4 rows of {width} dimensions in groups of {group}: groups are powers of two from 8 on that divide "
                         "the head dimension.")  # fmt: skip
    return width // 2 + 4 * (width // group)


def tree_words(masks: list[torch.Tensor | None], rows: list[int]) -> torch.Tensor:
    """int32 [sum(rows)] from bool masks [q, q] per sequence (None: causal; of more than 32 rows as the word 0)."""
    words: list[int] = []
    for mask, q in zip(masks, rows):
        if q > TREE_ROWS and mask is None:
            words += [0] * q
            continue
        if q > TREE_ROWS:
            raise KaruiError(f"a tree of {q} rows; the kernel verifies up to {TREE_ROWS} rows of a sequence at once.")
        seen = torch.ones(q, q, dtype=torch.bool).tril() if mask is None else mask.to(torch.bool).cpu()
        words += [sum(1 << j for j, bit in enumerate(row) if bit) for row in seen.tolist()]
    return torch.tensor([w - (1 << 32) if w >= 1 << 31 else w for w in words], dtype=torch.int32)


def write_kv(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, cache: Cache, backend: Backend = "auto") -> None:
    """Store k and v [T, G, D] at `slots` [T]; a slot below 0 is skipped.

    int8: scale absmax / 127, nearest; fp8: scale absmax / 448, E4M3; one scale per token and head. int4: step (max - min) / 15,
    min and step rounded to fp16 before the codes are made.
    """
    _check(cache, k)
    if use_triton(backend, k.device, "write_kv", refused="" if k.shape[-1] <= 256 else "a head dimension above 256"):
        from karui.kernels.paged_attention import triton

        triton.write_kv(k, v, slots, cache)
    else:
        reference.write_kv(k, v, slots, cache)


def enter(qkv: torch.Tensor, heads: int, cos: torch.Tensor, sin: torch.Tensor, slots: torch.Tensor, cache: Cache,
          norms: tuple[torch.Tensor, ...] | None = None, eps: float = 0.0,
          backend: Backend = "auto") -> torch.Tensor:  # fmt: skip
    """q [T, heads, D], normed and rotated, of a step's qkv [T, (heads + 2 G) D]; keys and values go into the cache as by
    `write_kv`, the keys normed and rotated too.

    Args:
        cos, sin: fp32 [T, D / 2] of the rows; pairs are (i, i + D / 2).
        norms: weights [D] of the RMS norms of q's and k's heads, or None; `eps` is theirs.
    """
    groups, width = cache.keys.shape[1], cache.head_dim
    columns = (heads + 2 * groups) * width
    if qkv.ndim != 2 or qkv.shape[1] != columns:
        raise KaruiError(f"{heads} and twice {groups} heads of {width} are {columns} columns, got {tuple(qkv.shape)}.")
    _check(cache, qkv.view(len(qkv), -1, width))
    refused = "" if width <= 256 and width % 2 == 0 else f"a head dimension of {width}"
    if use_triton(backend, qkv.device, "enter", refused=refused):
        from karui.kernels.paged_attention import triton

        return triton.enter(qkv, heads, cos, sin, slots, cache, norms, eps)
    return reference.enter(qkv, heads, cos, sin, slots, cache, norms, eps)


def paged_attention(
    q: torch.Tensor, cache: Cache, plan: Plan, scaling: float, window: int | None = None, backend: Backend = "auto"
) -> torch.Tensor:
    """[T, H, D] in q's dtype: each row of q [T, H, D] over the keys of its sequence that it may see.

    Args:
        window: a row sees only keys less than `window` positions before it.

    Raises:
        KaruiError: shapes that do not fit.
    """
    _check(cache, q)
    if q.shape[1] % cache.keys.shape[1]:
        raise KaruiError(f"{q.shape[1]} query heads are no multiple of {cache.keys.shape[1]} key heads.")
    if use_triton(backend, q.device, "paged_attention", refused="" if q.shape[-1] <= 256 else "a head dimension above 256"):
        from karui.kernels.paged_attention import triton

        return triton.paged_attention(q, cache, plan, scaling, window)
    return reference.paged_attention(q, cache, plan, scaling, window)


def _check(cache: Cache, x: torch.Tensor) -> None:
    scaled = cache.keys.dtype in (torch.int8, torch.float8_e4m3fn)
    if (cache.keys.dtype == torch.uint8) != (cache.packed is not None) or cache.packed is not None and (
        cache.keys.shape[-1] != row_bytes(*cache.packed)):
        raise KaruiError(f"an int4 cache's rows are uint8 and say their head dimension and group in `packed`; got "
                         f"{cache.keys.dtype} {tuple(cache.keys.shape)}, packed={cache.packed}.")  # fmt: skip
    if cache.keys.shape != cache.values.shape or cache.keys.dtype not in DTYPES or scaled != (cache.key_scale is not None):
        raise KaruiError(
            f"a cache of {cache.keys.dtype} {tuple(cache.keys.shape)} and {tuple(cache.values.shape)} with"
            f"{'' if cache.key_scale is not None else 'out'} scales; int8 and fp8 need scales, fp32, fp16 and bf16 have none."
        )
    if x.shape[-1] != cache.head_dim:
        raise KaruiError(f"head dimension {x.shape[-1]} against the cache's {cache.head_dim}.")
