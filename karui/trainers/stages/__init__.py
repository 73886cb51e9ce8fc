"""The code behind each step of `prepare:`; a stage is imported when a recipe asks for it."""

from __future__ import annotations

import importlib
from typing import Any

from karui.configs.errors import KaruiError
from karui.configs.recipe import Recipe
from karui.configs.section import Section
from karui.configs.steps import (
    BitNetStep,
    EfficientQatStep,
    Ia3Step,
    LatentStep,
    LearnedGridStep,
    LlmQatStep,
    LoraStep,
    LowPrecisionStep,
    MergeHeadsStep,
    PostTrainingStep,
    PromptStep,
    PruneStep,
    QatLoraStep,
    SparseAttentionStep,
    UpcycleStep,
    VeraStep,
    WindowStep,
)  # fmt: skip
from karui.trainers.stages.base import Context, Stage

_STAGES: dict[type[Section], str] = {
    PruneStep: "prune:PruneStage",
    MergeHeadsStep: "reshape:ReshapeStage",
    WindowStep: "reshape:ReshapeStage",
    UpcycleStep: "reshape:ReshapeStage",
    LatentStep: "reshape:ReshapeStage",
    SparseAttentionStep: "reshape:ReshapeStage",
    PostTrainingStep: "ptq:PostTrainingStage",
    LearnedGridStep: "qat:LearnedGridStage",
    EfficientQatStep: "qat:EfficientQatStage",
    BitNetStep: "qat:BitNetStage",
    LlmQatStep: "qat:LlmQatStage",
    QatLoraStep: "qat:QatLoraStage",
    LoraStep: "adapters:LoraStage",
    VeraStep: "adapters:VeraStage",
    Ia3Step: "adapters:Ia3Stage",
    PromptStep: "adapters:PromptStage",
    LowPrecisionStep: "lowprec:LowPrecisionStage",
}


def stage_class(step: Section) -> type[Stage]:
    module, _, name = _STAGES[type(step)].partition(":")
    found: type[Stage] = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    return found


def planned(recipe: Recipe, config: Any) -> tuple[Any, list[str]]:
    """The model's transformers configuration after the recipe's steps, as far as it can be known, and lines about it.

    Raises:
        KaruiError: a step that this model cannot have.
    """
    from karui.trainers.balance import check

    lines: list[str] = []
    for step in recipe.prepare:
        config, told = stage_class(step).plan(step, recipe, config)
        lines += told
    if getattr(recipe.objective, "indexer", None) is not None and not hasattr(config, "index_topk"):
        raise KaruiError(f"objective.indexer: a model of type {config.model_type!r} has no indexer; add "
                         "{method: sparse-attention} to prepare.")
    check(recipe, config)
    return config, lines


def make_stages(recipe: Recipe, context: Context) -> list[Stage]:
    """The recipe's stages, in its order.

    Raises:
        KaruiError: an order that makes no sense, or two steps that each want to own the saved result.
    """
    check_order(recipe)
    return [stage_class(step)(step, context) for step in recipe.prepare]


def check_order(recipe: Recipe) -> None:
    """Refuse a senseless order of steps, without touching a model; raises as `make_stages` does."""
    kinds = [stage_class(step) for step in recipe.prepare]
    names = [str(getattr(step, "method", type(step).__name__)) for step in recipe.prepare]
    for i in range(1, len(kinds)):
        if kinds[i].order < kinds[i - 1].order:
            raise KaruiError(
                f"prepare: {names[i]} comes after {names[i - 1]}, which is the wrong way round; "
                f"write it as {', '.join(n for _, n in sorted(zip((k.order for k in kinds), names), key=lambda p: p[0]))}."
            )
    owners = [n for k, n in zip(kinds, names) if k.is_adapter or k.is_on_grid]
    if len(owners) > 1:
        raise KaruiError(f"prepare: {' and '.join(owners)} each own the result of the run; one run trains one of them.")


__all__ = ["Context", "Stage", "check_order", "make_stages", "planned", "stage_class"]
