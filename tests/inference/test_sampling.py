"""Reference: the processed distribution against transformers' logits processors, draws against probabilities."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from karui.inference.requests import SamplingParams
from karui.inference.sampling import child_seed, distribution, logprobs_of, penalize, sample, sample_rows
from karui.inference.speculative.random import uniform


def by_transformers(logits: np.ndarray, params: SamplingParams, history: list[int]) -> np.ndarray:
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    steps = LogitsProcessorList()
    if params.repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    steps.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        steps.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        steps.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        steps.append(MinPLogitsWarper(params.min_p))
    return steps(torch.tensor([history]), torch.tensor(logits)[None].clone())[0].softmax(-1).numpy()


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 10**6), vocab=st.sampled_from([7, 100, 3000]), temperature=st.floats(0.1, 3), top_k=st.integers(0, 40),
       top_p=st.floats(0.05, 1), min_p=st.floats(0, 0.3), penalty=st.floats(0.5, 2))
def test_distribution_equals_transformers(seed, vocab, temperature, top_k, top_p, min_p, penalty):
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal(vocab) * rng.uniform(0.1, 6)).astype(np.float32)
    history = rng.integers(0, vocab, 9).tolist()
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=penalty)
    ours, theirs = distribution(logits, params, history[:4], history[4:]), by_transformers(logits, params, history)
    differing = np.flatnonzero((ours > 0) != (theirs > 0))
    # A token on the very border of the nucleus may fall either way by rounding; the mass it carries is all that may differ.
    # With top_p within rounding of 1 or of a cumulative sum, tokens that weigh less than fp32 can tell may fall with it.
    assert np.sort(np.maximum(ours, theirs)[differing])[:-1].sum() <= 1e-6
    allowed = max(ours[differing].sum(), theirs[differing].sum()) * 2 + 1e-5
    assert np.abs(ours - theirs).sum() <= allowed


def test_presence_and_frequency_count_the_output_only():
    logits = np.zeros(10, dtype=np.float32)
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    got = penalize(logits, params, [1, 2], [3, 3, 4])
    assert got.tolist() == [0, 0, 0, -1.0, -0.75, 0, 0, 0, 0, 0] and not logits.any()


def test_draws_follow_the_distribution():
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], dtype=np.float32))
    for params, want in ((SamplingParams(temperature=1.0), [0.5, 0.3, 0.15, 0.05]),
                         (SamplingParams(temperature=1.0, top_k=2), [0.625, 0.375, 0, 0]),
                         (SamplingParams(temperature=0.5), np.array([0.25, 0.09, 0.0225, 0.0025]) / 0.365)):
        counts = np.bincount([sample(logits, params, seed, 5)[0] for seed in range(20_000)], minlength=4) / 20_000
        assert np.abs(counts - want).max() < 0.015


def test_a_draw_depends_on_seed_and_position_only():
    rng = np.random.default_rng(0)
    logits = rng.standard_normal(500).astype(np.float32)
    params = SamplingParams(temperature=1.2)
    drawn = {(seed, position): sample(logits, params, seed, position) for seed in range(20) for position in range(20)}
    assert drawn == {key: sample(logits, params, *key) for key in reversed(drawn)}
    assert len({token for token, _ in drawn.values()}) > 50
    assert len({child_seed(3, i) for i in range(100)}) == 100 and child_seed(3, 0) == 3


def test_greedy_is_one_hot_and_penalized():
    logits = np.array([1.0, 3.0, 2.9], dtype=np.float32)
    assert distribution(logits, SamplingParams()).tolist() == [0, 1, 0]
    assert sample(logits, SamplingParams(repetition_penalty=1.5), 0, 3, [1], [])[0] == 2


@pytest.mark.parametrize("top", [0, 1, 5, 50])
def test_logprobs_equal_log_softmax(top):
    logits = torch.randn(50) * 5
    want = logits.double().log_softmax(-1)
    got = logprobs_of(logits.numpy(), 7, 0.25, top)
    assert abs(got.raw - want[7].item()) < 1e-6 and got.processed == np.log(0.25)
    assert [t for t, _ in got.top] == want.argsort(descending=True)[:top].tolist()
    assert all(abs(p - want[t].item()) < 1e-6 for t, p in got.top)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**6), vocab=st.sampled_from([1, 7, 100, 3001]), temperature=st.floats(0.1, 3),
       top_k=st.sampled_from([0, 1, 5, 40, 400]), top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]), min_p=st.sampled_from([0.0, 0.1]))
def test_native_draw_is_the_quantile_of_the_distribution(seed, vocab, temperature, top_k, top_p, min_p):
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal(vocab) * rng.uniform(0.1, 6)).astype(np.float32)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    token, probability = sample(logits, params, seed, 3)
    p = distribution(logits, params).astype(np.float64)
    assert p[token] > 0 and probability == pytest.approx(p[token], rel=1e-4)
    below, u = p[:token].sum(), uniform(seed, 3)
    assert below - 1e-5 <= u <= below + p[token] + 1e-5


def test_rows_drawn_together_equal_rows_drawn_alone():
    rng = np.random.default_rng(1)
    logits = (rng.standard_normal((9, 1000)) * 3).astype(np.float32)
    kinds = (SamplingParams(), SamplingParams(temperature=0.7), SamplingParams(temperature=1.0, top_k=300, min_p=0.01),
             SamplingParams(temperature=1.3, top_p=0.8), SamplingParams(temperature=1.0, top_k=5, top_p=0.9))
    draws = [(kinds[i % len(kinds)], i, 10 + i) for i in range(9)]
    alone = [sample(row, *draw) for row, draw in zip(logits, draws, strict=True)]
    assert sample_rows(logits, draws) == alone and alone[0] == (int(logits[0].argmax()), 1.0)


def test_without_the_native_kernels_the_same_tokens_are_drawn(monkeypatch):
    rng = np.random.default_rng(2)
    logits = (rng.standard_normal((40, 500)) * 2).astype(np.float32)
    draws = [(SamplingParams(temperature=0.9, top_k=50, top_p=0.95), i, 4) for i in range(40)]
    fast = sample_rows(logits, draws)
    monkeypatch.setattr("karui.kernels.native.available", lambda: False)
    slow = sample_rows(logits, draws)
    assert [t for t, _ in fast] == [t for t, _ in slow]
    assert np.allclose([p for _, p in fast], [p for _, p in slow], rtol=1e-4)
