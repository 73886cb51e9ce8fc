"""BitNet b1.58 (Ma et al., arXiv 2402.17764): ternary weights by their absolute mean, activations of 8 bits per token.

    W~ = clamp(round(W / mean|W|), -1, 1) mean|W|        one scale per tensor (or per group), floor 1e-5
    x~ = round(127 x / max|x|) max|x| / 127             per token
    forward with  W + lambda (W~ - W).detach(),  x + lambda (x~ - x).detach()

From scratch lambda is 1. From a pretrained model it rises, lambda = min(step / warm-up, 1), as in Hugging Face's fine-tuning of
Llama-3 to 1.58 bits (warm-up 1,000 steps): ternary weights at once destroy what was learned. Only at lambda = 1 does the model
compute what is stored; converting earlier is refused. The sub-norms of the published models are in `bitnet.with_sub_norms`.
"""

from __future__ import annotations

import torch
from torch import nn

from karui.configs.errors import KaruiError, UnsupportedError
from karui.configs.quantspec import QuantSpec
from karui.kernels.qtensor import QTensor
from karui.qat.activations import fake_quantize_tokens
from karui.qat.fake import Nearest


class Blend(nn.Module):
    """lambda, shared by all layers of a model; it follows from the step, so no checkpoint holds it."""

    value: torch.Tensor

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("value", torch.tensor(value), persistent=False)

    def at(self, step: int, warmup: int) -> None:
        """lambda = min(step / warmup, 1)."""
        self.value.fill_(1.0 if warmup <= 0 else min(step / warmup, 1.0))


class BlendedWeight(Nearest):
    """The grid's rule, blended with the full weight.

    Raises:
        UnsupportedError: another grid than ternary or binary.
    """

    def __init__(self, w: torch.Tensor, spec: QuantSpec, blend: Blend, *, name: str = "tensor") -> None:
        if spec.format not in ("ternary", "binary"):
            raise UnsupportedError(f"{name}: BitNet trains w1.58 (bitnet_158) or w1 (bitnet) grids, not {spec}; use lsq for it.")
        super().__init__(w, spec, name)
        self.blend = blend

    def forward(self, w: torch.Tensor) -> torch.Tensor:
        value = super().forward(w)
        share = self.blend.value
        return value if share >= 1 else w + share.to(w.dtype) * (value - w).detach()

    def codes(self, w: torch.Tensor) -> QTensor:
        return super().codes(w)


class BlendedActivations(nn.Module):
    """8 bits per token, blended with the full activation."""

    def __init__(self, blend: Blend, bits: int = 8) -> None:
        super().__init__()
        self.bits, self.blend = bits, blend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = fake_quantize_tokens(x, self.bits)
        share = self.blend.value
        return value if share >= 1 else x + share.to(x.dtype) * (value - x).detach()


def check_converged(blend: Blend) -> None:
    """Raise `KaruiError` when the model still computes with a blend that no code stands for."""
    if float(blend.value) < 1:
        raise KaruiError(
            f"BitNet: lambda is still {float(blend.value):.3f}, so the model computes with a blend of full and ternary weights; "
            "train for more steps than `warmup`, or lower it."
        )


def make(blend: Blend, *, activations: bool = True):
    """A factory for `karui.qat.fake.prepare`."""

    def one(name: str, linear: nn.Linear, spec: QuantSpec) -> tuple[BlendedWeight, nn.Module | None]:
        return BlendedWeight(linear.weight, spec, blend, name=name), BlendedActivations(blend) if activations else None

    return one
