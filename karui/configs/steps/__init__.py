"""The steps of `prepare:`, told apart by `method`. `karui.trainers.stages` holds the code behind each section."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from karui.configs.steps.adapters import Ia3Step, LoraStep, PromptStep, VeraStep
from karui.configs.steps.lowprec import LowPrecisionStep
from karui.configs.steps.prune import PruneStep
from karui.configs.steps.ptq import PostTrainingStep
from karui.configs.steps.qat import BitNetStep, EfficientQatStep, LearnedGridStep, LlmQatStep, QatLoraStep
from karui.configs.steps.reshape import LatentStep, MergeHeadsStep, SparseAttentionStep, UpcycleStep, WindowStep

PrepareStep = Annotated[
    PruneStep | MergeHeadsStep | WindowStep | UpcycleStep | LatentStep | SparseAttentionStep | PostTrainingStep | LearnedGridStep
    | EfficientQatStep | BitNetStep | LlmQatStep | QatLoraStep | LoraStep | VeraStep | Ia3Step | PromptStep | LowPrecisionStep,
    Field(discriminator="method"),
]  # fmt: skip

__all__ = [
    "BitNetStep", "EfficientQatStep", "Ia3Step", "LatentStep", "LearnedGridStep", "LlmQatStep", "LoraStep", "LowPrecisionStep",
    "MergeHeadsStep", "PostTrainingStep", "PrepareStep", "PromptStep", "PruneStep", "QatLoraStep", "SparseAttentionStep",
    "UpcycleStep", "VeraStep", "WindowStep",
]  # fmt: skip
