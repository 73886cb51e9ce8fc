"""Calibration of the kvquant caches: ranges of key channels and Fisher-weighted levels (KVQuant, arXiv 2401.18079, section 3.3).

    levels = calibrate(model, rows, bits=3)            a transformers causal LM, rows [samples, tokens]
    levels.save(folder / file_of("kvquant3"))          where the engine looks for it with kv_dtype="kvquant3"

The levels of a layer minimize sum_i F_i (x_i - Q(x_i))^2 over the calibration text's keys (or values), F_i the square of the
loss's gradient by x_i: the diagonal of the Fisher information, which says how much an error at x_i costs. Numbers are brought to
their range first, so F_i is multiplied with the square of half that range. Outliers and the first token, which the cache keeps
whole, do not count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from karui.configs.errors import KaruiError, UnsupportedError
from karui.kernels.kvquant import KVLevels


def kmeans(points: torch.Tensor, weights: torch.Tensor, count: int, bins: int = 1024, iterations: int = 100) -> torch.Tensor:
    """`count` ascending centres [count] that minimize sum w (x - nearest centre)^2 over points [n].

    On a line a cluster is a run of the sorted points, so the best runs are found by dynamic programming (Wang and Song, 2011);
    over more than `bins` points first over runs that hold like shares of sum w^(1/3), the density of the best centres (Panter and
    Dite, 1951), and then by Lloyd's iterations over all points.

    Raises:
        KaruiError: fewer points than centres, or weights that are negative, not finite or all zero.
    """
    if len(points) < count or not weights.isfinite().all() or (weights < 0).any() or not weights.sum() > 0:
        raise KaruiError(f"k-means of {len(points)} points needs at least {count} and weights that are finite and not all zero.")
    x, order = points.double().sort()
    w = weights.double()[order]
    w = w / w.sum() + 1e-12 / len(w)
    mass, moment, square = (torch.cat([torch.zeros(1, dtype=torch.float64), t.cumsum(0)]) for t in (w, w * x, w * x * x))
    if len(x) <= bins:
        edges = torch.arange(len(x) + 1)
    else:
        spread = w.pow(1 / 3).cumsum(0)
        edges = torch.searchsorted(spread, spread[-1] * torch.arange(1, bins) / bins)
        edges = torch.cat([torch.zeros(1, dtype=torch.long), edges, torch.tensor([len(x)])]).unique()
    ends = _best_runs(mass[edges], moment[edges], square[edges], min(count, len(edges) - 1))
    ends = edges[ends]
    centres = (moment[ends[1:]] - moment[ends[:-1]]) / (mass[ends[1:]] - mass[ends[:-1]])
    centres = torch.cat([centres, centres[-1:].expand(count - len(centres))])
    for _ in range(iterations):
        ends = torch.searchsorted(x, (centres[1:] + centres[:-1]) / 2)
        ends = torch.cat([torch.zeros(1, dtype=torch.long), ends, torch.tensor([len(x)])])
        total, sums = (t[ends[1:]] - t[ends[:-1]] for t in (mass, moment))
        moved = torch.where(ends[1:] > ends[:-1], sums / total.clamp_min(1e-300), centres).sort().values
        done = bool((moved - centres).abs().max() < 1e-9)
        centres = moved
        if done:
            break
    return centres.float()


def _best_runs(mass: torch.Tensor, moment: torch.Tensor, square: torch.Tensor, count: int) -> torch.Tensor:
    """Ends [count + 1] of the runs of n bins with the least variance inside, given running sums [n + 1] over the bins."""
    m, s, q = (t[None] - t[:, None] for t in (mass, moment, square))  # of bins a .. b - 1
    inside = torch.where(m > 0, q - s.square() / m.clamp_min(1e-300), torch.inf).clamp_min(0)
    best, choices = inside[0], []
    for _ in range(count - 1):
        best, choice = (best[:, None] + inside).min(0)
        choices.append(choice)
    ends = [len(mass) - 1]
    for choice in reversed(choices):
        ends.append(int(choice[ends[-1]]))
    return torch.tensor([0, *reversed(ends)])


@dataclass(frozen=True)
class Collected:
    """Keys (not rotated) and values of calibration text and the squares of the loss's gradients by them, each [L][tokens, C]."""

    keys: list[torch.Tensor]
    key_squares: list[torch.Tensor]
    values: list[torch.Tensor]
    value_squares: list[torch.Tensor]
    sinks: int


def calibrate(model: nn.Module, rows: torch.Tensor, bits: int, outliers: float = 0.01, sinks: int = 1,
              target: str = "") -> KVLevels:
    """Levels for the keys and values of a transformers causal LM: `fit` of what `collect` sees."""
    return fit(collect(model, rows, sinks), bits, outliers, target=target)


def collect(model: nn.Module, rows: torch.Tensor, sinks: int = 1) -> Collected:
    """Run each of `rows` [samples, tokens] forward and backward once. What is held takes 16 bytes per token, layer and channel.

    Args:
        sinks: 1: the first token of a text is kept whole and does not count; 0: it does.
    Raises:
        UnsupportedError: a model whose layers have no k_proj and v_proj.
    """
    layers = [m for m in model.modules() if hasattr(m, "k_proj") and hasattr(m, "v_proj")]
    if not layers:
        raise UnsupportedError("kvquant needs attention layers with k_proj and v_proj, which this model has not.")
    keys, values = ([_Seen(m, name) for m in layers] for name in ("k_norm", "v_proj"))
    trained = [p for p in model.parameters() if p.requires_grad]
    for p in trained:
        p.requires_grad_(False)
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    grad = embedding.register_forward_hook(lambda _m, _i, out: out.requires_grad_())
    try:
        for row in rows:
            model(input_ids=row[None], labels=row[None], use_cache=False).loss.backward()
            for seen in (*keys, *values):
                seen.take(sinks)
    finally:
        grad.remove()
        for seen in (*keys, *values):
            seen.hook.remove()
        for p in trained:
            p.requires_grad_(True)
    found = [(*k.all(), *v.all()) for k, v in zip(keys, values, strict=True)]
    return Collected([f[0] for f in found], [f[1] for f in found], [f[2] for f in found], [f[3] for f in found], sinks)


def fit(seen: Collected, bits: int, outliers: float = 0.01, *, fisher: bool = True, target: str = "") -> KVLevels:
    """Ranges and levels of every layer.

    Args:
        outliers: share of values that are kept whole.
        fisher: False: every value counts alike.
        target: identity of the model's weights, for the file.
    """
    lows, highs, key_levels, value_levels = [], [], [], []
    for key, key_f, value, value_f in zip(seen.keys, seen.key_squares, seen.values, seen.value_squares, strict=True):
        low, high = (torch.quantile(key, q, dim=0) for q in (outliers / 2, 1 - outliers / 2))
        key_levels.append(_levels(key, key_f if fisher else None, low, high, bits))
        lows.append(low)
        highs.append(high)
        each = math.ceil(outliers * value.shape[1] / 2)
        ends = value.sort(-1).values[:, [each, value.shape[1] - 1 - each]]
        value_levels.append(_levels(value, value_f if fisher else None, ends[:, :1], ends[:, 1:], bits))
    return KVLevels(key_low=torch.stack(lows), key_high=torch.stack(highs), key_levels=torch.stack(key_levels),
                    value_levels=torch.stack(value_levels), outliers=outliers, sinks=seen.sinks, target=target)


class _Seen:
    """What a layer's keys (behind their norm, where there is one) or values were, and the squares of their gradients."""

    def __init__(self, layer: nn.Module, name: str) -> None:
        module = getattr(layer, name, None)
        module = layer.k_proj if module is None else module
        assert isinstance(module, nn.Module)
        self._x: list[torch.Tensor] = []
        self._squares: list[torch.Tensor] = []
        self._out: torch.Tensor | None = None
        self.hook = module.register_forward_hook(self._hold)

    def _hold(self, _module: nn.Module, _inputs: Any, out: torch.Tensor) -> None:
        out.retain_grad()
        self._out = out

    def take(self, sinks: int) -> None:
        assert self._out is not None and self._out.grad is not None
        length = self._out.shape[1]
        x, g = (t.detach()[0].reshape(length, -1)[sinks:].float().cpu() for t in (self._out, self._out.grad))
        self._x.append(x)
        self._squares.append(g.square())
        self._out = None

    def all(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[tokens, C] each."""
        return torch.cat(self._x), torch.cat(self._squares)


def _levels(x: torch.Tensor, f: torch.Tensor | None, low: torch.Tensor, high: torch.Tensor, bits: int) -> torch.Tensor:
    half = ((high - low) / 2).clamp_min(1e-12)
    z = (x - (low + high) / 2) / half
    inside = z.abs() <= 1 + 1e-6
    weights = ((half.square() if f is None else f * half.square()).expand_as(x))[inside]
    return kmeans(z[inside], weights if weights.sum() > 0 else torch.ones_like(weights), 2**bits)
