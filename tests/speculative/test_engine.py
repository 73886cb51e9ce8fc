"""End to end: an engine that speculates says what the engine without speculation says, for every proposer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from karui.configs.errors import KaruiError
from karui.inference.engine import Engine
from karui.inference.requests import Output, Request, SamplingParams
from karui.inference.speculative.config import SpeculationConfig
from tests.speculative.conftest import tiny_engine

SPELLINGS = ["ngram:5", "lookahead", "lookahead:3,2,2", "draft:x:4", "medusa", "eagle3:4"]
PROMPTS: list[list[int]] = [[1, 2, 3, 1, 2, 3, 1, 2], [9], [40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52]]


def always(spelling: str) -> SpeculationConfig:
    """Without the controller, whose timings would decide how much of the test speculates; and matching single tokens, since a
    random model's text seldom repeats longer ones."""
    return replace(SpeculationConfig.parse(spelling), adaptive=False, n_min=1)


def run(engine: Engine, params: SamplingParams, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[Output]:
    outputs = engine.generate([list(p) for p in prompts], params)
    engine.check_integrity()
    return outputs


def tokens(outputs: Sequence[Output]) -> list[list[list[int]]]:
    return [[c.token_ids for c in o.completions] for o in outputs]


GREEDY = SamplingParams(max_tokens=32)
SAMPLED = SamplingParams(max_tokens=32, temperature=0.9, top_k=20, top_p=0.95, seed=3)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_greedy_tokens_are_identical(spelling: str) -> None:
    engine = tiny_engine(always(spelling))
    assert tokens(run(engine, GREEDY)) == tokens(run(tiny_engine(), GREEDY))
    assert engine.stats.num_drafted_tokens > 0
    if spelling != "eagle3:4":      # its random head is hardly ever right
        assert engine.stats.num_accepted_tokens > 0


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_sampled_tokens_are_identical_with_a_seed(spelling: str) -> None:
    engine = tiny_engine(always(spelling))
    assert tokens(run(engine, SAMPLED)) == tokens(run(tiny_engine(), SAMPLED))
    assert engine.stats.num_drafted_tokens > 0


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_native_runner_agrees_bit_for_bit(spelling: str) -> None:
    """Its sums have one order for every batch, so several rows at once give the bits of one row at a time."""
    plain = tiny_engine(native=True)
    for params in (GREEDY, SAMPLED):
        assert tokens(run(tiny_engine(always(spelling), native=True), params)) == tokens(run(plain, params))


@pytest.mark.parametrize("spelling", ["ngram:5", "lookahead", "draft:x:4"])
def test_batched_rows_agree_too(spelling: str) -> None:
    """The ordinary path, several rows per product, in float64 so that rounding cannot decide an argmax."""
    plain = tiny_engine(dtype=torch.float64, bit_exact=False)
    assert tokens(run(tiny_engine(always(spelling), dtype=torch.float64, bit_exact=False), GREEDY)) == tokens(run(plain, GREEDY))


@pytest.mark.parametrize("spelling", ["ngram:4", "lookahead:3,3,3", "draft:x:3", "medusa", "eagle3:3"])
def test_preemption_and_chunked_prefill_change_nothing(spelling: str) -> None:
    prompts = [[(7 * i + j) % 60 for j in range(14)] for i in range(3)] + [[3, 4] * 7]
    params = SamplingParams(max_tokens=24)
    plain = tiny_engine()
    memory = plain.runner.kv_bytes_per_token(plain.kv_dtype) * 120      # the four need 4 * 38 tokens
    tight = tiny_engine(always(spelling), memory=memory, max_context=64, max_tokens_per_step=37, block_size=4)
    assert tokens(run(tight, params, prompts)) == tokens(run(plain, params, prompts))
    assert tight.stats.num_preemptions > 0 and tight.stats.num_drafted_tokens > 0


@pytest.mark.parametrize("spelling", ["ngram:4", "eagle3:3"])
def test_a_warm_prefix_changes_nothing(spelling: str) -> None:
    engine = tiny_engine(always(spelling), block_size=4)
    params = SamplingParams(max_tokens=16)
    cold = tokens(run(engine, params))
    assert tokens(run(engine, params)) == cold == tokens(run(tiny_engine(), params))
    assert engine.stats.num_cached_prompt_tokens > 0


@pytest.mark.parametrize("spelling", ["ngram:5", "lookahead", "medusa"])
@pytest.mark.parametrize("params", [
    SamplingParams(max_tokens=20, logprobs=3), SamplingParams(max_tokens=20, logprobs=2, temperature=0.7, top_k=10, seed=5),
    SamplingParams(max_tokens=20, logprobs=0, repetition_penalty=1.3, frequency_penalty=0.2),
    SamplingParams(max_tokens=20, logprobs=0, presence_penalty=0.5, temperature=0.3, seed=8)],
    ids=["greedy", "sampled", "penalties", "sampled penalties"])
def test_logprobs_are_those_of_plain_decoding(spelling: str, params: SamplingParams) -> None:
    """Raw and processed, with alternatives, under penalties that depend on the drafted path."""
    engine = tiny_engine(always(spelling))
    got, expected = run(engine, params), run(tiny_engine(), params)
    assert tokens(got) == tokens(expected)
    for a, b in zip(got, expected, strict=True):
        assert a.completions[0].logprobs == b.completions[0].logprobs
    assert engine.stats.num_drafted_tokens > 0


def test_a_draft_model_without_memory_left_lets_sequences_go_on_without_drafts() -> None:
    """Its pool holds 3 blocks of 16 tokens: two sequences draft for a while, and both end as in a plain engine."""
    block = 2 * 4 * 2 * 8 * 4 * 16
    requests = [Request(prompt=[1 + i, 7, 9], params=SamplingParams(max_tokens=60, ignore_eos=True)) for i in range(2)]
    narrow, roomy = (tiny_engine(always("draft:x:4"), draft_memory=memory) for memory in (3 * block, None))
    found = [[o.token_ids for o in engine.generate(requests)] for engine in (narrow, roomy, tiny_engine())]
    assert found[0] == found[1] == found[2]
    assert 0 < narrow.stats.num_drafted_tokens < roomy.stats.num_drafted_tokens


def test_a_native_draft_model_drafts_in_one_call() -> None:
    """The same drafts as token by token, and one call of the runner for each, one forward more where a whole draft was right."""
    engines = [tiny_engine(always("draft:x:4"), native=True, draft_noise=0.005) for _ in range(2)]
    drafters = [e.speculation._probe.drafter for e in engines]      # type: ignore[union-attr]
    calls: list[int] = []
    decode = drafters[0].runner.decode
    drafters[0].runner.decode = lambda *a: calls.append(a[2]) or decode(*a)
    drafters[1].continued = lambda *a: None
    found = [tokens(run(e, GREEDY)) for e in engines]
    assert found[0] == found[1] == tokens(run(tiny_engine(native=True), GREEDY))
    counts = [(e.stats.num_drafted_tokens, e.stats.num_accepted_tokens) for e in engines]
    assert counts[0] == counts[1] and 0 < counts[0][1] < counts[0][0]
    assert sum(calls) == counts[0][0] and max(calls) == 4
    small = tiny_engine(always("draft:x:4"), native=True, draft_memory=3 * 2 * 4 * 2 * 16 * 4 * 16)
    assert tokens(run(small, GREEDY, PROMPTS[:2])) == found[0][:2] and small.stats.num_drafted_tokens > 0


def test_draft_model_logprobs_are_the_targets() -> None:
    params = SamplingParams(max_tokens=30, logprobs=2, temperature=0.8)
    engine, plain = tiny_engine(always("draft:x:4")), tiny_engine()
    for output in run(engine, params):
        said = output.completions[0]
        assert said.logprobs is not None
        scored = plain.score([[*output.prompt_token_ids, *said.token_ids]])[0][-len(said.token_ids):]
        assert torch.allclose(torch.tensor([e.raw for e in said.logprobs]), scored, atol=1e-5)
    assert engine.stats.num_accepted_tokens > 0


def test_a_sampling_draft_model_keeps_the_distribution() -> None:
    """2,000 answers without a seed, 7 tokens: the joint of the second and third token against the model's own probabilities."""
    vocab, runs, prompt = 7, 2_000, [1, 2, 3]
    plain = tiny_engine(vocab=vocab, bit_exact=False)
    texts = [[*prompt, a, b, c] for a in range(vocab) for b in range(vocab) for c in range(vocab)]
    exact = np.zeros((vocab, vocab))
    for text, logprobs in zip(texts, plain.score(texts), strict=True):
        exact[text[-2], text[-1]] += float(logprobs[-3:].double().sum().exp())
    assert exact.sum() == pytest.approx(1, abs=1e-4)
    engine = tiny_engine(always("draft:x:2"), vocab=vocab, bit_exact=False, draft_noise=0.1)
    seeds = itertools.count()
    engine._agree = lambda _: next(seeds)  # in place of random ones
    outputs = engine.generate([Request(prompt=prompt, params=SamplingParams(max_tokens=3, temperature=1.0))] * runs)
    joint = np.zeros((vocab, vocab))
    for output in outputs:
        joint[output.token_ids[1], output.token_ids[2]] += 1
    stats = engine.stats
    assert 0.2 < stats.acceptance < 0.99
    expected = runs * exact
    kept = expected > 5
    chi = ((joint - expected)[kept] ** 2 / expected[kept]).sum() / kept.sum()
    assert chi < 1.9
    assert 0.5 * np.abs(joint / runs - exact).sum() < 0.09


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_several_continuations_and_end_tokens(spelling: str) -> None:
    params = SamplingParams(max_tokens=24, temperature=1.0, n=3, seed=2, stop_token_ids=(7, 11, 13, 17))
    got = run(tiny_engine(always(spelling)), params)
    for output in got:
        for c in output.completions:
            assert not set(c.token_ids[:-1]) & {7, 11, 13, 17}
            assert (c.finish_reason == "stop") == (c.token_ids[-1] in (7, 11, 13, 17)) and len(c.token_ids) <= 24
    assert tokens(got) == tokens(run(tiny_engine(), params))


@pytest.mark.parametrize("spelling", ["ngram:5", "draft:x:4", "lookahead"])
def test_the_context_is_never_overrun(spelling: str) -> None:
    engine = tiny_engine(always(spelling), max_context=48)
    (output,) = run(engine, SamplingParams(), [[3, 4] * 10])
    assert len(output.token_ids) == 48 - 20 and output.completions[0].finish_reason == "length"
    assert tokens([output]) == tokens(run(tiny_engine(max_context=48), SamplingParams(), [[3, 4] * 10]))


def test_cancelling_gives_everything_back() -> None:
    engine = tiny_engine(always("draft:x:4"))
    seen: list[int] = []

    def stop_early(delta: object) -> bool:
        seen.append(1)
        return len(seen) < 3

    engine.generate([Request(prompt=p, params=SamplingParams(max_tokens=100), on_delta=stop_early) for p in PROMPTS])
    engine.check_integrity()
    assert engine.pool.num_free == engine.pool.num_blocks
    drafter = engine.speculation._new().drafter     # type: ignore[union-attr]
    assert not drafter.tables and len(drafter.free) == 64 * 16


def test_int8_cache_and_ngram_agree() -> None:
    """A quantized cache changes the numbers; speculation on it must not change them further."""
    engine = tiny_engine(always("ngram:5"), kv_dtype="int8")
    assert tokens(run(engine, GREEDY)) == tokens(run(tiny_engine(kv_dtype="int8"), GREEDY))


def test_typical_acceptance_is_offered_and_differs() -> None:
    config = SpeculationConfig(method="medusa", k=24, adaptive=False, typical=True)
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=1)
    engine = tiny_engine(config)
    run(engine, params)
    lossless = tiny_engine(always("medusa"))
    run(lossless, params)
    assert engine.stats.num_accepted_tokens > lossless.stats.num_accepted_tokens


def test_typical_acceptance_is_chosen_per_request_and_labelled() -> None:
    """Beside a lossy request the others stay lossless."""
    kept, lossy = (SamplingParams(max_tokens=24, temperature=1.0, seed=1, typical_acceptance=t) for t in (False, True))
    engine = tiny_engine(always("medusa"))
    mixed = engine.generate([Request(prompt=PROMPTS[0], params=kept), Request(prompt=PROMPTS[0], params=lossy)])
    assert [o.completions[0].lossy for o in mixed] == [False, True]
    assert tokens(mixed[:1]) == tokens(run(tiny_engine(), kept, PROMPTS[:1]))
    whole = tiny_engine(replace(always("medusa"), typical=True))
    assert tokens(mixed[1:]) == tokens(run(whole, kept, PROMPTS[:1]))
    for without in (tiny_engine(), tiny_engine(always("ngram:4"))):
        with pytest.raises(KaruiError, match="typical_acceptance.*medusa"):
            without.generate([PROMPTS[0]], lossy)


def test_the_controller_switches_off_what_does_not_pay() -> None:
    engine = tiny_engine("eagle3:5")
    run(engine, SamplingParams(max_tokens=120), [[1, 2, 3]])
    steps = engine.stats.num_steps
    assert engine.speculation is not None and steps > 90
    assert engine.speculation.statistics.drafts < steps / 2
    assert tokens(run(engine, GREEDY)) == tokens(run(tiny_engine(), GREEDY))


@pytest.mark.slow
@pytest.mark.parametrize("sampled", [False, True])
def test_prompt_lookup_on_the_real_model(smollm2: Path, sampled: bool) -> None:
    """Editing: the model repeats a text. Same tokens, in far fewer steps."""
    text = ("The river rises in the northern hills and flows south through the old town, where it passes under three stone "
            "bridges. In summer the water is low and children play on the gravel banks.")
    prompt = f"Repeat this text exactly:\n{text}\n\nHere is the text again:\n{text[:40]}"
    params = SamplingParams(max_tokens=64, ignore_eos=True, temperature=0.5 if sampled else 0.0, seed=4)
    plain = Engine.load(smollm2, runner="torch", bit_exact=True, max_context=512)
    expected = plain.generate([prompt], params)
    speculative = Engine.load(smollm2, runner="torch", bit_exact=True, max_context=512, speculation=always("ngram:6"))
    got = speculative.generate([prompt], params)
    assert got[0].token_ids == expected[0].token_ids
    assert speculative.stats.num_steps < 0.7 * plain.stats.num_steps
