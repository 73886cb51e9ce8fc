"""`QTensor`: codes + scale + zero + spec + logical shape. What exporters write and the runtime reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from karui.configs.quantspec import QuantSpec


@dataclass(frozen=True)
class QTensor:
    """One quantized tensor, codes unpacked.

    Shapes, for a weight [out, in] and G = in / group_size (channel: G = 1; tensor: one scale for all):
        codes: [out, in], int8 for signed grids, uint8 for affine, nf4 and 4-bit float grids, float8_e4m3fn for fp8.
        scale: [out, G] (group, channel) or [1, 1] (tensor), in the spec's scale dtype
            (nf4dq: uint8 codes of absmax - mean, see `double`).
        zero: [out, G] uint8 for affine grids, else None.  value = (code - zero) * scale
        extra: further stored tensors by name: `global_scale` fp32 [1] (nvfp4); `absmax_scale` fp32 [blocks],
            `absmax_mean` fp32 [1] (nf4dq).
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    spec: QuantSpec
    shape: tuple[int, ...]
    extra: dict[str, torch.Tensor] | None = None

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values the codes stand for, computed in fp32 and cast to `dtype`; shape `self.shape`."""
        from karui.kernels.quantize import dequantize

        return dequantize(self, dtype)

    def to(self, device: torch.device | str) -> QTensor:
        moved = {k: v.to(device) for k, v in self.extra.items()} if self.extra else None
        return replace(
            self,
            codes=self.codes.to(device),
            scale=self.scale.to(device),
            zero=None if self.zero is None else self.zero.to(device),
            extra=moved,
        )


def flatten(weights: Mapping[str, QTensor | torch.Tensor]) -> tuple[dict[str, torch.Tensor], str]:
    """Weights as plain tensors for a safetensors file, codes unpacked, and the specs and shapes as JSON for its metadata.

    The parts of a `QTensor` named `w` are called `w|codes`, `w|scale`, ...; `unflatten` is the exact inverse.
    """
    tensors: dict[str, torch.Tensor] = {}
    specs: dict[str, tuple[str, list[int]]] = {}
    for name, value in weights.items():
        if isinstance(value, QTensor):
            specs[name] = str(value.spec), list(value.shape)
            parts = {"codes": value.codes, "scale": value.scale, "zero": value.zero, **(value.extra or {})}
            tensors |= {f"{name}|{k}": v.contiguous() for k, v in parts.items() if v is not None}
        else:
            tensors[name] = value.contiguous()
    return tensors, json.dumps(specs)


def unflatten(tensors: Mapping[str, torch.Tensor], specs: str) -> dict[str, QTensor | torch.Tensor]:
    """The inverse of `flatten`. Raises KeyError or ValueError when parts are missing or the JSON is not its own."""
    weights: dict[str, QTensor | torch.Tensor] = {k: v for k, v in tensors.items() if "|" not in k}
    for name, (spec, shape) in json.loads(specs).items():
        parts = {k.partition("|")[2]: v for k, v in tensors.items() if k.startswith(f"{name}|")}
        codes, scale, zero = parts.pop("codes"), parts.pop("scale"), parts.pop("zero", None)
        weights[name] = QTensor(
            codes=codes, scale=scale, zero=zero, spec=QuantSpec.parse(spec), shape=tuple(shape), extra=parts or None
        )
    return weights
