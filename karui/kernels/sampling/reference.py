"""Plain torch, row by row: sort, cut, renormalize, and the same Philox numbers as the kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from karui.kernels.quantize.noise import philox

if TYPE_CHECKING:
    from karui.kernels.sampling import Settings


def kept(p: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Which entries of the distribution p [V] may be drawn."""
    keep = torch.ones_like(p, dtype=torch.bool)
    order = p.argsort(descending=True, stable=True)
    if top_k > 0:
        keep &= p >= p[order[min(top_k, len(p)) - 1]]
    if top_p < 1:
        inside = torch.where(keep, p, 0.0)
        whole = inside.sum()
        before = inside[order].cumsum(0) - inside[order]
        least = inside[order][before < top_p * whole].min()
        keep &= p >= least
    return keep & (p >= min_p * p.max())


def uniforms(size: int, seed: int, position: int) -> torch.Tensor:
    """fp32 [size] in (0, 1): 24 bits of Philox word 0 at counter (i, position, 0, 0)."""
    i = torch.arange(size, dtype=torch.int64)
    zero = torch.zeros_like(i)
    words = philox((i, zero + (position & 0xFFFFFFFF), zero, zero), (seed, seed >> 32))[0]
    return ((words >> 8).float() + 0.5) * 2.0**-24


def sample(logits: torch.Tensor, settings: Settings) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `karui.kernels.sampling.sample`."""
    tokens, chances = [], []
    rows = zip(*(t.tolist() for t in vars(settings).values()))
    for row, (temperature, top_k, top_p, min_p, seed, position) in zip(logits.float(), rows):
        if temperature == 0:
            tokens.append(int(row.argmax()))
            chances.append(1.0)
            continue
        p = (row / temperature).softmax(-1)
        keep = kept(p, top_k, top_p, min_p)
        score = p.log() - (-uniforms(len(p), seed, position).log()).log().to(p.device)
        tokens.append(int(score.masked_fill(~keep, float("-inf")).argmax()))
        chances.append(float(p[tokens[-1]] / p[keep].sum()))
    drawn = torch.tensor(tokens, dtype=torch.int64, device=logits.device)
    logprobs = logits.float().log_softmax(-1).gather(1, drawn[:, None])[:, 0]
    return drawn, torch.tensor(chances, device=logits.device), logprobs
