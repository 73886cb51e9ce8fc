"""Adapter steps of `prepare:`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from karui.configs.quantspec import QuantSpec
from karui.configs.section import Section


class LoraStep(Section):
    """LoRA (arXiv 2106.09685) on a base in its own precision, or on a quantized base when `base` names a grid (QLoRA)."""

    method: Literal["lora", "qlora"]
    rank: int = Field(16, ge=1)
    alpha: float = Field(32.0, gt=0)
    dropout: float = Field(0.0, ge=0, lt=1)
    targets: str | tuple[str, ...] = Field("all-linear", description="all-linear, or names of linear layers")
    rslora: bool = Field(False, description="scale by alpha / sqrt(rank) (arXiv 2312.03732)")
    base: QuantSpec = Field(default_factory=lambda: QuantSpec.parse("none"), description="grid of the frozen base; qlora: nf4dq")

    @model_validator(mode="before")
    @classmethod
    def _base_default(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and value.get("method") == "qlora" and "base" not in value:
            return {**value, "base": "nf4dq"}
        return value

    @model_validator(mode="after")
    def _base_fits(self) -> LoraStep:
        if self.method == "qlora" and self.base.format == "none":
            raise ValueError("qlora needs a quantized base, e.g. base: nf4dq")
        if self.method == "lora" and self.base.format != "none":
            raise ValueError(f"lora has a base in high precision; for base {self.base} write method: qlora")
        return self
