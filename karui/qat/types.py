"""What every method takes and gives: frozen configs, per-layer reports, the quantized model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from karui.configs.errors import KaruiError, nearest
from karui.configs.quantspec import QuantSpec
from karui.kernels.qtensor import QTensor


class MethodConfig(BaseModel):
    """Base of every method's settings: frozen, keyword-only, unknown keys are errors that list the valid ones."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def build(cls, values: Mapping[str, Any]) -> Self:
        """Validate a mapping; raises `KaruiError` that names the key, what was given and what is valid."""
        try:
            return cls(**values)
        except ValidationError as error:
            item = error.errors()[0]
            key = ".".join(map(str, item["loc"]))
            if item["type"] == "extra_forbidden":
                valid = list(cls.model_fields)
                raise KaruiError(
                    f"{cls.__name__}: unknown setting {key!r}; valid: {', '.join(valid)}.{nearest(key, valid)}"
                ) from error
            raise KaruiError(f"{cls.__name__}.{key}: {item['msg']} (given: {item.get('input')!r}).") from error


@dataclass(frozen=True, kw_only=True)
class Options:
    """How `quantize_model` goes about it, whatever the method.

    Attributes:
        settings: the method's own settings, see its config.
        targets, skip: glob patterns over module names (`*.mlp.*`, `q_proj`); `all-linear` is every linear of the blocks.
        overrides: pattern -> another grid for the linears it matches; later patterns win.
        batch: rows per forward pass. seed: of the methods that draw random numbers. device: where the blocks are computed.
        work: folder for hidden states and finished blocks; a killed run with the same options continues from it and its result
            is bit-identical. None: everything in memory.
        progress: called after each block with (blocks done, blocks, seconds so far).
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    targets: Sequence[str] = ("all-linear",)
    skip: Sequence[str] = ()
    overrides: Mapping[str, QuantSpec | str] = field(default_factory=dict)
    batch: int = 8
    seed: int = 0
    device: str | torch.device = "cpu"
    work: str | Path | None = None
    progress: Callable[[int, int, float], None] | None = None


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """The fate of one weight.

    Attributes:
        name: Hugging Face name of the weight, e.g. `model.layers.0.mlp.up_proj.weight`.
        spec: spelling of the grid, or `none` for a weight left in high precision.
        method: what chose the codes.
        error: relative squared error: of the layer's output over the calibration tokens when the method measured it
            (`error_of` is "output"), else of the weight itself ("weight"); None when nothing was quantized.
        tokens: calibration tokens that reached the layer; 0 when the method needs none.
        fallback: None, or what was used instead and why.
        activation_scale: static scale of the linear's input, absmax over the calibration tokens / 127, when the method found one.
        note: further facts in words (damping used, outlier columns, a tied weight, ...).
    """

    name: str
    spec: str
    method: str
    error: float | None = None
    error_of: str = "weight"
    tokens: int = 0
    fallback: str | None = None
    note: str = ""
    activation_scale: float | None = None

    def dump(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class QuantizedModel:
    """The result of `quantize_model`.

    Attributes:
        weights: every tensor of the model under its Hugging Face name: `QTensor` where quantized, else a dense tensor
            (norms that a method folded into hold their new values). A tied head is absent, as in the source folder.
        report: one entry per linear weight and for the embedding.
        config: the parsed config.json, changed only where a method had to (rotation of a tied model unties the head).
        changed: those of `weights` that are not the source's own: codes, and what a method folded a factor into.
        facts: method, its settings, spec, calibration tokens, seconds, and what else belongs into a manifest.
    """

    weights: dict[str, QTensor | torch.Tensor]
    report: list[LayerReport]
    config: dict[str, Any]
    facts: dict[str, Any] = field(default_factory=dict)
    changed: dict[str, QTensor | torch.Tensor] = field(default_factory=dict)

    def dense(self, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
        """Every weight dequantized: a state dict that evaluates exactly what an export of this result holds."""
        return {k: v.dequantize(dtype) if isinstance(v, QTensor) else v for k, v in self.weights.items()}
