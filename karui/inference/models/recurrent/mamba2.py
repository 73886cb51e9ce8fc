"""Mamba-2: a state space per head whose decay, input and output depend on the token (arXiv 2405.21060, section 6 and eq. 16).

With d_t = softplus(dt_t + dt_bias) and A < 0, of a head with input x_t [P], input map B_t [N] and output map C_t [N]:

    h_t = exp(d_t A) h_{t-1} + (d_t x_t) B_t'        y_t = h_t C_t + D x_t

`recur` is that, row by row; `chunked` is the block decomposition of the same sums (SSD, listing 1): attention with decay within
up to `CHUNK` rows, and the state carries what lies before them. Both work in fp32 (float64 for a float64 model).

Legend for shapes: S sequences, q rows, A heads, P head dim, N state size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from karui.inference.models.recurrent.conv import causal_conv

CHUNK = 128


@dataclass(frozen=True, kw_only=True)
class Mamba2:
    """See `Recurrent`. `groups` of heads share B and C and are normed together; d_t is clamped to `limits`."""

    layers: tuple[bool, ...]
    heads: int
    head_dim: int
    groups: int
    state: int
    taps: int
    eps: float
    limits: tuple[float, float] = (0.0, float("inf"))
    conv_bias: bool = True
    bias: bool = False
    module: ClassVar[str] = "mamba"
    projections: ClassVar[tuple[str, ...]] = ("in_proj",)

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def _channels(self) -> int:
        return self.inner + 2 * self.groups * self.state

    def shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        heads, wide = (self.heads,), self.inner + self._channels + self.heads
        found: dict[str, tuple[int, ...]] = {
            "in_proj.weight": (wide, hidden), "conv1d.weight": (self._channels, 1, self.taps), "A_log": heads, "D": heads,
            "dt_bias": heads, "norm.weight": (self.inner,), "out_proj.weight": (hidden, self.inner)}
        found |= {"conv1d.bias": (self._channels,)} if self.conv_bias else {}
        return found | ({"in_proj.bias": (wide,), "out_proj.bias": (hidden,)} if self.bias else {})

    def parts(self) -> tuple[tuple[tuple[int, ...], bool], ...]:
        return ((self.taps - 1, self._channels), False), ((self.heads, self.head_dim, self.state), True)

    def mix(self, rows: Sequence[torch.Tensor], weights: Mapping[str, torch.Tensor], state: tuple[torch.Tensor, ...],
            wide: torch.dtype) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        gate, x, dt = rows[0].split([self.inner, self._channels, self.heads], -1)
        x, tail = causal_conv(x, state[0], weights["conv1d.weight"], weights.get("conv1d.bias"), wide)
        x, b, c = F.silu(x).to(rows[0].dtype).to(wide).split([self.inner, *[self.groups * self.state] * 2], -1)
        x = x.unflatten(-1, (self.heads, self.head_dim))
        b, c = (t.unflatten(-1, (self.groups, self.state)).repeat_interleave(self.heads // self.groups, -2) for t in (b, c))
        step = F.softplus(dt.to(wide) + weights["dt_bias"].to(wide)).clamp(*self.limits)
        decay = -weights["A_log"].to(wide).exp() * step
        rule = recur if rows[0].shape[1] == 1 else chunked
        y, memory = rule(step[..., None] * x, decay, b, c, state[1])
        y = (y + weights["D"].to(wide)[:, None] * x).flatten(-2) * F.silu(gate.to(wide))
        y = y.unflatten(-1, (self.groups, -1))
        y = (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)).flatten(-2) * weights["norm.weight"].to(wide)
        return y.to(rows[0].dtype), (tail, memory)


def recur(x: torch.Tensor, g: torch.Tensor, b: torch.Tensor, c: torch.Tensor,
          memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [S, q, A, P] (times d), g [S, q, A] (d A), b, c [S, q, A, N], memory [S, A, P, N] -> (y [S, q, A, P], next memory)."""
    out = torch.empty_like(x)
    for t in range(x.shape[1]):
        memory = memory * g[:, t].exp()[..., None, None] + x[:, t, :, :, None] * b[:, t, :, None]
        out[:, t] = (memory * c[:, t, :, None]).sum(-1)
    return out, memory


def chunked(x: torch.Tensor, g: torch.Tensor, b: torch.Tensor, c: torch.Tensor, memory: torch.Tensor,
            chunk: int = CHUNK) -> tuple[torch.Tensor, torch.Tensor]:
    """What `recur` does, `chunk` rows at once."""
    out = []
    for start in range(0, x.shape[1], chunk):
        part = slice(start, start + chunk)
        x_c, b_c, c_c = (t[:, part].transpose(1, 2) for t in (x, b, c))  # [S, A, rows, ...]
        total = g[:, part].transpose(1, 2).cumsum(-1)
        rows = total.shape[-1]
        later = torch.ones(rows, rows, dtype=torch.bool, device=x.device).triu(1)
        decay = (total[..., :, None] - total[..., None, :]).masked_fill(later, float("-inf")).exp()
        out.append((total.exp()[..., None] * (c_c @ memory.transpose(-1, -2)) + (c_c @ b_c.transpose(-1, -2) * decay) @ x_c)
                   .transpose(1, 2))
        left = (total[..., -1:] - total).exp()[..., None]
        memory = memory * total[..., -1].exp()[..., None, None] + (x_c * left).transpose(-1, -2) @ b_c
    return torch.cat(out, 1), memory
