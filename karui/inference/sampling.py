"""From logits to a token: `distribution` is the one definition of p, for plain draws, logprobs and speculation alike.

Every draw uses `uniform(seed, position)`, so a token depends on its own request only. The native sampler draws for all rows of a
step in one call.
Order of the steps, as in transformers: penalties, temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from karui.inference.requests import SamplingParams, TokenLogprob
from karui.inference.speculative.random import draw, uniform
from karui.kernels import native


def penalize(logits: np.ndarray, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> np.ndarray:
    """Logits [V] with the repetition (arXiv 1909.05858, eq. 2), presence and frequency penalties; a copy when any is set."""
    if not params.penalized:
        return logits
    logits = logits.astype(np.float32, copy=True)
    if params.repetition_penalty != 1:
        seen = np.unique(np.fromiter((*prompt, *output), dtype=np.int64))
        values = logits[seen]
        logits[seen] = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if len(output) and (params.presence_penalty or params.frequency_penalty):
        seen, counts = np.unique(np.fromiter(output, dtype=np.int64), return_counts=True)
        logits[seen] -= params.presence_penalty + params.frequency_penalty * counts.astype(np.float32)
    return logits


def distribution(logits: np.ndarray, params: SamplingParams, prompt: Sequence[int] = (),
                 output: Sequence[int] = ()) -> np.ndarray:
    """The probabilities [V] fp32 a token is drawn from, given raw `logits` [V] and the tokens so far (read by penalties only).

    Greedy: one-hot.
    """
    ids, p = _candidates(penalize(logits, params, prompt, output), params)
    if ids is None:
        return p
    dense = np.zeros(len(logits), dtype=np.float32)
    dense[ids] = p
    return dense


def _candidates(logits: np.ndarray, params: SamplingParams) -> tuple[np.ndarray | None, np.ndarray]:
    """(ascending ids of the tokens that may be drawn, or None for all; their probabilities) of penalized logits."""
    if params.greedy:
        return np.array([logits.argmax()]), np.ones(1, dtype=np.float32)
    scaled = logits.astype(np.float32) / np.float32(params.temperature)
    scaled -= scaled.max()
    ids = None
    if 0 < params.top_k < len(scaled):
        ids = np.flatnonzero(scaled >= np.partition(scaled, -params.top_k)[-params.top_k])
        scaled = scaled[ids]
    p = np.exp(scaled)
    p /= p.sum()
    if params.top_p < 1:
        kept = _nucleus(p, params.top_p)
        ids, p = kept if ids is None else ids[kept], p[kept]
    if params.min_p > 0:
        kept = np.flatnonzero(p >= params.min_p * p.max())
        ids, p = kept if ids is None else ids[kept], p[kept]
    return ids, p if ids is None else p / p.sum()


def _nucleus(p: np.ndarray, top_p: float) -> np.ndarray:
    """Ascending indices of the smallest likeliest set of mass >= top_p."""
    # All tokens below (1 - top_p) / V together miss less than 1 - top_p, so none of them is needed; the rest is quick to sort.
    rest = np.flatnonzero(p >= np.float32(0.99 * (1 - top_p) / len(p)))
    order = rest[np.argsort(-p[rest], kind="stable")]
    keep = int(np.searchsorted(np.cumsum(p[order], dtype=np.float64), top_p)) + 1
    return np.sort(order[:keep])


def sample(logits: np.ndarray, params: SamplingParams, seed: int, position: int, prompt: Sequence[int] = (),
           output: Sequence[int] = ()) -> tuple[int, float]:
    """(token, its probability under `distribution`) for sequence position `position`."""
    return sample_rows(penalize(logits, params, prompt, output)[None], [(params, seed, position)])[0]


def sample_rows(logits: np.ndarray, draws: Sequence[tuple[SamplingParams, int, int]]) -> list[tuple[int, float]]:
    """`sample` for rows of penalized `logits` [L, V] with (parameters, seed, position) each. A row's draw is its own alone."""
    if native.available():
        wanted = np.array([(p.temperature, p.top_p, p.min_p, p.top_k, 0.0 if p.greedy else uniform(seed, position))
                           for p, seed, position in draws], dtype=native.DRAW)
        tokens, chances = native.sample(logits, wanted)
        return list(zip(tokens.tolist(), chances.tolist(), strict=True))
    drawn = []
    for row, (params, seed, position) in zip(logits, draws, strict=True):
        ids, p = _candidates(row, params)
        index = 0 if params.greedy else draw(p, uniform(seed, position))
        drawn.append((index if ids is None else int(ids[index]), float(p[index])))
    return drawn


def sample_on_device(
    logits: torch.Tensor, draws: Sequence[tuple[SamplingParams, int, int]]
) -> list[tuple[int, float, TokenLogprob]]:
    """`sample_rows` for rows of `logits` [L, V] where they lie, by random numbers of the device's own (`kernels.sampling`), with
    each token's logprob: the logits do not leave the GPU. A row's draw is its own alone here too."""
    from karui.kernels.sampling import Settings
    from karui.kernels.sampling import sample as draw_rows

    floats = torch.tensor([(p.temperature, p.top_p, p.min_p) for p, _, _ in draws], dtype=torch.float64)
    whole = torch.tensor([(p.top_k, seed & (2**63 - 1), at) for p, seed, at in draws])
    # one copy there and one back: each makes the host wait
    there = torch.cat((whole, floats.view(torch.int64)), 1).t().contiguous().to(logits.device, non_blocking=True)
    top_k, seed, position, *bits = there
    temperature, top_p, min_p = (row.view(torch.float64) for row in bits)
    tokens, chances, raw = draw_rows(logits, Settings(temperature, top_k, top_p, min_p, seed, position))
    back = torch.stack((tokens.double(), chances.double(), raw.double()), 1).tolist()
    return [(int(token), chance, TokenLogprob(int(token), plain, math.log(chance) if chance > 0 else -math.inf, ()))
            for token, chance, plain in back]


def logprobs_of(logits: np.ndarray, token: int, probability: float, top: int) -> TokenLogprob:
    """Logprobs of `token` from raw `logits` [V], with the `top` likeliest alternatives."""
    peak = float(logits.max())
    norm = peak + float(np.log(np.exp(logits - np.float32(peak)).sum(dtype=np.float64)))
    best: tuple[tuple[int, float], ...] = ()
    if top:
        found = torch.from_numpy(logits).topk(min(top, len(logits)))
        pairs = sorted(zip(found.values.tolist(), found.indices.tolist(), strict=True), key=lambda pair: (-pair[0], pair[1]))
        best = tuple((token, value - norm) for value, token in pairs)
    processed = float(np.log(probability)) if probability > 0 else float("-inf")
    return TokenLogprob(token, float(logits[token]) - norm, processed, best)


def child_seed(seed: int, index: int) -> int:
    """The seed of continuation `index` of a request; continuation 0 uses the request's own."""
    return seed if index == 0 else int(uniform(seed, index, stream=9) * 2**53)
