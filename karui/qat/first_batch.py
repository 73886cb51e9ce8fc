"""Activation rounding whose learned range is set from the first batch seen in training mode; `lsq_plus` and `pact` say how."""

from __future__ import annotations

import torch
from torch import nn


class FirstBatchRange(nn.Module):
    """x -> values of the same shape and dtype, computed in fp32.

    Learned are shares of `width`, what the first batch spans: inputs of a model's linears span .5 to 5,000, and one learning rate
    has to serve them all. Before the first batch in training mode activations pass unchanged. The first rank's first batch sets
    the ranges of all ranks. The engine has no static activation ranges: they shape training and end with it.
    """

    ready: torch.Tensor
    width: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ready", torch.zeros((), dtype=torch.bool))
        self.register_buffer("width", torch.ones(1))
        self._started = False  # as `ready`, once that was True: to look at a GPU is to wait for it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self._started and not self.ready:
            if not self.training:
                return x
            with torch.no_grad():
                self.start(x)
                if torch.distributed.is_available() and torch.distributed.is_initialized():
                    for t in (self.width, *self.parameters()):
                        torch.distributed.broadcast(t, 0)
                self.ready.fill_(True)
        self._started = True
        return self.rounded(x.float()).to(x.dtype)

    def start(self, x: torch.Tensor) -> None:
        """Set width and shares from the first batch."""
        raise NotImplementedError

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """fp32 x -> values, with gradients for x and the range."""
        raise NotImplementedError
