"""Mixtures of experts: keep the experts that the router really uses (after Lu et al., "Not All Experts are Equal",
arXiv 2402.14800, and MoE-Pruner, arXiv 2410.12013).

    score    the router's probability of an expert, added up over the calibration tokens that were sent to it, times the L2 norm
             of its down projection, which stands for how large its answers are
    count    how many calibration tokens were sent to it: the least used go
    random   a draw, to compare with

All layers keep the same number, because the configuration has one number for all.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from karui.configs.errors import KaruiError, UnsupportedError
from karui.distill.balance import counts
from karui.distill.prune import Pruned, decoder, forward
from karui.distill.routers import COUNTS, Routed, bias_of, find_routers, watching


def prune_experts(model: nn.Module, rows: Sequence[torch.Tensor], keep: int, by: Literal["score", "count", "random"] = "score",
                  seed: int = 0) -> Pruned:
    """Leave `keep` experts in every mixture layer, those of most `by`; `seed` draws the random ones.

    Raises:
        UnsupportedError: no mixture layer with stacked experts and a router that is one matrix; experts in groups.
        KaruiError: fewer experts than a token is sent to, nothing to drop, or an unknown choice.
    """
    blocks = mixtures(model)
    have = blocks[0][1].experts.down_proj.shape[0]
    _check(model.config, keep, have)
    if by not in ("score", "count", "random"):
        raise KaruiError(f"prune: experts by {by!r} are not known; valid: score, count, random.")
    use = router_use(model, rows)
    draw = torch.Generator().manual_seed(seed)
    kept, lines = {}, []
    for name, block in blocks:
        mass, count = use[name]
        size = block.experts.down_proj.detach().float().flatten(1).norm(dim=1).cpu().double()
        worth = {"score": mass * size, "count": count, "random": torch.rand(have, generator=draw)}[by]
        kept[name] = torch.argsort(worth, descending=True, stable=True)[:keep].sort().values
        share = 100 * mass[kept[name]].sum() / mass.sum()
        lines.append(f"{name}: experts {kept[name].tolist()} of {have}, {share:.1f} % of the router's mass")
    keep_experts(model, kept)
    return Pruned(kept_layers=tuple(range(len(decoder(model).layers))), lines=tuple(lines))


def _check(config: Any, keep: int, have: int) -> None:
    if (groups := getattr(config, "n_group", None) or 1) > 1:
        raise UnsupportedError(f"prune: the router chooses among {groups} groups of experts of one size, which dropping single "
                               "experts would break.")
    active = int(getattr(config, "num_experts_per_tok", 1))
    if not active <= keep < have:
        raise KaruiError(f"prune: keep_experts is {keep}; expected {active} (experts per token) to {have - 1}.")


def plan(config: Any, keep: int) -> Any:
    """A copy of a model's configuration as `prune_experts` leaves it; the same errors, as far as it shows them."""
    planned = copy.deepcopy(config)
    counted = [key for key in COUNTS if isinstance(getattr(config, key, None), int)]
    if not counted:
        raise UnsupportedError(f"prune: a model of type {config.model_type!r} has no experts to drop.")
    for key in counted:
        _check(config, keep, getattr(config, key))
        setattr(planned, key, keep)
    return planned


@torch.no_grad()
def keep_experts(model: nn.Module, kept: Mapping[str, torch.Tensor]) -> None:
    """Leave the experts of these indices, equally many in every mixture by name, and make the configuration agree."""
    config: Any = model.config
    for name, block in mixtures(model):
        chosen, keep = kept[name].to(block.gate.weight.device), len(kept[name])
        for owner, key in ((block.experts, "gate_up_proj"), (block.experts, "down_proj"), (block.gate, "weight")):
            setattr(owner, key, nn.Parameter(getattr(owner, key).detach()[chosen].contiguous()))
        if (held := bias_of(block)) is not None:
            bias = getattr(*held)
            bias.data = bias.data[..., chosen].contiguous()
        for owner in (block, block.gate, block.experts, config):
            for key in COUNTS:
                if isinstance(getattr(owner, key, None), int):
                    setattr(owner, key, keep)


def mixtures(model: nn.Module) -> list[tuple[str, Any]]:
    """The mixture blocks by name: `experts.gate_up_proj` [E, 2I, H], `experts.down_proj` [E, H, I], `gate.weight` [E, H]."""
    found = [(name, block) for name, block in model.named_modules()
             if hasattr(getattr(block, "experts", None), "down_proj") and hasattr(getattr(block, "gate", None), "weight")
             and isinstance(block.experts.down_proj, torch.Tensor)]
    if not found:
        raise UnsupportedError(f"{type(model).__name__} has no mixture of stacked experts behind a router; there is no expert to "
                               "prune.")
    return found


@torch.no_grad()
def router_use(model: nn.Module, rows: Sequence[torch.Tensor]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Per mixture block two [E] in float64 on the host: the router's scores (probabilities, or sigmoids) of the chosen experts,
    added up over tokens, and how many tokens were sent to each.

    Raises:
        UnsupportedError: routers of a kind that is not known.
    """
    names = [name for name, _ in mixtures(model)]
    routers = [r for r in find_routers(model) if r.name in names]
    if len(routers) < len(names):
        raise UnsupportedError(f"prune: the routers of a {type(model).__name__} are not laid out as in transformers' newer "
                               "mixtures (logits, weights, indices).")
    seen: list[list[Routed]] = [[] for _ in routers]
    with watching(routers, seen):
        forward(model, rows)
    found = {}
    for router, given in zip(routers, seen):
        logits, indices = (torch.cat(parts).cpu() for parts in zip(*given))
        scores = logits.float().sigmoid() if router.sigmoid else logits.float().softmax(-1)
        mass = torch.zeros(router.experts, dtype=torch.float64)
        mass.index_add_(0, indices.flatten(), scores.gather(-1, indices).flatten().double())
        found[router.name] = (mass, counts(indices, router.experts).double())
    return found
