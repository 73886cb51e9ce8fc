"""The work folder of a calibration: finished blocks and the hidden states behind them, so that a killed run can go on.

state.json               fingerprint of model, rows, method, settings and versions
block-0007.safetensors   codes, scales and dense tensors of one block, its report in the metadata; written and renamed
hidden-0008.bin          hidden states in front of block 8 (fp32, raw); `target-0008.bin` those of the unquantized model
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch

from karui.configs.errors import CorruptError, KaruiError
from karui.kernels.qtensor import QTensor, flatten, unflatten
from karui.qat.types import LayerReport


def fingerprint(facts: dict[str, Any], rows: torch.Tensor | None) -> str:
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode())
    if rows is not None:
        digest.update(rows.to(torch.int64).cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


class Store:
    """Opens or creates the folder; refuses one that belongs to another run."""

    def __init__(self, folder: Path, mark: str) -> None:
        self.folder, self.mark = folder, mark
        folder.mkdir(parents=True, exist_ok=True)
        state = folder / "state.json"
        if state.is_file():
            try:
                found = json.loads(state.read_text(encoding="utf-8"))["fingerprint"]
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise CorruptError(f"{state} is not readable; delete the folder {folder} to start anew.") from error
            if found != mark:
                raise KaruiError(
                    f"{folder} holds the calibration of another model, data set, method or setting; "
                    "delete it or name another folder."
                )
        elif any(folder.iterdir()):
            raise KaruiError(f"{folder} is not empty and holds no calibration state; name an empty folder.")
        else:
            _write(state, json.dumps({"fingerprint": mark}).encode())

    def hidden(self, index: int, kind: str = "hidden") -> Path:
        return self.folder / f"{kind}-{index:04d}.bin"

    def block(self, index: int) -> Path:
        return self.folder / f"block-{index:04d}.safetensors"

    def save(self, index: int, weights: dict[str, QTensor | torch.Tensor], report: list[LayerReport]) -> None:
        from safetensors.torch import save

        tensors, specs = flatten(weights)
        metadata = {"specs": specs, "report": json.dumps([r.dump() for r in report]), "fingerprint": self.mark}
        _write(self.block(index), save(tensors, metadata))

    def load(self, index: int) -> tuple[dict[str, QTensor | torch.Tensor], list[LayerReport]] | None:
        """A finished block, or None when it is not there."""
        from safetensors import SafetensorError, safe_open

        file = self.block(index)
        if not file.is_file():
            return None
        try:
            with safe_open(str(file), "pt") as opened:
                metadata = opened.metadata() or {}
                tensors = {k: opened.get_tensor(k) for k in opened.keys()}  # noqa: SIM118 - not a dict
        except SafetensorError as error:
            raise CorruptError(f"{file} is damaged ({error}); delete it and the later blocks.") from error
        if metadata.get("fingerprint") != self.mark:
            raise CorruptError(f"{file} belongs to another run; delete the folder {self.folder}.")
        weights = unflatten(tensors, metadata["specs"])
        return weights, [LayerReport(**r) for r in json.loads(metadata["report"])]


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
