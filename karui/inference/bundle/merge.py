"""Fold a peft adapter folder into the weights of its base, in fp32.

LoRA (arXiv 2106.09685, section 4.1)    W + s B A,  s = alpha / r, or alpha / sqrt(r) (rsLoRA, arXiv 2312.03732)
DoRA (arXiv 2402.09353, eq. 5)          m * (W + s B A) / ||W + s B A||, the norm of each output row

W is the base that was trained on: the original weight, or that weight on a grid, or, where the adapter's start changed a
quantized base (LoftQ, PiSSA), grid(original - s U V) with U and V from `karui_residual.safetensors`. `base_weight` makes it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from karui.configs.errors import CorruptError, KaruiError, UnsupportedError
from karui.configs.quantspec import QuantSpec
from karui.kernels.lora.residual import residual
from karui.kernels.quantize import quantize

_SIDE_FILE = "karui_adapter.json"  # beside the adapter: what karui knows of its base
_RESIDUAL_FILE = "karui_residual.safetensors"
_PREFIX = "base_model.model."
_NO_LINEAR = re.compile(r"\.experts\.\d+\.|\.(gate|router|weights_proj)\.weight$")
_PART = re.compile(r"(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_magnitude_vector)(?:\.weight)?")


class Adapter:
    """The tensors of one adapter folder, by the name of the weight they change. `apply` each weight once, then `check_used`."""

    def __init__(self, folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        self.folder, self.config = folder, config
        self.base_spec: str | None = None  # the grid of the base's linears during training (QLoRA)
        self.residuals: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # U, V by weight name
        self._parts: dict[str, dict[str, torch.Tensor]] = {}
        self._replaced: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            short = name.removeprefix(_PREFIX)
            if match := _PART.fullmatch(short):
                self._parts.setdefault(f"{match['module']}.weight", {})[match["part"]] = tensor.float()
            elif "lora_" in short:
                raise UnsupportedError(
                    f"{folder}: {short} (of an embedding) cannot be merged; adapt linear layers."
                )
            else:
                self._replaced[short] = tensor
        for name, parts in self._parts.items():
            if not {"lora_A", "lora_B"} <= parts.keys():
                raise CorruptError(f"{folder}: {name} has only {sorted(parts)}; an adapter needs lora_A and lora_B.")
            if not all(bool(torch.isfinite(t).all()) for t in parts.values()):
                raise KaruiError(f"{folder}: the adapter of {name} holds NaN or infinite values; the training diverged.")

    def changes(self, name: str) -> bool:
        return name in self._parts or name in self._replaced

    def names(self) -> set[str]:
        """Names of the weights this adapter changes."""
        return self._parts.keys() | self._replaced.keys()

    def drop_tied(self, tied: Iterable[tuple[str, ...]]) -> None:
        """Forget a replaced tensor that is stored once more under a name tied to it.

        Raises:
            KaruiError: the two differ, so they are no longer one matrix.
        """
        for first, *others in tied:
            for name in others:
                if name in self._replaced:
                    if first not in self._replaced or not torch.equal(self._replaced[first], self._replaced[name]):
                        raise KaruiError(f"{self.folder} trains {name}, which is tied to {first} here; untie it first.")
                    del self._replaced[name]

    def apply(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """The merged weight in fp32, [out, in]; `weight` itself when the adapter leaves it alone."""
        if name in self._replaced:
            if self._replaced[name].shape != weight.shape:
                raise KaruiError(
                    f"{self.folder}: {name} has shape {list(self._replaced[name].shape)}, the base has {list(weight.shape)}."
                )
            return self._replaced[name].float()
        if name not in self._parts:
            return weight
        parts = self._parts[name]
        a, b = parts["lora_A"], parts["lora_B"]
        if (b.shape[0], a.shape[1]) != tuple(weight.shape) or b.shape[1] != a.shape[0]:
            raise KaruiError(
                f"{self.folder}: the adapter of {name} is {list(b.shape)} x {list(a.shape)}, "
                f"the base weight {list(weight.shape)}: it was trained on another model."
            )
        merged = weight.float() + self.scaling(name, a.shape[0]) * (b @ a)
        if (magnitude := parts.get("lora_magnitude_vector")) is not None:
            merged *= (magnitude / merged.norm(dim=1)).unsqueeze(1)
        return merged

    def scaling(self, name: str, rank: int) -> float:
        module = name.removesuffix(".weight")
        alpha = _pattern(self.config.get("alpha_pattern"), module, self.config["lora_alpha"])
        expected = _pattern(self.config.get("rank_pattern"), module, self.config["r"])
        if expected != rank:
            raise CorruptError(f"{self.folder}: {module} has rank {rank}, adapter_config.json says {expected}.")
        return alpha / math.sqrt(rank) if self.config.get("use_rslora") else alpha / rank


def base_weight(name: str, weight: torch.Tensor, grid: QuantSpec | None, adapter: Adapter | None) -> torch.Tensor:
    """A linear's weight as its adapter saw it: what the adapter's start took out is taken out, and the rest put on the grid.
    Fused experts and their router are no linears and were on no grid, nor were the weights of an indexer's heads."""
    if grid is None or grid.format == "none" or _NO_LINEAR.search(name):
        return weight
    pair = adapter.residuals.get(name) if adapter is not None else None
    if adapter is not None and pair is not None:
        weight = residual(weight.float(), *pair, adapter.scaling(name, pair[1].shape[0]))
    return quantize(weight, grid, name=name).dequantize()


def _pattern(patterns: dict[str, Any] | None, module: str, default: Any) -> Any:
    """peft's rule: a key is a regular expression that must match the end of the module's name, after a dot."""
    for key, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default


def load_adapter(folder: str | Path) -> Adapter:
    """Read `adapter_config.json` and `adapter_model.safetensors` of a peft LoRA or DoRA adapter.

    Raises:
        KaruiError: files are missing.
        UnsupportedError: another kind of adapter, or an option whose merge is not the plain one above.
        CorruptError: a file is damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = Path(folder)
    try:
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        tensors = load_file(folder / "adapter_model.safetensors")
    except FileNotFoundError as error:
        raise KaruiError(f"{folder} is no adapter folder: {Path(str(error.filename or folder)).name} is missing.") from error
    except (ValueError, SafetensorError) as error:
        raise CorruptError(f"{folder}: the adapter cannot be read ({error}).") from error
    if config.get("peft_type") != "LORA":
        raise UnsupportedError(f"{folder}: adapters of type {config.get('peft_type')!r} cannot be merged; LORA can.")
    for option in (
        "fan_in_fan_out",
        "lora_bias",
        "use_qalora",
       
        "layer_replication",
        "target_parameters",
    ):
        if config.get(option):
            raise UnsupportedError(f"{folder}: adapters with {option} cannot be merged here.")
    if config.get("bias", "none") != "none":
        raise UnsupportedError(f"{folder}: adapters that train biases (bias={config['bias']!r}) cannot be merged here.")
    adapter = Adapter(folder, config, tensors)
    if (side := folder / _SIDE_FILE).is_file():
        try:
            spec = json.loads(side.read_text(encoding="utf-8")).get("base_spec")
        except (ValueError, AttributeError) as error:
            raise CorruptError(f"{side}: not valid JSON ({error}).") from error
        adapter.base_spec = None if spec in (None, "none") else str(spec)
    if (path := folder / _RESIDUAL_FILE).is_file():
        try:
            stored = load_file(path)
            names = sorted({n.rpartition(".")[0] for n in stored})
            adapter.residuals = {f"{n}.weight": (stored[f"{n}.u"], stored[f"{n}.v"]) for n in names}
        except (SafetensorError, KeyError) as error:
            raise CorruptError(f"{path}: cannot be read ({error}).") from error
    return adapter
