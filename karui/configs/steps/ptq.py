"""A post-training method as a step of `prepare:`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from karui.configs.quantspec import QuantSpec
from karui.configs.section import Section


class PostTrainingStep(Section):
    """The linears of the blocks go onto their grid before training, calibrated on the training samples, and stay there.

    What is left learns to live with it: the norms (norm tweaking, arXiv 2309.02784), or everything that is not on the grid.
    """

    method: Literal["rtn", "hqq", "gptq", "awq", "smoothquant", "llm_int8", "rotation", "autoround", "block_ap"]
    spec: QuantSpec = Field(default_factory=lambda: QuantSpec.parse("w4g64"), description="grid of the block linears")
    samples: int = Field(64, ge=1, description="calibration rows, cut from the training samples")
    length: int = Field(256, ge=8, description="tokens per calibration row")
    settings: dict[str, Any] = Field(default_factory=dict, description="the method's own settings, e.g. {damp: 0.05}")
    skip: tuple[str, ...] = Field((), description="patterns of linears that stay in high precision (and as they are)")
    train: Literal["norms", "rest"] = Field("norms", description="norms, or the rest: norms, embedding and head")

    @model_validator(mode="after")
    def _grid(self) -> PostTrainingStep:
        if self.spec.format == "none":
            raise ValueError("a post-training step needs a grid, e.g. spec: w4g64")
        return self
