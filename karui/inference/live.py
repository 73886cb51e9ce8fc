"""Requests on their way: a `Group` per request, a `Live` per continuation, a `Score` per text to score."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from karui.inference.beam import BeamSearch
from karui.inference.requests import Completion, Output, Request
from karui.inference.sampling import child_seed
from karui.inference.scheduler import Sequence as Tokens
from karui.inference.text import Detokenizer


class Group:
    """A request: its prompt, its continuations, when things happened. `max_tokens`: what context and memory leave of it."""

    def __init__(self, request: Request, request_id: str, prompt: list[int], seed: int, max_tokens: int) -> None:
        self.request, self.id, self.prompt, self.seed, self.max_tokens = request, request_id, prompt, seed, max_tokens
        self.lives: list[Live] = []
        self.beams: Beams | None = None
        self.arrival_s = time.monotonic()
        self.first_s: float | None = None
        self.finished_s: float | None = None
        self.num_cached: int | None = None

    @property
    def finished(self) -> bool:
        return self.finished_s is not None

    def output(self) -> Output:
        return Output(self.id, self.prompt, [live.completion for live in self.lives], self.num_cached or 0,
                      None if self.first_s is None else self.first_s - self.arrival_s,
                      (self.finished_s or time.monotonic()) - self.arrival_s)


class Live:
    """One continuation: what it has said so far and how its next token is chosen.

    `fast`: the argmax of the raw logits is the next token, and nothing else is wanted of them.
    """

    __slots__ = ("group", "index", "sequence", "params", "seed", "detokenizer", "completion", "ends", "fast", "proposer")

    def __init__(self, group: Group, index: int, backend: Any, eos: frozenset[int]) -> None:
        params = group.request.params
        self.group, self.index, self.params, self.seed = group, index, params, child_seed(group.seed, index)
        self.detokenizer = None if backend is None else Detokenizer(backend, params.stop)
        self.completion = Completion(index, logprobs=None if params.logprobs is None else [])
        self.ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos)
        self.fast = params.greedy and not params.penalized and params.logprobs is None and params.n == params.beams == 1
        self.proposer: Any = None
        self.sequence: Tokens

    @property
    def output_tokens(self) -> list[int]:
        return self.sequence.tokens[self.sequence.num_prompt:]


class Beams:
    """The beams of a group that are alive, and what those that were run this round found."""

    def __init__(self, search: BeamSearch, first: Live) -> None:
        self.search, self.lives = search, [first]
        self.found: dict[Live, list[tuple[int, float]]] = {}
        self.next_index = 1

    def row(self, live: Live, logits: np.ndarray) -> bool:
        """Take one beam's logits; True when the round is complete."""
        self.found[live] = self.search.candidates(logits)
        live.sequence.held = True
        return len(self.found) == len(self.lives)


class Score:
    """A text whose own tokens' logprobs [n - 1] are wanted."""

    def __init__(self, length: int) -> None:
        self.logprobs = torch.zeros(length - 1)
        self.done = False
        self.error: str | None = None

    def rows(self, tokens: list[int], first: int, logits: torch.Tensor) -> None:
        """Rows first .. first + len(logits) of the text are run; the last row of the text predicts nothing that is wanted."""
        count = min(len(logits), len(self.logprobs) - first)
        if count > 0:
            logits = logits[:count].float()
            targets = torch.tensor(tokens[first + 1:first + 1 + count], device=logits.device)
            self.logprobs[first:first + count] = (logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(-1)).cpu()
