"""`Precision`: which number format every operand of every GEMM of a linear layer is in, and when.

A linear layer trains with three GEMMs, all written here as A [M, K] times B [N, K] transposed, K the contraction:

    fprop   y  = x    W^T        A = x     [T, in]     B = W      [out, in]
    dgrad   dx = dy   W          A = dy    [T, out]    B = W^T    [in, out]
    wgrad   dW = dy^T x          A = dy^T  [out, T]    B = x^T    [in, T]

Recipes (sources in the facts each names):
    fp8-delayed    per tensor, scales from the amax history; E4M3 forward, E5M2 gradients (TransformerEngine's DelayedScaling)
    fp8-current    per tensor, scales from the tensor at hand; E4M3 and E5M2
    fp8-rowwise    one scale per row of A and B, E4M3 everywhere (torchao's rowwise recipe)
    fp8-blockwise  E4M3, 1x128 for x and dy, 128x128 for W (DeepSeek-V3, arXiv 2412.19437, section 3.3)
    mxfp8          E4M3 in blocks of 32 with power-of-two scales, gradients too (arXiv 2506.08027)
    mxfp4          E2M1 in blocks of 32; gradients rounded stochastically, wgrad through the Hadamard transform (2502.20586)
    nvfp4          E2M1 in blocks of 16 with two scale levels; W in 16x16 tiles (arXiv 2509.25149)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from karui.configs.errors import KaruiError, nearest

Gemm = Literal["fprop", "dgrad", "wgrad"]
RecipeName = Literal["fp8-delayed", "fp8-current", "fp8-rowwise", "fp8-blockwise", "mxfp8", "mxfp4", "nvfp4"]
GemmFormat = Literal["fp8-delayed", "fp8-current", "fp8-rowwise", "fp8-blockwise", "mxfp8", "mxfp4", "nvfp4", "high"]
Backend = Literal["auto", "emulate", "scaled_mm", "triton", "te"]
GEMMS: tuple[Gemm, ...] = get_args(Gemm)
RECIPES: tuple[str, ...] = get_args(RecipeName)
FOUR_BIT = ("mxfp4", "nvfp4")


@dataclass(frozen=True, kw_only=True)
class Operand:
    """How one operand of a GEMM is quantized. format "high" leaves it as it is.

    Attributes:
        format: e4m3 or e5m2 (scaled FP8), mxfp8, mxfp4, nvfp4, high.
        tile: what shares a scale: tensor, row, 1x128, 128x128 (FP8); 1x16, 16x16 (NVFP4); 1x32 (MX).
        delayed: the scale comes from the amax history.
        hadamard: transformed along K before it is quantized; both operands of a GEMM or none.
        stochastic: rounded stochastically.
    """

    format: str
    tile: str = "tensor"
    delayed: bool = False
    hadamard: bool = False
    stochastic: bool = False

    @property
    def symmetric(self) -> bool:
        """Whether the codes of a matrix, transposed, are the codes of its transpose."""
        return self.tile in ("tensor", "128x128", "16x16") and not (self.hadamard or self.stochastic) and self.format != "high"

    @property
    def multiple(self) -> int:
        """What K is padded to."""
        return {"high": 1, "mxfp8": 32, "mxfp4": 32, "nvfp4": 16}.get(self.format, 128 if "128" in self.tile else 16)


HIGH = Operand(format="high")


class Switch(BaseModel):
    """From optimizer step `step` on, `gemm` (or all of them) runs in format `to`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int = Field(ge=0, description="optimizer steps done before it takes effect")
    gemm: Literal["fprop", "dgrad", "wgrad", "all"] = "fprop"
    to: GemmFormat = "high"


class LayerPolicy(BaseModel):
    """Which linear layers stay in high precision.

    Always: the output head and whatever shares its weight with an embedding, routers, adapters. With a 4-bit recipe also the
    first 2 blocks and the last 8, or the last 15 % of a model with fewer than 54 blocks (arXiv 2509.25149, section 3.1).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    first_blocks: int | None = Field(None, ge=0, description="null: the recipe's default, scaled to the model")
    last_blocks: int | None = Field(None, ge=0, description="null: the recipe's default, scaled to the model")
    skip: tuple[str, ...] = Field((), description="further names: full, or the last parts of one")
    only: tuple[str, ...] = Field((), description="if given, no other layers")
    min_features: int = Field(0, ge=0, description="layers whose smaller dimension is below stay high (small GEMMs get slower)")


class Precision(BaseModel):
    """A frozen description of low-precision training.

    Attributes:
        recipe: the formats of all three GEMMs.
        fprop, dgrad, wgrad: a GEMM in another recipe's format, or "high".
        schedule: changes over optimizer steps, later ones win.
        compat: whose rounding and eps; None takes the recipe's own library (torchao for fp8-rowwise, else TransformerEngine).
        hadamard, stochastic, square_weights: NVFP4's (and, but for the last, MXFP4's) ingredients, to switch off one by one.
        history: steps of amax that delayed scaling remembers; margin: it divides the scale by 2^margin.
        seed: of stochastic rounding.
        pad: zero-pad dimensions that are no multiple of the format's block; False makes them an error.
        frozen: a weight that takes no gradient is quantized once: "codes" keeps only that, "master" the weight beside it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    recipe: RecipeName
    fprop: GemmFormat | None = None
    dgrad: GemmFormat | None = None
    wgrad: GemmFormat | None = None
    schedule: tuple[Switch, ...] = ()
    compat: Literal["te", "ao", "deepgemm"] | None = None
    hadamard: bool = True
    stochastic: bool = True
    square_weights: bool = True
    history: int = Field(1024, ge=1)
    margin: int = Field(0, ge=0)
    seed: int = 0
    pad: bool = True
    frozen: Literal["codes", "master"] = "codes"
    backend: Backend = "auto"
    policy: LayerPolicy = LayerPolicy()

    @model_validator(mode="before")
    @classmethod
    def _bare(cls, value: Any) -> Any:
        return {"recipe": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _sensible(self) -> Precision:
        if self.compat == "deepgemm" and any(f in ("nvfp4",) for f in self._formats()):
            raise ValueError("compat 'deepgemm' knows no NVFP4; use 'te' or 'ao'")
        return self

    @classmethod
    def parse(cls, value: str | dict[str, Any] | Precision) -> Precision:
        """A recipe's name or its fields. Raises `KaruiError` naming the valid names."""
        if isinstance(value, Precision):
            return value
        name = value if isinstance(value, str) else value.get("recipe")
        if isinstance(name, str) and name not in RECIPES:
            raise KaruiError(
                f"low-precision recipe {name!r} is not known; recipes: {', '.join(RECIPES)}.{nearest(name, RECIPES)}"
            )
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(p) for p in first["loc"]) or "precision"
            hint = f"; valid keys: {', '.join(cls.model_fields)}" if first["type"] == "extra_forbidden" else ""
            raise KaruiError(f"low precision: {where}: {first['msg'].removeprefix('Value error, ')}{hint}.") from error

    def at(self, step: int) -> dict[Gemm, GemmFormat]:
        """Each GEMM's format after `step` optimizer steps."""
        formats: dict[Gemm, GemmFormat] = {g: getattr(self, g) or self.recipe for g in GEMMS}
        for switch in sorted(self.schedule, key=lambda s: s.step):
            if switch.step <= step:
                for gemm in GEMMS if switch.gemm == "all" else (switch.gemm,):
                    formats[gemm] = switch.to
        return formats

    def operands(self, gemm: Gemm, form: GemmFormat) -> tuple[Operand, Operand]:
        """How A and B of `gemm` are quantized in format `form`."""
        a, b = _table(form)[gemm]
        if form in FOUR_BIT:
            a, b = (
                replace(
                    o,
                    hadamard=o.hadamard and self.hadamard,
                    stochastic=o.stochastic and self.stochastic,
                    tile="1x16" if o.tile == "16x16" and not self.square_weights else o.tile,
                )
                for o in (a, b)
            )
        return a, b

    def library(self, form: GemmFormat) -> Literal["te", "ao", "deepgemm"]:
        """Whose bits `form` reproduces."""
        return self.compat or ("ao" if form == "fp8-rowwise" else "te")

    @property
    def uses_history(self) -> bool:
        return "fp8-delayed" in self._formats()

    @property
    def four_bit(self) -> bool:
        return any(f in FOUR_BIT for f in self._formats())

    def identity(self) -> str:
        """JSON of everything that changes a number; equal for two runs that may resume one another."""
        return self.model_dump_json(exclude={"backend"}, exclude_defaults=True)

    def _formats(self) -> set[str]:
        return {getattr(self, g) or self.recipe for g in GEMMS} | {s.to for s in self.schedule}


def _table(form: GemmFormat) -> dict[Gemm, tuple[Operand, Operand]]:
    if form == "high":
        return {g: (HIGH, HIGH) for g in GEMMS}
    if form in ("fp8-delayed", "fp8-current"):
        e4m3 = Operand(format="e4m3", delayed=form == "fp8-delayed")
        e5m2 = replace(e4m3, format="e5m2")
        return {"fprop": (e4m3, e4m3), "dgrad": (e5m2, e4m3), "wgrad": (e5m2, e4m3)}
    if form == "fp8-rowwise":
        row = Operand(format="e4m3", tile="row")
        return {g: (row, row) for g in GEMMS}
    if form == "fp8-blockwise":
        line, square = Operand(format="e4m3", tile="1x128"), Operand(format="e4m3", tile="128x128")
        return {"fprop": (line, square), "dgrad": (line, square), "wgrad": (line, line)}
    if form == "mxfp8":
        mx = Operand(format="mxfp8", tile="1x32")
        return {g: (mx, mx) for g in GEMMS}
    tile = "1x32" if form == "mxfp4" else "1x16"
    x = Operand(format=form, tile=tile)
    w = replace(x, tile="16x16") if form == "nvfp4" else x
    dy = replace(x, stochastic=True)
    return {
        "fprop": (x, w),
        "dgrad": (dy, w),
        "wgrad": (replace(dy, hadamard=True), replace(x, hadamard=True)),
    }
