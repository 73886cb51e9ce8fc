"""SparseGPT (Frantar & Alistarh, arXiv 2301.00774, algorithm 1): zero weights in one pass and let the others make up for it.

Per linear with inputs X: H = 2 X X^T + damping, and Hinv its inverse's upper Cholesky factor. Columns go in blocks; a weight's
saliency is w^2 / Hinv_jj^2, the least salient are zeroed (a share of each block, or n of every m neighbours in a row), and the
error w / Hinv_jj is taken off the columns to the right. Layers go in order, each calibrated on the outputs of the pruned ones
before.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from karui.configs.errors import KaruiError
from karui.distill.prune import Pruned, decoder

BLOCK = 128


def prune_sparse(model: nn.Module, rows: Sequence[torch.Tensor], pattern: float | str, damping: float = 0.01) -> Pruned:
    """Prune every linear of the decoder layers.

    Args:
        pattern: a share of zeros in 0..1, or "n:m": n zeros of every m neighbours, e.g. "2:4".

    Raises:
        KaruiError: no calibration rows, a pattern that cannot be read, a width that m does not divide.
    """
    share, n, m = read_pattern(pattern)
    if not rows:
        raise KaruiError("prune: sparsegpt needs calibration text; the recipe's training samples gave none.")
    body = decoder(model)
    names = {id(p): name for name, p in model.named_parameters()}
    states, arguments = _into_first_layer(model, rows)
    masks: dict[str, torch.Tensor] = {}
    total = zeros = 0
    for layer in body.layers:
        linears = [mod for mod in layer.modules() if isinstance(mod, nn.Linear)]
        hessians = [_Hessian(linear) for linear in linears]
        with torch.no_grad():
            for x, kwargs in zip(states, arguments):
                layer(x, **kwargs)
            for hessian in hessians:
                hessian.handle.remove()
            for linear, hessian in zip(linears, hessians):
                mask = prune_matrix(linear.weight, hessian.value, share, n, m, damping)
                masks[names[id(linear.weight)]] = mask
                total, zeros = total + mask.numel(), zeros + int((~mask).sum())
            states = [_first(layer(x, **kwargs)) for x, kwargs in zip(states, arguments)]
    return Pruned(kept_layers=tuple(range(len(body.layers))), masks=masks,
                  lines=(f"sparsegpt {pattern}: {zeros:,} of {total:,} weights zeroed ({100 * zeros / total:.1f} %)",))


@torch.no_grad()
def prune_matrix(weight: torch.Tensor, hessian: torch.Tensor, share: float, n: int = 0, m: int = 0,
                 damping: float = 0.01) -> torch.Tensor:
    """Prune a weight [out, in] in place, given X X^T [in, in]; returns the mask of kept weights, bool [out, in]."""
    w, h = weight.float().clone(), hessian.double().clone()
    if m and w.shape[1] % m:
        raise KaruiError(f"prune: a width of {w.shape[1]} does not divide into groups of {m}.")
    dead = h.diagonal() == 0
    h.diagonal()[dead] = 1
    w[:, dead] = 0
    h.diagonal().add_(damping * h.diagonal().mean())
    factor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(h)), upper=True).float()
    kept = torch.ones_like(w, dtype=torch.bool)
    for a in range(0, w.shape[1], BLOCK):
        b = min(a + BLOCK, w.shape[1])
        block, inner = w[:, a:b], factor[a:b, a:b]
        errors = torch.zeros_like(block)
        if not m:
            saliency = (block / inner.diagonal()).pow(2)
            count = round(share * saliency.numel())
            if count:
                flat = torch.ones(saliency.numel(), dtype=torch.bool, device=w.device)
                flat[saliency.flatten().argsort(stable=True)[:count]] = False
                kept[:, a:b] = flat.view_as(block)
        for j in range(b - a):
            if m and (a + j) % m == 0:
                group = (block[:, j : j + m] / inner.diagonal()[j : j + m]).pow(2)
                kept[:, a + j : a + j + m].scatter_(1, group.argsort(dim=1, stable=True)[:, :n], False)
            pruned = torch.where(kept[:, a + j], block[:, j], 0.0)
            error = (block[:, j] - pruned) / inner[j, j]
            block[:, j] = pruned
            block[:, j + 1 :] -= error.unsqueeze(1) * inner[j, j + 1 :]
            errors[:, j] = error
        w[:, b:] -= errors @ factor[a:b, b:]
    w.mul_(kept)
    weight.copy_(w.to(weight.dtype))
    return kept


def read_pattern(pattern: float | str) -> tuple[float, int, int]:
    """(share, n, m); n = m = 0 for a free pattern."""
    if isinstance(pattern, str) and (found := re.fullmatch(r"(\d+):(\d+)", pattern)):
        n, m = int(found[1]), int(found[2])
        if 0 < n < m and BLOCK % m == 0:
            return n / m, n, m
    elif not isinstance(pattern, str) and 0 < pattern < 1:
        return float(pattern), 0, 0
    raise KaruiError(f"prune: sparsity {pattern!r} is neither a share between 0 and 1 nor n:m such as 2:4 (n zeros of m, "
                     f"m a divisor of {BLOCK}).")


class _Hessian:
    """Adds up X X^T of a linear's inputs."""

    def __init__(self, linear: nn.Linear) -> None:
        self.value = torch.zeros(linear.in_features, linear.in_features, device=linear.weight.device)
        self.handle = linear.register_forward_pre_hook(self._add)

    def _add(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        x = args[0].reshape(-1, args[0].shape[-1]).float()
        self.value.addmm_(x.T, x)


class _Stop(Exception):
    pass


@torch.no_grad()
def _into_first_layer(model: nn.Module, rows: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
    """What the body hands its first layer for each row: hidden states and keyword arguments."""
    from karui.distill.prune import forward

    states: list[torch.Tensor] = []
    arguments: list[dict[str, Any]] = []

    def catch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kwargs = dict(kwargs)
        states.append(args[0] if args else kwargs.pop("hidden_states"))
        arguments.append(kwargs)
        raise _Stop

    handle = decoder(model).layers[0].register_forward_pre_hook(catch, with_kwargs=True)
    try:
        for row in rows:
            try:
                forward(model, [row])
            except _Stop:
                continue
    finally:
        handle.remove()
    return states, arguments


def _first(out: Any) -> torch.Tensor:
    found: torch.Tensor = out[0] if isinstance(out, tuple) else out
    return found
