"""QAT together with LoRA: only the adapter trains, and the merged weight is what lies on the grid.

    W_q = Q(W + s B A),   s = alpha / rank,   gradient of Q straight through, so that  dA = s B^T dW_q,  dB = s dW_q A^T

QLoRA trains A and B beside Q(W) and its merge falls between the grid's points, so that rounding it again gives back part of what
was learnt. Here rounding happens after the sum in every forward pass (as in LoTA, PEQA and L4Q, arXiv 2402.04902, eq. 3), so the
merge is the trained model, bit for bit. B starts at zero: the first forward pass is plain rounding, or a given grid's. In a run
the steps of an integer grid are those that err least on W, and stay so unless they train too.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from karui.configs.quantspec import QuantSpec
from karui.kernels.qtensor import QTensor
from karui.qat.fake import WeightQuantizer


class AdaptedWeight(WeightQuantizer):
    """`lora_a` [rank, in] and `lora_b` [out, rank] around an inner quantizer.

    Args:
        inner: quantizes W + s B A, e.g. `Nearest`, `LSQ`.
    """

    def __init__(self, w: torch.Tensor, inner: WeightQuantizer, *, rank: int, alpha: float) -> None:
        super().__init__()
        out_features, in_features = w.shape
        self.inner, self.scaling = inner, alpha / rank
        self.lora_a = nn.Parameter(torch.empty(rank, in_features, dtype=torch.float32, device=w.device))
        self.lora_b = nn.Parameter(torch.zeros(out_features, rank, dtype=torch.float32, device=w.device))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))

    @property
    def spec(self) -> QuantSpec:  # type: ignore[override]
        return self.inner.spec

    def merged(self, w: torch.Tensor) -> torch.Tensor:
        """W + s B A in fp32."""
        with torch.autocast(w.device.type, enabled=False):
            return torch.addmm(w.float(), self.lora_b, self.lora_a, alpha=self.scaling)

    def forward(self, w: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = self.inner(self.merged(w)).to(w.dtype)
        return value

    @torch.no_grad()
    def codes(self, w: torch.Tensor) -> QTensor:
        return self.inner.codes(self.merged(w))
