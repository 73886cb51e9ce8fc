"""Reference: the processed distribution against transformers' logits processors, draws against probabilities."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from karui.inference.requests import SamplingParams
from karui.inference.sampling import child_seed, distribution, logprobs_of, penalize, sample


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
