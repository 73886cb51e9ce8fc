"""The routers of a mixture of experts, as transformers lays them out: a block with `experts` and a `gate` or `router`, which
gives (logits [T, E], weights [T, k], indices [T, k]) of the tokens that came in.

How a router scores is not read off its name: one is tried on random numbers, and the scores are those that its weights agree
with, the softmax over the experts or the sigmoid of each.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import logsigmoid

BIASES = ("e_score_correction_bias", "expert_bias")
COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")  # of experts, in configurations
Routed = tuple[torch.Tensor, torch.Tensor]  # logits [T, E], with their gradient, and indices [T, k]


@dataclass(frozen=True, kw_only=True, eq=False)
class Router:
    """One router.

    Attributes:
        name: of its block in the model.
        block: holds `experts` and the router.
        module: the router itself.
        sigmoid: experts are scored by the sigmoid of their logit, else by the softmax over all.
        experts: how many.
    """

    name: str
    block: Any
    module: nn.Module
    sigmoid: bool
    experts: int

    @property
    def bias(self) -> torch.Tensor | None:
        """What is added to the scores where experts are chosen, not where they are weighed (arXiv 2408.15664); [E] or [1, E]."""
        held = bias_of(self.block)
        return None if held is None else getattr(*held)


def bias_of(block: nn.Module) -> tuple[nn.Module, str] | None:
    """(the module that holds it, its name) of a block's correction bias."""
    for owner in block.modules():
        for name in BIASES:
            if isinstance(getattr(owner, name, None), torch.Tensor):
                return owner, name
    return None


def find_routers(model: nn.Module) -> list[Router]:
    """The model's routers in order; none where a block gives something else than the module's head says."""
    blocks = [(n, b) for n, b in model.named_modules()
              if isinstance(getattr(b, "experts", None), nn.Module) and _of(b) is not None]
    sigmoid = _scored(blocks[0][1]) if blocks else None
    if sigmoid is None:
        return []
    return [Router(name=n, block=b, module=_of(b), sigmoid=sigmoid, experts=len(next(_of(b).parameters()))) for n, b in blocks]


def _of(block: Any) -> Any:
    return next((r for r in (getattr(block, key, None) for key in ("gate", "router")) if isinstance(r, nn.Module)), None)


@contextmanager
def watching(routers: list[Router], seen: list[list[Routed]]) -> Iterator[None]:
    """Within, what router i gave is appended to `seen[i]`."""
    handles = hooks(routers, seen)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def hooks(routers: list[Router], seen: list[list[Routed]]) -> list[Any]:
    """The same, until each of the handles is removed."""
    def note(into: list[Routed]) -> Any:
        return lambda module, args, out: into.append((out[0], out[2]))

    return [r.module.register_forward_hook(note(into)) for r, into in zip(routers, seen)]


@torch.no_grad()
def _scored(block: Any) -> bool | None:
    """Whether a block's router scores by sigmoids; None when it is a router of another kind."""
    router = _of(block)
    weight = next(router.parameters(), None)
    if weight is None or weight.ndim != 2:
        return None
    probe = 3 * torch.randn(16, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight)
    held = bias_of(block)
    more = [getattr(*held)] if held and len(inspect.signature(router.forward).parameters) > 1 else []  # it is the block's
    was_training = router.training
    router.eval()
    try:
        out = router(probe, *more)
    except (TypeError, RuntimeError, ValueError, AttributeError, IndexError):
        return None
    finally:
        router.train(was_training)
    if not (isinstance(out, tuple) and len(out) == 3 and all(isinstance(x, torch.Tensor) and x.ndim == 2 for x in out)):
        return None
    logits, weights, indices = out[0].float(), out[1].float().clamp_min(1e-30).log(), out[2]
    if indices.is_floating_point() or weights.shape != indices.shape or len(logits) != len(probe):
        return None
    corrected = held is not None
    if indices.shape[1] == 1 and float(weights.std()) < 1e-3:  # one expert, weighed 1: nothing to tell them by
        return corrected
    error = {}
    for sigmoid, scores in ((False, logits.log_softmax(-1)), (True, logsigmoid(logits))):
        gap = weights - scores.gather(1, indices)
        error[sigmoid] = float((gap - gap.mean(1 if indices.shape[1] > 1 else None, keepdim=True)).abs().max())
    if abs(error[True] - error[False]) < 1e-4:  # all logits alike
        return corrected
    best = min(error, key=lambda k: error[k])
    return best if error[best] < 0.05 else None
