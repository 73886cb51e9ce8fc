"""How fast an engine is: prefill and decode rates of one stream, and the latencies of many."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from karui.configs.errors import KaruiError
from karui.inference.requests import Delta, Output, Request, SamplingParams


class Generates(Protocol):
    """The part of an engine that is measured."""

    def generate(self, requests: Sequence[Request]) -> list[Output]:
        """Run requests to their end, all at once."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One request as its receiver saw it; times in seconds from submission, tokens as they were delivered."""

    prompt_tokens: int
    new_tokens: int
    first_s: float
    last_s: float

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first; nan for a single token."""
        return (self.last_s - self.first_s) / (self.new_tokens - 1) if self.new_tokens > 1 else math.nan


def run_timed(engine: Generates, prompts: Sequence[Sequence[int]], new_tokens: int) -> tuple[list[Timing], float]:
    """Submit all prompts (token ids) at once, greedily, past end tokens, sharing no prefix; also returns the total seconds."""
    arrivals: list[list[tuple[float, int]]] = [[] for _ in prompts]
    # A salt of its own keeps every prompt cold, however often the same text was measured before.
    requests = [
        Request(prompt=list(prompt), params=SamplingParams(max_tokens=new_tokens, ignore_eos=True), cache_salt=uuid.uuid4().hex,
                on_delta=_recorder(arrivals[i]))
        for i, prompt in enumerate(prompts)]
    start = time.perf_counter()
    outputs = engine.generate(requests)
    total = time.perf_counter() - start
    timings = []
    for prompt, output, arrived in zip(prompts, outputs, arrivals, strict=True):
        count = len(output.token_ids)
        completion = output.completions[0]
        if completion.error or not arrived or count < new_tokens:
            raise KaruiError(f"speed: a request ended after {count} of {new_tokens} tokens ({completion.finish_reason}"
                             f"{': ' + completion.error if completion.error else ''}); choose a shorter prompt or fewer tokens.")
        first = arrived[0]
        # A speculative step may deliver several tokens as the first delta: only those after it took the time that follows.
        timings.append(Timing(prompt_tokens=len(prompt), new_tokens=count - first[1] + 1, first_s=first[0] - start,
                              last_s=arrived[-1][0] - start))
    return timings, total


def _recorder(arrived: list[tuple[float, int]]) -> Any:
    def record(delta: Delta) -> None:
        if delta.token_ids:
            arrived.append((time.perf_counter(), len(delta.token_ids)))
    return record


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Tokens per second of one stream: prefill of `prefill_tokens`, decode after contexts of the given lengths."""

    prefill_tokens: int
    prefill_per_s: float
    decode_per_s: dict[int, float]
    new_tokens: int


def speed(engine: Generates, tokens: Sequence[int], contexts: Sequence[int] = (8, 512), new_tokens: int = 64,
          repeats: int = 3) -> Speed:
    """Best of `repeats` (a busy machine only ever slows things down), after one warm-up.

    Args:
        tokens: text to take prompts from, at least as long as the largest context.
        contexts: prompt lengths; the largest also measures prefill.
    Raises:
        KaruiError: too few tokens, or a request that does not fit the engine's context.
    """
    longest = max(contexts)
    if len(tokens) < longest:
        raise KaruiError(f"speed: {len(tokens)} tokens of text are too few for a context of {longest}.")
    run_timed(engine, [tokens[:min(16, longest)]], min(4, new_tokens))
    prefill, decode = 0.0, dict.fromkeys(contexts, 0.0)
    for _ in range(repeats):
        for context in contexts:
            (timing,), _total = run_timed(engine, [tokens[:context]], new_tokens)
            decode[context] = max(decode[context], 1.0 / timing.tpot_s)
            if context == longest:
                prefill = max(prefill, context / timing.first_s)
    return Speed(prefill_tokens=longest, prefill_per_s=prefill, decode_per_s=decode, new_tokens=new_tokens)


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest-rank percentile; nan values are left out, nan when none is left."""
    kept = sorted(v for v in values if not math.isnan(v))
    return kept[min(len(kept) - 1, max(0, math.ceil(share * len(kept)) - 1))] if kept else math.nan
