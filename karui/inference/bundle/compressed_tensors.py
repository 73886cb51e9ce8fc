"""compressed-tensors: the format vLLM and transformers load. Reader and writer, codes and scales carried over one to one.

    pack-quantized    int 2, 4, 8 bit weights: weight_packed int32 [out, ceil(in * b / 32)], stored code + 2^(b-1), element 0
                      in the lowest bits; weight_scale [out, G]; weight_shape; affine: weight_zero_point int32, packed along out
    int-quantized     8 bit weights and activations: weight int8, weight_scale [out, 1]
    float-quantized   weight float8_e4m3fn, weight_scale [out, 1]

3, 5, 6 and 7 bits are refused: the same format name has stood for two layouts of them. An affine code c of 0 .. 2^b-1 is
stored as the signed c - 2^(b-1) and its zero point likewise, which leaves c - zero as it is. (transformers 5.24 loads affine
folders only with `quantization_config=CompressedTensorsConfig(dequantize=True)`: without it, it expects unpacked zero points.)

Embedding and head go out in high precision (their dequantized values): the loaders do not quantize them everywhere.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from karui.catalogue.helpers import load_config
from karui.configs.errors import CorruptError, KaruiError, UnsupportedError
from karui.configs.quantspec import QuantSpec, ScaleDtype
from karui.inference.bundle.layout import check_finite
from karui.inference.bundle.reader import Opened, SafetensorsFiles, Weight, weight_files
from karui.inference.bundle.staging import staged
from karui.inference.bundle.writer import save_hf_folder
from karui.kernels.pack import pack, unpack
from karui.kernels.qtensor import QTensor

log = logging.getLogger(__name__)
METHOD = "compressed-tensors"
_HIGH_PRECISION = ("model.embed_tokens.weight", "lm_head.weight")
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def write(source: Opened, target: str | Path, *, dtype: str = "float32") -> Path:
    """Write a bundle as a compressed-tensors folder.

    Args:
        source: an opened bundle, its block linears on int (2, 4, 8 bit) or fp8 grids.
        dtype: of scales and unquantized tensors. float32 carries every value exactly; float16 and bfloat16 are smaller, and
            scales that they would change are refused.

    Raises:
        UnsupportedError: a grid that the format or its loaders do not have; names the tensor.
        KaruiError: dtype would change a scale, or the target exists.
    """
    target = Path(target)
    if dtype not in _DTYPES:
        raise KaruiError(f"dtype {dtype!r}: expected one of {', '.join(_DTYPES)}.")
    stored: dict[str, torch.Tensor] = {}
    groups: dict[QuantSpec, list[str]] = {}
    ignored = ["lm_head"]
    for name, w in source.weights().items():
        if not isinstance(w, QTensor) or name in _HIGH_PRECISION:
            value = w.dequantize() if isinstance(w, QTensor) else w
            stored[name] = value.to(_DTYPES[dtype]).contiguous()
            if isinstance(w, torch.Tensor) and w.dim() == 2 and name not in _HIGH_PRECISION:
                ignored.append(name.removesuffix(".weight"))
            continue
        module = name.removesuffix(".weight")
        groups.setdefault(w.spec, []).append(module)
        stored |= {f"{module}.{part}": t for part, t in _module(name, w, _DTYPES[dtype]).items()}
    if not groups:
        raise KaruiError(f"{source.path} has no quantized linear; nothing to write as compressed-tensors.")
    config = {**source.config, "dtype": dtype, "quantization_config": _quantization_config(groups, ignored)}
    config.pop("torch_dtype", None)
    needed = sum(t.nbytes for t in stored.values()) + 16_000_000
    with staged(target, needed) as folder:
        save_hf_folder(folder, stored, config, source.tokenizer_path)
        _compare(source, read(folder))
    return target


def read(path: str | Path) -> CompressedTensors:
    """Open a compressed-tensors folder; its codes and scales become `QTensor`s one to one.

    Raises: `UnsupportedError` for formats and strategies karui has no grid for, `CorruptError` for damaged files.
    """
    folder = Path(path)
    config = load_config(folder)
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict) or quantization.get("quant_method") != METHOD:
        raise KaruiError(f"{folder} is not a compressed-tensors folder: its config.json names no such quantization.")
    return CompressedTensors(folder, config, quantization, SafetensorsFiles(weight_files(folder)))


class CompressedTensors(Opened):
    """An opened compressed-tensors folder. Made by `read`."""

    def __init__(self, path: Path, config: dict[str, Any], quantization: Mapping[str, Any], files: SafetensorsFiles) -> None:
        self.path = self.tokenizer_path = path
        self.config = {k: v for k, v in config.items() if k != "quantization_config"}
        self._files = files
        stored = set(files.names())
        modules = {n.rsplit(".", 1)[0] for n in stored if n.endswith((".weight_packed", ".weight_scale"))}
        self._specs = {f"{m}.weight": _spec_of(m, quantization, files) for m in sorted(modules)}
        parts = {f"{m}.{p}" for m in modules for p in _PARTS}
        names = [*self._specs, *(n for n in files.names() if n not in parts)]
        self.tied = ()
        if config.get("tie_word_embeddings"):
            names = [n for n in names if n != _HIGH_PRECISION[1]]
            self.tied = (_HIGH_PRECISION,)
        self.names = tuple(names)

    def spec(self, name: str) -> QuantSpec:
        return self._specs.get(name) or QuantSpec.parse("none")

    def packed(self, name: str) -> dict[str, torch.Tensor]:
        module = name.removesuffix(".weight")
        if name in self._specs:
            return {p: self._files.read(f"{module}.{p}") for p in _PARTS if f"{module}.{p}" in self._files}
        if name not in self._files:
            raise KaruiError(f"{self.path} stores no tensor {name!r}.")
        return {"": self._files.read(name)}

    def weight(self, name: str) -> Weight:
        parts = self.packed(name)
        if name not in self._specs:
            check_finite(name, parts[""])
            return parts[""]
        spec, module = self._specs[name], name.removesuffix(".weight")
        needed = ["weight_scale"]
        if "weight_packed" in parts:
            needed += ["weight_shape", *([] if spec.symmetric else ["weight_zero_point"])]
        if missing := [part for part in needed if part not in parts]:
            raise CorruptError(f"{self.path}: {module}.{missing[0]} is missing.")
        check_finite(f"{name}_scale", parts["weight_scale"])
        return _qtensor(name, parts, spec)

    def nbytes(self) -> int:
        return sum(p.stat().st_size for p in self.path.iterdir() if p.is_file())


_PARTS = ("weight_packed", "weight", "weight_scale", "weight_zero_point", "weight_shape")


def pack_int32(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [rows, n] uint8 -> int32 [rows, ceil(n * bits / 32)]: the little-endian bit stream, padded to whole words."""
    stream = pack(codes, bits)
    stream = torch.nn.functional.pad(stream, (0, -stream.shape[1] % 4))
    return stream.flatten().view(torch.int32).reshape(codes.shape[0], -1)


def unpack_int32(words: torch.Tensor, bits: int, n: int) -> torch.Tensor:
    """The inverse of `pack_int32`."""
    stream = words.flatten().view(torch.uint8).reshape(words.shape[0], -1)  # flat: a row of one word has no last stride
    width = (n * bits + 7) // 8
    if stream.shape[1] != width + -width % 4:
        raise CorruptError(f"{n} codes of {bits} bits do not take {words.shape[1]} words of 32 bits.")
    return unpack(stream[:, :width].contiguous(), bits, n)


def _module(name: str, q: QTensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    spec, width = q.spec, q.shape[-1]
    scale = q.scale.to(dtype)
    if not torch.equal(scale.float(), q.scale.float()):
        raise KaruiError(f"{name}: {dtype} would change its scales ({spec}); write dtype float32.")
    scale = scale.reshape(1) if spec.granularity == "tensor" else scale.contiguous()
    if spec.format == "fp8":
        return {"weight": q.codes.contiguous(), "weight_scale": scale}
    if spec.format != "int" or spec.bits not in (2, 4, 8):
        raise UnsupportedError(
            f"{name}: {spec} has no compressed-tensors layout that all its readers share; int 2, 4, 8 and fp8 have."
        )
    if spec.granularity == "tensor" and not spec.symmetric:
        raise UnsupportedError(f"{name}: compressed-tensors does not pack zero points per tensor; use a channel or group grid.")
    half = 1 << (spec.bits - 1)
    if spec.activation_bits == 8 and spec.bits == 8:
        if not spec.symmetric:
            raise UnsupportedError(f"{name}: {spec}: int-quantized weights are symmetric here; use w8a8.")
        return {"weight": q.codes.contiguous(), "weight_scale": scale}
    unsigned = (q.codes.to(torch.int16) + (half if spec.symmetric else 0)).to(torch.uint8)
    parts = {
        "weight_packed": pack_int32(unsigned, spec.bits),
        "weight_scale": scale,
        "weight_shape": torch.tensor([q.codes.shape[0], width], dtype=torch.int64),
    }
    if q.zero is not None:
        parts["weight_zero_point"] = pack_int32(q.zero.T.contiguous(), spec.bits).T.contiguous()
    return parts


def _qtensor(name: str, parts: Mapping[str, torch.Tensor], spec: QuantSpec) -> QTensor:
    scale = parts["weight_scale"]
    if spec.granularity == "tensor" and scale.numel() == 1:
        scale = scale.reshape(1, 1)
    if "weight_packed" not in parts:
        codes = parts["weight"]
        wanted = torch.float8_e4m3fn if spec.format == "fp8" else torch.int8
        if codes.dtype != wanted:
            raise CorruptError(f"{name} is stored as {codes.dtype}, {spec} takes {wanted}.")
        _check_groups(name, spec, codes, scale)
        return QTensor(codes, scale, None, spec, tuple(codes.shape))
    rows, width = (int(size) for size in parts["weight_shape"])
    codes = unpack_int32(parts["weight_packed"], spec.bits, width)
    half = 1 << (spec.bits - 1)
    zero = None
    if spec.symmetric:
        codes = (codes.to(torch.int16) - half).to(torch.int8)
    else:
        zero = unpack_int32(parts["weight_zero_point"].T.contiguous(), spec.bits, rows).T.contiguous()
    if codes.shape[0] != rows:
        raise CorruptError(f"{name}: {codes.shape[0]} rows of codes, weight_shape says {rows}.")
    _check_groups(name, spec, codes, scale, *([] if zero is None else [zero]))
    return QTensor(codes, scale, zero, spec, (rows, width))


def _check_groups(name: str, spec: QuantSpec, codes: torch.Tensor, *parts: torch.Tensor) -> None:
    """One scale, and zero point, for each group of a row, or for a row, or for all."""
    rows, width = codes.shape
    groups = -(-width // spec.group_size) if spec.group_size else 1
    wanted = (1, 1) if spec.granularity == "tensor" else (rows, groups)
    for part in parts:
        if tuple(part.shape) != wanted:
            raise CorruptError(f"{name}: scales or zero points of shape {list(part.shape)}; {spec} of shape {[rows, width]} "
                               f"takes {list(wanted)}.")


def _quantization_config(groups: Mapping[QuantSpec, list[str]], ignored: list[str]) -> dict[str, Any]:
    schemes = {}
    for index, (spec, modules) in enumerate(groups.items()):
        kind = "float" if spec.format == "fp8" else "int"
        activations = None
        if kind == "float" or spec.activation_bits == 8:
            activations = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}
        weights = {
            "num_bits": spec.bits,
            "type": kind,
            "symmetric": spec.symmetric,
            "strategy": spec.granularity,
            "dynamic": False,
        }
        if spec.group_size:
            weights["group_size"] = spec.group_size
        schemes[f"group_{index}"] = {
            "targets": ["Linear"] if len(groups) == 1 else modules,
            "weights": weights,
            "input_activations": activations,
            "output_activations": None,
            "format": _format(spec),
        }
    formats = {_format(spec) for spec in groups}
    return {
        "quant_method": METHOD,
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": schemes,
        "ignore": ignored,
        "kv_cache_scheme": None,
    }


def _format(spec: QuantSpec) -> str:
    if spec.format == "fp8":
        return "float-quantized"
    return "int-quantized" if spec.bits == 8 and spec.activation_bits == 8 else "pack-quantized"


def _spec_of(module: str, quantization: Mapping[str, Any], files: SafetensorsFiles) -> QuantSpec:
    """The grid of a module from the first config group that targets it."""
    import re

    def hits(target: str) -> bool:
        if target.startswith("re:"):
            return re.match(target[3:], module) is not None
        return target in ("Linear", module) or module.endswith("." + target)

    try:
        for group in quantization.get("config_groups", {}).values():
            if any(hits(target) for target in group.get("targets", ())):
                if f"{module}.weight_scale" not in files:
                    raise CorruptError(f"{module}.weight_scale is missing.")
                return _spec(module, group, files.read(f"{module}.weight_scale").dtype)
    except (CorruptError, UnsupportedError):
        raise
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError, re.error) as error:
        raise CorruptError(f"{module}: its group in config.json's quantization_config cannot be read: {error}") from error
    raise CorruptError(f"{module} is stored quantized, but no config group targets it.")


def _spec(module: str, group: Mapping[str, Any], scale: torch.dtype) -> QuantSpec:
    args, act = group["weights"], group.get("input_activations")
    kind, bits, strategy = args.get("type", "int"), args.get("num_bits", 8), args.get("strategy")
    if args.get("actorder") not in (None, "static", "weight") or strategy not in ("group", "channel", "tensor"):
        raise UnsupportedError(f"{module}: strategy {strategy!r} with actorder {args.get('actorder')!r} is not read.")
    if (kind, bits) not in (("int", 2), ("int", 4), ("int", 8), ("float", 8)):
        raise UnsupportedError(f"{module}: {kind} of {bits} bits is not read; int of 2, 4 or 8 and float of 8 bits are.")
    if act is not None and not act.get("dynamic", False):
        raise UnsupportedError(f"{module}: static activation scales are not read; activations are scaled per token here.")
    names: dict[torch.dtype, ScaleDtype] = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}
    return QuantSpec(
        format="fp8" if kind == "float" else "int",
        bits=bits,
        granularity=strategy,
        group_size=args.get("group_size") if strategy == "group" else None,
        symmetric=args.get("symmetric", True),
        scale_dtype=names[scale],
        activation_bits=8 if kind == "int" and act is not None else 16,
    )


def _compare(source: Opened, written: Opened) -> None:
    """Codes, zero points and scales on disk against the source's; raises `CorruptError`."""
    for name in source.names:
        a, b = source.weight(name), written.weight(name)
        if isinstance(a, QTensor) and isinstance(b, QTensor):
            same = torch.equal(a.codes.float(), b.codes.float()) and torch.equal(a.scale.float(), b.scale.float())
            if same and (a.zero is None or (b.zero is not None and torch.equal(a.zero, b.zero))):
                continue
            raise CorruptError(f"{name}: codes or scales read back differ from those written.")
