"""Causal attention inside documents in pieces of queries, in plain torch: windows, sinks, soft caps, any dimension and dtype.

The forward pass keeps q, k, v, the output and a log-sum-exp per token and head; the backward pass makes a piece's probabilities
again from those (FlashAttention-2, arXiv 2307.08691, alg. 2), so memory grows with the row, work with length * window.

    capped    c tanh(s / c) in place of the score s (Gemma 2, arXiv 2408.00118); d/ds = 1 - (capped / c)^2
    sink      a logit per head that takes part in the softmax and brings no value (gpt-oss); its gradient is -sum p_sink D,
              with D = sum_d dout_d out_d of each token and head
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

QUERIES = 128
"""Queries whose scores exist at one moment."""


class Piece(NamedTuple):
    """Queries first .. last of the row, the one or two stretches of rows whose keys are read for them, and who sees which."""

    first: int
    last: int
    keys: list[tuple[int, int]]
    seen: torch.Tensor


class PieceAttention(torch.autograd.Function):
    """q [1, H, T, D], k [1, G, T, D], v [1, G, T, Dv], sinks [H] or None -> [1, T, H, Dv] in q's dtype; sums in fp32 (fp64)."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, bounds: list[int],
        scaling: float, shared: bool, window: int | None, softcap: float | None,
    ) -> torch.Tensor:
        exact = torch.float64 if q.dtype == torch.float64 else torch.float32
        (heads, tokens), groups = q.shape[1:3], k.shape[1]
        out = q.new_zeros(1, tokens, heads, v.shape[-1])
        lse = torch.zeros(heads, tokens, dtype=exact, device=q.device)
        for piece in pieces(bounds, shared, window, q.device):
            s, _ = _scores(_queries(q, piece, groups), _rows(k, piece.keys), piece, scaling, softcap)
            total = s.logsumexp(-1)
            if sinks is not None:
                total = torch.logaddexp(total, _per_row(sinks.to(exact), piece, groups))
            p = (s - total.unsqueeze(-1)).exp_()
            made = (p @ _rows(v, piece.keys).to(exact)).view(heads, -1, v.shape[-1])
            out[0, piece.first : piece.last] = made.transpose(0, 1).to(out.dtype)
            lse[:, piece.first : piece.last] = total.view(heads, -1)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.how = bounds, scaling, shared, window, softcap
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        bounds, scaling, shared, window, softcap = ctx.how
        exact, groups, heads = lse.dtype, k.shape[1], q.shape[1]
        dout = grads[0].to(exact)
        delta = (dout * out.to(exact)).sum(-1)[0].T  # [H, T]
        dq, dk, dv = (torch.zeros(x.shape[1:], dtype=exact, device=x.device) for x in (q, k, v))
        for piece in pieces(bounds, shared, window, q.device):
            mine, keys, values = _queries(q, piece, groups), _rows(k, piece.keys), _rows(v, piece.keys).to(exact)
            s, capped = _scores(mine, keys, piece, scaling, softcap)
            rows = slice(piece.first, piece.last)
            p = (s - lse[:, rows].reshape(groups, -1, 1)).exp_()
            pull = dout[0, rows].transpose(0, 1).reshape(groups, -1, v.shape[-1])
            ds = p * (pull @ values.mT - delta[:, rows].reshape(groups, -1, 1))
            if capped is not None:
                ds *= 1 - capped.square()
            ds *= scaling
            dq[:, rows] = (ds @ keys.to(exact)).view(heads, -1, q.shape[-1])
            _add(dk, piece.keys, ds.mT @ mine.to(exact))
            _add(dv, piece.keys, p.mT @ pull)
        dsinks = None if sinks is None else -((sinks.to(exact).unsqueeze(1) - lse).exp() * delta).sum(1).to(sinks.dtype)
        found = (g.unsqueeze(0).to(x.dtype) for g, x in zip((dq, dk, dv), (q, k, v)))
        return *found, dsinks, None, None, None, None, None


def pieces(bounds: list[int], shared: bool, window: int | None, device: torch.device) -> Iterator[Piece]:
    """All queries of a row, some at a time; with `shared` later documents follow on from the first one's rows."""
    size = QUERIES if window is None else max(16, min(QUERIES, window))
    for number, (start, end) in enumerate(zip(bounds, bounds[1:])):
        before = bounds[1] if shared and number else 0  # rows of the shared beginning
        for first in range(start, end, size):
            last = min(first + size, end)
            low = 0 if window is None else max(0, first - start + before - window + 1)  # the first place that is seen
            keys = [(min(low, before), before)] if low < before else []
            keys.append((start + max(0, low - before), last))
            places = torch.arange(first, last, device=device) - start + before
            theirs = torch.arange(low, last - start + before, device=device)
            seen = theirs <= places.unsqueeze(1)
            if window is not None:
                seen &= theirs > places.unsqueeze(1) - window
            yield Piece(first, last, keys, seen)


def _scores(
    mine: torch.Tensor, keys: torch.Tensor, piece: Piece, scaling: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(masked scores [G, group * rows, keys], what the cap's derivative takes: capped scores as shares of the cap)."""
    exact = torch.float64 if mine.dtype == torch.float64 else torch.float32
    s = (mine.to(exact) @ keys.to(exact).mT) * scaling
    capped = None
    if softcap is not None:
        capped = (s / softcap).tanh_()
        s = capped * softcap
    shape = s.shape
    s = s.view(shape[0], -1, piece.last - piece.first, shape[-1]).masked_fill_(~piece.seen, float("-inf")).view(shape)
    return s, capped


def _queries(x: torch.Tensor, piece: Piece, groups: int) -> torch.Tensor:
    """[1, H, T, D] -> the piece's [G, group * rows, D], heads that share keys below one another."""
    return x[0, :, piece.first : piece.last].reshape(groups, -1, x.shape[-1])


def _rows(x: torch.Tensor, stretches: list[tuple[int, int]]) -> torch.Tensor:
    parts = [x[0, :, a:b] for a, b in stretches]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _add(total: torch.Tensor, stretches: list[tuple[int, int]], part: torch.Tensor) -> None:
    at = 0
    for a, b in stretches:
        total[:, a:b] += part[:, at : at + b - a]
        at += b - a


def _per_row(per_head: torch.Tensor, piece: Piece, groups: int) -> torch.Tensor:
    """[H] -> [G, group * rows], as `_queries` lays rows out."""
    return per_head.repeat_interleave(piece.last - piece.first).view(groups, -1)
