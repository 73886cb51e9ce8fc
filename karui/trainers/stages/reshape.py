"""Another architecture as a step of a run: the model is changed before training, which heals it."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from karui.configs.errors import UnsupportedError
from karui.configs.recipe import Recipe
from karui.trainers.stages.base import Stage

# method: its module in karui.distill.reshape, the keys that make the configuration, and those that only make weights
_METHODS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "merge-kv-heads": ("kv_heads", ("kv_heads",), ("pooling",)),
    "sliding-window": ("window", ("window", "every"), ()),
    "upcycle-moe": ("upcycle", ("experts", "top_k", "split", "correction"), ("router_std",)),
    "mla": ("latent", ("rank", "rope_dims"), ()),
    "sparse-attention": ("sparse", ("top_k", "index_heads", "index_head_dim", "query_rank"), ("start",)),
}


class ReshapeStage(Stage):
    """See `karui.distill.reshape`. The same samples and seed make the same model on every rank and in every resumed run."""

    order = 10

    @classmethod
    def plan(cls, step: Any, recipe: Recipe, config: Any) -> tuple[Any, list[str]]:
        from karui.distill.reshape import describe
        from karui.trainers.stages import stage_class

        if any(stage_class(s).is_adapter for s in recipe.prepare):
            raise UnsupportedError("prepare: an adapter is merged into the model it was loaded from, whose architecture "
                                   f"{step.method} changes. Change and heal in one run, then train the adapter on that run's "
                                   "final/.")
        module, keys, _ = _METHODS[step.method]
        planned = importlib.import_module(f"karui.distill.reshape.{module}").plan(config, **{k: getattr(step, k) for k in keys})
        return planned, [f"{step.method}: {describe(config, planned)}"]

    def prepare(self, model: Any) -> Any:
        step, recipe, samples = self.step, self.context.recipe, self.context.samples
        _, self.told = self.plan(step, recipe, model.config)
        module, keys, more = _METHODS[step.method]
        given: dict[str, Any] = {k: getattr(step, k) for k in (*keys, *more)}
        if step.method in ("upcycle-moe", "sparse-attention"):
            given["seed"] = recipe.run.seed
        if step.method in ("mla", "sparse-attention"):
            given["rows"] = [torch.from_numpy(samples[i].ids.astype("int64")) for i in range(min(step.samples, len(samples)))]
        was_training = model.training
        changed: Any = importlib.import_module(f"karui.distill.reshape.{module}").convert(model.eval(), **given)
        return changed.train(was_training)

    def lines(self) -> list[str]:
        return list(self.told)
