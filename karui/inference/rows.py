"""The rows of logits that a step gave back, looked at as little as possible."""

from __future__ import annotations

import functools
import math

import numpy as np

from karui.inference.batch import StepOutput
from karui.inference.requests import SamplingParams, TokenLogprob
from karui.inference.sampling import sample_on_device, sample_rows


class Rows:
    """The logits of a step: every row's argmax at once, single rows on demand. From a GPU nothing is fetched unasked, for each
    look makes the host wait."""

    def __init__(self, output: StepOutput) -> None:
        self.output = output
        self.drawn: dict[int, tuple[int, float]] = {}
        self.logprobs: dict[int, TokenLogprob] = {}

    @functools.cached_property
    def best(self) -> list[int]:
        """Each row's argmax, -1 for rows that are not numbers."""
        logits = self.output.logits
        if self.on_gpu:
            top = logits.max(-1)
            found: list[int] = top.indices.where(~top.values.isnan(), -1).tolist()
            return found
        array = logits.numpy()
        best = array.argmax(-1)  # the first NaN where there is one
        return np.where(np.isnan(array[np.arange(len(best)), best]), -1, best).tolist()

    def bad(self, row: int) -> bool:
        """Whether a row's logits are not numbers; one that was drawn on the GPU is known by its logprob."""
        known = self.logprobs.get(row)
        return self.best[row] < 0 if known is None else math.isnan(known.raw)

    def numpy(self, row: int) -> np.ndarray:
        return self.output.logits[row].cpu().numpy()

    def draw(self, rows: list[int], draws: list[tuple[SamplingParams, int, int]]) -> None:
        """Draw a token for each of `rows`; on a GPU there, where no alternatives are wanted beside it."""
        there = [i for i, (params, _, _) in enumerate(draws) if self.on_gpu and not params.logprobs]
        if there:
            wanted, logits = [rows[i] for i in there], self.output.logits
            found = sample_on_device(logits if wanted == list(range(len(logits))) else logits[wanted], [draws[i] for i in there])
            self.drawn = {rows[i]: (token, chance) for i, (token, chance, _) in zip(there, found, strict=True)}
            self.logprobs = {rows[i]: logprob for i, (_, _, logprob) in zip(there, found, strict=True)}
        rest = {row: draw for row, draw in zip(rows, draws, strict=True) if row not in self.drawn}
        if rest:
            self.drawn |= dict(zip(rest, sample_rows(self.take(list(rest)), list(rest.values())), strict=True))

    def take(self, rows: list[int]) -> np.ndarray:
        if self.on_gpu:
            return self.output.logits[rows].cpu().numpy()
        return self.output.logits.numpy()[rows if len(rows) < len(self.output.logits) else slice(None)]

    @property
    def on_gpu(self) -> bool:
        return self.output.logits.is_cuda

    def many(self, rows: slice) -> np.ndarray:
        return self.output.logits[rows].cpu().numpy()
