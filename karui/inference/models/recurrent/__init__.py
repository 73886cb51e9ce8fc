"""Layers that keep a state of fixed size instead of keys and values: what stands beside attention in a hybrid model.

    short_conv.py   a gated convolution over a few tokens       LFM2
    delta_net.py    the gated delta rule over a matrix per head  Qwen3-Next, Qwen3.5
    mamba2.py       a selective state space per head             Granite 4 (granitemoehybrid), Bamba
    conv.py         the causal convolution that all three begin with

Each kind is a frozen dataclass of its sizes, so that a `ModelConfig` can hold one, and a pure function: `mix` takes what the
input projections made of some rows of a sequence, and the state before them, to the rows for the output projection and the state
behind them. Projections, adapters and quantized weights are the decoder's; where states lie is `cache/states.py`'s.

One row goes through the recurrence as it is written in the paper, in an order of operations that does not depend on what runs
beside it; several rows go through its chunked form (delta rule, Mamba-2), which is equal up to rounding and much faster.

Legend for shapes: S sequences, q rows of each, C channels, K taps of the convolution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

State = tuple[torch.Tensor, ...]


class Recurrent(Protocol):
    """One kind of recurrent layer with its sizes.

    Attributes:
        layers: for each layer of the model whether it is recurrent, else it is attention.
        module: name of the mixer within its layer. projections: its input linears; the output linear is always `out_proj`.
        inner: width of the rows for `out_proj`.
    """

    @property
    def layers(self) -> tuple[bool, ...]: ...

    @property
    def module(self) -> str: ...

    @property
    def projections(self) -> tuple[str, ...]: ...

    @property
    def inner(self) -> int: ...

    def shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """The mixer's tensors, by their names within it."""

    def parts(self) -> tuple[tuple[tuple[int, ...], bool], ...]:
        """(shape, kept in fp32 whatever the activations' dtype) of each tensor of one layer's state."""

    def mix(self, rows: Sequence[torch.Tensor], weights: Mapping[str, torch.Tensor], state: State,
            wide: torch.dtype) -> tuple[torch.Tensor, State]:
        """Projected rows, each [S, q, out of the projection], and the state before them [S, ...] -> ([S, q, inner] in the dtype
        of the rows, the state behind them). `weights` are the mixer's by name; sums and states are in `wide`."""
