"""Before the first request: what a GPU compiles, measures and records when it first meets a shape, so that no user waits."""

from __future__ import annotations

import logging
import time
from typing import Any

from karui.inference.requests import Request, SamplingParams

logger = logging.getLogger(__name__)

PROMPTS = (1, 16, 64, 512, 2048)
"""Tokens of the prompts that are run: kernels choose their tiles by powers of two of the rows, up to these."""


def warm_up(engine: Any) -> None:
    """Decode and prefill once in every shape that the engine's runner prepares for (`runner.warm_up`); nothing stays in the
    prefix cache. Runners without preparation, and engines without room for a prompt, are left alone."""
    if not hasattr(engine.runner, "warm_up"):
        return
    began, scheduler = time.perf_counter(), engine.scheduler
    graphs = engine.runner.warm_up(scheduler.max_sequences, scheduler.tables.shape[2])
    longest = min(scheduler.max_tokens, engine.max_context - 2)
    for length in sorted({min(p, longest) for p in PROMPTS if longest > 0}):
        for temperature in (0.0, 1.0):
            params = SamplingParams(max_tokens=2, temperature=temperature, seed=0)
            engine.generate(Request(prompt=[0] * length, params=params, cache_salt="warm-up"))
    engine.pool.forget_all()
    logger.info("warmed up in %.1f s: %d graphs recorded", time.perf_counter() - began, graphs)
