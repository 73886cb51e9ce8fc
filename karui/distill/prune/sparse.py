"""Masks over the linears of a decoder: single weights are zeroed, freely or n of every m neighbours in a row.

    sparsegpt  what a weight's loss costs once the others have made up for it, which they do (see `sparsegpt`)
    wanda      |weight| times its input's norm, within each output row; the others stay (see `wanda`)
    magnitude  |weight|, within the whole matrix; needs no text

Layers go in order, each calibrated on the outputs of the pruned ones before. All linears of a layer get the same share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from karui.configs.errors import KaruiError, UnsupportedError
from karui.configs.steps import prune
from karui.distill.prune import Pruned, decoder, forward, sparsegpt, wanda

METHODS = ("sparsegpt", "wanda", "magnitude")


def prune_sparse(model: nn.Module, rows: Sequence[torch.Tensor], pattern: float | str, method: str = "sparsegpt",
                 damping: float = 0.01) -> Pruned:
    """Prune every linear of the decoder layers.

    Args:
        rows: calibration text, token tensors [T]; magnitude needs none.
        pattern: a share of zeros in 0..1, or "n:m": n zeros of every m neighbours, e.g. "2:4".
        damping: sparsegpt's share of the Hessian's mean diagonal.

    Raises:
        UnsupportedError: experts that are stacked into one tensor.
        KaruiError: an unknown method, no calibration rows, a pattern that cannot be read, a width that m does not divide, inputs
            of a linear that are NaN or infinite.
    """
    if method not in METHODS:
        raise KaruiError(f"prune: method {method!r} is not known; valid: {', '.join(METHODS)}.")
    share, n, m = read_pattern(pattern)
    blind = method == "magnitude"
    if not rows and not blind:
        raise KaruiError(f"prune: {method} needs calibration text; the recipe's training samples gave none.")
    body = decoder(model)
    _check(body.layers, m)
    names = {id(p): name for name, p in model.named_parameters()}
    states, arguments = ([], []) if blind else _into_first_layer(model, rows)
    masks: dict[str, torch.Tensor] = {}
    for layer in body.layers:
        linears = {names[id(mod.weight)]: mod for mod in layer.modules() if isinstance(mod, nn.Linear)}
        seen = {} if blind else {name: _Inputs(linear, whole=method == "sparsegpt") for name, linear in linears.items()}
        with torch.no_grad():
            for x, kwargs in zip(states, arguments):
                layer(x, **kwargs)
            for inputs in seen.values():
                inputs.handle.remove()
            for name, linear in linears.items():
                if name in seen and not bool(seen[name].value.isfinite().all()):
                    raise KaruiError(f"prune: the inputs of {name} hold NaN or infinite values; the weights or the precision are "
                                     "at fault (half precision overflows: load the model in float32).")
                if method == "sparsegpt":
                    masks[name] = sparsegpt.prune_matrix(linear.weight, seen[name].value, share, n, m, damping)
                else:
                    norms = None if blind else seen[name].value.sqrt()
                    masks[name] = wanda.prune_matrix(linear.weight, norms, share, n, m)
            states = [_first(layer(x, **kwargs)) for x, kwargs in zip(states, arguments)]
    total, zeros = sum(k.numel() for k in masks.values()), sum(int((~k).sum()) for k in masks.values())
    line = f"{method} {pattern}: {zeros:,} of {total:,} weights zeroed ({100 * zeros / total:.1f} %)"
    line += "" if blind else f", calibrated on {sum(map(len, rows)):,} tokens"
    return Pruned(kept_layers=tuple(range(len(body.layers))), masks=masks, lines=(line,))


def read_pattern(pattern: float | str) -> tuple[float, int, int]:
    """As `configs.steps.prune.read_pattern`, with a `KaruiError`."""
    try:
        return prune.read_pattern(pattern)
    except ValueError as error:
        raise KaruiError(f"prune: {error}.") from None


def _check(layers: nn.ModuleList, m: int) -> None:
    """Before any weight is touched."""
    for i, layer in enumerate(layers):
        for name, p in layer.named_parameters():
            if "experts" in name and p.ndim == 3:
                raise UnsupportedError(f"prune: layer {i} holds its experts in one tensor ({name}), whose single weights no mask "
                                       "reaches; drop experts instead (prune-experts).")
        for name, mod in layer.named_modules():
            if isinstance(mod, nn.Linear) and m and mod.in_features % m:
                raise KaruiError(f"prune: layer {i}, {name}: a width of {mod.in_features} does not divide into groups of {m}.")


class _Inputs:
    """Adds up X X^T [in, in] of a linear's inputs (`whole`), or only its diagonal [in]."""

    def __init__(self, linear: nn.Linear, whole: bool) -> None:
        size = (linear.in_features,) * (2 if whole else 1)
        self.value, self.whole = torch.zeros(size, device=linear.weight.device), whole
        self.handle = linear.register_forward_pre_hook(self._add)

    def _add(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        x = args[0].reshape(-1, args[0].shape[-1]).float()
        if self.whole:
            self.value.addmm_(x.T, x)
        else:
            self.value += x.square().sum(0)


class _Stop(Exception):
    pass


@torch.no_grad()
def _into_first_layer(model: nn.Module, rows: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
    """What the body hands its first layer for each row: hidden states and keyword arguments."""
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
