"""How one `QTensor` lies in the file: parts, shapes and dtypes; see `karui.configs.manifest.FORMAT`."""

from __future__ import annotations

import math

import torch

from karui.configs.errors import CorruptError
from karui.configs.quantspec import QuantSpec
from karui.kernels.pack import pack, packed_width, unpack
from karui.kernels.qtensor import QTensor

_SCALE = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "e8m0": torch.uint8,
    "e4m3": torch.float8_e4m3fn,
}
DTYPE_NAMES = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float64: "float64",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.bool: "bool",
    torch.float8_e4m3fn: "float8_e4m3fn",
}


def is_float8(spec: QuantSpec) -> bool:
    """Grids whose codes are stored as float8_e4m3fn, not as a bit stream."""
    return spec.format in ("fp8", "mxfp8")


def scale_dtype(spec: QuantSpec) -> torch.dtype:
    return torch.uint8 if spec.double_quant else _SCALE[spec.scale_dtype]


def expected_parts(spec: QuantSpec, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """part -> (shape, dtype) of the parts whose form follows from spec and logical shape."""
    width = shape[-1]
    rows = math.prod(shape[:-1])
    groups = {"group": (rows, width // (spec.group_size or width)), "tensor": (1, 1)}.get(spec.granularity, (rows, 1))
    codes = ((rows, width), torch.float8_e4m3fn) if is_float8(spec) else ((rows, packed_width(width, spec.bits)), torch.uint8)
    parts: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"codes": codes, "scale": (groups, scale_dtype(spec))}
    if not spec.symmetric:
        parts["zero"] = (groups, torch.uint8)
    return parts


def to_parts(q: QTensor) -> dict[str, torch.Tensor]:
    """The stored tensors of `q`, codes packed, on the CPU and contiguous."""
    width = q.shape[-1]
    codes = q.codes.reshape(-1, width)
    if not is_float8(q.spec):
        codes = pack(_unsigned(codes, q.spec), q.spec.bits)
    scale = q.scale.view(torch.uint8) if q.spec.scale_dtype == "e8m0" else q.scale
    parts = {"codes": codes, "scale": scale, **({} if q.zero is None else {"zero": q.zero}), **(q.extra or {})}
    return {name: part.detach().cpu().contiguous() for name, part in parts.items()}


def from_parts(parts: dict[str, torch.Tensor], spec: QuantSpec, shape: tuple[int, ...]) -> QTensor:
    """The inverse of `to_parts`."""
    codes = parts["codes"]
    if not is_float8(spec):
        codes = _signed(unpack(codes, spec.bits, shape[-1]), spec)
    extra = {name: part for name, part in parts.items() if name not in ("codes", "scale", "zero")}
    scale = parts["scale"].view(torch.float8_e8m0fnu) if spec.scale_dtype == "e8m0" else parts["scale"]
    return QTensor(codes, scale, parts.get("zero"), spec, tuple(shape), extra or None)


def check_parts(name: str, parts: dict[str, torch.Tensor], spec: QuantSpec, shape: tuple[int, ...]) -> None:
    """Raise `CorruptError` naming the part whose shape or dtype is not what the spec says, or whose scale is not finite."""
    for part, (want_shape, want_dtype) in expected_parts(spec, shape).items():
        if part not in parts:
            raise CorruptError(f"{name}: part {part!r} of a {spec} tensor is missing.")
        got = parts[part]
        if tuple(got.shape) != want_shape or got.dtype != want_dtype:
            raise CorruptError(
                f"{name}.{part}: {DTYPE_NAMES.get(got.dtype, got.dtype)} {list(got.shape)}, but {spec} of shape {list(shape)} "
                f"takes {DTYPE_NAMES[want_dtype]} {list(want_shape)}."
            )
    for part in parts.keys() - {"codes", "zero"}:
        check_finite(f"{name}.{part}", parts[part], e8m0=part == "scale" and spec.scale_dtype == "e8m0")


def check_finite(name: str, values: torch.Tensor, *, e8m0: bool = False) -> None:
    if e8m0:
        bad = int((values == 255).sum())
    elif values.is_floating_point():
        bad = int((~torch.isfinite(values.float())).sum())
    else:
        return
    if bad:
        raise CorruptError(f"{name}: {bad} of {values.numel()} values are NaN or infinite; damaged or never calibrated.")


def _unsigned(codes: torch.Tensor, spec: QuantSpec) -> torch.Tensor:
    if spec.format == "binary":
        return (codes > 0).to(torch.uint8)
    low = spec.code_range[0]
    return codes.to(torch.uint8) if low == 0 else (codes.to(torch.int16) - low).to(torch.uint8)


def _signed(codes: torch.Tensor, spec: QuantSpec) -> torch.Tensor:
    if spec.format == "binary":
        return codes.to(torch.int8) * 2 - 1
    low = spec.code_range[0]
    return codes if low == 0 else (codes.to(torch.int16) + low).to(torch.int8)
