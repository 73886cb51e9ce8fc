"""DoRA (arXiv 2402.09353) as a peft layer: a magnitude per output row over a LoRA direction.

    y = (m / n) (W x + s B A x) + bias,   n = ||W + s B A||, m starts as n

Norm and scaling are `karui.kernels.dora`; the inner part is the fused LoRA product, so the base may be packed. ||W||^2 is kept;
n is made anew in every forward pass, because fused optimizers change A and B without a trace in their version counters. Dropout
acts on the low-rank part alone (in the authors' code and in peft the base sees it too, which costs a second base product).
Parameter names and files are peft's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from peft.tuners.lora.variants import DoraLinearVariant
from torch import nn

from karui.adapters.fused import FusedLoraLinear
from karui.adapters.quantized_linear import QuantizedLinear
from karui.kernels.dora import row_norms, scale_rows, squared_row_norms
from karui.kernels.lora import frozen_linear, lora_linear


class DoraLinear(FusedLoraLinear):
    """DoRA over a frozen `nn.Linear` or `QuantizedLinear`; one active adapter, not merged."""

    @property
    def lora_variants(self) -> dict[tuple[str, ...], Any]:
        return {**super().lora_variants, ("use_dora",): _Variant}

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        adapter = self._dora(*args, **kwargs)
        if adapter is None:
            return super().forward(x, *args, **kwargs)
        base: Any = self.base_layer
        a: Any = self.lora_A[adapter].weight
        b: Any = self.lora_B[adapter].weight
        scaling, dropout = self.scaling[adapter], self.lora_dropout[adapter]
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        with torch.autocast(x.device.type, enabled=False):
            x, low_a, low_b = x.to(dtype), a.to(dtype), b.to(dtype)
            weight = _Once(self._weight, dtype)
            norm = self.norm(adapter, weight.first)
            if self.training and not isinstance(dropout, nn.Identity):
                y = frozen_linear(x, weight, None) + scaling * ((dropout(x) @ low_a.T) @ low_b.T)
            else:
                y = lora_linear(x, weight, None, low_a, low_b, scaling)
            magnitude: Any = self.lora_magnitude_vector[adapter].weight
            y = scale_rows(y, magnitude, norm)
        return y if base.bias is None else y + base.bias.to(dtype)

    def norm(self, adapter: str, weight: torch.Tensor | None = None) -> torch.Tensor:
        """||W + s B A|| per output row, fp32 (float64 for float64 factors); `weight`: W, when it is at hand."""
        a: Any = self.lora_A[adapter].weight
        b: Any = self.lora_B[adapter].weight
        dtype = torch.float64 if a.dtype == torch.float64 else torch.float32
        weight = self._weight(dtype) if weight is None else weight
        return row_norms(weight, self._squared(dtype), a.detach(), b.detach(), self.scaling[adapter])

    def _squared(self, dtype: torch.dtype) -> torch.Tensor:
        """||W||^2 per row, made when the base is first used or was replaced."""
        base: Any = self.base_layer
        stored = base.qweight if isinstance(base, QuantizedLinear) else base.weight
        key = stored.data_ptr(), stored._version, stored.device, dtype
        kept: Any = self.__dict__.get("_kept_squares")
        if kept is None or kept[0] != key:
            kept = self.__dict__["_kept_squares"] = key, squared_row_norms(self._weight(dtype))
        return kept[1]

    def _weight(self, dtype: torch.dtype) -> torch.Tensor:
        base: Any = self.base_layer
        return base.dequantize(dtype) if isinstance(base, QuantizedLinear) else base.weight.detach().to(dtype)

    def _dora(self, *args: Any, **kwargs: Any) -> str | None:
        """The active adapter when it is one DoRA adapter over a base this layer knows, else None."""
        if args or kwargs or self.disable_adapters or self.merged or len(self.active_adapters) != 1:
            return None
        adapter = self.active_adapters[0]
        known = type(self.base_layer) in (nn.Linear, QuantizedLinear) and not any(
            p.requires_grad for p in self.base_layer.parameters())
        return adapter if known and isinstance(self.lora_variant.get(adapter), _Variant) else None


class _Once:
    """A weight that norm and product share; the backward pass makes it again, so that it is not kept in between."""

    def __init__(self, make: Callable[[torch.dtype], torch.Tensor], dtype: torch.dtype) -> None:
        self.make = make
        self.first: torch.Tensor | None = make(dtype)

    def __call__(self, dtype: torch.dtype) -> torch.Tensor:
        first, self.first = self.first, None
        return first if first is not None and first.dtype == dtype else self.make(dtype)


class _Variant(DoraLinearVariant):
    """peft's DoRA with a start that works on a packed base."""

    @staticmethod
    def init(module: Any, adapter_name: str, **kwargs: Any) -> None:
        from peft.tuners.lora.dora import DoraLinearLayer

        assert isinstance(module, DoraLinear)
        layer = DoraLinearLayer(fan_in_fan_out=False)
        layer.weight = nn.Parameter(module.norm(adapter_name).clone())
        module.lora_magnitude_vector[adapter_name] = layer


def custom_modules() -> dict[type[nn.Module], type[nn.Module]]:
    """Base layer type -> DoRA layer type, for `LoraConfig._register_custom_module`."""
    return {QuantizedLinear: DoraLinear, nn.Linear: DoraLinear}
