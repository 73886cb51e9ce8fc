"""Fold an adapter into its base: W' = W + s B A, in the base's high precision, with a report of how much each layer moved.

A quantized base is merged as it was trained on, dequantized; the sum is not put back onto the grid here, because that loses what
training found (transformers 31293, peft 2321). Exporting quantizes the merged weights once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from karui.adapters.quantized_linear import QuantizedLinear
from karui.configs.errors import UnsupportedError


@dataclass(frozen=True, kw_only=True)
class MergeReport:
    """What `merge_adapter` did.

    Attributes:
        layers: by full name of each merged linear, ||s B A|| / ||W|| in the Frobenius norm.
        base: spelling of the grid the base was on, or none.
    """

    layers: dict[str, float]
    base: str

    @property
    def largest(self) -> float:
        return max(self.layers.values(), default=0.0)


@torch.no_grad()
def merge_adapter(model: Any) -> tuple[nn.Module, MergeReport]:
    """The base model with the active adapter folded in and plain linears everywhere; the peft model must not be used after.

    Raises:
        UnsupportedError: a layer whose update is not s B A (DoRA and other variants, a bias of its own).
    """
    from peft.tuners.lora.layer import LoraLayer

    base = model.get_base_model()
    layers: dict[str, float] = {}
    grids: set[str] = set()
    for name, module in list(base.named_modules()):
        if isinstance(module, LoraLayer):
            layer: Any = module
            adapter = layer.active_adapters[0]
            if len(layer.active_adapters) != 1 or adapter in layer.lora_variant or layer.lora_bias[adapter]:
                raise UnsupportedError(f"{name}: only one plain low-rank adapter can be merged, not variants or several.")
            linear = _plain(layer.base_layer, grids)
            update = layer.get_delta_weight(adapter).to(linear.weight.dtype)
            layers[name] = float(update.float().norm() / linear.weight.float().norm().clamp(min=1e-30))
            linear.weight += update
            _replace(base, name, linear)
        elif isinstance(module, QuantizedLinear) and not name.endswith(".base_layer"):
            _replace(base, name, _plain(module, grids))
    return base, MergeReport(layers=layers, base=", ".join(sorted(grids)) or "none")


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
