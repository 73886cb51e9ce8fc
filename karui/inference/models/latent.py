"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) and sparse attention over it (DeepSeek-V3.2, arXiv
2512.02556). What a token leaves in a layer's cache:

    c = norm(W_DKV h)       the latent, `rank` numbers                                                       (eq. 9)
    r = RoPE(W_KR h)        a rotated key, `rope` numbers, the same for all heads                            (eq. 15)
    i = RoPE(norm(W_I h))   with an indexer: its key                                        (V3.2, eq. 1)

A head's key is [W_UK c, r], its value W_UV c (eq. 10, 11). Two ways to the same result:

    materialized    keys and values of all heads are made from the cached latents, then attended to: many rows, as in a prefill
    absorbed        q · W_UK c = W_UK^T q · c and sum p W_UV c = W_UV sum p c: W_UK is folded into the query, W_UV put behind the
                    weighted latent, so all heads read the same `rank + rope` numbers per token and nothing is made: decoding

The one that computes less is taken; one row is always absorbed, so that its bits do not depend on how it came.
W_UK and W_UV are halves of `kv_b_proj`. Quantized, they are dequantized in each step as every linear of the torch runner is: held
dense they would take back what quantizing saved. Where their grid rounds inputs (w?a8), the latent is rounded when it is cached.

With an indexer a row attends to `top` keys only: those with the largest sum over its heads of w relu(q · i). The row reads every
token's i (one key, no heads) but only the chosen tokens' c and r.

Legend for shapes: T tokens in the step, N slots, S sequences side by side, q rows of each, C keys seen, K keys chosen, A heads.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from karui.configs.errors import UnsupportedError, nearest
from karui.inference.cache.kv import DTYPES
from karui.inference.models.config import Latent, ModelConfig
from karui.inference.models.rope import rotate
from karui.inference.models.step import Step
from karui.kernels.sparse_attention import largest

if TYPE_CHECKING:
    from karui.inference.models.decoder import TorchRunner

FORMATS = ("float32", "float16", "bfloat16", "int8", "fp8")
NORM_EPS = 1e-6  # of the latents' and the indexer's norms, whatever the config says of the others
_LARGEST = {"int8": 127.0, "fp8": 448.0}
_HELD = 1 << 26  # numbers that one product makes at once: keys and values of heads, or scores
Ups = list[tuple[torch.Tensor, torch.Tensor]]
"""Rows of the step, and the W_UK and W_UV that they have."""


def bytes_per_token(config: ModelConfig, kv_dtype: str) -> int:
    """Bytes that one token takes in the cache over all layers, scales included. Raises `UnsupportedError` for other formats."""
    m = _latent(config)
    per_layer = config.num_layers * (m.rank + m.rope)
    if m.indexer is not None:
        per_layer += sum(m.indexer.layers) * m.indexer.head_dim
    return per_layer * _dtype(kv_dtype).itemsize + (4 * per_layer // m.group if kv_dtype in _LARGEST else 0)


def bytes_read(config: ModelConfig, kv_dtype: str, context: int) -> int:
    """Bytes of the cache that a decoding step of one sequence reads at a context of so many tokens, its own included."""
    m = _latent(config)
    item = _dtype(kv_dtype).itemsize + (4 / m.group if kv_dtype in _LARGEST else 0)
    if m.indexer is None or context <= m.indexer.top:
        return int(config.num_layers * context * (m.rank + m.rope) * item)
    chosen, seen = config.num_layers * m.indexer.top * (m.rank + m.rope), sum(m.indexer.layers) * context * m.indexer.head_dim
    return int((chosen + seen) * item)


class LatentStore:
    """Latents, rotated keys and indexer keys of `num_slots` tokens in every layer, in one of `FORMATS`. int8 and fp8 keep a scale
    per `Latent.group` numbers. Indexer keys lie apart: they are read for every token."""

    staged = False

    def __init__(self, config: ModelConfig, num_slots: int, kv_dtype: str, device: torch.device | str) -> None:
        m = _latent(config)
        self._rank, shape = m.rank, (num_slots, m.group, kv_dtype, device)
        self._cells = _Cells(config.num_layers, m.rank + m.rope, *shape)
        self._index_layers = [i for i, there in enumerate(m.indexer.layers) if there] if m.indexer else []
        self._index = _Cells(len(self._index_layers), m.indexer.head_dim if m.indexer else 0, *shape)
        self._layers = config.num_layers

    def write(self, layer: int, slots: torch.Tensor, latent: torch.Tensor, key: torch.Tensor) -> None:
        """Store latents [T, rank] and rotated keys [T, rope] at `slots` [T] int64."""
        self._cells.write(layer, slots, torch.cat([latent, key], -1))

    def read(self, layer: int, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[*slots.shape, rank + rope] at `slots` in `dtype`."""
        return self._cells.read(layer, slots, dtype)

    def write_index(self, layer: int, slots: torch.Tensor, key: torch.Tensor) -> None:
        """Store indexer keys [T, head_dim]."""
        self._index.write(self._index_layers.index(layer), slots, key)

    def read_index(self, layer: int, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Indexer keys [*slots.shape, head_dim]."""
        return self._index.read(self._index_layers.index(layer), slots, dtype)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy slot source[i] to target[i] in every layer; all are read before any is written."""
        for tensor in (*self._cells.tensors, *self._index.tensors):
            tensor[:, target] = tensor[:, source]

    def take(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What lies at `slots` [T] int64: data [1, layers, T, G, D] and scale [1, layers, T, G] or None, see
        `ModelConfig.cache_shape`; on the CPU. Layers without an indexer have zeros for its key."""
        parts = []
        for cells, index in zip(self._cells.tensors, self._index.tensors, strict=True):
            part = cells[:, slots]
            if self._index_layers:
                wide = part.new_zeros(self._layers, len(slots), *index.shape[2:])
                wide[self._index_layers] = index[:, slots]
                part = torch.cat([part, wide], 2)
            parts.append(part[None].cpu())
        return parts[0].view(self._cells.dtype), parts[1] if len(parts) > 1 else None

    def put(self, slots: torch.Tensor, data: torch.Tensor, scale: torch.Tensor | None) -> None:
        """The inverse of `take`."""
        for cells, index, given in zip(self._cells.tensors, self._index.tensors, (data, scale), strict=False):
            assert given is not None
            raw = given[0].view(cells.dtype).to(cells.device)
            cells[:, slots] = raw[:, :, :cells.shape[2]]
            if self._index_layers:
                index[:, slots] = raw[self._index_layers][:, :, cells.shape[2]:]


class _Cells:
    """One part of the cache: data [layers, N, G, g] in the cache's dtype, where it has scales: fp32 [layers, N, G]."""

    def __init__(self, layers: int, width: int, num_slots: int, group: int, kv_dtype: str, device: torch.device | str) -> None:
        self.dtype, self._largest = _dtype(kv_dtype), _LARGEST.get(kv_dtype)
        self._group = group
        data = torch.zeros(layers, num_slots, width // group, group, dtype=self.dtype, device=device)
        # fp8 is indexed as bytes: torch cannot on every device
        self.tensors = [data.view(torch.uint8) if kv_dtype == "fp8" else data]
        if self._largest is not None:
            self.tensors.append(torch.zeros(data.shape[:3], device=device))

    def write(self, layer: int, slots: torch.Tensor, x: torch.Tensor) -> None:
        x = x.unflatten(-1, (-1, self._group))
        if self._largest is not None:
            scale = x.float().abs().amax(-1).clamp_min(1e-12) / self._largest
            self.tensors[1][layer, slots] = scale
            x = x.float() / scale[..., None]
            x = x.round() if self.dtype == torch.int8 else x
            self.tensors[0][layer, slots] = x.to(self.dtype).view(self.tensors[0].dtype)
        else:
            self.tensors[0][layer, slots] = x.to(self.tensors[0].dtype)

    def read(self, layer: int, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        x = self.tensors[0][layer, slots]
        if self._largest is not None:
            x = x.view(self.dtype).to(dtype) * self.tensors[1][layer, slots].to(dtype)[..., None]
        return x.to(dtype).flatten(-2)


@dataclass
class _Unit:
    """Rows that are computed together: S sequences of q rows each, at `rows` [S * q] of the step; slots [S, C]; visible [S, q, C]
    bool, None: all. index [S, q, K] into C: what the rows attend to, of which `real` [S, q, K] (None: all) are theirs; without an
    index it is everything visible."""

    rows: torch.Tensor
    slots: torch.Tensor
    visible: torch.Tensor | None
    index: torch.Tensor | None = None
    real: torch.Tensor | None = None

    @property
    def size(self) -> int:
        """q."""
        return len(self.rows) // len(self.slots)

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Its rows of x [T, ...], as [S, q, ...]."""
        return x[self.rows].unflatten(0, (len(self.slots), -1))

    @property
    def gathers(self) -> bool:
        """Whether reading each row's own keys reads less than reading all of them once."""
        return self.index is not None and self.size * self.index.shape[-1] <= self.slots.shape[1]


def _units(step: Step) -> Iterator[_Unit]:
    if step.padded is not None:
        slots, mask = step.padded.near(None)
        yield _Unit(step.padded.rows, slots, mask[:, 0])
    for span in step.spans if step.padded is None else step.padded.others:
        rows = torch.arange(span.start, span.stop, device=span.slots.device)
        yield _Unit(rows, span.slots[None], None if span.visible is None else span.visible[None])


def mix(run: TorchRunner, layer: int, h: torch.Tensor, step: Step) -> torch.Tensor:
    """h [T, H] -> [T, H]: the attention of one layer."""
    m, p, store = _latent(run.config), f"model.layers.{layer}.self_attn.", run._kv
    assert isinstance(store, LatentStore), "allocate() first"
    if m.query_rank is None:
        q_in, q = h, run._linear(h, p + "q_proj", step.adapters)
    else:
        q_in = run._norm(run._linear(h, p + "q_a_proj", step.adapters), p + "q_a_layernorm.weight", NORM_EPS)
        q = run._linear(q_in, p + "q_b_proj", step.adapters)
    q_nope, q_rope = q.unflatten(-1, (run.config.num_heads, -1)).split([m.nope, m.rope], -1)
    latent, key = run._linear(h, p + "kv_a_proj_with_mqa", step.adapters).split([m.rank, m.rope], -1)
    latent = run._as_input(run._norm(latent, p + "kv_a_layernorm.weight", NORM_EPS), p + "kv_b_proj")
    q_rope, key = _turned(q_rope, step, m.interleaved), _turned(key[:, None], step, m.interleaved)[:, 0]
    store.write(layer, step.slots, latent, key)
    if m.indexer is not None and m.indexer.layers[layer]:
        step.shared = _choose(run, layer, h, q_in, step)
    units = list(_units(step)) if m.indexer is None else step.shared

    ups = _ups(run, p + "kv_b_proj", step)
    out = h.new_empty(len(h), run.config.num_heads, m.value)
    absorbed = [u for u in units if u.gathers or not _materializes(m, u.size, u.slots.shape[1])]
    for unit in units:
        if not any(unit is other for other in absorbed):
            out[unit.rows] = _materialized(m, store, layer, unit, q_nope, q_rope, _up_of(unit, ups))
    if absorbed:
        rows = torch.cat([unit.rows for unit in absorbed])
        queries = torch.cat([_fold(q_nope[rows], rows, ups, slice(m.nope), "tad,adr->tar"), q_rope[rows]], -1)
        weighted = torch.cat([_absorbed(m, store, layer, unit, q.unflatten(0, (len(unit.slots), -1)), run._wide)
                              for unit, q in zip(absorbed, queries.split([len(unit.rows) for unit in absorbed]), strict=True)])
        out[rows] = _fold(weighted, rows, ups, slice(m.nope, None), "tar,avr->tav")
    return run._linear(out.flatten(-2), p + "o_proj", step.adapters)


def _materializes(m: Latent, rows: int, seen: int) -> bool:
    """Whether making keys and values costs fewer products per head than `rows` longer queries over `seen` latents."""
    made, folded = seen * m.rank * (m.nope + m.value), rows * m.rank * (m.nope + m.value)
    return rows > 1 and made + rows * seen * (m.nope + m.rope + m.value) < folded + rows * seen * (2 * m.rank + m.rope)


def _materialized(m: Latent, store: LatentStore, layer: int, unit: _Unit, q_nope: torch.Tensor, q_rope: torch.Tensor,
                  up: torch.Tensor) -> torch.Tensor:
    """[S * q, A, value], as many heads at once as `_HELD` lets."""
    latent, key = store.read(layer, unit.slots, q_nope.dtype).split([m.rank, m.rope], -1)
    q = torch.cat([unit.of(q_nope), unit.of(q_rope)], -1).transpose(1, 2)
    mask, mixed = _only_chosen(unit), []
    for heads in torch.arange(len(up)).split(max(1, _HELD // (unit.slots.numel() * (m.nope + m.value)))):
        part = slice(int(heads[0]), int(heads[-1]) + 1)
        made = torch.einsum("scr,adr->sacd", latent, up[part])
        k = torch.cat([made[..., :m.nope], key[:, None].expand(-1, made.shape[1], -1, -1)], -1)
        # torch's fused attention wants values as wide as keys
        v = F.pad(made[..., m.nope:], (0, max(m.nope + m.rope - m.value, 0)))
        mixed.append(F.scaled_dot_product_attention(q[:, part], k, v, None if mask is None else mask[:, None], scale=m.scale))
    return torch.cat(mixed, 1)[..., :m.value].transpose(1, 2).flatten(0, 1)


def _absorbed(m: Latent, store: LatentStore, layer: int, unit: _Unit, q: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """The weighted latents [S * q, A, rank] of queries q [S, q, A, rank + rope], as many rows at once as `_HELD` lets."""
    heads = q.shape[2]
    if unit.gathers:  # every row becomes a sequence of its own
        assert unit.index is not None
        slots = unit.slots[:, None].expand(-1, unit.size, -1).gather(-1, unit.index).flatten(0, 1)
        rows = max(1, _HELD // (slots.shape[1] * (heads + q.shape[3])))
        q, mask = q.flatten(0, 1)[:, None], None if unit.real is None else unit.real.flatten(0, 1)[:, None]
        return torch.cat([_weighted(m, store.read(layer, at, q.dtype), part, seen, wide)
                          for at, part, seen in zip(slots.split(rows), q.split(rows), _split(mask, rows, 0))])[:, 0]
    keys, mask = store.read(layer, unit.slots, q.dtype), _only_chosen(unit)
    rows = max(1, _HELD // (unit.slots.numel() * heads))
    return torch.cat([_weighted(m, keys, part, seen, wide)
                      for part, seen in zip(q.split(rows, 1), _split(mask, rows, 1))], 1).flatten(0, 1)


def _weighted(m: Latent, keys: torch.Tensor, q: torch.Tensor, mask: torch.Tensor | None, wide: torch.dtype) -> torch.Tensor:
    """q [S, q, A, rank + rope] over keys [S, C, rank + rope], mask [S, q, C] -> [S, q, A, rank]."""
    scores = (q.flatten(1, 2) @ keys.transpose(1, 2)).unflatten(1, q.shape[1:3]) * m.scale
    if mask is not None:
        scores = scores.masked_fill(~mask[:, :, None], float("-inf"))
    shares = scores.softmax(-1, dtype=wide).to(q.dtype)
    return (shares.flatten(1, 2) @ keys[..., :m.rank]).unflatten(1, q.shape[1:3])


def _split(mask: torch.Tensor | None, rows: int, side: int) -> Iterable[torch.Tensor | None]:
    return itertools.repeat(None) if mask is None else mask.split(rows, side)


def _only_chosen(unit: _Unit) -> torch.Tensor | None:
    """[S, q, C] bool: what each row attends to; None: everything."""
    if unit.index is None:
        return unit.visible
    chosen = torch.zeros(*unit.index.shape[:2], unit.slots.shape[1], dtype=torch.bool, device=unit.index.device)
    chosen.scatter_(-1, unit.index, True)
    return chosen if unit.visible is None else chosen & unit.visible


def _choose(run: TorchRunner, layer: int, h: torch.Tensor, q_in: torch.Tensor, step: Step) -> list[_Unit]:
    """The step's units with the keys that their rows attend to. The indexer's keys of the step are written."""
    m, p, store = _latent(run.config), f"model.layers.{layer}.self_attn.indexer.", run._kv
    assert m.indexer is not None and isinstance(store, LatentStore)
    x = m.indexer
    q = run._linear(q_in, p + "wq_b", step.adapters).unflatten(-1, (x.heads, x.head_dim))
    weight, bias = run._weight(p + "k_norm.weight", run._wide), run._weight(p + "k_norm.bias", run._wide)
    k = F.layer_norm(run._linear(h, p + "wk", step.adapters).to(run._wide), (x.head_dim,), weight, bias, NORM_EPS).to(h.dtype)
    q, k = (torch.cat([_turned(part, step, x.interleaved), rest], -1)
            for part, rest in (t.split([m.rope, x.head_dim - m.rope], -1) for t in (q, k[:, None])))
    store.write_index(layer, step.slots, k[:, 0])
    weights = F.linear(h.to(run._wide), run._weight(p + "weights_proj.weight", run._wide)) * x.heads**-0.5
    units = list(_units(step))
    for unit in units:
        if unit.slots.shape[1] > x.top:
            keys = store.read_index(layer, unit.slots, run._wide)[:, None].transpose(2, 3)  # [S, 1, D, C]
            rows = max(1, _HELD // 4 // (x.heads * unit.slots.numel()))
            scores = torch.cat([(w[:, :, None] @ F.relu(part.to(run._wide) @ keys * x.head_dim**-0.5))[:, :, 0]
                                for part, w in zip(unit.of(q).split(rows, 1), unit.of(weights).split(rows, 1), strict=True)], 1)
            if unit.visible is not None:
                scores = scores.masked_fill(~unit.visible, float("-inf"))
            unit.index = largest(scores, x.top)
            unit.real = None if unit.visible is None else unit.visible.expand_as(scores).gather(-1, unit.index)
    return units


def _turned(x: torch.Tensor, step: Step, interleaved: bool) -> torch.Tensor:
    """Rotated x [T, heads, D], half-split whatever it was: query and key are laid out alike, so their product is the same."""
    return rotate(torch.cat([x[..., 0::2], x[..., 1::2]], -1) if interleaved else x, step.cos, step.sin)


def _ups(run: TorchRunner, module: str, step: Step) -> Ups:
    """W_UK and W_UV [A, nope + value, rank], first of the base, then with each adapter of them, and that adapter's rows."""
    w = run._weight(f"{module}.weight", run.dtype)
    found = [(step.slots[:0], w)]
    for slot, rows in step.adapters.items():
        lora = run._adapter(slot, module)
        if lora is not None:
            adapted = w + lora.scale * (lora.b @ lora.a)
            found.append((rows, adapted if lora.row_scale is None else adapted * lora.row_scale[:, None]))
    return [(rows, w.unflatten(0, (run.config.num_heads, -1))) for rows, w in found]


def _up_of(unit: _Unit, ups: Ups) -> torch.Tensor:
    """The weights of a unit of one sequence."""
    return next((w for rows, w in ups[1:] if (rows == unit.rows[0]).any()), ups[0][1])


def _fold(x: torch.Tensor, rows: torch.Tensor, ups: Ups, part: slice, product: str) -> torch.Tensor:
    """x [n, A, ...] of the step's `rows` [n] times a part of each row's own W_UK and W_UV."""
    out = torch.einsum(product, x, ups[0][1][:, part])
    for theirs, w in ups[1:]:
        at = torch.isin(rows, theirs)
        out[at] = torch.einsum(product, x[at], w[:, part])
    return out


def _dtype(kv_dtype: str) -> torch.dtype:
    if kv_dtype not in FORMATS:
        raise UnsupportedError(f"kv_dtype {kv_dtype!r} is not supported for latent attention; use one of {', '.join(FORMATS)}."
                               f"{nearest(kv_dtype, FORMATS)}")
    return DTYPES[kv_dtype]


def _latent(config: ModelConfig) -> Latent:
    assert config.latent is not None
    return config.latent
