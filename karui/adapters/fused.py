"""peft's LoRA linear with the fused forward of `karui.kernels.lora`.

peft builds layers by the base module's type; `custom_modules()` is given to `LoraConfig._register_custom_module`, which makes
peft put this class where it would put its own. Parameter names, saving and loading stay peft's. Whatever the fused form does
not cover (a disabled or merged adapter, several active ones, dropout in training, a trainable base, variants such as DoRA)
runs through peft's own forward.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora.layer import Linear as PeftLoraLinear
from torch import nn

from karui.adapters.quantized_linear import BaseWeight, QuantizedLinear
from karui.kernels.lora import gated_lora_linear, lora_linear
from karui.kernels.swiglu import swiglu


class FusedLoraLinear(PeftLoraLinear):
    """LoRA over a frozen `nn.Linear` or `QuantizedLinear`."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        adapter = self._fusable(x) if not args and not kwargs else None
        if adapter is None:
            return super().forward(x, *args, **kwargs)
        dtype = _compute_dtype(x)
        with torch.autocast(x.device.type, enabled=False):
            return lora_linear(x.to(dtype), *self._parts(adapter, dtype))

    def gated(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """The layer's output for silu(gate) * up, which is not kept for the backward pass."""
        adapter = self._fusable(gate)
        if adapter is None:
            return self(swiglu(gate, up))
        dtype = _compute_dtype(gate)
        with torch.autocast(gate.device.type, enabled=False):
            return gated_lora_linear(gate.to(dtype), up.to(dtype), *self._parts(adapter, dtype))

    def _parts(self, adapter: str, dtype: torch.dtype) -> tuple[Any, ...]:
        """Weight, bias, A, B and scaling."""
        base: Any = self.base_layer
        a: Any = self.lora_A[adapter].weight
        b: Any = self.lora_B[adapter].weight
        return BaseWeight(base), base.bias, a.to(dtype), b.to(dtype), self.scaling[adapter]

    def _fusable(self, x: torch.Tensor) -> str | None:
        """The one active adapter that the fused form can serve, else None."""
        if self.disable_adapters or self.merged or len(self.active_adapters) != 1:
            return None
        adapter = self.active_adapters[0]
        if adapter not in list(self.lora_A) or adapter in self.lora_variant or self.lora_bias[adapter]:
            return None
        if self.training and not isinstance(self.lora_dropout[adapter], nn.Identity):
            return None
        # Exact types: a subclass of nn.Linear (a low-precision layer, say) computes something else than x W^T.
        if type(self.base_layer) is QuantizedLinear:
            return adapter
        return adapter if type(self.base_layer) is nn.Linear and not self.base_layer.weight.requires_grad else None


def _compute_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype


def custom_modules() -> dict[type[nn.Module], type[nn.Module]]:
    """Base layer type -> LoRA layer type, for `LoraConfig._register_custom_module`."""
    return {QuantizedLinear: FusedLoraLinear, nn.Linear: FusedLoraLinear}
