"""Depth: drop whole layers, chosen by what they change (ShortGPT, Men et al., arXiv 2403.03853; Minitron, arXiv 2407.14679).

Importance of a layer is its block influence, 1 - cos(what enters, what leaves), averaged over tokens: a layer that hardly turns
the residual stream is hardly missed. `uniform` instead spreads the kept layers evenly, first and last always among them, which
distillation often starts from as well or better.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from karui.configs.errors import KaruiError, UnsupportedError
from karui.distill import capture
from karui.distill.prune import Pruned, decoder, forward


def drop_layers(model: nn.Module, keep: int, rows: Sequence[torch.Tensor] = (), choice: str = "uniform") -> Pruned:
    """Leave `keep` layers.

    Args:
        choice: uniform, influence (needs rows), first.

    Raises:
        KaruiError: nothing would be dropped or left.
    """
    total = len(decoder(model).layers)
    kept = _without_looking(keep, total, choice)
    lines: tuple[str, ...] = ()
    if choice == "influence":
        influence = block_influence(model, rows)
        kept = sorted(sorted(range(total), key=lambda i: -influence[i])[:keep])
        lines = ("block influence " + ", ".join(f"{i}: {v:.4f}" for i, v in enumerate(influence)),)
    keep_layers(model, kept)
    return Pruned(kept_layers=tuple(kept), lines=(f"kept layers {kept} of {total} ({choice})", *lines))


def _without_looking(keep: int, total: int, choice: str) -> list[int]:
    """The layers that `choice` keeps; those of uniform where it has to see them first."""
    if not 1 <= keep < total:
        raise KaruiError(f"prune: keep_layers is {keep}; expected 1 to {total - 1} of the model's {total} layers.")
    if choice not in ("uniform", "influence", "first"):
        raise KaruiError(f"prune: choice {choice!r} is not known; valid: uniform, influence, first.")
    return list(range(keep)) if choice == "first" else sorted({round(i * (total - 1) / max(1, keep - 1)) for i in range(keep)})


def plan(config: Any, keep: int, choice: str = "uniform") -> Any:
    """A copy of a model's configuration as `drop_layers` leaves it, but for which layers influence keeps; the same errors."""
    planned = copy.deepcopy(config)
    _leave(planned, _without_looking(keep, config.num_hidden_layers, choice))
    return planned


@torch.no_grad()
def block_influence(model: nn.Module, rows: Sequence[torch.Tensor]) -> list[float]:
    """1 - cos(input, output) of each layer, averaged over all tokens of the rows."""
    layers = decoder(model).layers
    total, tokens = torch.zeros(len(layers), dtype=torch.float64), 0
    for row in rows or [torch.empty(0, dtype=torch.int64)]:
        with capture.depths(layers, range(len(layers) + 1)) as states:
            forward(model, [row] if len(row) else [])
        for i in range(len(layers)):
            total[i] += (1 - nn.functional.cosine_similarity(states[i].double(), states[i + 1].double(), dim=-1)).sum().cpu()
        tokens += len(row)
    return (total / tokens).tolist()


def keep_layers(model: nn.Module, kept: Sequence[int]) -> None:
    """Leave the named layers, in order, and make the configuration agree.

    Raises:
        UnsupportedError: the first layer left uses what the indexer of a layer before it picked.
    """
    _leave(model.config, kept)
    body = decoder(model)
    body.layers = nn.ModuleList(body.layers[i] for i in kept)
    for at, layer in enumerate(body.layers):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = at


def _leave(config: Any, kept: Sequence[int]) -> None:
    kinds = getattr(config, "indexer_types", None)
    if kinds and kinds[kept[0]] != "full":
        raise UnsupportedError(f"prune: layer {kept[0]} has no indexer and uses what the layer before it picked; it cannot come "
                               "first.")
    config.num_hidden_layers = len(kept)
    for key in ("layer_types", "no_rope_layers", "mlp_layer_types", "indexer_types"):
        if isinstance(value := getattr(config, key, None), (list, tuple)):
            setattr(config, key, [value[i] for i in kept])
    if isinstance(dense := getattr(config, "first_k_dense_replace", None), int):
        config.first_k_dense_replace = sum(i < dense for i in kept)
    if hasattr(config, "mlp_only_layers") and hasattr(config, "decoder_sparse_step"):
        every, plain = config.decoder_sparse_step or 1, config.mlp_only_layers or ()
        config.mlp_only_layers = [at for at, i in enumerate(kept) if i in plain or (i + 1) % every]
        config.decoder_sparse_step = 1
