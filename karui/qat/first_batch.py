"""Activation rounding whose learned range is set from the first batch seen in training mode; `lsq_plus` and `pact` say how."""

from __future__ import annotations

import torch
from torch import nn


class FirstBatchRange(nn.Module):
    """x -> values of the same shape and dtype, computed in fp32.

    Before the first batch in training mode activations pass unchanged. The engine has no static activation ranges: they shape
    training and end with it.
    """

    ready: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ready", torch.zeros((), dtype=torch.bool))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.ready:
            if not self.training:
                return x
            with torch.no_grad():
                self.start(x)
                self.ready.fill_(True)
        return self.rounded(x.float()).to(x.dtype)

    def start(self, x: torch.Tensor) -> None:
        """Set the range from the first batch."""
        raise NotImplementedError

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """fp32 x -> values, with gradients for x and the range."""
        raise NotImplementedError
