"""LoRA adapters at serving: a peft folder becomes low-rank pairs that the runner adds per sequence, beside the untouched base."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from karui.configs.errors import CorruptError, KaruiError, UnsupportedError
from karui.inference.models.decoder import LoraWeights
from karui.inference.models.weights import canonical_name

_TENSOR = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_magnitude_vector)(?:\.default)?(?:\.weight)?")


def read_adapter(folder: str | Path, shapes: dict[str, tuple[int, ...]],
                 dense_weight: Callable[[str], torch.Tensor] | None) -> dict[str, LoraWeights]:
    """Read `adapter_config.json` and `adapter_model.safetensors` of a LoRA, rsLoRA or DoRA adapter.

    Args:
        folder: as peft's `save_pretrained` writes it.
        shapes: the base model's tensors (`expected_shapes`); every adapted module must be one of its linears and fit.
        dense_weight: the base weight of a module in fp32, asked for by DoRA only.
    Raises:
        KaruiError: no such folder or files. UnsupportedError: an adapter of another kind, or one that also changes other
        tensors. CorruptError: unpaired, misshapen, unknown or non-finite tensors.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = Path(folder)
    try:
        config: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        tensors = load_file(folder / "adapter_model.safetensors")
    except FileNotFoundError as error:
        raise KaruiError(f"adapter {folder}: {Path(str(error.filename)).name} not found; expected a folder written by peft's "
                         "save_pretrained (adapter_config.json, adapter_model.safetensors).") from None
    except (SafetensorError, ValueError) as error:
        raise CorruptError(f"adapter {folder}: cannot be read ({error}).") from error
    _check_kind(folder, config)
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise UnsupportedError(f"adapter {folder}: tensor {name} is not a LoRA pair; serve a merged export instead.")
        if not torch.isfinite(tensor).all():
            raise CorruptError(f"adapter {folder}: {name} holds NaN or infinity.")
        parts.setdefault(match["module"], {})[match["part"]] = tensor.float()
    return {canonical_name(module): _layer(folder, module, found, config, shapes, dense_weight)
            for module, found in parts.items()}


def _check_kind(folder: Path, config: dict[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise UnsupportedError(f"adapter {folder}: peft_type {config.get('peft_type')!r}; the engine serves LORA side by side.")
    for key, plain in (("bias", "none"), ("modules_to_save", None), ("fan_in_fan_out", False), ("lora_bias", False),
                       ("layer_replication", None), ("trainable_token_indices", None)):
        if config.get(key) not in (plain, None, [], False):
            raise UnsupportedError(f"adapter {folder}: {key}={config[key]!r} changes more than low-rank pairs; merge it instead.")


def _layer(folder: Path, module: str, found: dict[str, torch.Tensor], config: dict[str, Any], shapes: dict[str, tuple[int, ...]],
           dense_weight: Callable[[str], torch.Tensor] | None) -> LoraWeights:
    name = canonical_name(module)
    shape = shapes.get(f"{name}.weight")
    if shape is None or len(shape) != 2 or "embed_tokens" in module:
        raise CorruptError(f"adapter {folder}: it adapts {module}, which is not a linear of this model; is it another model's?")
    a, b = found.get("lora_A"), found.get("lora_B")
    if a is None or b is None or a.shape != (b.shape[1], shape[1]) or b.shape[0] != shape[0]:
        given = [None if x is None else list(x.shape) for x in (a, b)]
        raise CorruptError(f"adapter {folder}: {module} has A and B of shapes {given}; the base weight is {list(shape)}.")
    rank, alpha = a.shape[0], _pattern(config.get("alpha_pattern"), module, config["lora_alpha"])
    scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
    magnitude = found.get("lora_magnitude_vector")
    if magnitude is None:
        return LoraWeights(a, b, scale)
    if dense_weight is None:
        raise UnsupportedError(f"adapter {folder} is a DoRA, which needs the base weights; this engine's were replaced in packed "
                               "form: load the engine anew or merge the adapter.")
    adapted = dense_weight(name).cpu() + scale * (b @ a)
    return LoraWeights(a, b, scale, magnitude.flatten() / adapted.norm(dim=1))


def _pattern(patterns: dict[str, Any] | None, module: str, default: float) -> float:
    """peft's rule: a key is a regular expression for the end of the module's name."""
    for key, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({key})$", module):
            return float(value)
    return float(default)
