"""Mixtures of experts: keep the experts that the router really uses (after Lu et al., "Not All Experts are Equal",
arXiv 2402.14800, and MoE-Pruner, arXiv 2410.12013).

Importance of an expert is the router's probability for it, added up over the calibration tokens that were sent to it, times
the L2 norm of its down projection, which stands for how large its answers are. All layers keep the same number, because the
configuration has one number for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from karui.configs.errors import KaruiError, UnsupportedError
from karui.distill.prune import Pruned, decoder, forward

_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")


def prune_experts(model: nn.Module, rows: Sequence[torch.Tensor], keep: int) -> Pruned:
    """Leave `keep` experts in every mixture layer.

    Raises:
        UnsupportedError: no mixture layer with stacked experts and a router that is one matrix; experts in groups.
        KaruiError: fewer experts than a token is sent to, or nothing to drop.
    """
    blocks = mixtures(model)
    config: Any = model.config
    have = blocks[0][1].experts.down_proj.shape[0]
    if (groups := getattr(config, "n_group", None) or 1) > 1:
        raise UnsupportedError(f"prune: the router chooses among {groups} groups of experts of one size, which dropping single "
                               "experts would break.")
    active = int(getattr(config, "num_experts_per_tok", 1))
    if not active <= keep < have:
        raise KaruiError(f"prune: keep_experts is {keep}; expected {active} (experts per token) to {have - 1}.")
    mass = router_mass(model, rows)
    kept, lines = {}, []
    for name, block in blocks:
        size = block.experts.down_proj.detach().float().flatten(1).norm(dim=1).cpu().double()
        kept[name] = torch.argsort(mass[name] * size, descending=True, stable=True)[:keep].sort().values
        share = 100 * mass[name][kept[name]].sum() / mass[name].sum()
        lines.append(f"{name}: experts {kept[name].tolist()} of {have}, {share:.1f} % of the router's mass")
    keep_experts(model, kept)
    return Pruned(kept_layers=tuple(range(len(decoder(model).layers))), lines=tuple(lines))


@torch.no_grad()
def keep_experts(model: nn.Module, kept: Mapping[str, torch.Tensor]) -> None:
    """Leave the experts of these indices, equally many in every mixture by name, and make the configuration agree."""
    config: Any = model.config
    for name, block in mixtures(model):
        chosen, keep = kept[name].to(block.gate.weight.device), len(kept[name])
        for owner, key in ((block.experts, "gate_up_proj"), (block.experts, "down_proj"), (block.gate, "weight")):
            setattr(owner, key, nn.Parameter(getattr(owner, key).detach()[chosen].contiguous()))
        if (bias := getattr(block.gate, "e_score_correction_bias", None)) is not None:
            bias.data = bias.data[chosen]
        for owner in (block, block.gate, block.experts, config):
            for key in ("num_experts", *_COUNTS):
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
def router_mass(model: nn.Module, rows: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Per mixture block [E]: the router's probabilities of the chosen experts, added up over tokens."""
    mass: dict[str, torch.Tensor] = {}
    active = int(getattr(model.config, "num_experts_per_tok", 1))
    handles = []

    def watch(name: str, gate: Any) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            logits = args[0].reshape(-1, args[0].shape[-1]).float() @ gate.weight.float().T
            bias = getattr(gate, "e_score_correction_bias", None)  # DeepSeek-V3: chosen by sigmoid and bias, weighed by sigmoid
            scores = logits.softmax(-1) if bias is None else logits.sigmoid()
            best = (scores if bias is None else scores + bias.float()).topk(active, dim=-1).indices
            seen = torch.zeros(gate.weight.shape[0], dtype=torch.float64)
            seen.index_add_(0, best.flatten().cpu(), scores.gather(-1, best).flatten().double().cpu())
            mass[name] = mass[name] + seen if name in mass else seen

        return hook

    for name, block in mixtures(model):
        handles.append(block.gate.register_forward_pre_hook(watch(name, block.gate)))
    try:
        forward(model, rows)
    finally:
        for handle in handles:
            handle.remove()
    return mass
