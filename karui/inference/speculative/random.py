"""Counter-based uniforms: the number drawn for a position depends on (seed, position, stream) and on nothing else.

A stateful generator would make a request's sample depend on how many numbers its neighbours in the batch drew, or on how
many drafts were rejected before it. Here every position owns its numbers, so a sampled answer is the same alone, batched,
preempted or speculated. A draft model's own draws, for a request without a seed, keep its distribution instead.
"""

from __future__ import annotations

import numpy as np

MASK = (1 << 64) - 1
SAMPLE, ACCEPT, DRAFT, RESIDUAL = 0, 1, 2, 3
"""Streams: the plain draw, the acceptance test of a draft, the draft model's own draw, the draw after a rejection."""


def _mix(x: int) -> int:
    """splitmix64's finalizer (Steele et al. 2014): a bijection of 64 bits whose outputs pass BigCrush."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def uniform(seed: int, position: int, stream: int = SAMPLE, lane: int = 0) -> float:
    """A number in [0, 1) with 53 random bits for this position of the sequence.

    Args:
        seed: the request's seed, any integer.
        position: index in the sequence of the token that is being decided.
        stream: what the number is used for; two uses of one position must not share a number.
        lane: a further index, such as the sibling under test.
    """
    x = _mix((seed + 0x9E3779B97F4A7C15) & MASK)
    x = _mix((x + position * 0x9E3779B97F4A7C15) & MASK)
    x = _mix((x + (stream * 65_536 + lane + 1) * 0xD1B54A32D192ED03) & MASK)
    return (x >> 11) * 2.0**-53


def draw(p: np.ndarray, u: float) -> int:
    """The token at quantile `u` of the distribution p [V] (inverse CDF in float64; p need not sum to one exactly)."""
    cdf = np.cumsum(p, dtype=np.float64)
    index = int(np.searchsorted(cdf, u * cdf[-1], side="right"))
    # u * total may round up to the total: step back to the last token that has any probability.
    return index if index < len(cdf) else int(np.flatnonzero(p)[-1])
