"""Random bits that depend on nothing but a key: Philox4x32-10 (Salmon et al., SC 2011, "Parallel random numbers: as easy as
1, 2, 3"), in torch integers.

Stochastic rounding keyed by (seed, step, layer, tensor) rounds the same way after a resume, in a recomputed forward pass,
compiled or not, on any device. A `torch.Generator` gives none of these.
"""

from __future__ import annotations

import torch

_LOW = 0xFFFFFFFF
_ROUND = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(counter: tuple[torch.Tensor, ...], key: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    """Four tensors of 32 random bits (int64 in [0, 2^32)) from four counter words (int64, broadcastable) and a 64-bit key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key[0] & _LOW, key[1] & _LOW
    for _ in range(10):
        # the 64-bit products wrap in int64; the masks make that harmless
        product0, product1 = c0 * _ROUND[0], c2 * _ROUND[1]
        low0, high0 = product0 & _LOW, (product0 >> 32) & _LOW
        low1, high1 = product1 & _LOW, (product1 >> 32) & _LOW
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def noise_bits(
    shape: tuple[int, ...] | torch.Size,
    *,
    seed: int,
    step: int | torch.Tensor,
    layer: int,
    tensor: int,
    device: torch.device | str = "cpu",
    start: int = 0,
) -> torch.Tensor:
    """int32 `shape` of uniform integers in [0, 2^31), element i a function of (seed, step, layer, tensor, start + i) alone.

    `step` may be an int64 tensor of one element, so that a compiled graph need not be rebuilt at every step; `start` is a
    multiple of 4.
    """
    total = 1
    for size in shape:
        total *= size
    index = torch.arange(start // 4, start // 4 + (total + 3) // 4, dtype=torch.int64, device=device)
    when = step.to(index.device).reshape(()) if isinstance(step, torch.Tensor) else torch.tensor(step, device=device)
    fill = torch.zeros_like(index)
    words = philox((index, fill + (when & _LOW), fill + (layer & _LOW), fill + (tensor & _LOW)), (seed, seed >> 32))
    return (torch.stack(words, -1).reshape(-1)[:total] >> 1).to(torch.int32).reshape(shape)
