"""The one grid: `quantize(w, spec)` and back. Fake quantization, exporters and the runtime all stand on these functions.

    quantize(w, spec)                        codes and scales, the scales rounded to the dtype they are stored in first
    quantize(w, spec, scale=s, zero=z)       codes on a grid found elsewhere (GPTQ, a learned step)
    dequantize(q, dtype)                     the values the codes stand for
    fake_quantize(w, spec)                   dequantize(quantize(w)), gradient straight through (Bengio et al., arXiv 1308.3432)

One file per family of grids (integer, ternary, nf4, float8, microscaling, nvfp4): `encode`, `decode` over [rows, in] fp32.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from karui.configs.errors import KaruiError, UnsupportedError
from karui.configs.quantspec import QuantSpec
from karui.kernels.qtensor import QTensor
from karui.kernels.quantize import float8, integer, microscaling, nf4, nvfp4, ternary

_FAMILIES: dict[str, ModuleType] = {
    "int": integer,
    "ternary": ternary,
    "binary": ternary,
    "nf4": nf4,
    "fp8": float8,
    "mxfp8": microscaling,
    "mxfp4": microscaling,
    "nvfp4": nvfp4,
}


def quantize(
    w: torch.Tensor, spec: QuantSpec, *, scale: torch.Tensor | None = None, zero: torch.Tensor | None = None, name: str = "tensor"
) -> QTensor:
    """Codes and scales of `w` on the grid `spec`.

    Args:
        w: [..., in], any float dtype; groups run along the last dimension. Computed in fp32.
        spec: the grid; its activation part plays no role here.
        scale, zero: a given grid, [rows, G] as in `QTensor`, with rows = product of the leading dimensions; by default
            it is found from the range of each group. Int grids only.
        name: how errors call the tensor.

    Raises:
        KaruiError: NaN or Inf in `w`, a group size that does not divide `in`, a scale too large for its dtype.
        UnsupportedError: the spec stands for no grid (`none`) or one this function does not build.
    """
    family = _family(spec, name)
    rows = checked_rows(w, spec, name)
    given: dict[str, Any] = {}
    if scale is not None:
        if spec.format != "int":
            raise UnsupportedError(f"{name}: a given scale works on int grids, not on {spec}.")
        given = {"scale": scale, "zero": zero}
    try:
        parts = family.encode(rows, spec, **given)
    except KaruiError as error:
        raise type(error)(f"{name}: {error}") from error
    return QTensor(spec=spec, shape=tuple(w.shape), **parts)


def checked_rows(w: torch.Tensor, spec: QuantSpec, name: str) -> torch.Tensor:
    """w [..., in] as fp32 [rows, in]; `KaruiError` when it is empty, not finite, or its groups do not divide."""
    if w.numel() == 0:
        raise KaruiError(f"{name}: cannot quantize an empty tensor of shape {tuple(w.shape)}.")
    if spec.group_size is not None and w.shape[-1] % spec.group_size:
        raise KaruiError(
            f"{name}: group size {spec.group_size} does not divide its input width {w.shape[-1]}; "
            f"sizes that do: {', '.join(map(str, group_sizes(w.shape[-1])))}."
        )
    rows = w.detach().reshape(-1, w.shape[-1]).float()
    # The sum is finite when every value is, and costs a fraction of the full look, which only a suspicion is worth.
    if not torch.isfinite(rows.sum()) and not torch.isfinite(rows).all():
        bad = int((~torch.isfinite(rows)).sum())
        raise KaruiError(f"{name}: {bad} of {rows.numel()} values are NaN or infinite; mend the weights before quantizing.")
    return rows


def dequantize(q: QTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The values of `q`, computed in fp32, cast to `dtype`, shape `q.shape`."""
    return _family(q.spec, "tensor").decode(q).reshape(q.shape).to(dtype)


def fake_quantize(w: torch.Tensor, spec: QuantSpec, *, name: str = "tensor") -> torch.Tensor:
    """`dequantize(quantize(w, spec), w.dtype)` in the forward pass, identity in the backward pass; shape and dtype of `w`."""
    return StraightThrough.apply(w, quantize(w, spec, name=name).dequantize(w.dtype))


class StraightThrough(torch.autograd.Function):
    """Returns the second argument and gives its gradient to the first."""

    @staticmethod
    def forward(ctx: Any, w: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.clone() if value is w else value

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def group_sizes(width: int) -> list[int]:
    """Group sizes in common use that divide `width`."""
    return [g for g in (16, 32, 64, 96, 128, 192, 256) if width % g == 0]


def _family(spec: QuantSpec, name: str) -> ModuleType:
    if spec.format not in _FAMILIES:
        raise UnsupportedError(f"{name}: no quantizer for {str(spec)!r} here; formats: {', '.join(_FAMILIES)}.")
    return _FAMILIES[spec.format]
