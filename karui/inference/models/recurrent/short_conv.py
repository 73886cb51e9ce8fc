"""LFM2's short convolution over K tokens: (B, C, x) = W_in h, y = W_out (C * conv(B * x)) (LFM2 technical report, arXiv
2511.23404, section 2). The state of a layer is the K - 1 last products B * x, no more than a few kilobytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from karui.inference.models.recurrent.conv import causal_conv


@dataclass(frozen=True, kw_only=True)
class ShortConv:
    """See `Recurrent`. `inner` channels, `taps` tokens; `bias`: of the convolution and both projections."""

    layers: tuple[bool, ...]
    inner: int
    taps: int
    bias: bool = False
    module: ClassVar[str] = "conv"
    projections: ClassVar[tuple[str, ...]] = ("in_proj",)

    def shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        c = self.inner
        found: dict[str, tuple[int, ...]] = {"in_proj.weight": (3 * c, hidden), "conv.weight": (c, 1, self.taps),
                                             "out_proj.weight": (hidden, c)}
        return found | ({"in_proj.bias": (3 * c,), "conv.bias": (c,), "out_proj.bias": (hidden,)} if self.bias else {})

    def parts(self) -> tuple[tuple[tuple[int, ...], bool], ...]:
        return (((self.taps - 1, self.inner), False),)

    def mix(self, rows: Sequence[torch.Tensor], weights: Mapping[str, torch.Tensor], state: tuple[torch.Tensor, ...],
            wide: torch.dtype) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        before, after, x = rows[0].chunk(3, -1)
        y, tail = causal_conv(before * x, state[0], weights["conv.weight"], weights.get("conv.bias"), wide)
        return after * y.to(x.dtype), (tail,)
