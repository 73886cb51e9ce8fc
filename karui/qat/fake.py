"""Fake quantization in a model: linears that compute with the values their codes stand for, and the way there and back.

    QATLinear(x) = linear(activation(x), weight(W))        W stays the parameter `weight` under its own state-dict name

`weight` is a `WeightQuantizer`: `forward(W)` is differentiable and bit-equal to `codes(W).dequantize(W.dtype)`, with scales
already rounded to the dtype they are stored in. Rounding passes its gradient straight through (Bengio et al., arXiv 1308.3432).

    prepare(model, specs, make)    targeted linears become QATLinear
    convert(model)                 {weight name: QTensor}, what the forward pass saw, bit for bit
    finish(model)                  ordinary linears again, holding the dequantized values
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from karui.configs.errors import KaruiError, UnsupportedError
from karui.configs.quantspec import QuantSpec
from karui.kernels.linear import linear
from karui.kernels.qtensor import QTensor
from karui.kernels.quantize import StraightThrough, quantize
from karui.qat.activations import fake_quantize_tokens


class WeightQuantizer(nn.Module):
    """Base of every weight quantizer.

    Attributes:
        spec: the grid of `codes`.
    """

    spec: QuantSpec

    def forward(self, w: torch.Tensor) -> torch.Tensor:
        """w [out, in] -> values on the grid, same shape and dtype, with gradient; equals `codes(w).dequantize(w.dtype)`."""
        raise NotImplementedError

    def codes(self, w: torch.Tensor) -> QTensor:
        """What is stored for w [out, in]."""
        raise NotImplementedError


class Nearest(WeightQuantizer):
    """The grid's own rule: absmax or min/max for integers, absmean for ternary and binary, any format of `quantize`."""

    def __init__(self, w: torch.Tensor, spec: QuantSpec, name: str = "tensor") -> None:
        super().__init__()
        self.spec, self.name = spec, name
        self.codes(w[:1] if spec.granularity != "tensor" else w)  # refuse now what cannot be stored

    def forward(self, w: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = StraightThrough.apply(w, self.codes(w).dequantize(w.dtype))
        return value

    def codes(self, w: torch.Tensor) -> QTensor:
        return quantize(w, self.spec, name=self.name)


class TokenActivations(nn.Module):
    """Activations rounded per token, symmetric, as the engine does for `a8` grids."""

    def __init__(self, bits: int = 8) -> None:
        super().__init__()
        self.bits = bits

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return fake_quantize_tokens(x, self.bits)


class QATLinear(nn.Linear):
    """A linear whose weight and input pass through quantizers; made by `prepare`."""

    weight_quantizer: WeightQuantizer
    input_quantizer: nn.Module | None

    @classmethod
    def around(cls, linear: nn.Linear, weight: WeightQuantizer, activation: nn.Module | None) -> QATLinear:
        """Shares the linear's parameters."""
        module = cls(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        module.weight, module.bias = linear.weight, linear.bias
        module.weight_quantizer, module.input_quantizer = weight, activation
        module.train(linear.training)
        return module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.input_quantizer is not None:
            x = self.input_quantizer(x)
        return linear(x, self.weight_quantizer(self.weight), self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, grid={self.weight_quantizer.spec}"


Make = Callable[[str, nn.Linear, QuantSpec], "tuple[WeightQuantizer, nn.Module | None]"]


def prepare(model: nn.Module, specs: Mapping[str, QuantSpec], make: Make) -> list[str]:
    """Replace the linears named in `specs` (weight names, as `karui.qat.run.choose` gives them); returns the names.

    Raises:
        KaruiError: a name that is no linear of the model, a weight that is not finite.
        UnsupportedError: a linear that is fake-quantized already, or whose weight is shared with another module.
    """
    named = {f"{n}.weight": (n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    owners: dict[int, list[str]] = {}
    for n, m in model.named_modules():
        if isinstance(w := getattr(m, "weight", None), nn.Parameter):
            owners.setdefault(id(w), []).append(n)
    for name, spec in specs.items():
        if name not in named:
            raise KaruiError(f"{name} is not the weight of a linear of this model; names look like {next(iter(named), 'none')}.")
        path, linear = named[name]
        if isinstance(linear, QATLinear):
            raise UnsupportedError(f"{name} is trained on grid {linear.weight_quantizer.spec} already; name it in one step only.")
        if len(owners[id(linear.weight)]) > 1:
            raise UnsupportedError(
                f"{name} shares its tensor with {next(o for o in owners[id(linear.weight)] if o != path)}; a tied tensor cannot "
                "be trained on a grid here. Leave it out, it is quantized at export."
            )
        if not torch.isfinite(linear.weight).all():
            raise KaruiError(f"{name} holds NaN or infinite values; mend the weights before training on a grid.")
        _replace(model, path, QATLinear.around(linear, *make(name, linear, spec)))
    return list(specs)


def qat_linears(model: nn.Module) -> dict[str, QATLinear]:
    """Every prepared linear by its weight's name, without the prefixes of wrappers."""
    return {f"{n}.weight": m for n, m in model.named_modules() if isinstance(m, QATLinear)}


@torch.no_grad()
def convert(model: nn.Module) -> dict[str, QTensor]:
    """Codes and scales of every prepared linear: what the forward pass computes with, bit for bit."""
    return {name: m.weight_quantizer.codes(m.weight) for name, m in qat_linears(model).items()}


@torch.no_grad()
def finish(model: nn.Module) -> None:
    """Ordinary linears again, holding the dequantized values."""
    for name, m in qat_linears(model).items():
        linear = nn.Linear(m.in_features, m.out_features, bias=m.bias is not None, device="meta")
        value = m.weight_quantizer.codes(m.weight).dequantize(m.weight.dtype)
        linear.weight, linear.bias = nn.Parameter(value, requires_grad=m.weight.requires_grad), m.bias
        _replace(model, name.removesuffix(".weight"), linear)


def quantizer_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Step sizes, offsets and ranges that train beside the weights."""
    found: dict[int, nn.Parameter] = {}
    for m in qat_linears(model).values():
        for part in (m.weight_quantizer, m.input_quantizer):
            if part is not None:
                found |= {id(p): p for p in part.parameters()}
    return list(found.values())


def _replace(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, last = path.rpartition(".")
    setattr(model.get_submodule(parent), last, module)


def names_of(specs: Sequence[str]) -> str:
    """`n linears` with the first name, for a printed line."""
    return f"{len(specs)} linears, first {specs[0]}" if specs else "no linear"
