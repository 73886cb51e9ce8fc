"""Behavioural: 2,000 requests with random lengths, cancellations and faults: no hang, no leaked block, flat memory."""

from __future__ import annotations

import gc
import random
import threading
import tracemalloc

import numpy as np
import pytest
import torch

from karui.inference.batch import StepBatch, StepOutput
from karui.inference.engine import Engine
from karui.inference.models.config import ModelConfig
from karui.inference.models.decoder import TorchRunner
from karui.inference.requests import Request, SamplingParams
from karui.inference.speculate import Speculation
from karui.inference.speculative.config import SpeculationConfig
from karui.inference.speculative.ngram import NgramProposer
from tests.inference.conftest import tiny

VOCAB = 50


class CheckingRunner:
    """No model: the next token is a function of the whole text, read back from the slots, so a wrong cache changes the output.

    Raises in a share of the steps, before or after it wrote to the cache.
    """

    config = ModelConfig(model_type="llama", vocab_size=VOCAB, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1,
                         num_kv_heads=1, head_dim=8, norm_eps=1e-6, rope_theta=1e4, max_context=256, tied=True)

    def __init__(self, rng: random.Random, faults: float) -> None:
        self.rng, self.faults, self.num_faults = rng, faults, 0

    def allocate(self, num_blocks: int, block_size: int, kv_dtype: str) -> None:
        self.slots, self.block_size = np.full(num_blocks * block_size, -1), block_size

    def kv_bytes_per_token(self, kv_dtype: str) -> int:
        return 64

    def weight_bytes(self) -> int:
        return 0

    def embedding_bytes(self) -> int:
        return 0

    def copy_slots(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self._maybe_fail()
        self.slots[target.numpy()] = self.slots[source.numpy()]

    def _maybe_fail(self) -> None:
        if self.rng.random() < self.faults:
            self.num_faults += 1
            raise RuntimeError("injected")

    def forward(self, batch: StepBatch) -> StepOutput:
        self._maybe_fail()
        self.slots[batch.slots.numpy()] = batch.tokens.numpy()
        self._maybe_fail()
        wanted = set(batch.logit_rows.tolist())
        logits = torch.zeros(len(wanted), VOCAB)
        starts, at = batch.query_starts.tolist(), 0
        for s, context in enumerate(batch.context_lens.tolist()):
            index = np.arange(context)
            text = self.slots[batch.block_tables[s].numpy()[index // self.block_size] * self.block_size + index % self.block_size]
            for row in range(starts[s], starts[s + 1]):
                if row in wanted:
                    logits[at, next_token(text[:context - (starts[s + 1] - 1 - row)])] = 1
                    at += 1
        return StepOutput(logits)


def next_token(text: np.ndarray) -> int:
    """Small on purpose, so that drafts by repetition are sometimes right."""
    return int(text[-4:].sum() * 3 + len(text) // 40 + text[:8].sum()) % VOCAB


def expected(prompt: list[int], count: int) -> list[int]:
    text = list(prompt)
    for _ in range(count):
        text.append(next_token(np.array(text)))
    return text[len(prompt):]


def held_bytes() -> int:
    """What lines of the package have allocated and not freed."""
    gc.collect()
    snapshot = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/karui/*")])
    return sum(s.size for s in snapshot.statistics("filename"))


@pytest.mark.parametrize("total,speculate", [(2000, False), (700, True)])
def test_thousands_of_requests(total, speculate, caplog):
    caplog.set_level("ERROR")
    rng = random.Random(3)
    runner = CheckingRunner(rng, faults=0.01)
    drafts = Speculation(SpeculationConfig(method="ngram", adaptive=False), lambda: NgramProposer(4, 3, 1)) if speculate else None
    engine = Engine(runner, memory=64 * 16 * 80, block_size=16, max_tokens_per_step=96, max_sequences=24, speculation=drafts)
    shared = [rng.randrange(VOCAB) for _ in range(60)]
    answers: dict[str, list[int]] = {}
    reasons: dict[str, str] = {}
    prompts: dict[str, list[int]] = {}
    submitted = 0

    def submit() -> None:
        nonlocal submitted
        length = rng.choice((1, 5, 20, 60, 150))
        prompt = (shared if rng.random() < 0.5 else []) + [rng.randrange(VOCAB) for _ in range(length)]
        name = f"r{submitted}"
        engine.add(Request(prompt=prompt[:200], params=SamplingParams(max_tokens=rng.choice((1, 3, 10, 40)), n=rng.choice((1, 1, 1, 2))),
                           priority=rng.choice((0, 0, 1)), id=name))
        prompts[name], answers[name] = prompt[:200], []
        submitted += 1

    steps, before = 0, 0
    if not speculate:
        tracemalloc.start()
        before = held_bytes()
    while submitted < total or engine.has_work:
        for _ in range(min(rng.choice((0, 1, 3)), total - submitted)):
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
        if steps % 50 == 0:
            engine.check_integrity()
    if not speculate:
        growth = held_bytes() - before
        tracemalloc.stop()
        assert growth < 300_000, f"{growth:,} bytes are still held after the last request"
    engine.check_integrity()
    stats = engine.stats
    assert len(reasons) == total and stats.num_free_blocks == stats.num_blocks
    assert min(runner.num_faults, stats.num_failed_steps, stats.num_preemptions) > 5
    assert not speculate or stats.num_accepted_tokens > 20
    complete = [name for name, reason in reasons.items() if reason == "length"]
    assert len(complete) > 0.6 * total and list(reasons.values()).count("error") < 0.05 * total
    for name in complete[::5]:
        assert answers[name] == expected(prompts[name], len(answers[name])), name
    assert not engine._groups and not engine._inbox and not engine._aborts


def test_threads_may_submit_and_cancel_while_another_steps():
    _, config, weights = tiny("llama")
    engine = Engine(TorchRunner(config, weights), memory="4MB", block_size=4, max_sequences=6)
    finished: list[str] = []
    errors: list[BaseException] = []

    def client(k: int) -> None:
        try:
            for i in range(10):
                name = f"{k}-{i}"
                engine.add(Request(prompt=[3 + k, 4, 5 + i], params=SamplingParams(max_tokens=5), id=name,
                                   on_delta=lambda d: finished.append(d.request_id) if d.finish_reason else None))
                if i % 3 == 0:
                    engine.abort(name)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=client, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    while any(t.is_alive() for t in threads) or engine.has_work:
        engine.step()
    assert not errors and sorted(finished) == sorted(f"{k}-{i}" for k in range(4) for i in range(10))
    engine.check_integrity()
