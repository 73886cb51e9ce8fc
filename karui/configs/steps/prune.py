"""Pruning as a step of `prepare:`: what makes a student of the recipe's model."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, model_validator

from karui.configs.section import Section

BLOCK = 128
"""Inputs whose weights SparseGPT prunes before it moves on; groups of n:m must not lie across."""


def read_pattern(sparsity: float | str) -> tuple[float, int, int]:
    """(share of zeros, n, m); n = m = 0 for a share that lies anywhere. Raises `ValueError`."""
    if isinstance(sparsity, str) and (found := re.fullmatch(r"(\d{1,3}):(\d{1,3})", sparsity)):
        n, m = int(found[1]), int(found[2])
        if 0 < n < m and BLOCK % m == 0:
            return n / m, n, m
    elif not isinstance(sparsity, str) and 0 < sparsity < 1:
        return float(sparsity), 0, 0
    raise ValueError(f"sparsity {sparsity!r} is neither a share between 0 and 1 nor n:m such as 2:4 (n zeros of m, m a divisor "
                     f"of {BLOCK})")


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
        if self.sparsity is not None:
            read_pattern(self.sparsity)
        return self
