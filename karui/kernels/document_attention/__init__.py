"""Causal attention inside each document of a ragged row: work and memory grow with sum(length^2), no [T, T] mask exists.

On CPU one autograd node runs torch's flash kernel per document and writes into one output, which is all that is kept besides
q, k, v and a log-sum-exp per token and head. Elsewhere: `scaled_dot_product_attention` per document.
"""

from __future__ import annotations

from typing import Any

import torch


def document_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Attention output [1, T, heads, D], each token seeing the tokens of its own document up to itself.

    Args:
        q: [1, heads, T, D].
        k, v: [1, kv_heads, T, D]; kv_heads divides heads.
        cu_seqlens: [documents + 1] integers, from 0 to T: where documents begin.
        scaling: factor on q k^T.
    """
    bounds = cu_seqlens.tolist()
    if q.device.type == "cpu" and q.dtype != torch.float64:
        return _DocumentAttention.apply(q, k, v, bounds, scaling)
    lengths = [e - s for s, e in zip(bounds, bounds[1:])]
    parts = zip(q.split(lengths, 2), k.split(lengths, 2), v.split(lengths, 2))
    attend = torch.nn.functional.scaled_dot_product_attention
    outs = [attend(qd, kd, vd, is_causal=True, scale=scaling, enable_gqa=True) for qd, kd, vd in parts]
    return torch.cat(outs, 2).transpose(1, 2)


class _DocumentAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: list[int], scaling: float
    ) -> torch.Tensor:
        out = q.new_empty(1, q.shape[2], q.shape[1], q.shape[3])
        sums = []
        for s, e in zip(bounds, bounds[1:]):
            part, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q[:, :, s:e], k[:, :, s:e], v[:, :, s:e], 0.0, True, scale=scaling
            )
            out[:, s:e] = part.transpose(1, 2)
            sums.append(lse)
        ctx.save_for_backward(q, k, v, out, *sums)
        ctx.bounds, ctx.scaling = bounds, scaling
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, *sums = ctx.saved_tensors
        dout = grads[0]
        # laid out as [1, T, heads, D] so that the projections' gradients are plain views
        dq, dk, dv = (t.new_empty(1, t.shape[2], t.shape[1], t.shape[3]) for t in (q, k, v))
        for (s, e), lse in zip(zip(ctx.bounds, ctx.bounds[1:]), sums):
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                dout[:, s:e].transpose(1, 2), q[:, :, s:e], k[:, :, s:e], v[:, :, s:e], out[:, s:e].transpose(1, 2), lse,
                0.0, True, scale=ctx.scaling,
            )
            for whole, part in zip((dq, dk, dv), parts):
                whole[:, s:e] = part.transpose(1, 2)
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2), None, None
