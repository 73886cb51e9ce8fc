"""The independent decoder: reads a bundle back with numpy alone and says whether it holds what was meant to be written.

It shares no code with the writer: safetensors headers are parsed here, bits are unpacked here, and values are computed here
from the formulas of `karui.configs.manifest.FORMAT` and of the papers. Slow and plain on purpose.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from karui.configs.errors import CorruptError
from karui.configs.manifest import Manifest, TensorRecord
from karui.configs.quantspec import QuantSpec
from karui.kernels.qtensor import QTensor

_NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1", "BOOL": "?"}
_RAW = {"BF16": "<u2", "F8_E4M3": "u1"}  # numpy has no such dtypes: their bytes, turned into numbers by `_floats`
_NF4 = [  # QLoRA, appendix E
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip


class Stored:
    """One stored array: `array` in numpy, `kind` its safetensors dtype."""

    def __init__(self, kind: str, array: np.ndarray) -> None:
        self.kind, self.array = kind, array

    @property
    def values(self) -> np.ndarray:
        """Its numbers, as float32 for the dtypes numpy lacks."""
        return _floats(self.array, self.kind) if self.kind in _RAW else self.array


def read_header(path: Path) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
    """name -> (dtype, shape, first byte, end byte) of a safetensors file.

    Raises `CorruptError` when the file is truncated, has bytes that belong to no tensor, or a header that contradicts itself.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if 8 + length > size:
            raise CorruptError(f"{path}: truncated: its header does not fit into {size:,} bytes.")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            spans = {name: (i["dtype"], tuple(i["shape"]), *i["data_offsets"]) for name, i in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptError(f"{path}: its safetensors header is damaged ({error}).") from error
    end = 0
    for name, (kind, shape, first, last) in sorted(spans.items(), key=lambda item: item[1][2:]):
        if kind not in _NUMPY and kind not in _RAW:
            raise CorruptError(f"{path}: tensor {name} has dtype {kind}, which no bundle holds.")
        if first != end or last - first != int(np.prod(shape, dtype=np.int64)) * _itemsize(kind):
            raise CorruptError(f"{path}: tensor {name} does not lie where its shape says.")
        end = last
    if 8 + length + end != size:
        raise CorruptError(f"{path}: {size:,} bytes, its header speaks of {8 + length + end:,}; truncated, or with a tail.")
    return {name: (kind, shape, 8 + length + first, 8 + length + last) for name, (kind, shape, first, last) in spans.items()}


def read_stored(folder: Path, manifest: Manifest) -> Iterator[tuple[str, dict[str, Stored]]]:
    """(logical name, {part: array}) for every tensor of a bundle, one at a time."""
    where: dict[str, tuple[Any, ...]] = {}
    for file in manifest.weight_files:
        where |= {name: (folder / file, *span) for name, span in read_header(folder / file).items()}
    for name, record in manifest.tensors.items():
        parts = {}
        for part, stored in record.stored_names(name).items():
            if stored not in where:
                raise CorruptError(f"{folder}: {stored} is in no weight file.")
            path, kind, shape, first, _ = where[stored]
            dtype = np.dtype(_NUMPY.get(kind) or _RAW[kind])
            parts[part] = Stored(kind, np.fromfile(path, dtype, int(np.prod(shape, dtype=np.int64)), offset=first).reshape(shape))
        yield name, parts


def codes(parts: Mapping[str, Stored], record: TensorRecord) -> np.ndarray:
    """The codes [rows, in] as the grid counts them: signed integers, table indices, or float8 values."""
    spec = QuantSpec.parse(record.spec)
    stored = parts["codes"]
    if stored.kind == "F8_E4M3":
        return stored.values
    width = record.shape[-1]
    bits = np.unpackbits(stored.array, axis=-1, bitorder="little")[:, : width * spec.bits].reshape(-1, width, spec.bits)
    number = np.zeros(bits.shape[:2], np.int16)
    for position in range(spec.bits):
        number += bits[..., position].astype(np.int16) << position
    if spec.format == "binary":
        return 2 * number - 1
    if spec.format == "ternary":
        return number - 1
    if spec.format == "int" and spec.symmetric:
        return number - (127 if spec.bits == 8 else 1 << (spec.bits - 1))
    return number


def values(parts: Mapping[str, Stored], record: TensorRecord) -> np.ndarray:
    """The fp32 values [*shape] a stored tensor stands for."""
    if record.spec == "none":
        return parts[""].values
    spec = QuantSpec.parse(record.spec)
    number = codes(parts, record)
    if spec.format == "nf4":
        number = np.array(_NF4, np.float32)[number]
    elif spec.format in ("mxfp4", "nvfp4"):
        number = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)[number & 7] * np.where(number & 8, -1, 1).astype(np.float32)
    number = number.astype(np.float32)
    scale = _scale(parts, spec)
    grouped = number.reshape(*scale.shape, -1)
    if "zero" in parts:
        grouped = grouped - parts["zero"].array.astype(np.float32)[..., None]
    return (grouped * scale[..., None]).reshape(record.shape)


def _scale(parts: Mapping[str, Stored], spec: QuantSpec) -> np.ndarray:
    stored = parts["scale"]
    if spec.scale_dtype == "e8m0":
        return np.exp2(stored.array.astype(np.float32) - 127)
    if not spec.double_quant:
        scale = stored.values.astype(np.float32)
        return scale / parts["global_scale"].array if spec.format == "nvfp4" else scale
    flat = np.array(_dynamic_map(), np.float32)[stored.array.reshape(-1)]
    flat = flat * np.repeat(parts["absmax_scale"].array, 256)[: flat.size] + parts["absmax_mean"].array
    return flat.reshape(stored.array.shape).astype(np.float32)


def _dynamic_map() -> list[float]:
    """8-bit dynamic data type (arXiv 2110.02861, figure 2): sign, zeros that count tens, then a linear fraction."""
    found = [0.0, 1.0]
    for tens in range(7):
        count = 2**tens
        for step in range(count):
            fraction = 0.1 + 0.9 * (step + 0.5) / count
            found += [fraction * 10.0 ** (tens - 6), -fraction * 10.0 ** (tens - 6)]
    return sorted(found)


def _floats(array: np.ndarray, kind: str) -> np.ndarray:
    if kind == "BF16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    byte = np.arange(256)
    sign, exponent, fraction = np.where(byte & 128, -1.0, 1.0), (byte >> 3) & 15, byte & 7
    table = sign * np.where(exponent == 0, fraction / 8 * 2.0**-6, (1 + fraction / 8) * 2.0 ** (exponent - 7.0))
    table[(byte & 127) == 127] = np.nan
    return table.astype(np.float32)[array]


def _itemsize(kind: str) -> int:
    return np.dtype(_NUMPY.get(kind) or _RAW[kind]).itemsize


def compare(folder: Path, manifest: Manifest, weights: Mapping[str, QTensor | torch.Tensor]) -> dict[str, Any]:
    """Hold what lies in `folder` against the tensors that were to be written.

    Codes, scales, zero points, further parts and kept tensors must be equal bit by bit, and the values computed here those of
    `dequantize` (to 1e-6: double quantization adds in another order).

    Returns: how many tensors and codes were compared.
    Raises: `CorruptError` naming the first tensor that differs.
    """
    seen = num_codes = 0
    for name, parts in read_stored(folder, manifest):
        wanted, record = weights[name], manifest.tensors[name]
        seen += 1
        if isinstance(wanted, torch.Tensor):
            _same(name, parts[""].array, wanted)
            continue
        got = codes(parts, record)
        num_codes += got.size
        if not np.array_equal(got, wanted.codes.detach().cpu().float().numpy().reshape(got.shape), equal_nan=False):
            raise CorruptError(f"{name}: the codes read back differ from those written.")
        if list(record.shape) != list(wanted.shape) or QuantSpec.parse(record.spec) != wanted.spec:
            raise CorruptError(f"{name}: shape or grid read back differ from those written.")
        for part, tensor in (("scale", wanted.scale), ("zero", wanted.zero), *(wanted.extra or {}).items()):
            if tensor is not None:
                _same(f"{name}.{part}", parts[part].array, tensor)
        if not np.allclose(values(parts, record), wanted.dequantize().cpu().numpy(), rtol=1e-6, atol=0):
            raise CorruptError(f"{name}: the values read back differ from those of the grid that was written.")
    if seen != len(weights):
        raise CorruptError(f"{folder}: {seen} tensors read back, {len(weights)} were to be written.")
    return {"tensors": seen, "codes": num_codes}


def _same(name: str, got: np.ndarray, wanted: torch.Tensor) -> None:
    flat = wanted.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    if got.shape != tuple(wanted.shape) or got.tobytes() != flat.tobytes():
        raise CorruptError(f"{name}: the bytes read back differ from those written.")
