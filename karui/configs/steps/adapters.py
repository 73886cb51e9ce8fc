"""Adapter steps of `prepare:`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from karui.configs.quantspec import QuantSpec
from karui.configs.section import Names, Section, Seed

Init = Literal["kaiming", "gaussian", "pissa", "olora", "loftq", "eva"]


class LoraStep(Section):
    """LoRA (arXiv 2106.09685) on a base in its own precision, or on a quantized base when `base` names a grid (QLoRA)."""

    method: Literal["lora", "qlora"]
    rank: int = Field(16, ge=1)
    alpha: float = Field(32.0, gt=0, le=1e6, description="the update is scaled by alpha / rank")
    dropout: float = Field(0.0, ge=0, lt=1)
    targets: str | Names = Field("all-linear", description="all-linear, or names of linear layers")
    rslora: bool = Field(False, description="scale by alpha / sqrt(rank) (arXiv 2312.03732)")
    dora: bool = Field(False, description="train a magnitude per output row beside the direction (arXiv 2402.09353)")
    init: Init = Field("kaiming", description="where A and B start: kaiming, gaussian: B = 0; pissa (2404.02948), olora "
                       "(2406.01775), loftq (2310.08659, needs a grid), eva (2410.07170, looks at the data first)")
    init_steps: int | None = Field(None, ge=1, description="steps of loftq (null: 5) and of pissa on a grid (null: 1)")
    eva_rho: float = Field(1.0, ge=1, description="eva: ranks of single layers may grow up to rho times rank; 1: all alike")
    lr_ratio: float = Field(1.0, gt=0, description="learning rate of B over that of A: LoRA+ (arXiv 2402.12354), 16 there")
    train_also: tuple[str, ...] = Field((), description="modules trained whole beside the adapter, e.g. embed_tokens, norm")
    embedding_lr: float | None = Field(None, gt=0, description="learning rate of an embedding in train_also; null: optim.lr, "
                                       "with lr_ratio 1e-6 as LoRA+ has it")
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
        if self.init == "loftq" and self.base.format == "none":
            raise ValueError("init loftq makes up for the rounding of a quantized base; write method: qlora, or init: pissa")
        if self.init_steps is not None and self.init not in ("loftq", "pissa"):
            raise ValueError(f"init_steps belongs to init loftq and pissa, not to {self.init}")
        if self.eva_rho != 1 and self.init != "eva":
            raise ValueError(f"eva_rho belongs to init eva, not to {self.init}")
        if self.embedding_lr is not None and not self.train_also:
            raise ValueError("embedding_lr needs an embedding in train_also")
        return self

    @property
    def scaling(self) -> float:
        """s in W + s B A."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


class VeraStep(Section):
    """VeRA (arXiv 2310.11454): shared random projections, two trained vectors per layer."""

    method: Literal["vera"]
    rank: int = Field(256, ge=1, le=65536, description="of the shared projections, which are not trained")
    dropout: float = Field(0.0, ge=0, lt=1)
    targets: str | Names = Field("all-linear", description="all-linear, or names of linear layers")
    d_initial: float = Field(0.1, ge=-1e6, le=1e6, description="start of the vector between the projections")
    seed: Seed = Field(0, description="of the projections")


class Ia3Step(Section):
    """IA3 (arXiv 2205.05638): one factor per key, value and inner feed-forward value."""

    method: Literal["ia3"]
    targets: Names = Field(("k_proj", "v_proj", "down_proj"), description="names of linear layers")
    feedforward: tuple[str, ...] = Field(("down_proj",), description="targets whose input is scaled, not their output")


class PromptStep(Section):
    """Soft prompts: trained vectors before every sample, as embeddings (prompt, arXiv 2104.08691) or as keys and values of every
    layer (prefix, 2101.00190)."""

    method: Literal["prompt", "prefix"]
    tokens: int = Field(20, ge=1, le=65536, description="virtual tokens")
    text: str | None = Field(None, description="start from the embeddings (prompt), or the keys and values (prefix), of this "
                             "text, repeated to the length; null: random embeddings, and keys and values of random tokens")
