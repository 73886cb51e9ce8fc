"""Quantization-aware training as a step of `prepare:`: the linears of the blocks train on the grid they are exported on."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from karui.configs.quantspec import QuantSpec
from karui.configs.section import Names, Section


def _grid(text: str) -> Any:
    return Field(default_factory=lambda: QuantSpec.parse(text), description="grid of the block linears")


class _OnGrid(Section):
    targets: Names = Field(("all-linear",), description="all-linear, or patterns of linears of the blocks")
    skip: tuple[str, ...] = Field((), description="patterns of linears that stay in high precision")

    @model_validator(mode="after")
    def _has_grid(self) -> _OnGrid:
        spec: QuantSpec = self.spec  # type: ignore[attr-defined]
        if spec.format == "none":
            raise ValueError("training on a grid needs one, e.g. spec: w4g64")
        return self


class LearnedGridStep(_OnGrid):
    """All weights train through rounding; the grid's steps train with them. A spec that ends in a8 rounds activations too."""

    method: Literal["lsq", "lsq_plus", "pact", "seq"]
    spec: QuantSpec = _grid("w4g64")
    activation_bits: int = Field(8, ge=2, le=8, description="lsq_plus and pact: bits of activations with a learned range")
    lr_ratio: float = Field(1.0, gt=0, description="learning rate of steps and offsets over that of the weights")
    range_lr: float = Field(5e-3, gt=0, description="lsq_plus and pact: learning rate of activation ranges, as a share of what "
                            "the first batch spans")
    start: Literal["search", "range", "paper"] = Field("search", description="lsq and lsq_plus: where step sizes start. search: "
                       "least squared error of the weights; range: the grid's own rule; paper: the method's")

    @model_validator(mode="after")
    def _start_fits(self) -> LearnedGridStep:
        if self.start != "search" and self.method in ("pact", "seq"):
            raise ValueError(f"start belongs to lsq and lsq_plus; {self.method} has a rule of its own")
        if self.method in ("lsq", "seq") and (self.activation_bits != 8 or self.range_lr != 5e-3):
            raise ValueError("activation_bits and range_lr are of lsq_plus and pact, whose activations have a learned range; "
                             f"with {self.method} a spec that ends in a8 rounds activations")
        return self


class EfficientQatStep(_OnGrid):
    """EfficientQAT (arXiv 2407.11062): Block-AP on the training samples, then the run trains step sizes (and norms) only."""

    method: Literal["efficient_qat"]
    spec: QuantSpec = _grid("w2g64")
    samples: int = Field(64, ge=1, description="calibration rows of Block-AP, cut from the training samples")
    length: int = Field(256, ge=8, description="tokens per calibration row")
    settings: dict[str, Any] = Field(default_factory=dict, description="Block-AP's settings, e.g. {epochs: 2}")
    norms: bool = Field(True, description="norm weights train along with the step sizes")


class BitNetStep(_OnGrid):
    """BitNet (arXiv 2310.11453, spec w1) and BitNet b1.58 (2402.17764, spec w1.58), activations in 8 bits per token."""

    method: Literal["bitnet", "bitnet_158"]
    spec: QuantSpec = Field(default_factory=lambda: QuantSpec.parse("w1.58a8"), description="groups allowed; bitnet: w1a8")
    start: Literal["pretrained", "scratch"] = Field("pretrained", description="scratch: random weights of the model's shape")
    warmup: int = Field(0, ge=0, description="steps over which lambda rises from full to quantized weights; scratch: 0")
    sub_norms: bool = Field(False, description="a norm before every o_proj and down_proj, as the published models have")

    @model_validator(mode="before")
    @classmethod
    def _spec_default(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("method") == "bitnet" and "spec" not in value:
            return {**value, "spec": "w1a8"}
        return value

    @model_validator(mode="after")
    def _fits(self) -> BitNetStep:
        wanted = "binary" if self.method == "bitnet" else "ternary"
        if self.spec.format != wanted:
            raise ValueError(f"{self.method} trains {wanted} weights, not {self.spec}")
        if self.start == "scratch" and self.warmup:
            raise ValueError("random weights have nothing to lose: warmup belongs to start: pretrained")
        return self


class LlmQatStep(_OnGrid):
    """LLM-QAT (arXiv 2305.17888): the model writes its own training data; weights, activations and KV cache are rounded."""

    method: Literal["llm_qat"]
    spec: QuantSpec = _grid("w4g64a8")
    kv_bits: int | None = Field(8, ge=2, le=8, description="bits of keys and values; null: they stay as they are")
    generate: int = Field(256, ge=0, le=10_000_000, description="samples the model writes; 0: train on the recipe's own data")
    length: int = Field(256, ge=8, le=1_000_000, description="tokens per written sample")


class QatLoraStep(_OnGrid):
    """Only an adapter trains, inside the rounding: W_q = Q(W + s B A); its merge lies on the grid."""

    method: Literal["qat_lora"]
    spec: QuantSpec = _grid("w4g64")
    rank: int = Field(16, ge=1, le=65536)
    alpha: float = Field(32.0, gt=0, le=1e6, description="the update is scaled by alpha / rank")
    learn_steps: bool = Field(False, description="the steps of an integer grid train too (LSQ); else they stay where the weights "
                              "err least")


QatStep = LearnedGridStep | EfficientQatStep | BitNetStep | LlmQatStep | QatLoraStep
