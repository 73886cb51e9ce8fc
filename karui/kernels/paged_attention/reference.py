"""Plain torch, sequence by sequence, with the mask written out; float64 inside."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from karui.kernels.rms_norm.reference import rms_norm
from karui.kernels.rope.reference import rope

if TYPE_CHECKING:
    from karui.kernels.paged_attention import Cache, Plan


def write_kv(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, cache: Cache) -> None:
    """As `karui.kernels.paged_attention.write_kv`."""
    keep = slots >= 0
    at = slots[keep].long()
    for x, to, scales in ((k[keep], cache.keys, cache.key_scale), (v[keep], cache.values, cache.value_scale)):
        if cache.packed is not None:
            to[at] = pack4(x, cache.packed[1])
            continue
        if scales is None:
            to[at] = x.to(to.dtype)
            continue
        top = 127.0 if to.dtype == torch.int8 else 448.0
        scale = x.float().abs().amax(-1).clamp_min(1e-12) / top
        scales[at] = scale
        codes = (x.float() / scale[..., None]).clamp(-top, top)
        codes = codes.round().to(torch.int8) if to.dtype == torch.int8 else codes.to(to.dtype)
        to.view(torch.uint8)[at] = codes.view(torch.uint8)


def enter(qkv: torch.Tensor, heads: int, cos: torch.Tensor, sin: torch.Tensor, slots: torch.Tensor, cache: Cache,
          norms: tuple[torch.Tensor, ...] | None, eps: float) -> torch.Tensor:  # fmt: skip
    """As `karui.kernels.paged_attention.enter`."""
    groups, width = cache.keys.shape[1], cache.head_dim
    q, k, v = qkv.view(len(qkv), -1, width).split((heads, groups, groups), 1)
    if norms is not None:
        q, k = (rms_norm(x, weight, eps) for x, weight in zip((q, k), norms))
    q, k = rope(q, cos, sin), rope(k, cos, sin)
    write_kv(k, v, slots, cache)
    return q


def pack4(x: torch.Tensor, group: int) -> torch.Tensor:
    """Rows of an int4 cache of x [..., D], see `Cache`; a group with a NaN has no number for step and min."""
    x = x.float().clamp(-65504.0, 65504.0).unflatten(-1, (-1, group))
    low, high = x.amin(-1, keepdim=True).half(), x.amax(-1, keepdim=True)
    step = ((high - low.float()) / 15).half()
    code = ((x - low.float()) / step.float()).round().clamp(0, 15)
    code = code.masked_fill((step == 0) | code.isnan(), 0).to(torch.uint8).flatten(-2)
    parts = [code[..., ::2] | code[..., 1::2] << 4, step.squeeze(-1).view(torch.uint8), low.squeeze(-1).view(torch.uint8)]
    return torch.cat(parts, -1)


def unpack4(rows: torch.Tensor, width: int, group: int) -> torch.Tensor:
    """float64 [..., D] of rows of an int4 cache."""
    codes, step, low = rows.split([width // 2, *[2 * (width // group)] * 2], -1)
    step, low = (x.contiguous().view(torch.float16).double().repeat_interleave(group, -1) for x in (step, low))
    return torch.stack([codes & 15, codes >> 4], -1).flatten(-2).double() * step + low


def read(values: torch.Tensor, scale: torch.Tensor | None, slots: torch.Tensor,
         packed: tuple[int, int] | None = None) -> torch.Tensor:  # fmt: skip
    """float64 [len(slots), G, D]."""
    if packed is not None:
        return unpack4(values[slots], *packed)
    x = values.view(torch.uint8)[slots].view(values.dtype) if values.element_size() == 1 else values[slots]
    return x.to(torch.float64) if scale is None else x.float().double() * scale[slots].double()[..., None]


def paged_attention(q: torch.Tensor, cache: Cache, plan: Plan, scaling: float, window: int | None) -> torch.Tensor:
    """As `karui.kernels.paged_attention.paged_attention`."""
    out = torch.zeros_like(q)
    starts, group = plan.query_starts.tolist(), q.shape[1] // cache.keys.shape[1]
    for s, context in enumerate(plan.contexts.tolist()):
        start, stop = starts[s], starts[s + 1]
        rows = stop - start
        if not rows:
            continue
        j = torch.arange(context, device=q.device)
        slots = plan.block_tables[s].long()[j // plan.block_size] * plan.block_size + j % plan.block_size
        k, v = (read(x, scale, slots, cache.packed).repeat_interleave(group, 1) for x, scale in
                ((cache.keys, cache.key_scale), (cache.values, cache.value_scale)))  # fmt: skip
        own = torch.ones(rows, rows, dtype=torch.bool, device=q.device).tril()
        if plan.tree is not None:
            words = plan.tree[start:stop, None].long()
            own = torch.where(words == 0, own, (words >> torch.arange(rows, device=q.device) & 1).bool())
        seen = torch.cat([torch.ones(rows, context - rows, dtype=torch.bool, device=q.device), own], 1)
        if window is not None:
            at = plan.positions[start:stop] if plan.positions is not None else j[context - rows :]
            place = torch.cat([j[: context - rows], at])
            seen = seen & (place[None] > at[:, None] - window)
        scores = torch.einsum("ihd,jhd->hij", q[start:stop].double(), k) * scaling
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        out[start:stop] = torch.einsum("hij,jhd->ihd", weights, v).to(q.dtype)
    return out
