"""Pruning as a step of `prepare:`: what makes a student of the recipe's model."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from karui.configs.section import Section


class PruneStep(Section):
    """A smaller or sparser model, healed by the training that follows; see `karui.distill.prune`."""

    method: Literal["prune-layers", "prune-width", "prune-experts", "sparsegpt", "wanda", "magnitude"]
    keep_layers: int | None = Field(None, ge=1, description="prune-layers: layers left")
    choice: Literal["uniform", "influence", "first"] = Field("uniform", description="prune-layers: which ones")
    intermediate: int | None = Field(None, ge=1, description="prune-width: FFN neurons left in each layer")
    kv_heads: int | None = Field(None, ge=1, description="prune-width: groups of heads left in each layer")
    hidden: int | None = Field(None, ge=1, description="prune-width: channels of the residual stream left")
    keep_experts: int | None = Field(None, ge=1, description="prune-experts: experts left in each mixture")
    by: Literal["score", "count", "random"] = Field(
        "score", description="prune-experts: keep those of most router mass times size, those that most tokens are sent to, any")
    sparsity: float | str | None = Field(None, description="sparsegpt, wanda, magnitude: a share of zeros, or n:m")
    samples: int = Field(64, ge=1, description="training samples that calibrate it")

    @model_validator(mode="after")
    def _fits(self) -> PruneStep:
        own = {"prune-layers": ("keep_layers",), "prune-width": ("intermediate", "kv_heads", "hidden"),
               "prune-experts": ("keep_experts",)} | dict.fromkeys(("sparsegpt", "wanda", "magnitude"), ("sparsity",))
        needed = own[self.method]
        if all(getattr(self, key) is None for key in needed):
            raise ValueError(f"{self.method} needs {' or '.join(needed)}")
        if self.choice != "uniform" and self.method != "prune-layers":
            raise ValueError(f"choice: {self.choice} does not belong to {self.method}")
        if self.by != "score" and self.method != "prune-experts":
            raise ValueError(f"by: {self.by} does not belong to {self.method}")
        foreign = [k for keys in own.values() for k in keys if k not in needed and getattr(self, k) is not None]
        if foreign:
            raise ValueError(f"{', '.join(foreign)} does not belong to {self.method}")
        return self
