"""Optimizers by name, and parameter groups for LoRA+ and Muon.

adamw          torch's                          adafactor   torch's (arXiv 1804.04235)
adamw8bit      8-bit dynamic states (ours)      muon        Muon for matrices inside the blocks, AdamW for the rest
adamw-fp8      FP8 states (ours)                            (torch's, Keller Jordan 2024, arXiv 2502.16982)
paged-adamw8bit, paged-adamw-fp8                ours, states in main memory, one parameter at a time on the device
bnb-adamw8bit, bnb-paged-adamw8bit              bitsandbytes'
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, get_args

import torch
from torch import nn

from karui.configs.errors import KaruiError, UnsupportedError, nearest
from karui.configs.precision import OptimizerName
from karui.lowprec.optim.adamw import AdamWLowState

OPTIMIZERS: tuple[str, ...] = get_args(OptimizerName)


def build_optimizer(
    name: str,
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    lora_plus: float | None = None,
    seed: int = 0,
    groups: Sequence[dict[str, Any]] | None = None,
) -> torch.optim.Optimizer:
    """The optimizer of the parameters of `model` that take gradients.

    Args:
        lora_plus: learning rate of LoRA's B matrices as a multiple of `lr` (LoRA+, arXiv 2402.12354); None: no such groups.
        groups: the parameters in groups made elsewhere, in place of `model`'s; their own keys stay.

    Raises:
        KaruiError: an unknown name, no trained parameter, an option the optimizer does not have.
        UnsupportedError: bitsandbytes' paged optimizer for parameters that are not on a GPU.
    """
    if name not in OPTIMIZERS:
        raise KaruiError(f"optimizer {name!r} is not known; use one of {', '.join(OPTIMIZERS)}.{nearest(name, OPTIMIZERS)}")
    if groups is None:
        groups = lora_plus_groups(model, lr, lora_plus) if lora_plus is not None else [{"params": _trained(model), "lr": lr}]
    groups = [dict(g) for g in groups if g["params"]]
    if not groups:
        raise KaruiError("no parameter takes gradients; there is nothing to optimise.")
    common: dict[str, Any] = dict(lr=lr, weight_decay=weight_decay)
    if name == "adamw":
        return torch.optim.AdamW(groups, betas=betas, eps=eps, fused=True, **common)
    if name in ("adamw8bit", "adamw-fp8", "paged-adamw8bit", "paged-adamw-fp8"):
        state = "fp8" if name.endswith("fp8") else "dynamic"
        return AdamWLowState(groups, betas=betas, eps=eps, state=state, seed=seed, offload=name.startswith("paged"), **common)
    if name == "adafactor":
        return torch.optim.Adafactor(groups, **common)
    if name == "muon":
        if lora_plus is not None or any(g.get("lr_scale", 1.0) != 1.0 for g in groups):
            raise KaruiError("groups with a learning rate of their own (LoRA+) do not go with muon, which scales its own; "
                             "use adamw or adamw8bit.")  # fmt: skip
        return MuonAdamW(model, groups, betas=betas, eps=eps, **common)
    if "paged" in name and any(p.device.type != "cuda" for g in groups for p in g["params"]):
        raise UnsupportedError(f"{name}: bitsandbytes pages states of CUDA devices only; use {name.removeprefix('bnb-')}.")
    import bitsandbytes as bnb

    kind = bnb.optim.PagedAdamW8bit if "paged" in name else bnb.optim.AdamW8bit
    return kind(groups, betas=betas, eps=eps, **common)


def lora_plus_groups(model: nn.Module, lr: float, ratio: float) -> list[dict[str, Any]]:
    """Two groups: LoRA's B matrices with `ratio * lr`, everything else trained with `lr`.

    Raises:
        KaruiError: a ratio of 0 or less, or a model without LoRA.
    """
    if ratio <= 0:
        raise KaruiError(f"lora_plus is a positive multiple of the learning rate, got {ratio}.")
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    fast = [p for n, p in named if ".lora_B." in n or ".lora_embedding_B." in n]
    if not fast:
        raise KaruiError("lora_plus: the model has no trained LoRA B matrix; attach adapters first, or leave it out.")
    chosen = {id(p) for p in fast}
    slow = [p for _, p in named if id(p) not in chosen]
    return [{"params": slow, "lr": lr}, {"params": fast, "lr": ratio * lr}]


class MuonAdamW(torch.optim.Optimizer):
    """Muon for matrices that are neither embedding nor head, AdamW for the rest, as one optimizer.

    Muon's update is scaled to AdamW's size (0.2 sqrt(max(rows, columns)), arXiv 2502.16982 eq. 4), so one learning rate serves.
    """

    def __init__(
        self, model: nn.Module, groups: Sequence[dict[str, Any]], *, lr: float, weight_decay: float,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
    ) -> None:  # fmt: skip
        outer = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        heads = (getattr(m, "get_output_embeddings", lambda: None)() for m in model.modules())
        outer |= {id(head.weight) for head in heads if head is not None}

        def split(inner: bool) -> list[dict[str, Any]]:
            kept = [{**g, "params": [p for p in g["params"] if (p.dim() == 2 and id(p) not in outer) == inner]} for g in groups]
            return [g for g in kept if g["params"]]

        matrices, rest = split(True), split(False)
        if not matrices:
            raise KaruiError("muon: the model has no trained matrix besides embedding and head; use adamw.")
        self.parts: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        ]
        if rest:
            self.parts.append(torch.optim.AdamW(rest, lr=lr, weight_decay=weight_decay, betas=betas, eps=eps))
        super().__init__([g for part in self.parts for g in part.param_groups], dict(lr=lr))
        # one set of groups and states, seen by a scheduler and a checkpoint as by the parts
        self.param_groups = [g for part in self.parts for g in part.param_groups]
        for part in self.parts:
            part.state = self.state

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch; the parts see what was loaded."""
        super().load_state_dict(state_dict)
        at = 0
        for part in self.parts:
            part.param_groups = self.param_groups[at : at + len(part.param_groups)]
            part.state = self.state
            at += len(part.param_groups)


def _trained(model: nn.Module) -> list[nn.Parameter]:
    params = [p for p in model.parameters() if p.requires_grad]
    if not params:
        raise KaruiError("no parameter takes gradients; there is nothing to optimise.")
    return params
