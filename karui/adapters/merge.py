"""Fold an adapter into its base in memory, in the base's high precision, with a report of how much each layer moved.

    LoRA W' = W + s B A        DoRA W' = m (W + s B A) / ||W + s B A||, the norm of each row

A quantized base is merged as it was trained on, dequantized; the sum is not put back onto the grid here, because that loses what
training found (transformers 31293, peft 2321). Exporting quantizes the merged weights once; `karui.trainers.merging` measures
whether that base or the original weights should be merged into.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from karui.adapters.dora import DoraLinear
from karui.adapters.quantized_linear import QuantizedLinear
from karui.configs.errors import UnsupportedError


@dataclass(frozen=True, kw_only=True)
class MergeReport:
    """What `merge_adapter` did.

    Attributes:
        layers: by full name of each merged linear, ||W' - W|| / ||W|| in the Frobenius norm.
        replaced: full names of the modules that were trained whole.
        base: spelling of the grid the base was on, or none.
    """

    layers: dict[str, float]
    replaced: tuple[str, ...]
    base: str

    @property
    def largest(self) -> float:
        return max(self.layers.values(), default=0.0)


@torch.no_grad()
def merge_adapter(model: Any) -> tuple[nn.Module, MergeReport]:
    """The base model with the active adapter folded in and plain modules everywhere; the peft model must not be used after.

    Raises:
        UnsupportedError: a layer whose update is neither LoRA nor DoRA, an adapter with a bias, or several at once.
    """
    from peft.tuners.lora.layer import LoraLayer
    from peft.utils.other import ModulesToSaveWrapper

    base = model.get_base_model()
    layers: dict[str, float] = {}
    replaced: list[str] = []
    grids: set[str] = set()
    for name, module in list(base.named_modules()):
        if isinstance(module, ModulesToSaveWrapper):
            _replace(base, name, module.modules_to_save[module.active_adapter])  # type: ignore[index]
            replaced.append(name)
        elif isinstance(module, LoraLayer):
            layers[name] = _merge_layer(base, name, module, grids)
        elif isinstance(module, QuantizedLinear) and not name.endswith(".base_layer"):
            _replace(base, name, _plain(module, grids))
    return base, MergeReport(layers=layers, replaced=tuple(replaced), base=", ".join(sorted(grids)) or "none")


def _merge_layer(base: nn.Module, name: str, layer: Any, grids: set[str]) -> float:
    adapter = layer.active_adapters[0]
    dora = isinstance(layer, DoraLinear) and adapter in layer.lora_variant
    if len(layer.active_adapters) != 1 or layer.lora_bias[adapter] or (adapter in layer.lora_variant and not dora):
        raise UnsupportedError(f"{name}: only one LoRA or DoRA adapter without a bias can be merged, not variants or several.")
    linear = _plain(layer.base_layer, grids)
    before = linear.weight.float()
    merged = before + layer.get_delta_weight(adapter).float()
    if dora:
        norm = layer.norm(adapter).clamp(min=torch.finfo(torch.float32).tiny)
        gain = layer.lora_magnitude_vector[adapter].weight.float() / norm
        merged *= gain.unsqueeze(1)
    moved = float((merged - before).norm() / before.norm().clamp(min=1e-30))
    linear.weight.copy_(merged)
    _replace(base, name, linear)
    return moved


def _plain(module: Any, grids: set[str]) -> nn.Linear:
    if not isinstance(module, QuantizedLinear):
        return module
    grids.add(str(module.spec))
    linear = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None, device=module.qweight.device)
    linear.weight.copy_(module.dequantize())
    if module.bias is not None:
        linear.bias.copy_(module.bias)
    return linear


def _replace(model: nn.Module, name: str, new: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, new)
