"""The BitNet folder of transformers (`integrations/bitnet.py`): ternary weights, activations in 8 bit per token at run time.

    weight        uint8 [out / 4, in]: code + 1 in 2-bit slots, slot i of byte row r is row r + i * out / 4
    weight_scale  [1]: the scale itself for AutoBitLinear, which multiplies; its reciprocal for BitLinear, which divides

Written for AutoBitLinear, so that the stored scale is the bundle's; both are read. Embedding and head stay in high precision.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from karui.catalogue.helpers import load_config
from karui.configs.errors import CorruptError, KaruiError, UnsupportedError
from karui.configs.quantspec import QuantSpec
from karui.inference.bundle.layout import check_finite, to_parts
from karui.inference.bundle.reader import Opened, SafetensorsFiles, Weight, weight_files
from karui.inference.bundle.staging import staged
from karui.inference.bundle.writer import save_hf_folder
from karui.kernels.qtensor import QTensor

METHOD = "bitnet"
_SPEC = QuantSpec.parse("w1.58:fp32")
_HIGH_PRECISION = ("model.embed_tokens.weight", "lm_head.weight")


def write(source: Opened, target: str | Path) -> Path:
    """Write a bundle whose block linears are ternary per tensor (`w1.58`) as a BitNet folder of transformers, in fp32.

    Raises:
        UnsupportedError: another grid, or rows that four does not divide; names the tensor.
        KaruiError: no ternary linear at all, or the target exists.
    """
    target = Path(target)
    stored: dict[str, torch.Tensor] = {}
    kept, num_ternary = ["lm_head"], 0
    for name, w in source.weights().items():
        if not isinstance(w, QTensor) or name in _HIGH_PRECISION:
            stored[name] = (w.dequantize() if isinstance(w, QTensor) else w.float()).contiguous()
            if w.shape[-1:] and len(w.shape) == 2 and name not in _HIGH_PRECISION:
                kept.append(name.removesuffix(".weight"))
            continue
        if w.spec.format != "ternary" or w.spec.granularity != "tensor":
            raise UnsupportedError(f"{name}: {w.spec} is not what BitNet layers hold; export with w1.58.")
        if w.codes.shape[0] % 4:
            raise UnsupportedError(f"{name}: {w.codes.shape[0]} rows; BitNet layers pack four rows into one.")
        num_ternary += 1
        stored[name] = pack_rows(w.codes)
        stored[f"{name}_scale"] = w.scale.float().reshape(1)
    if not num_ternary:
        raise KaruiError(f"{source.path} has no ternary linear; export with w1.58 first.")
    quantization = {
        "quant_method": METHOD,
        "linear_class": "autobitlinear",
        "quantization_mode": "offline",
        "modules_to_not_convert": kept,
    }
    config = {**source.config, "dtype": "float32", "quantization_config": quantization}
    config.pop("torch_dtype", None)
    with staged(target, sum(t.nbytes for t in stored.values()) + 16_000_000) as folder:
        save_hf_folder(folder, stored, config, source.tokenizer_path)
        _compare(source, read(folder))
    return target


def read(path: str | Path) -> HfBitnet:
    """Open a BitNet folder whose weights are stored packed. `UnsupportedError` when they are quantized at run time (online)."""
    folder = Path(path)
    config = load_config(folder)
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict) or quantization.get("quant_method") != METHOD:
        raise KaruiError(f"{folder} is not a BitNet folder: its config.json names no such quantization.")
    if quantization.get("use_rms_norm"):
        raise UnsupportedError(f"{folder}: BitNet layers with a norm of their own (use_rms_norm) are not read.")
    return HfBitnet(folder, config, quantization, SafetensorsFiles(weight_files(folder)))


class HfBitnet(Opened):
    """An opened BitNet folder. Made by `read`."""

    def __init__(self, path: Path, config: dict[str, Any], quantization: dict[str, Any], files: SafetensorsFiles) -> None:
        self.path = self.tokenizer_path = path
        self.config = {k: v for k, v in config.items() if k != "quantization_config"}
        self._files = files
        self._divides = quantization.get("linear_class", "bitlinear") == "bitlinear"
        names = [n for n in files.names() if not n.endswith(".weight_scale")]
        if config.get("tie_word_embeddings"):
            names = [n for n in names if n != _HIGH_PRECISION[1]]
            self.tied = (_HIGH_PRECISION,)
        self.names = tuple(names)
        if not any(self._ternary(n) for n in names):
            raise UnsupportedError(
                f"{path} holds no packed ternary weights (quantization_mode online?); nothing to read as BitNet."
            )

    def spec(self, name: str) -> QuantSpec:
        return _SPEC if self._ternary(name) else QuantSpec.parse("none")

    def weight(self, name: str) -> Weight:
        if name not in self._files:
            raise KaruiError(f"{self.path} stores no tensor {name!r}.")
        tensor = self._files.read(name)
        if not self._ternary(name):
            check_finite(name, tensor)
            return tensor
        scale = self._files.read(f"{name}_scale").float().reshape(1, 1)
        scale = 1 / scale if self._divides else scale
        check_finite(f"{name}_scale", scale)
        if tensor.dtype != torch.uint8:
            raise CorruptError(f"{name} is stored as {tensor.dtype}; packed ternary codes are uint8.")
        codes = unpack_rows(tensor)
        if int(codes.max()) > 1:
            raise CorruptError(f"{name}: a 2-bit slot holds 3, which is no ternary code.")
        return QTensor(codes, scale, None, _SPEC, tuple(codes.shape))

    def packed(self, name: str) -> dict[str, torch.Tensor]:
        w = self.weight(name)
        return to_parts(w) if isinstance(w, QTensor) else {"": w}

    def nbytes(self) -> int:
        return sum(p.stat().st_size for p in self.path.iterdir() if p.is_file())

    def _ternary(self, name: str) -> bool:
        return f"{name}_scale" in self._files


def pack_rows(codes: torch.Tensor) -> torch.Tensor:
    """Ternary codes int8 [out, in] -> uint8 [out / 4, in]."""
    slots = (codes + 1).to(torch.uint8).reshape(4, -1, codes.shape[1])
    return slots[0] | slots[1] << 2 | slots[2] << 4 | slots[3] << 6


def unpack_rows(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_rows`."""
    slots = torch.stack([packed >> shift & 3 for shift in (0, 2, 4, 6)])
    return slots.reshape(-1, packed.shape[1]).to(torch.int8) - 1


def _compare(source: Opened, written: Opened) -> None:
    for name in source.names:
        a, b = source.weight(name), written.weight(name)
        value = a.dequantize() if isinstance(a, QTensor) else a.float()
        if isinstance(b, QTensor):
            same = (
                isinstance(a, QTensor)
                and torch.equal(a.codes, b.codes)
                and math.isclose(float(a.scale), float(b.scale), rel_tol=0)
            )
        else:
            same = torch.equal(value, b)
        if not same:
            raise CorruptError(f"{name}: what was read back differs from what was written.")
