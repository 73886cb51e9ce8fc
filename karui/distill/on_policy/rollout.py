"""`Sampler`, what it draws, and documents that were written turn by turn.

A document is a list of turns as the data has them: text that is given (system, user, tool) and text that carries loss. The
student writes each of the latter anew, given all before it; given turns are taken as they are. Only written tokens carry loss,
each with the log-probability it was drawn with.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from karui.configs.errors import KaruiError


@dataclass(frozen=True)
class Drawn:
    """One continuation.

    Attributes:
        tokens: [n] ids, the end token included when there is one.
        processed: [n] log-probability under the distribution each was drawn from (temperature, top-p).
        raw: [n] log-probability under the model itself.
        finished: an end token was drawn; False when the limit cut it off.
    """

    tokens: np.ndarray
    processed: np.ndarray
    raw: np.ndarray
    finished: bool


class Sampler(Protocol):
    """A text generator with weights that can be swapped; `version` says which ones it holds."""

    version: int

    def generate(self, prompts: Sequence[np.ndarray], seeds: Sequence[int], max_tokens: Sequence[int]) -> list[Drawn]:
        """One continuation per prompt, each with its own seed and limit.

        Same prompt, seed and weights: same tokens, whatever else is in the batch.
        """


@dataclass(frozen=True)
class Rollout:
    """A document the student wrote in.

    Attributes:
        ids: [n] int32; loss_mask: [n] bool, True for written tokens.
        processed, raw: [n] float32 log-probabilities of written tokens when they were drawn, 0 elsewhere.
        version: of the weights that wrote it.
        finished: every turn came to its own end.
        index: the sample it stands for.
        own: the student wrote it; False: the data's own text.
    """

    ids: np.ndarray
    loss_mask: np.ndarray
    processed: np.ndarray
    raw: np.ndarray
    version: int
    finished: bool
    index: int
    own: bool = True


def turns(loss_mask: np.ndarray) -> list[tuple[int, int, bool]]:
    """(from, to, carries loss) of the runs of a mask."""
    mask = np.asarray(loss_mask, dtype=bool)
    cuts = [0, *(np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist(), len(mask)]
    return [(a, b, bool(mask[a])) for a, b in zip(cuts, cuts[1:]) if b > a]


def write(sampler: Sampler, documents: Sequence[tuple[int, np.ndarray, np.ndarray]], *, seed: int, steps: Sequence[int],
          max_tokens: int, max_length: int) -> list[Rollout]:
    """Let the student write the supervised turns of documents, all documents' first turns in one batch, then all second ones.

    Args:
        documents: (sample index, ids [n], loss mask [n]).
        seed, steps: with a document's index and the turn, the run's seed and the step [documents] seed each continuation.
        max_tokens: of one turn; max_length: of a document, beyond which nothing more is written.

    A turn that the limit cut off ends its document: what follows in the data would not follow such a turn.
    """
    state = [_Open(step, *document) for step, document in zip(steps, documents, strict=True)]
    turn = 0
    while live := [s for s in state if s.advance()]:
        for s in live:
            if len(s.ids) >= max_length:
                s.close(finished=False)
        going = [s for s in live if s.left]
        limits = [min(max_tokens, max_length - len(s.ids)) for s in going]
        seeds = [_seed(seed, s.step, s.index, turn) for s in going]
        drawn = sampler.generate([np.array(s.ids, np.int64) for s in going], seeds, limits) if going else []
        for s, d in zip(going, drawn, strict=True):
            s.add(d)
        turn += 1
    return [s.rollout(sampler.version) for s in state]


class _Open:
    """A document while it is written."""

    def __init__(self, step: int, index: int, ids: np.ndarray, mask: np.ndarray) -> None:
        self.step, self.index, self.source, self.left = step, index, ids, turns(mask)
        self.ids: list[int] = []
        self.mask: list[bool] = []
        self.processed: list[float] = []
        self.raw: list[float] = []
        self.finished = True
        if not any(loss for _, _, loss in self.left):
            raise KaruiError(f"sample {index} has no supervised turn, so there is nothing for the student to write.")

    def advance(self) -> bool:
        """Take given turns over up to the next one to write; False when none is left."""
        while self.left and not self.left[0][2]:
            a, b, _ = self.left.pop(0)
            if any(loss for _, _, loss in self.left):  # what follows the last written turn carries no loss
                self._extend(self.source[a:b].tolist(), False, [0.0] * (b - a), [0.0] * (b - a))
        return bool(self.left)

    def add(self, drawn: Drawn) -> None:
        self.left.pop(0)
        self._extend(drawn.tokens.tolist(), True, drawn.processed.tolist(), drawn.raw.tolist())
        if not drawn.finished:
            self.close(finished=False)

    def close(self, *, finished: bool) -> None:
        self.left, self.finished = [], finished

    def rollout(self, version: int) -> Rollout:
        return Rollout(np.array(self.ids, np.int32), np.array(self.mask, bool), np.array(self.processed, np.float32),
                       np.array(self.raw, np.float32), version, self.finished, self.index)

    def _extend(self, ids: list[int], loss: bool, processed: list[float], raw: list[float]) -> None:
        self.ids += ids
        self.mask += [loss] * len(ids)
        self.processed += processed
        self.raw += raw


def _seed(*parts: int) -> int:
    """A seed of 63 bits from whole numbers, the same everywhere."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1
