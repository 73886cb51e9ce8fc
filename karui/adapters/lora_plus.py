"""LoRA+ (arXiv 2402.12354): B learns faster than A.

    lr_B = ratio * lr_A, ratio 16 in the paper (its README: 20); a trained embedding gets 1e-6

With one rate for both, either A or B stops learning features as the width grows (section 4); the ratio mends that. Only rates
differ from the optimizer's ordinary groups, so weight decay (0 by default, as in the authors' code) stays what the recipe says.
"""

from __future__ import annotations

from typing import Any

from torch import nn

EMBEDDING_LR = 1e-6


def plus_groups(
    model: nn.Module, groups: list[dict[str, Any]], *, ratio: float, embedding_lr: float | None, lr: float
) -> list[dict[str, Any]]:
    """Split the optimizer's groups by rate: B and trained embeddings get groups of their own.

    Args:
        groups: {"params", "lr_scale", ...} as `Stage.param_groups` has them; their other values are kept.
        ratio: lr_B / lr_A; 1: nothing changes for B.
        embedding_lr: absolute; None: `EMBEDDING_LR` when `ratio` is not 1, else as the rest.
        lr: the recipe's rate, which `lr_scale` multiplies.
    """
    if ratio == 1 and embedding_lr is None:
        return groups
    inside = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    embeddings = {id(p) for m in inside for p in m.parameters(recurse=False)}
    factors = {id(p): ratio for n, p in model.named_parameters() if ".lora_B." in n}
    factors |= dict.fromkeys(embeddings, (embedding_lr or EMBEDDING_LR) / lr)
    out: list[dict[str, Any]] = []
    for group in groups:
        by_factor: dict[float, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            by_factor.setdefault(factors.get(id(parameter), 1.0), []).append(parameter)
        scale = group.get("lr_scale", 1.0)
        out += [{**group, "params": params, "lr_scale": scale * factor} for factor, params in by_factor.items()]
    return out
