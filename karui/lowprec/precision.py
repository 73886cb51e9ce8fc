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

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from karui.configs.errors import KaruiError, nearest
from karui.configs.precision import Backend, Gemm, GemmFormat, Library, RecipeName

if TYPE_CHECKING:
    from karui.configs.steps import LowPrecisionStep

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
        tensor_scale: NVFP4's fp32 scale above the block scales; without it block scales below 2^-10 are 0, and so is the block.
    """

    format: str
    tile: str = "tensor"
    delayed: bool = False
    hadamard: bool = False
    stochastic: bool = False
    tensor_scale: bool = True

    @property
    def symmetric(self) -> bool:
        """Whether the codes of a matrix, transposed, are the codes of its transpose."""
        return self.tile in ("tensor", "128x128", "16x16") and not (self.hadamard or self.stochastic) and self.format != "high"

    @property
    def multiple(self) -> int:
        """What K is padded to."""
        return {"high": 1, "mxfp8": 32, "mxfp4": 32, "nvfp4": 16}.get(self.format, 128 if "128" in self.tile else 16)


HIGH = Operand(format="high")


@dataclass(frozen=True, kw_only=True)
class Switch:
    """From optimizer step `step` on, `gemm` (or all of them) runs in format `to`."""

    step: int
    gemm: Gemm | Literal["all"] = "fprop"
    to: GemmFormat = "high"


@dataclass(frozen=True, kw_only=True)
class LayerPolicy:
    """Which linear layers stay in high precision: the keys of a recipe's `policy`."""

    first_blocks: int | None = None
    last_blocks: int | None = None
    skip: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    min_features: int = 0


@dataclass(frozen=True, kw_only=True)
class Precision:
    """A frozen description of low-precision training: the formats of all three GEMMs, and the keys of a recipe's step.

    What the keys mean and may be is said by that step, `karui.configs.steps.LowPrecisionStep`, which checks whatever differs from
    its defaults here, too. Raises `KaruiError`.
    """

    recipe: RecipeName
    fprop: GemmFormat | None = None
    dgrad: GemmFormat | None = None
    wgrad: GemmFormat | None = None
    schedule: tuple[Switch, ...] = ()
    compat: Library | None = None
    hadamard: bool = True
    stochastic: bool = True
    square_weights: bool = True
    tensor_scale: bool = True
    history: int = 1024
    margin: int = 0
    seed: int = 0
    pad: bool = True
    frozen: Literal["codes", "master"] = "codes"
    backend: Backend = "auto"
    policy: LayerPolicy = LayerPolicy()

    def __post_init__(self) -> None:
        if self.recipe not in RECIPES:
            near = nearest(str(self.recipe), RECIPES)
            raise KaruiError(f"low-precision recipe {self.recipe!r} is not known; recipes: {', '.join(RECIPES)}.{near}")
        said = _beyond_defaults(self)
        if said.keys() > {"recipe"}:
            for key, value in _checked(said).items():
                object.__setattr__(self, key, value)

    @classmethod
    def of(cls, step: LowPrecisionStep) -> Precision:
        """What a recipe's `prepare:` step says."""
        return cls(recipe=step.method, **_taken(step))

    @classmethod
    def parse(cls, value: str | Mapping[str, Any] | Precision) -> Precision:
        """A recipe's name or its fields. Raises `KaruiError` naming the valid names."""
        if isinstance(value, Precision):
            return value
        given = dict(value) if isinstance(value, Mapping) else {"recipe": value}
        names = [f.name for f in fields(cls)]
        if unknown := [key for key in given if key not in names]:
            near = nearest(str(unknown[0]), names)
            raise KaruiError(f"low precision: unknown key {unknown[0]!r}; valid keys: {', '.join(names)}.{near}")
        return cls(**{"recipe": None} | given)

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
                    tensor_scale=self.tensor_scale,
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
        return json.dumps(_beyond_defaults(replace(self, backend="auto")), separators=(",", ":"))

    def _formats(self) -> set[str]:
        return {getattr(self, g) or self.recipe for g in GEMMS} | {s.to for s in self.schedule}


def _beyond_defaults(value: Any) -> Any:
    """What a value says beyond its defaults, in a recipe's words."""
    if is_dataclass(value):
        return {f.name: _beyond_defaults(own) for f in fields(value) if (own := getattr(value, f.name)) != f.default}
    return [_beyond_defaults(v) for v in value] if isinstance(value, list | tuple) else value


def _checked(said: dict[str, Any]) -> dict[str, Any]:
    """These values as a recipe's step takes them, or a `KaruiError`."""
    from pydantic import ValidationError

    from karui.configs.recipe import explain
    from karui.configs.steps import LowPrecisionStep

    keys = {"method" if key == "recipe" else key: value for key, value in said.items()}
    try:
        return _taken(LowPrecisionStep.model_validate(keys))
    except ValidationError as error:
        raise KaruiError(explain(LowPrecisionStep, "low precision", error)) from error


def _taken(step: LowPrecisionStep) -> dict[str, Any]:
    """The values of a step by the names they have in a `Precision`."""
    values = {f.name: getattr(step, f.name) for f in fields(Precision) if f.name != "recipe"}
    schedule = tuple(Switch(step=s.step, gemm=s.gemm, to=s.to) for s in step.schedule)
    return values | {"schedule": schedule, "policy": LayerPolicy(**dict(step.policy))}


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


__all__ = ["GEMMS", "Gemm", "GemmFormat", "LayerPolicy", "Operand", "Precision", "RECIPES", "Switch"]
