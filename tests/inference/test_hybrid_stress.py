"""Behavioural: a thousand requests on a model whose next token depends on a state alone: a wrong page would change the text.

Faults before and after pages are written, cancellations, priorities, samples that fork, shared beginnings, drafts, little memory.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from karui.inference.batch import StepBatch, StepOutput
from karui.inference.engine import Engine
from karui.inference.models.recurrent.short_conv import ShortConv
from karui.inference.requests import Request, SamplingParams
from karui.inference.speculate import Speculation
from karui.inference.speculative.base import Context, Draft
from karui.inference.speculative.config import SpeculationConfig
from tests.inference.test_stress import VOCAB, CheckingRunner

MODULUS = 1_000_003


class StateRunner(CheckingRunner):
    """The state is a hash of every token so far; the next token is a function of it, and of the text in the blocks."""

    config = replace(CheckingRunner.config, num_layers=2, recurrent=ShortConv(layers=(True, False), inner=8, taps=3))
    state_bytes = 64

    def allocate_states(self, num_pages: int) -> None:
        self.pages = np.full(1 + num_pages, -1, dtype=np.int64)
        self.pages[0] = 0

    def forward(self, batch: StepBatch) -> StepOutput:
        self._maybe_fail()
        assert batch.states is not None
        tokens, positions = batch.tokens.tolist(), batch.positions.tolist()
        self.slots[batch.slots.numpy()] = batch.tokens.numpy()
        behind: dict[int, int] = {}
        for start, stop, before, after in batch.states.tolist():
            assert after != 0 and self.pages[before] >= 0 and (before == 0) == (positions[start] == 0)
            state = int(self.pages[before])
            for row in range(start, stop):
                state = advance(state, tokens[row])
                behind[row] = state
            self.pages[after] = state
        self._maybe_fail()
        assert sorted(behind) == list(range(len(tokens)))
        starts, lengths = batch.query_starts.tolist(), batch.context_lens.tolist()
        logits = torch.zeros(len(batch.logit_rows), VOCAB)
        for at, row in enumerate(batch.logit_rows.tolist()):
            s = next(i for i in range(len(lengths)) if row < starts[i + 1])
            index = np.arange(positions[row] + 1)
            text = self.slots[batch.block_tables[s].numpy()[index // self.block_size] * self.block_size + index % self.block_size]
            logits[at, next_token(behind[row], text)] = 1
        return StepOutput(logits)


def advance(state: int, token: int) -> int:
    return (state * 31 + token + 7) % MODULUS


def next_token(state: int, text: np.ndarray) -> int:
    return (state + int(text.sum())) % VOCAB


def expected(prompt: list[int], count: int) -> list[int]:
    text, state = list(prompt), 0
    for token in prompt:
        state = advance(state, token)
    for _ in range(count):
        text.append(next_token(state, np.array(text)))
        state = advance(state, text[-1])
    return text[len(prompt):]


class Oracle:
    """Drafts what is right, up to a random place."""

    needs_hidden, aux_layers = False, ()

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def propose(self, context: Context) -> Draft:
        count = min(context.limit, context.depth, 5)
        tokens = expected(list(context.tokens), count)
        if count and self.rng.random() < 0.7:
            at = self.rng.randrange(count)
            tokens[at] = (tokens[at] + 1) % VOCAB
        return Draft(tokens=tokens)

    def observe(self, seen: object) -> None: ...

    def reset(self) -> None: ...


@pytest.mark.parametrize(("total", "speculate"), [(900, False), (350, True)])
def test_a_thousand_requests(total: int, speculate: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("ERROR")
    rng = random.Random(5)
    runner = StateRunner(rng, faults=0.01)
    drafts = Speculation(SpeculationConfig(method="ngram", adaptive=False), lambda: Oracle(rng)) if speculate else None
    # 40 pages for 13 sequences at once: the prefix cache has the rest
    engine = Engine(runner, memory=64 * (16 * 60 + 41), max_context=256, block_size=16, max_tokens_per_step=96, max_sequences=13,
                    speculation=drafts)
    assert engine.scheduler.states is not None
    shared = [[rng.randrange(VOCAB) for _ in range(n)] for n in (60, 100)]
    prompts: dict[str, list[int]] = {}
    answers: dict[str, list[int]] = {}
    reasons: dict[str, str] = {}
    submitted = steps = 0

    def submit() -> None:
        nonlocal submitted
        beginning = rng.choice([[], *shared, *list(prompts.values())[-3:]])
        prompt = (beginning + [rng.randrange(VOCAB) for _ in range(rng.choice((1, 5, 20, 60)))])[-190:]
        if rng.random() < 0.15 and answers:  # a conversation that goes on
            name = rng.choice(list(answers))
            prompt = (prompts[name] + answers[name] + [3, 4])[:200]
        name = f"r{submitted}"
        engine.add(Request(prompt=prompt, params=SamplingParams(max_tokens=rng.choice((1, 3, 10, 40)), n=rng.choice((1, 1, 1, 2))),
                           priority=rng.choice((0, 0, 1)), id=name))
        prompts[name], answers[name] = prompt, []
        submitted += 1

    while submitted < total or engine.has_work:
        for _ in range(min(rng.choice((0, 1, 2)), total - submitted)):
            submit()
        if rng.random() < 0.05:
            engine.abort(f"r{rng.randrange(max(submitted, 1))}")
        for delta in engine.step():
            if delta.index == 0:
                answers[delta.request_id] += delta.token_ids
            if delta.finish_reason and delta.index == 0:
                reasons[delta.request_id] = delta.finish_reason
        steps += 1
        assert steps < 60_000, engine.scheduler.dump()
        if steps % 20 == 0:
            engine.check_integrity()
    engine.check_integrity()
    stats = engine.stats
    assert len(reasons) == total and stats.num_free_blocks == stats.num_blocks
    assert engine.scheduler.states.num_free == engine.scheduler.states.num_pages
    assert min(runner.num_faults, stats.num_failed_steps, stats.num_preemptions) > 5
    assert stats.num_cached_states > 0 and stats.num_cached_prompt_tokens > 0.1 * stats.num_prompt_tokens
    assert not speculate or stats.num_accepted_tokens > 200
    complete = [name for name, reason in reasons.items() if reason == "length"]
    assert len(complete) > 0.6 * total and list(reasons.values()).count("error") < 0.05 * total
    for name in complete:
        assert answers[name] == expected(prompts[name], len(answers[name])), name
