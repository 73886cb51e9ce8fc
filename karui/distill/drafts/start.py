"""A drafting layer that copies before it has learned anything: an induction head by construction (arXiv 2209.11895).

Row r of the layer holds the embedding of x_{r+1} beside a stream in which x_r can still be read (linearly, with R^2 of 0.86 in
SmolLM2-135M). So one layer is enough: a query made of the embedding of x_{t+1} finds the rows r with x_r = x_{t+1} by keys
made of their streams, and their values are the embeddings of what followed, x_{r+1}. Matching uses only the rotary dimensions
that turn slowly, which see content at any distance. A model's greedy answers repeat their prompt and themselves, so this alone
drafts a good part of them (SmolLM2-135M on GSM8K: 44 % of the tokens, where an epoch over 54 answers from a random start
reaches 34 %).

Legend: n rows, H hidden size, A streams' width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

SHARPNESS = 5.0
"""Query times key of a match, per matched dimension."""
STRENGTH = 1.5
"""Size of what is copied, beside a stream of unit mean square."""
SLOWEST = 0.02
"""Radians a position that a matched dimension turns at most."""


@torch.no_grad()
def scale_fusion(layer: Any, aux: torch.Tensor) -> None:
    """Start `fc` so that a typical fused stream has mean square one, each layer's streams with an equal part in it.

    Streams grow with depth, and what the layer adds to them would drown: SmolLM2-135M's enter layers 2, 15 and 27 with root mean
    squares of 2.8, 6.1 and 21.8. The median over the tokens leaves out a text's first, a hundred times larger.

    Args:
        aux: [n, A] streams of some text.
    """
    parts = aux.unflatten(-1, (-1, layer.config.hidden_size))
    sizes = parts.pow(2).mean(-1).sqrt().median(0).values.clamp_min(1e-6)
    weight = layer.fc.weight.unflatten(-1, (len(sizes), -1))  # [H, L, H]
    weight.normal_().div_(sizes[:, None] * (len(sizes) * weight.shape[-1]) ** 0.5)


@torch.no_grad()
def start_copying(layer: Any, aux: Sequence[torch.Tensor], embeddings: Sequence[torch.Tensor]) -> float:
    """Make the layer's attention an induction head; returns R^2 of reading a row's token from its fused stream.

    Args:
        layer: an `Eagle3`, its fusion scaled.
        aux: [n, A] streams of each text; embeddings: [n, H] of its tokens. The first row of a text is left out.
    """
    c, attention, width = layer.config, layer.midlayer.self_attn, layer.config.hidden_size
    streams = torch.cat([F.rms_norm(layer.fuse(a[1:]), (width,)) for a in aux])
    tokens = torch.cat([F.rms_norm(e[1:], (width,)) for e in embeddings])
    gram = streams.T @ streams + 0.01 * len(streams) * torch.eye(width)
    read = torch.linalg.solve(gram, streams.T @ tokens).T  # [H, H]: stream -> embedding
    missed = (tokens - streams @ read.T).pow(2).sum() / tokens.pow(2).sum()
    half, dim, group = c.head_dim // 2, c.head_dim, c.num_heads // c.num_kv_heads
    slow = [i for i in range(half) if c.rope_theta ** (-i / half) < SLOWEST] or [half - 1]
    matched = torch.tensor([*slow, *(i + half for i in slow)])
    looks, says = (torch.linalg.qr(torch.randn(width, width))[0] for _ in range(2))
    nothing = torch.zeros(max(dim, len(matched)), width)
    for h in range(c.num_kv_heads):
        look = looks[(h * len(matched) + torch.arange(len(matched))) % width] * SHARPNESS**0.5
        say = says[(h * dim + torch.arange(dim)) % width]
        attention.k_proj.weight[h * dim + matched] = torch.cat([nothing[: len(matched)], look @ read], 1)
        attention.v_proj.weight[h * dim : (h + 1) * dim] = torch.cat([say, nothing[:dim]], 1)
        for q in range(h * group, (h + 1) * group):
            attention.q_proj.weight[q * dim + matched] = torch.cat([look, nothing[: len(matched)]], 1)
            attention.o_proj.weight[:, q * dim : (q + 1) * dim] = say.T * (STRENGTH / group)
    return 1.0 - float(missed)


@torch.no_grad()
def calibrate(layer: Any, loss: Callable[[], float]) -> float:
    """Set the last norm's weight, one number for all channels, to where `loss` is least; returns it.

    A layer that is sure of what it copies would otherwise be corrected by gradients that wipe out the copying.
    """
    found = []
    for scale in (0.7**i for i in range(10)):
        layer.norm.weight.fill_(scale)
        found.append((loss(), scale))
    layer.norm.weight.fill_(min(found)[1])
    return min(found)[1]
