"""Causal attention inside each document of a ragged row: work and memory grow with sum(length^2), no [T, T] mask exists.

With `shared` the first document is a prefix of all others: they see its rows as if each began with them, so that a system prompt
that many samples open with is computed once. Rotary embedding (arXiv 2104.09864, halves against halves) can be left to the
attention: q and k are then rotated on the way, and neither rotated copy exists.

On CPU one autograd node keeps q, k, v, the output and a log-sum-exp per token and head; it runs a native kernel, or torch's flash
kernel per document. A GPU has Triton kernels. What neither has (windows shorter than a document, sinks and soft caps on a CPU,
odd dtypes and dimensions) goes through `pieces`, in plain torch, with the same memory.
"""

from __future__ import annotations

from typing import Any

import torch

from karui.configs.errors import KaruiError
from karui.kernels.document_attention.pieces import PieceAttention
from karui.kernels.native import train as native
from karui.kernels.rope import rope
from karui.kernels.triton_support import Backend, use_triton

Rotary = tuple[torch.Tensor, torch.Tensor]


def document_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scaling: float,
    *,
    shared: bool = False,
    rotary: Rotary | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Attention output [1, T, heads, Dv], each token seeing the tokens of its own document up to itself.

    Args:
        q: [1, heads, T, D].
        k, v: [1, kv_heads, T, D] and [1, kv_heads, T, Dv]; kv_heads divides heads.
        cu_seqlens: [documents + 1] integers, from 0 to T: where documents begin.
        scaling: factor on q k^T.
        shared: the first document is seen by all others, before their own rows.
        rotary: cosine and sine [T, D] to rotate q and k by, q cos + rotate_half(q) sin; None: they are as they should be.
        window: tokens a token sees, itself among them; None: all before it.
        sinks: [heads] logits that take part in each token's softmax and bring no value (gpt-oss); they get a gradient.
        softcap: c, scores s are c tanh(s / c) (Gemma 2, arXiv 2408.00118).

    Raises:
        KaruiError: a window below 1, a cap that is not positive, sinks that are not one per head.
    """
    _check(q, window, sinks, softcap)
    if (short := q.shape[-1] - v.shape[-1]) > 0:  # latent attention has narrower values; zeros beside them stay zeros
        wide = torch.nn.functional.pad(v, (0, short))
        return document_attention(q, k, wide, cu_seqlens, scaling, shared=shared, rotary=rotary, window=window, sinks=sinks,
                                  softcap=softcap, backend=backend)[..., :-short]
    if use_triton(backend, q.device, "document_attention", refused=_refused(q)):
        from karui.kernels.document_attention.triton import DocumentAttention

        if rotary:
            q, k = (rope(x.squeeze(0).transpose(0, 1), *rotary, backend).transpose(0, 1).unsqueeze(0) for x in (q, k))
        return DocumentAttention.apply(q, k, v, cu_seqlens, scaling, shared, window, sinks, softcap)
    bounds = cu_seqlens.tolist()
    if window is not None and _longest(bounds, shared) <= window:
        window = None
    plain = window is None and sinks is None and softcap is None
    if plain and native.attention_usable(q, k, v, bounds):
        cosine, sine = (t.float().contiguous() for t in rotary) if rotary else (None, None)
        return _NativeAttention.apply(q, k, v, bounds, scaling, shared, cosine, sine)
    if rotary:
        q, k = rotate(q, *rotary), rotate(k, *rotary)
    if plain and q.device.type == "cpu" and q.dtype != torch.float64 and not shared:
        return _DocumentAttention.apply(q, k, v, bounds, scaling)
    return PieceAttention.apply(q, k, v, sinks, bounds, scaling, shared, window, softcap)


def _check(q: torch.Tensor, window: int | None, sinks: torch.Tensor | None, softcap: float | None) -> None:
    if window is not None and window < 1:
        raise KaruiError(f"document_attention: a window holds at least the token itself, got {window}.")
    if softcap is not None and not softcap > 0:
        raise KaruiError(f"document_attention: softcap must be positive, got {softcap}.")
    if sinks is not None and sinks.shape != (q.shape[1],):
        raise KaruiError(f"document_attention takes one sink per head, [{q.shape[1]}]; got {tuple(sinks.shape)}.")


def _longest(bounds: list[int], shared: bool) -> int:
    lengths = [e - s for s, e in zip(bounds, bounds[1:])]
    return lengths[0] + max(lengths[1:], default=0) if shared else max(lengths, default=0)


def rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """x cos + rotate_half(x) sin, in x's dtype; cosine and sine may be of a wider one."""
    low, high = x.chunk(2, -1)
    return (x * cosine + torch.cat((-high, low), -1) * sine).to(x.dtype)


class _NativeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: list[int], scaling: float, shared: bool,
        cosine: torch.Tensor | None, sine: torch.Tensor | None,
    ) -> torch.Tensor:
        exact, lse = native.attention(q.float(), k.float(), v.float(), bounds, scaling, shared, cosine, sine)
        out = exact.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse, cosine, sine)
        ctx.how = bounds, scaling, shared
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, cosine, sine = ctx.saved_tensors
        bounds, scaling, shared = ctx.how
        found = native.attention_backward(
            grads[0].contiguous().float(), q.float(), k.float(), v.float(), out.float(), lse, bounds, scaling, shared,
            cosine, sine,
        )
        return *(g.to(t.dtype).transpose(1, 2) for g, t in zip(found, (q, k, v))), None, None, None, None, None


def _refused(q: torch.Tensor) -> str:
    if q.shape[-1] > 256:
        return f"a head dimension of {q.shape[-1]}, more than 256"
    if q.is_cuda and q.dtype not in (torch.bfloat16, torch.float16):
        return f"dtype {q.dtype}, which tensor cores would round"
    return f"dtype {q.dtype}" if q.dtype == torch.float64 else ""


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
