"""Low-precision training as a step of `prepare:`. What `karui.lowprec` works with is made of it, and checked by it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from karui.configs.precision import Backend, GemmFormat, Library, RecipeName
from karui.configs.section import Section, Seed


class Switch(Section):
    """From optimizer step `step` on, `gemm` (or all of them) runs in format `to`."""

    step: int = Field(ge=0, description="optimizer steps done before it takes effect")
    gemm: Literal["fprop", "dgrad", "wgrad", "all"] = "fprop"
    to: GemmFormat = "high"


class LayerPolicy(Section):
    """Which linear layers stay in high precision.

    Always: the output head and whatever shares its weight with an embedding, routers, adapters. With a 4-bit recipe also the
    first 2 blocks and the last 8, or the last 15 % of a model with fewer than 54 blocks (arXiv 2509.25149, section 3.1).
    """

    first_blocks: int | None = Field(None, ge=0, description="null: the recipe's default, scaled to the model")
    last_blocks: int | None = Field(None, ge=0, description="null: the recipe's default, scaled to the model")
    skip: tuple[str, ...] = Field((), description="further names: full, or the last parts of one")
    only: tuple[str, ...] = Field((), description="if given, no other layers")
    min_features: int = Field(0, ge=0, description="layers whose smaller dimension is below stay high (small GEMMs get slower)")


class LowPrecisionStep(Section):
    """Linears trained in 8 or 4 bits (`karui.lowprec`); the weights that are saved are the ordinary ones."""

    fprop: GemmFormat | None = Field(None, description="this GEMM in another recipe's format, or high")
    dgrad: GemmFormat | None = Field(None, description="the same for the gradient of the input")
    wgrad: GemmFormat | None = Field(None, description="the same for the gradient of the weight")
    schedule: tuple[Switch, ...] = Field((), description="changes over optimizer steps; later ones win")
    compat: Library | None = Field(
        None, description="whose rounding and eps; null: torchao for fp8-rowwise, else TransformerEngine"
    )
    hadamard: bool = Field(True, description="4 bits: random Hadamard transform in wgrad")
    stochastic: bool = Field(True, description="4 bits: gradients rounded stochastically")
    square_weights: bool = Field(True, description="nvfp4: weights in 16x16 tiles")
    tensor_scale: bool = Field(True, description="nvfp4: an fp32 scale per tensor above the blocks' E4M3 scales")
    history: int = Field(1024, ge=1, le=1_000_000, description="fp8-delayed: steps of amax remembered")
    margin: int = Field(0, ge=0, le=64, description="fp8-delayed: the scale is divided by 2^margin")
    seed: Seed = Field(0, description="of stochastic rounding")
    pad: bool = Field(True, description="zero-pad dimensions that are no multiple of the block; false: an error")
    frozen: Literal["codes", "master"] = Field("codes", description="a frozen weight is quantized once: keep codes, or both")
    backend: Backend = Field("auto", description="who multiplies; an explicit one that cannot serve is an error")
    policy: LayerPolicy = LayerPolicy()
    method: RecipeName

    @model_validator(mode="after")
    def _sensible(self) -> LowPrecisionStep:
        formats = {self.method, self.fprop, self.dgrad, self.wgrad, *(s.to for s in self.schedule)}
        if self.compat == "deepgemm" and "nvfp4" in formats:
            raise ValueError("compat 'deepgemm' knows no NVFP4; use 'te' or 'ao'")
        return self
