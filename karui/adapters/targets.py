"""Which modules of a model an adapter is put on."""

from __future__ import annotations

import logging
import re
from typing import Any

from torch import nn

from karui.adapters.quantized_linear import QuantizedLinear
from karui.configs.errors import KaruiError, UnsupportedError, nearest

logger = logging.getLogger(__name__)
_INDEXER = re.compile(r"\.indexer\.")
EXPERT_PARTS = ("gate_proj", "up_proj", "down_proj")


def linears(model: nn.Module) -> list[str]:
    """Full names of all linear layers, packed ones too."""
    return [n for n, m in model.named_modules() if isinstance(m, (nn.Linear, QuantizedLinear))]


def resolve_targets(model: nn.Module, targets: str | tuple[str, ...]) -> list[str]:
    """Full names of the linears that `targets` means: all but output head and indexers, or those whose name ends in a given one.

    Raises:
        KaruiError: a name that matches nothing (the model's names are listed), a tied output head, an indexer, whose choice of
            keys has no gradient.
    """
    every, head = linears(model), head_names(model)
    if targets == "all-linear":
        found = [n for n in every if n not in head and not _INDEXER.search(n)]
        if not found:
            raise KaruiError(f"targets all-linear: {type(model).__name__} has no linear layer besides its output head.")
        return found
    chosen = _matching(every, (targets,) if isinstance(targets, str) else targets, "adapter target", "linear layer")
    if tied := sorted(chosen & head) if is_tied(model) else []:
        raise KaruiError(
            f"adapter target {tied[0]!r} shares its weight with the embedding; a merged adapter would change both. "
            f"Leave it out of targets."
        )
    if index := sorted(n for n in chosen if _INDEXER.search(n)):
        raise KaruiError(f"adapter target {index[0]!r} is of an indexer, which an adapter does not train; leave it out.")
    return [n for n in every if n in chosen]


def resolve_lora_targets(model: nn.Module, targets: str | tuple[str, ...]) -> list[str]:
    """`resolve_targets` without the plain feed-forward linears of a model with fused experts: peft takes their names for parts of
    the experts and would put the adapters there (`_convert_peft_config_moe`).

    Raises:
        KaruiError: as `resolve_targets`.
        UnsupportedError: such a linear that was named.
    """
    found = resolve_targets(model, targets)
    if not any(p.ndim == 3 and n.endswith("experts.gate_up_proj") for n, p in model.named_parameters()):
        return found
    taken = [n for n in found if n.rpartition(".")[2] in EXPERT_PARTS]
    if taken and targets != "all-linear":
        raise UnsupportedError(f"adapter target {taken[0]!r}: in a model with fused experts peft takes this name for a part of "
                               "the experts; target the attention only.")
    if taken:
        logger.warning("targets all-linear leaves %d feed-forward linears out, first %s: peft takes their names for parts of the "
                       "experts", len(taken), taken[0])
    return [n for n in found if n not in taken]


def resolve_modules(model: nn.Module, names: tuple[str, ...]) -> list[str]:
    """Full names of the modules with weights of their own that `train_also` means.

    Raises:
        KaruiError: a name that matches nothing, or a head alone that shares its weight with the embedding.
    """
    every = [n for n, m in model.named_modules() if n and any(True for _ in m.parameters(recurse=False))]
    chosen = _matching(every, names, "train_also", "module with weights")
    if is_tied(model) and chosen & head_names(model):
        embedding = next(n for n, m in model.named_modules() if m is model.get_input_embeddings())  # type: ignore[operator]
        raise KaruiError(f"train_also: the output head shares its weight with {embedding}; write "
                         f"{embedding.rpartition('.')[2]!r} instead, which trains both as the one matrix they are.")
    return [n for n in every if n in chosen]


def check_rank(model: nn.Module, targets: list[str], rank: int) -> None:
    """Raise `KaruiError` when a target's smaller dimension is below `rank`."""
    for name in targets:
        module: Any = model.get_submodule(name)
        limit = min(module.in_features, module.out_features)
        if rank > limit:
            raise KaruiError(
                f"rank {rank} is above the dimensions of {name} ({module.out_features} x {module.in_features}); "
                f"a low-rank update has at most rank {limit}. Lower prepare's rank or leave that layer out of targets."
            )


def head_names(model: nn.Module) -> set[str]:
    get = getattr(model, "get_output_embeddings", None)
    head = get() if callable(get) else None
    return {n for n, m in model.named_modules() if m is head}


def is_tied(model: nn.Module) -> bool:
    """Whether output head and embedding are one matrix."""
    get_in, get_out = getattr(model, "get_input_embeddings", None), getattr(model, "get_output_embeddings", None)
    if not callable(get_in) or not callable(get_out) or get_in() is None or get_out() is None:
        return False
    return get_in().weight is get_out().weight


def shortest(model: nn.Module, targets: list[str]) -> list[str]:
    """Leaf names when they mean exactly `targets` (the form other tools write), else the full names."""
    leaves = sorted({n.rpartition(".")[2] for n in targets})
    meant = {n for n in linears(model) if n.rpartition(".")[2] in leaves}
    return leaves if meant == set(targets) else list(targets)


def _matching(every: list[str], wanted: tuple[str, ...], what: str, kind: str) -> set[str]:
    chosen: set[str] = set()
    for name in wanted:
        matches = [n for n in every if n == name or n.endswith("." + name)]
        if not matches:
            leaves = sorted({n.rpartition(".")[2] for n in every})
            raise KaruiError(
                f"{what} {name!r} matches no {kind}; this model's: {', '.join(leaves)}.{nearest(name, leaves)}"
            )
        chosen.update(matches)
    return chosen
