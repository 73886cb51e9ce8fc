"""From logits to a token: `distribution` is the one definition of p, for plain draws, logprobs and speculation alike.

Everything works on one row [V] at a time and draws with `uniform(seed, position)`, so a token depends on its own request only.
Order of the steps, as in transformers: penalties, temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from karui.inference.requests import SamplingParams, TokenLogprob
from karui.inference.speculative.random import draw, uniform


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
    logits = penalize(logits, params, prompt, output)
    if params.greedy:
        p = np.zeros(len(logits), dtype=np.float32)
        p[int(logits.argmax())] = 1
        return p
    scaled = logits.astype(np.float32) / np.float32(params.temperature)
    scaled -= scaled.max()
    if 0 < params.top_k < len(scaled):
        scaled[scaled < np.partition(scaled, -params.top_k)[-params.top_k]] = -np.inf
    p = np.exp(scaled)
    p /= p.sum()
    if params.top_p < 1:
        p = _nucleus(p, params.top_p)
    if params.min_p > 0:
        p[p < params.min_p * p.max()] = 0
    return p / p.sum()


def _nucleus(p: np.ndarray, top_p: float) -> np.ndarray:
    """p with everything outside the smallest likeliest set of mass >= top_p set to zero."""
    order, few = None, 512
    if len(p) > 2 * few:  # sorting the whole vocabulary costs milliseconds, and the nucleus is nearly always small
        best = np.argpartition(p, -few)[-few:]
        if p[best].sum(dtype=np.float64) >= top_p:
            order = best[np.argsort(-p[best], kind="stable")]
    if order is None:
        order = np.argsort(-p, kind="stable")
    keep = int(np.searchsorted(np.cumsum(p[order], dtype=np.float64), top_p)) + 1
    kept = np.zeros_like(p)
    kept[order[:keep]] = p[order[:keep]]
    return kept


def sample(logits: np.ndarray, params: SamplingParams, seed: int, position: int, prompt: Sequence[int] = (),
           output: Sequence[int] = ()) -> tuple[int, float]:
    """(token, its probability under `distribution`) for sequence position `position`."""
    if params.greedy:
        return int(penalize(logits, params, prompt, output).argmax()), 1.0
    p = distribution(logits, params, prompt, output)
    token = draw(p, uniform(seed, position))
    return token, float(p[token])


def logprobs_of(logits: np.ndarray, token: int, probability: float, top: int) -> TokenLogprob:
    """Logprobs of `token` from raw `logits` [V], with the `top` likeliest alternatives."""
    wide = logits.astype(np.float64)
    peak = wide.max()
    norm = peak + np.log(np.exp(wide - peak).sum())
    best: tuple[tuple[int, float], ...] = ()
    if top:
        top = min(top, len(wide))
        ids = np.argpartition(-wide, top - 1)[:top]
        ids = ids[np.lexsort((ids, -wide[ids]))]
        best = tuple((int(i), float(wide[i] - norm)) for i in ids)
    return TokenLogprob(token, float(wide[token] - norm), float(np.log(probability)) if probability > 0 else float("-inf"), best)


def child_seed(seed: int, index: int) -> int:
    """The seed of continuation `index` of a request; continuation 0 uses the request's own."""
    return seed if index == 0 else int(uniform(seed, index, stream=9) * 2**53)
