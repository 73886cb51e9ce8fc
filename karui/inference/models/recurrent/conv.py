"""The causal depthwise convolution over a few tokens: y_t = b + sum_k w_k x_{t - K + 1 + k}, each channel for itself.

The state is the K - 1 inputs before the next one, zeros at a sequence's beginning. The sum is written out tap by tap, so a row's
bits do not depend on how many rows are run at once.
"""

from __future__ import annotations

import torch


def causal_conv(x: torch.Tensor, tail: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
                wide: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [S, q, C] behind tail [S, K - 1, C], weight [C, 1, K], bias [C] -> (y [S, q, C] in `wide`, the next tail)."""
    rows, taps = x.shape[1], weight.shape[-1]
    seen = torch.cat([tail.to(x.dtype), x], 1)
    wide_seen, w = seen.to(wide), weight[:, 0].to(wide)
    y = wide_seen[:, :rows] * w[:, 0]
    for k in range(1, taps):
        y = y + wide_seen[:, k:k + rows] * w[:, k]
    return y if bias is None else y + bias.to(wide), seen[:, rows:]
