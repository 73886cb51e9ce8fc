"""Folders that laboratories release in few bits: the experts of gpt-oss in MXFP4, and FP8 in blocks (DeepSeek-V3, Qwen3 FP8).

    mxfp4   {experts}.gate_up_proj_blocks uint8 [experts, out, in / 32, 16], two codes a byte, the lower half first; _scales
            uint8 [experts, out, in / 32], E8M0. Rows of gate and up take turns. It is karui's mxfp4 grid: codes and scales stay
    fp8     {linear}.weight E4M3 [out, in], .weight_scale_inv fp32 [out / 128, in / 128]: value = code * scale. karui has no grid
            of square blocks: these weights are given dequantized in fp32, four bytes for each on disk. What a run in FP8 would
            round at run time, its inputs, is not rounded
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from karui.catalogue.helpers import load_config
from karui.configs.errors import CorruptError, KaruiError, UnsupportedError
from karui.configs.quantspec import QuantSpec
from karui.inference.bundle.layout import check_finite, to_parts
from karui.inference.bundle.reader import ModelFolder, SafetensorsFiles, Weight, experts_of, weight_files
from karui.kernels.qtensor import QTensor

METHODS = ("mxfp4", "fp8")
_MXFP4 = QuantSpec.parse("mxfp4")
_BLOCKS, _SCALES, _INVERSE = "_blocks", "_scales", "_scale_inv"


def read(path: str | Path) -> Released:
    """Open a folder whose config names one of `METHODS`.

    Raises:
        UnsupportedError: FP8 without blocks, or codes in a layout that is not the one above.
        CorruptError: codes without scales, or scales of another shape.
    """
    folder = Path(path)
    config = load_config(folder)
    quantization = config.get("quantization_config") or {}
    if quantization.get("quant_method") not in METHODS:
        raise KaruiError(f"{folder} names none of the quantizations {', '.join(METHODS)} in its config.json.")
    return Released(folder, config, SafetensorsFiles(weight_files(folder)))


class Released(ModelFolder):
    """An opened folder of this kind. Made by `read`."""

    def __init__(self, path: Path, config: dict[str, Any], files: SafetensorsFiles) -> None:
        quantization = config["quantization_config"]
        super().__init__(path, {k: v for k, v in config.items() if k != "quantization_config"}, files)
        block = quantization.get("weight_block_size")
        if quantization["quant_method"] == "fp8" and (not isinstance(block, list | tuple) or len(block) != 2):
            raise UnsupportedError(f"{path}: FP8 without weight_block_size is not read; give the model in 16 bits.")
        self._block: tuple[int, int] = tuple(block) if block else (0, 0)
        self._codes: dict[str, tuple[str, int, slice]] = {}
        names: list[str] = []
        for name in self.names:
            if name.endswith(_BLOCKS):
                fused = name.removesuffix(_BLOCKS)
                found = experts_of(fused, files.shape(self._stored[name])[0])
                self._codes |= {one: (self._stored[name].removesuffix(_BLOCKS), *at) for one, at in found.items()}
                names += found
            elif not name.endswith((_SCALES, _INVERSE)):
                names.append(name)
        self.names = tuple(names)

    def spec(self, name: str) -> QuantSpec:
        return _MXFP4 if name in self._codes else super().spec(name)

    def packed(self, name: str) -> dict[str, torch.Tensor]:
        w = self.weight(name)
        return to_parts(w) if isinstance(w, QTensor) else {"": w}

    def weight(self, name: str) -> Weight:  # type: ignore[override]
        if name in self._codes:
            return self._mxfp4(name, *self._codes[name])
        if name in self._experts or name not in self._stored or name not in self.names:
            return super().packed(name)[""]
        tensor = self._files.read(self._stored[name])
        scales = f"{self._stored[name]}{_INVERSE}"
        if tensor.dtype == torch.float8_e4m3fn:
            if scales not in self._files:
                raise CorruptError(f"{name} is in FP8 and has no {scales.rpartition('.')[2]}.")
            tensor = self._dequantized(name, tensor, self._files.read(scales))
        check_finite(name, tensor)
        return tensor

    def _mxfp4(self, name: str, stored: str, expert: int, rows: slice) -> QTensor:
        if f"{stored}{_SCALES}" not in self._files:
            raise CorruptError(f"{stored}{_BLOCKS} has no {_SCALES}.")
        shapes = self._files.shape(f"{stored}{_BLOCKS}"), self._files.shape(f"{stored}{_SCALES}")
        if len(shapes[0]) != 4 or shapes[0][3] != 16 or shapes[0][:3] != shapes[1] or expert >= shapes[0][0]:
            raise CorruptError(f"{name}: blocks {list(shapes[0])} and scales {list(shapes[1])} do not belong together.")
        blocks, scales = (self._files.part(f"{stored}{end}", expert)[rows] for end in (_BLOCKS, _SCALES))
        codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(1)
        if bool((scales == 255).any()):
            raise CorruptError(f"{name}: a scale is NaN.")
        return QTensor(codes, scales.contiguous().view(torch.float8_e8m0fnu), None, _MXFP4, tuple(codes.shape))

    def _dequantized(self, name: str, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        out, into = self._block
        wanted = [-(-codes.shape[0] // out), -(-codes.shape[1] // into)]
        if list(scales.shape) != wanted:
            raise CorruptError(f"{name}: scales of shape {list(scales.shape)}, blocks of {out} x {into} ask for {wanted}.")
        wide = scales.float().repeat_interleave(out, 0)[:codes.shape[0]].repeat_interleave(into, 1)[:, :codes.shape[1]]
        return codes.float() * wide
