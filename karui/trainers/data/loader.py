"""The micro-batches of a step, made in a thread while the step before computes.

What is made is a function of the step's number alone, so making it ahead changes nothing: a run that is resumed, or one that asks
for steps in another order, gets the same batches.
"""

from __future__ import annotations

import math
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from karui.trainers.data.packing import EpochPlan, collate, plan_epoch
from karui.trainers.data.types import PackedBatch, SampleSet

if TYPE_CHECKING:
    from karui.configs.recipe import Recipe

Micros = tuple[float, list[PackedBatch]]


class StepLoader:
    """loader(step) -> (position in epochs, this rank's micro-batches of an optimizer step); the next step is made meanwhile.

    Args:
        rank, world: of the ranks that get different micro-batches.
    """

    def __init__(self, recipe: Recipe, samples: SampleSet, *, rank: int, world: int) -> None:
        self.recipe, self.samples, self.rank, self.world = recipe, samples, rank, world
        self.steps_per_epoch = math.ceil(len(samples) / recipe.optim.batch)
        self._plan: tuple[int, EpochPlan] | None = None  # the thread's alone
        self._pool = ThreadPoolExecutor(1, "loader")
        self._made: dict[int, Future[Micros]] = {}

    def __call__(self, step: int) -> Micros:
        wanted = (step, step + 1)
        self._made = {k: self._made[k] if k in self._made else self._pool.submit(self._make, k) for k in wanted}
        return self._made[step].result()

    def _make(self, step: int) -> Micros:
        recipe = self.recipe
        epoch, at = divmod(step, self.steps_per_epoch)
        if self._plan is None or self._plan[0] != epoch:
            self._plan = epoch, plan_epoch(
                self.samples.lengths, batch=recipe.optim.batch, micro_tokens=recipe.optim.micro_tokens,
                rank=self.rank, world=self.world, seed=recipe.run.seed, epoch=epoch, shuffle=recipe.data.shuffle,
                packing=recipe.data.packing, window=recipe.data.shuffle_window,
            )  # fmt: skip
        batches = [collate([self.samples[i] for i in micro]) for micro in self._plan[1][at]]
        return step / self.steps_per_epoch, batches
