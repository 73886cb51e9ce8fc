"""Attention of a step's rows over the paged keys of their own sequences, in plain torch: MHA, MQA, GQA, sliding windows, trees.

Legend for shapes: T tokens in the step, S sequences, A attention heads, G kv heads, D head_dim, C keys seen, q a sequence's rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from karui.inference.cache.kivi import KiviStore
from karui.inference.cache.kv import KVStore
from karui.inference.cache.kvquant import KVQuantStore
from karui.inference.models.step import Step


def attend(kv: KVStore | KiviStore | KVQuantStore, layer: int, q: torch.Tensor, step: Step, window: int | None,
           cap: float | None = None, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """q [T, A, D] -> [T, A, D], each sequence over its own keys; one-row sequences go together, padded. cap, sinks: `sdpa`'s."""
    out = torch.empty_like(q)
    padded = step.padded if isinstance(kv, KVStore) else None
    if padded is not None and isinstance(kv, KVStore):
        slots, mask = padded.near(window)
        k, v = kv.read(layer, slots, q.dtype)
        out[padded.rows] = sdpa(q[padded.rows][:, None], k, v, mask, cap, sinks)[:, 0]
    for span in step.spans if padded is None else padded.others:
        if window is not None:
            span = span.within(window, kv.block_size if isinstance(kv, KiviStore) else 1)
        for start, stop, k, v in kv.seen(layer, span, q.dtype):
            visible = None if span.visible is None else span.visible[start - span.start:stop - span.start, :len(k)]
            if window is not None:
                near = span.key_positions[None, :len(k)] > step.positions[start:stop, None] - window
                visible = near if visible is None else visible & near
            mixed = sdpa(q[None, start:stop], k[None], v[None], None if visible is None else visible[None, None], cap, sinks)
            out[start:stop] = mixed[0]
    return out


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, cap: float | None = None,
         sinks: torch.Tensor | None = None) -> torch.Tensor:
    """q [S, q, A, D] over k, v [S, C, G, D] -> [S, q, A, D]; mask bool, broadcast over heads.

    cap: scores x become cap tanh(x / cap) (Gemma 2, arXiv 2408.00118). sinks [A]: a logit per head that takes its share and has
    no value (gpt-oss, after StreamingLLM, arXiv 2309.17453).
    """
    groups = q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    if cap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)
    scores = q @ k.transpose(2, 3) * q.shape[-1]**-0.5
    if cap is not None:
        scores = (scores / cap).tanh() * cap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)], -1)
    shares = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(v.dtype)
    return (shares[..., :k.shape[2]] @ v).transpose(1, 2)
