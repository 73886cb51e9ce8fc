"""Pruning as a step of a run: the student is made before training, masks are kept while it trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from karui.configs.errors import UnsupportedError
from karui.configs.recipe import Recipe
from karui.qat.methods import check_zeros
from karui.trainers.stages.base import Stage


class PruneStage(Stage):
    """See `karui.distill.prune`. The same samples calibrate every rank and every resumed run."""

    order = 10
    kept_layers: tuple[int, ...] = ()

    @classmethod
    def plan(cls, step: Any, recipe: Recipe, config: Any) -> tuple[Any, list[str]]:
        from karui.distill.prune import experts, layers, width
        from karui.trainers.stages import stage_class

        if any(stage_class(s).is_adapter for s in recipe.prepare):
            raise UnsupportedError("prepare: an adapter is merged into the model it was loaded from, which pruning changes. "
                                   "Prune and heal in one run, then train the adapter on that run's final/.")
        if step.method == "prune-layers":
            told = f"{step.keep_layers} of {config.num_hidden_layers} layers"
            return layers.plan(config, step.keep_layers, step.choice), [told]
        if step.method == "prune-width":
            planned, line = width.plan(config, intermediate=step.intermediate, kv_heads=step.kv_heads, hidden=step.hidden)
            return planned, [line]
        if step.method == "prune-experts":
            return experts.plan(config, step.keep_experts), [f"{step.keep_experts} experts in each mixture"]
        for other in recipe.prepare:
            if (spec := getattr(other, "spec", None)) is not None:
                check_zeros(other.method, spec, step.method)
        return config, [f"{step.method}: {step.sparsity} zeros"]

    def prepare(self, model: Any) -> Any:
        from karui.distill.prune.experts import prune_experts
        from karui.distill.prune.layers import drop_layers
        from karui.distill.prune.sparse import prune_sparse
        from karui.distill.prune.width import prune_width

        step, samples = self.step, self.context.samples
        rows = [torch.from_numpy(samples[i].ids.astype("int64")) for i in range(min(step.samples, len(samples)))]
        was_training = model.training
        model.eval()
        if step.method == "prune-layers":
            self.done = drop_layers(model, step.keep_layers, rows, step.choice)
        elif step.method == "prune-width":
            self.done = prune_width(model, rows, intermediate=step.intermediate, kv_heads=step.kv_heads, hidden=step.hidden)
        elif step.method == "prune-experts":
            self.done = prune_experts(model, rows, step.keep_experts, step.by, self.context.recipe.run.seed)
        else:
            self.done = prune_sparse(model, rows, step.sparsity, step.method)
        self.kept_layers = self.done.kept_layers
        self.masks = dict(self.done.masks)
        self.parameters = {name: model.get_parameter(name) for name in self.masks}
        model.train(was_training)
        return model

    def lines(self) -> list[str]:
        return list(self.done.lines)

    @torch.no_grad()
    def after_step(self, *, skipped: bool) -> None:
        """Momentum and weight decay must not bring pruned weights back."""
        for name, mask in self.masks.items():
            self.parameters[name].mul_(mask.to(self.parameters[name].device))

    def state(self) -> dict[str, torch.Tensor]:
        return {name: mask.to(torch.uint8) for name, mask in self.masks.items()}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        self.masks = {name: mask.bool() for name, mask in state.items()}
