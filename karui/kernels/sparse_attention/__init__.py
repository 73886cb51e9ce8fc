"""DeepSeek's sparse attention in training (DeepSeek-V3.2, arXiv 2512.02556, section 2.1), in plain torch, document by document:

    score I_ts = sum over index heads j of w_tj relu(q_tj . k_s)       `scores`    (eq. 1)
    each row attends to the `top` keys with the largest score           `choose`, `sparse_attention`    (eq. 2)
    loss = sum_t w_t KL(p_t || softmax(I_t)), p_t the attention of row t, summed over heads and normalized    (eq. 3, 4)

Over all keys in the dense warm-up, over the chosen ones in the sparse stage. p is a target: only the index has a gradient.

Work is quadratic in a document, memory is not: scores and shares exist for a block of rows at a time and are made again in the
backward pass; the loss's gradient is made with the loss. What is kept of a choice is [n, top] int32 for a document of n > top.

Legend: T rows, A heads, I index heads, D head sizes, n rows of a block, C keys it may see.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

Chosen = list[torch.Tensor | None]
"""Per document the keys [length, top] int32 that its rows attend to, counted from its first row, best first; None: all."""
_HELD = 1 << 22  # numbers that one product makes at once


def scores(iq: torch.Tensor, ik: torch.Tensor, iw: torch.Tensor) -> torch.Tensor:
    """Index scores [n, C] of queries [n, I, D] with weights [n, I] over keys [C, D]; not masked. In transformers' order."""
    lit = torch.relu(iq @ ik.T * ik.shape[-1] ** -0.5)  # [n, I, C]
    return (iw[:, None] @ lit)[:, 0]


def largest(scores: torch.Tensor, top: int) -> torch.Tensor:
    """Where the `top` largest of the last dimension are, best first, of equals the first.

    `topk` breaks ties as the shape has it, and a score of 0 is no rarity behind a ReLU: a row's choice would depend on others'.
    """
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :top]


@torch.no_grad()
def choose(iq: torch.Tensor, ik: torch.Tensor, iw: torch.Tensor, cu_seqlens: torch.Tensor, top: int) -> Chosen:
    """The `top` keys of every row by score, among those up to it in its document.

    Args:
        iq, ik, iw: [T, I, D], [T, D] and [T, I], rotated, in fp32 or wider.
        cu_seqlens: [documents + 1] integers, from 0 to T.
    """
    chosen: Chosen = []
    for s, e in _documents(cu_seqlens):
        if e - s <= top:
            chosen.append(None)
            continue
        rows = [scores(iq[a:b], ik[s:b], iw[a:b]).masked_fill(~_before(a - s, b - s, iq.device), float("-inf"))
                for a, b in _blocks(s, e, iq.shape[1])]
        # a block that ends before `top` keys is widened: what it may not see comes last
        wide = [torch.nn.functional.pad(x, (0, max(0, top - x.shape[1])), value=float("-inf")) for x in rows]
        chosen.append(torch.cat([largest(x, top).int() for x in wide]))
    return chosen


def sparse_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, scaling: float,
                     chosen: Chosen) -> torch.Tensor:
    """[1, T, A, Dv] of q, k [1, A, T, D] and v [1, A, T, Dv], every row over its chosen keys."""
    return _Attention.apply(q, k, v, _documents(cu_seqlens), scaling, chosen)


def indexer_loss(iq: torch.Tensor, ik: torch.Tensor, iw: torch.Tensor, q: torch.Tensor, k: torch.Tensor, cu_seqlens: torch.Tensor,
                 scaling: float, weight: torch.Tensor, chosen: Chosen | None = None) -> torch.Tensor:
    """Sum over rows of weight [T] times KL(p || softmax(score)) in fp32 (fp64 of fp64 inputs), nats; differentiable in the index.

    Args:
        iq, ik, iw: as in `choose`.
        q, k: [1, A, T, D] of the attention that is to be found; they get no gradient.
        chosen: None: over all keys up to a row.
    """
    bounds = _documents(cu_seqlens)
    return _Loss.apply(iq, ik, iw, q.detach(), k.detach(), bounds, scaling, weight, chosen or [None] * len(bounds))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: list[tuple[int, int]], scaling: float,
                chosen: Chosen) -> torch.Tensor:
        out = v.new_empty(1, v.shape[2], v.shape[1], v.shape[3])
        with torch.autocast(q.device.type, enabled=False):
            for s, a, b, seen in _seen(bounds, chosen, q):
                shares = _shares(q[0, :, a:b], k[0, :, s:b], seen, scaling)
                out[0, a:b] = (shares.to(v.dtype) @ v[0, :, s:b]).transpose(0, 1)
        ctx.save_for_backward(q, k, v)
        ctx.how = bounds, scaling, chosen
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        bounds, scaling, chosen = ctx.how
        wide = _wide(q)
        dq, dk, dv = (torch.zeros(x.shape[1:], dtype=wide, device=x.device) for x in (q, k, v))
        with torch.autocast(q.device.type, enabled=False):
            for s, a, b, seen in _seen(bounds, chosen, q):
                queries, keys, values = (x.to(wide) for x in (q[0, :, a:b], k[0, :, s:b], v[0, :, s:b]))
                shares, given = _shares(queries, keys, seen, scaling), grads[0][0, a:b].transpose(0, 1).to(wide)
                dv[:, s:b] += shares.mT @ given
                d = given @ values.mT
                d = shares * (d - (d * shares).sum(-1, keepdim=True)) * scaling
                dq[:, a:b] = d @ keys
                dk[:, s:b] += d.mT @ queries
        return *(d.to(x.dtype)[None] for d, x in zip((dq, dk, dv), (q, k, v))), None, None, None


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, iq: torch.Tensor, ik: torch.Tensor, iw: torch.Tensor, q: torch.Tensor, k: torch.Tensor,
                bounds: list[tuple[int, int]], scaling: float, weight: torch.Tensor, chosen: Chosen) -> torch.Tensor:
        wide, scale = _wide(q), ik.shape[-1] ** -0.5
        iq_, ik_, iw_, weight = (x.to(wide) for x in (iq, ik, iw, weight))
        total = torch.zeros((), dtype=wide, device=q.device)
        dq, dk, dw = (torch.zeros_like(x) for x in (iq_, ik_, iw_))
        with torch.autocast(q.device.type, enabled=False):
            for s, a, b, seen in _seen(bounds, chosen, q, iq.shape[1]):
                wanted = _shares(q[0, :, a:b], k[0, :, s:b], seen, scaling).mean(0)  # each head's sum to 1
                products = iq_[a:b] @ ik_[s:b].T * scale
                lit = products.relu()  # [n, I, C]
                score = (iw_[a:b, None] @ lit)[:, 0].masked_fill(~seen, float("-inf"))
                logs = score.log_softmax(-1)
                total += ((torch.xlogy(wanted, wanted) - wanted * logs.masked_fill(~seen, 0)).sum(-1) * weight[a:b]).sum()
                d = (logs.exp() - wanted) * weight[a:b, None]
                dw[a:b] = (lit @ d[:, :, None])[..., 0]
                through = iw_[a:b, :, None] * d[:, None] * (products > 0) * scale
                dq[a:b] = through @ ik_[s:b]
                dk[s:b] += through.flatten(0, 1).T @ iq_[a:b].flatten(0, 1)
        ctx.save_for_backward(*(d.to(x.dtype) for d, x in zip((dq, dk, dw), (iq, ik, iw))))
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *(d * grads[0].to(d.dtype) for d in ctx.saved_tensors), None, None, None, None, None, None


def _documents(cu_seqlens: torch.Tensor) -> list[tuple[int, int]]:
    bounds = cu_seqlens.tolist()
    return list(zip(bounds, bounds[1:]))


def _blocks(s: int, e: int, heads: int) -> Iterator[tuple[int, int]]:
    """Rows [a, b) of a document that are worked on at once."""
    size = max(1, _HELD // (heads * max(1, e - s)))
    return ((a, min(a + size, e)) for a in range(s, e, size))


def _before(a: int, b: int, device: torch.device) -> torch.Tensor:
    """[b - a, b] bool: rows a to b of a document see what is not after them."""
    return torch.arange(b, device=device)[None] <= torch.arange(a, b, device=device)[:, None]


def _seen(bounds: list[tuple[int, int]], chosen: Chosen, q: torch.Tensor,
          heads: int = 0) -> Iterator[tuple[int, int, int, torch.Tensor]]:
    """(document's begin, a, b, seen [b - a, b - begin] bool) of every block of rows, for q's heads or more."""
    for (s, e), keys in zip(bounds, chosen, strict=True):
        for a, b in _blocks(s, e, max(heads, q.shape[1])):
            seen = _before(a - s, b - s, q.device)
            if keys is not None:
                # rows with fewer keys than `top` name some that they may not see, which may lie beyond the block
                picked = torch.zeros(b - a, e - s, dtype=torch.bool, device=q.device)
                seen = seen & picked.scatter_(1, keys[a - s : b - s].long(), True)[:, : b - s]
            yield s, a, b, seen


def _shares(q: torch.Tensor, k: torch.Tensor, seen: torch.Tensor, scaling: float) -> torch.Tensor:
    """[A, n, C] in fp32 or wider, of q [A, n, D] over k [A, C, D]."""
    products = (q @ k.mT).to(_wide(q)) * scaling
    return products.masked_fill(~seen, float("-inf")).softmax(-1)


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
