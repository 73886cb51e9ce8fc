"""Read what layers compute while a model runs, by forward hooks: residual streams by depth, or any module's output by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from karui.configs.errors import KaruiError


@contextmanager
def depths(layers: nn.ModuleList, wanted: Iterable[int]) -> Iterator[dict[int, torch.Tensor]]:
    """The residual stream after d layers, for each wanted d, as [T, H]; filled by the forward pass inside the context.

    Args:
        layers: the decoder's layers; depth 0 is what enters the first, depth len(layers) what leaves the last (before the norm).
    """
    found: dict[int, torch.Tensor] = {}
    handles = []
    for depth in sorted(set(wanted)):
        if not 0 <= depth <= len(layers):
            raise KaruiError(f"depth {depth} does not exist in a model of {len(layers)} layers.")
        if depth < len(layers):
            handles.append(layers[depth].register_forward_pre_hook(_before(found, depth), with_kwargs=True))
        else:
            handles.append(layers[-1].register_forward_hook(_after(found, depth)))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def outputs(model: nn.Module, names: Iterable[str]) -> Iterator[dict[str, torch.Tensor]]:
    """The output of each named module, as [T, *]."""
    found: dict[str, torch.Tensor] = {}
    handles = [model.get_submodule(name).register_forward_hook(_after(found, name)) for name in names]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _before(found: dict[int, torch.Tensor], key: int) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found[key] = _flat(args[0] if args else kwargs["hidden_states"])

    return hook


def _after(found: dict[Any, torch.Tensor], key: Any) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        found[key] = _flat(output[0] if isinstance(output, tuple) else output)

    return hook


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])
