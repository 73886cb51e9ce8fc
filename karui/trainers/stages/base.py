"""`Stage`: one step of `prepare:` at work in a run, from the loaded model to the saved one."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch
    from torch import nn

    from karui.configs.recipe import Recipe
    from karui.configs.section import Section
    from karui.kernels.qtensor import QTensor
    from karui.trainers.data import SampleSet


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a stage may look at while it prepares.

    Attributes:
        model_folder: the resolved folder of the recipe's model, unquantized.
        tokenizer: the model's.
        samples: the training samples, for calibration.
        base: fingerprint of the model as it was loaded.
        device: where it will be trained; stages see it on the CPU.
    """

    recipe: Recipe
    model_folder: Path
    tokenizer: Any
    samples: SampleSet
    base: str
    device: torch.device


class Stage:
    """One step. A subclass overrides what it needs; every method but `prepare` has a default that does nothing.

    The calls come in this order: `plan`, before there is a model; `prepare` once; `load` when a checkpoint is resumed;
    `param_groups` and `attach` once; `before_step` and `after_step` around every optimizer step; `state` with every checkpoint;
    at the end, on the main rank, `save` by a stage whose result is an adapter, else `finish` and, by a stage whose result is on a
    grid, `convert`.

    Attributes:
        order: steps of a recipe must come in ascending order: prune 10, grid of the weights 20, adapters 30, low precision 40.
        is_adapter: `save` writes an adapter, and nothing else of the model is saved.
        is_on_grid: `convert` gives the codes and scales that are exported.
    """

    order: ClassVar[int]
    is_adapter: ClassVar[bool] = False
    is_on_grid: ClassVar[bool] = False

    def __init__(self, step: Section, context: Context) -> None:
        self.step: Any = step
        self.context = context

    @classmethod
    def plan(cls, step: Section, recipe: Recipe, config: Any) -> tuple[Any, list[str]]:
        """The transformers configuration that `prepare` will leave, from the one before, and what there is to say of it.

        Raises what `prepare` would, as far as the configuration tells.
        """
        return config, []

    def prepare(self, model: nn.Module) -> nn.Module:
        """Change the model for training; in place or not, the result goes on. Runs on every rank, seeded alike."""
        raise NotImplementedError

    def training_samples(self, samples: SampleSet) -> SampleSet:
        """What the run trains on, given what the recipe's data gives; called once after all stages have prepared."""
        return samples

    def lines(self) -> list[str]:
        """What became of the model, printed before training starts."""
        return []

    def param_groups(self, model: nn.Module, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The optimizer's groups, from those that were made so far: {"params": [...], "lr_scale": 1.0, "weight_decay": ...}.

        A group's learning rate is the schedule's times `lr_scale`.
        """
        return groups

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Register what has to happen around the optimizer's steps."""

    def exact(self) -> AbstractContextManager[None]:
        """While it lasts, rows of a batch do not touch one another through this step (a scale per tensor is such a touch)."""
        return nullcontext()

    def before_step(self, step: int, total: int) -> None:
        """Called before optimizer step `step` (from 0) of `total`: schedules."""

    def faults(self) -> list[str]:
        """What met a NaN or Inf in this step, where the gradient may hide it: the step is left out. Alike on every rank."""
        return []

    def after_step(self, *, skipped: bool) -> None:
        """Called after the optimizer's step, or where one was left out because of a non-finite loss or gradient."""

    def state(self) -> dict[str, torch.Tensor]:
        """What a checkpoint must hold beside the model's parameters and buffers."""
        return {}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """The inverse of `state`."""

    def save(self, model: nn.Module, folder: Path) -> None:
        """Write the adapter into an existing folder (`is_adapter` only); called for checkpoints and at the end."""
        raise NotImplementedError

    def restore(self, model: nn.Module, folder: Path) -> None:
        """Put what `save` wrote back into the model (`is_adapter` only)."""
        raise NotImplementedError

    def finish(self, model: nn.Module) -> None:
        """Take out what only training needed, so that the model can be saved as an ordinary one."""

    def convert(self, model: nn.Module) -> dict[str, QTensor]:
        """Weights on their grid by state-dict name (`is_on_grid` only); bit-equal to what the forward pass saw."""
        raise NotImplementedError
