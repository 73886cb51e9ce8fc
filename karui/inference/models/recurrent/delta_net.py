"""Gated DeltaNet, the linear attention of Qwen3-Next and Qwen3.5: a memory matrix per head that forgets and overwrites (arXiv
2412.06464, eq. 10).

With g_t <= 0 the log of the decay, b_t in (0, 1) how much is overwritten, keys and queries of length 1:

    S_t = exp(g_t) S_{t-1} + k_t (b_t (v_t - exp(g_t) S_{t-1}' k_t))'        o_t = S_t' q_t / sqrt(d_k)

`recur` is that, row by row. `chunked` runs up to `CHUNK` rows at once (section 3.3, the WY form): with G_t the sum of g up to row
t of the chunk, the corrections u_t = b_t (v_t - ...) of all rows solve one unit lower triangular system

    (1 + tril(b_i exp(G_i - G_j) k_i'k_j, -1)) U = b V - b exp(G) K S_0

and the rest are matrix products. Both work in fp32 (float64 for a float64 model); they agree up to rounding.

Legend for shapes: S sequences, q rows, A value heads, G key heads, D key dim, V value dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from karui.inference.models.recurrent.conv import causal_conv

CHUNK = 64
LENGTH_EPS = 1e-6  # under the root of a key's length


@dataclass(frozen=True, kw_only=True)
class DeltaNet:
    """See `Recurrent`. Each key head serves value_heads / key_heads value heads beside each other; `eps` of the gated norm.

    joint: queries, keys, values and gate of a key head are beside each other in one projection, strengths and decays in another
    (Qwen3-Next); else there are four projections (Qwen3.5).
    """

    layers: tuple[bool, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    eps: float
    joint: bool = True
    module: ClassVar[str] = "linear_attn"

    @property
    def projections(self) -> tuple[str, ...]:
        return ("in_proj_qkvz", "in_proj_ba") if self.joint else ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")

    @property
    def inner(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def _channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.inner

    def shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        heads = (self.value_heads,)
        widths = (self._channels + self.inner, 2 * self.value_heads) if self.joint else (
            self._channels, self.inner, self.value_heads, self.value_heads)
        found: dict[str, tuple[int, ...]] = {f"{n}.weight": (w, hidden) for n, w in zip(self.projections, widths, strict=True)}
        return found | {"conv1d.weight": (self._channels, 1, self.taps), "A_log": heads, "dt_bias": heads,
                        "norm.weight": (self.value_dim,), "out_proj.weight": (hidden, self.inner)}

    def parts(self) -> tuple[tuple[tuple[int, ...], bool], ...]:
        return ((self.taps - 1, self._channels), False), ((self.value_heads, self.key_dim, self.value_dim), True)

    def mix(self, rows: Sequence[torch.Tensor], weights: Mapping[str, torch.Tensor], state: tuple[torch.Tensor, ...],
            wide: torch.dtype) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        each = self.value_heads // self.key_heads
        x, z, overwrite, step = self._taken_apart(rows, each) if self.joint else rows
        z = z.unflatten(-1, (self.value_heads, self.value_dim))
        overwrite, step = overwrite.to(wide), step.to(wide)
        x, tail = causal_conv(x, state[0], weights["conv1d.weight"], None, wide)
        keys = self.key_heads * self.key_dim
        q, k, v = F.silu(x).to(rows[0].dtype).to(wide).split([keys, keys, self.inner], -1)
        q, k = (_unit(t.unflatten(-1, (self.key_heads, self.key_dim))).repeat_interleave(each, -2) for t in (q, k))
        v = v.unflatten(-1, (self.value_heads, self.value_dim))
        decay = -weights["A_log"].to(wide).exp() * F.softplus(step + weights["dt_bias"].to(wide))
        rule = recur if rows[0].shape[1] == 1 else chunked
        o, memory = rule(q * self.key_dim**-0.5, k, v, decay, overwrite.sigmoid(), state[1])
        o = o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + self.eps) * weights["norm.weight"].to(wide) * F.silu(z.to(wide))
        return o.flatten(-2).to(rows[0].dtype), (tail, memory)

    def _taken_apart(self, rows: Sequence[torch.Tensor], each: int) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values; gate; strengths; decays."""
        qkvz, ba = (x.unflatten(-1, (self.key_heads, -1)) for x in rows)
        q, k, v, z = (x.flatten(-2) for x in qkvz.split([self.key_dim, self.key_dim, *[each * self.value_dim] * 2], -1))
        return torch.cat([q, k, v], -1), z, *(x.flatten(-2) for x in ba.split([each, each], -1))


def recur(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, b: torch.Tensor,
          memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """q, k [S, q, A, D], v [S, q, A, V], g, b [S, q, A], memory [S, A, D, V] -> (o [S, q, A, V], the memory behind them)."""
    out = torch.empty_like(v)
    for t in range(q.shape[1]):
        memory = memory * g[:, t].exp()[..., None, None]
        known = (memory * k[:, t, :, :, None]).sum(-2)
        memory = memory + k[:, t, :, :, None] * ((v[:, t] - known) * b[:, t, :, None])[:, :, None]
        out[:, t] = (memory * q[:, t, :, :, None]).sum(-2)
    return out, memory


def chunked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, b: torch.Tensor,
            memory: torch.Tensor, chunk: int = CHUNK) -> tuple[torch.Tensor, torch.Tensor]:
    """What `recur` does, `chunk` rows at once."""
    out = []
    for start in range(0, q.shape[1], chunk):
        part = slice(start, start + chunk)
        q_c, k_c, v_c, b_c = (t[:, part].transpose(1, 2) for t in (q, k, v, b[..., None]))  # [S, A, rows, ...]
        total = g[:, part].transpose(1, 2).cumsum(-1)
        rows = total.shape[-1]
        later = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu(1)
        decay = (total[..., :, None] - total[..., None, :]).masked_fill(later, float("-inf")).exp()
        system = (b_c * k_c) @ k_c.transpose(-1, -2) * decay  # what lies on the diagonal is not read
        right = b_c * (v_c - total.exp()[..., None] * (k_c @ memory))
        u = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        out.append((total.exp()[..., None] * (q_c @ memory) + (q_c @ k_c.transpose(-1, -2) * decay) @ u).transpose(1, 2))
        left = (total[..., -1:] - total).exp()[..., None]
        memory = memory * total[..., -1].exp()[..., None, None] + (k_c * left).transpose(-1, -2) @ u
    return torch.cat(out, 1), memory


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + LENGTH_EPS)
