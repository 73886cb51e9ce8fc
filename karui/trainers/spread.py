"""How a run's module and optimizer lie over the ranks: alone or under DDP, split by FSDP2, or under DeepSpeed's engine.

The loop and the checkpoints see one thing, whichever it is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from karui.configs.errors import KaruiError, UnsupportedError
from karui.configs.recipe import Recipe
from karui.trainers import checkpoint, sharding, zero

if TYPE_CHECKING:
    from accelerate import Accelerator

    from karui.trainers.stages import Stage


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A module as it was prepared for its ranks.

    Attributes:
        module: what the loop calls.
        optimizer: what the loop steps.
        inner: torch's own optimizer in it.
        loss: the objective's module, unwrapped.
    """

    module: Any
    optimizer: Any
    inner: torch.optim.Optimizer
    loss: nn.Module

    def moments(self) -> dict[str, torch.Tensor]:
        """The optimizer's state by `KIND/parameter name`, whole. A collective."""
        return checkpoint.optimizer_tensors(self.inner, self.loss)

    def restore(self, tensors: Mapping[str, torch.Tensor], source: str) -> None:
        """The inverse of `moments`; raises `CorruptError` when they do not fit."""
        checkpoint.restore_optimizer(self.inner, self.loss, tensors, source)

    def gathered(self, *, frozen: bool) -> AbstractContextManager[None]:
        """Within, the main rank's modules hold whole tensors, also those that are not trained if `frozen`. A collective."""
        return sharding.gathered(self.loss, frozen=frozen)


@dataclass(frozen=True, kw_only=True)
class ZeroSpread(Spread):
    """Under DeepSpeed's engine."""

    def moments(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = self.optimizer.tensors()
        return found

    def restore(self, tensors: Mapping[str, torch.Tensor], source: str) -> None:
        shapes = {n: self.optimizer.shape(p) for n, p in self.loss.named_parameters() if p.requires_grad}
        if checkpoint.by_parameter(tensors, shapes, source):
            self.optimizer.restore(tensors)

    def gathered(self, *, frozen: bool) -> AbstractContextManager[None]:
        whole: AbstractContextManager[None] = self.optimizer.gathered(frozen=frozen)
        return whole


def spread(recipe: Recipe, accelerator: Accelerator, loss: nn.Module, optimizer_of: Any, stages: Sequence[Stage]) -> Spread:
    """Lay a run's module out as recipe and launch say.

    Args:
        optimizer_of: makes the optimizer of the module, once its parameters are those that are trained.

    Raises:
        UnsupportedError: the recipe has something that the way it is split does not serve.
    """
    stage = zero.stage_of(recipe, os.environ)
    split = sharding.wanted(recipe, accelerator)
    if recipe.run.precision == "fp16" and not stage:
        _check_half(loss, split)
    if recipe.run.checkpoint == "sharded" and (stage or recipe.objective.kind != "sft"):
        raise UnsupportedError("run.checkpoint sharded is for objective sft without DeepSpeed; leave it at whole.")
    if (stage or split) and getattr(recipe.objective, "indexer", None) is not None:
        raise UnsupportedError("objective.indexer is not for parameters that are split over ranks; launch with DDP, or alone.")
    if stage:
        zero.check(recipe, loss, stages)
        if not torch.distributed.is_initialized():
            raise KaruiError(f"DeepSpeed ZeRO {stage} needs to be launched (accelerate launch, or torchrun --nproc_per_node N -m "
                             f"karui.trainers.run RECIPE), also with one process.")
        engine = zero.spread(loss, optimizer_of(), recipe, accelerator, stage)
        return ZeroSpread(module=engine.engine, optimizer=engine, inner=engine.inner, loss=loss)
    if split:
        if recipe.optim.name != "adamw":
            raise UnsupportedError(f"optim.name {recipe.optim.name} takes no parameters that are split over ranks; use adamw, or "
                                   f"run.sharding: none.")
        sharding.shard(loss, accelerator)
        optimizer = optimizer_of()
        return Spread(module=loss, optimizer=optimizer, inner=optimizer, loss=loss)
    module, optimizer = accelerator.prepare(loss, optimizer_of())
    if isinstance(module, nn.parallel.DistributedDataParallel):
        # alike on all ranks as they are; the codes of a frozen base would be sent in every forward pass
        module.broadcast_buffers = False
    return Spread(module=module, optimizer=optimizer, inner=optimizer.optimizer, loss=loss)


def _check_half(loss: nn.Module, split: bool) -> None:
    """fp16 needs a loss scale, which unscales whole gradients in fp32."""
    if split:
        raise UnsupportedError("run.precision fp16 needs a loss scale, which FSDP2's split gradients do not have here; use bf16, "
                               "or run.sharding: none.")
    if odd := next((n for n, p in loss.named_parameters() if p.requires_grad and p.dtype == torch.float16), None):
        raise UnsupportedError(f"run.precision fp16 trains weights that are kept in fp32, and {odd} is in fp16; set model.dtype: "
                               "float32, or run.precision: no.")
