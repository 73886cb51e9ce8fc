"""One optimizer step's gradient: sums over supervised tokens, divided once by how many the whole step has over all ranks.

The contract: the gradient is the same however the step's samples are cut into micro-batches, packed, chunked and spread over
ranks (where averaging per micro-batch is the field's classic error: transformers 34191, 35203, 37766).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from karui.trainers.balance import counted_tokens
from karui.trainers.data import PackedBatch
from karui.trainers.sharding import whole
from karui.trainers.zero import ZeroOptimizer

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(frozen=True, kw_only=True)
class StepGradient:
    """What one step computed, over all ranks.

    Attributes:
        loss: mean loss of the supervised tokens; NaN or infinite when the forward pass was.
        num_supervised: tokens that carry loss.
        num_tokens: all tokens that went through the model.
    """

    loss: float
    num_supervised: int
    num_tokens: int


def accumulate(
    accelerator: Accelerator, module: nn.Module, micros: Sequence[PackedBatch], optimizer: Any = None, *, sharing: int = 1
) -> StepGradient:
    """Run all micro-batches of this rank and leave the step's mean gradient in `.grad`, or with a `ZeroOptimizer`.

    Args:
        module: `LossSum`, prepared by the accelerator (DDP averages gradients over ranks, which is undone here).
        micros: the same number on every rank; a filler has no supervised tokens.
        sharing: ranks that have the same micro-batches, each computing a part of them.
    """
    device = accelerator.device
    routers = getattr(accelerator.unwrap_model(module), "routers", None)
    counts = torch.tensor([sum(b.num_supervised for b in micros), sum(b.num_tokens for b in micros if b.num_samples),
                           sum(map(counted_tokens, micros)) if routers is not None else 0], dtype=torch.int64, device=device)
    counts = accelerator.reduce(counts, "sum")
    supervised, tokens = int(counts[0]) // sharing, int(counts[1]) // sharing
    factor = accelerator.num_processes / max(1, supervised)
    if routers is not None:
        routers.begin(supervised, int(counts[2]) // sharing)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for at, batch in enumerate(micros):
        batch = batch.to(device)
        last = at == len(micros) - 1
        with _summing(accelerator, module, last):
            with accelerator.autocast():
                loss_sum = module(batch.tokens, batch.positions, batch.cu_seqlens, batch.targets)
            total += loss_sum.detach().double()
            if isinstance(optimizer, ZeroOptimizer):
                optimizer.backward(loss_sum * factor, last=last)
            else:
                accelerator.backward(loss_sum * factor)
    total = accelerator.reduce(total, "sum")
    return StepGradient(loss=float(total) / max(1, supervised), num_supervised=supervised, num_tokens=tokens)


def _summing(accelerator: Accelerator, module: nn.Module, last: bool) -> AbstractContextManager[Any]:
    """Gradients are summed over ranks with the last micro-batch only."""
    if hasattr(module, "set_requires_gradient_sync"):
        module.set_requires_gradient_sync(last)  # type: ignore[operator]
        return nullcontext()
    own = not last and hasattr(module, "no_sync") and not hasattr(module, "zero_optimization_stage")  # DDP; the engine sees to it
    return accelerator.no_sync(module) if own else nullcontext()


def update(accelerator: Accelerator, optimizer: Any, limit: float | None, *, usable: bool) -> float:
    """Clip the gradient and step, unless the step is not `usable` or its gradient not finite; the norm before clipping."""
    if isinstance(optimizer, ZeroOptimizer):
        return optimizer.update(usable=usable)
    norm = clip(accelerator, [p for group in optimizer.param_groups for p in group["params"]], limit or math.inf)
    if usable and math.isfinite(norm):
        optimizer.step()
    elif accelerator.scaler is not None:
        accelerator.scaler.update()  # fp16: the clipping has looked for overflows; without a step the loss scale falls here
    optimizer.zero_grad(set_to_none=True)
    return norm


def clip(accelerator: Accelerator, parameters: Sequence[torch.Tensor], limit: float) -> float:
    """Scale the gradients so that their norm over all ranks is at most `limit`; returns the norm before."""
    if any(hasattr(p, "device_mesh") for p in parameters):
        return float(whole(torch.nn.utils.clip_grad_norm_(parameters, limit)))
    return float(accelerator.clip_grad_norm_(parameters, limit))
