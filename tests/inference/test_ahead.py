"""Several tokens of plain greedy decoding in one call of the native runner: what comes out is what comes out one by one."""

import numpy as np
import pytest

from karui.configs.errors import KaruiError
from karui.inference import engine as engine_module
from karui.inference.batch import Ahead, Gained
from karui.inference.engine import Engine
from karui.inference.models.native import NativeRunner
from karui.inference.requests import Request, SamplingParams
from karui.kernels.native import available
from tests.inference.conftest import tiny
from tests.inference.test_engine import prompts

pytestmark = pytest.mark.skipif(not available(), reason="no C++ compiler here")


@pytest.fixture(autouse=True)
def _time_enough(monkeypatch):
    monkeypatch.setattr(engine_module, "AHEAD_S", 1e9)  # a busy machine must not decide what is tested


def engine_of(ahead, kind="llama", changes=None, **options):
    _, config, weights = tiny(kind, **(changes or {}))
    runner = NativeRunner(config, weights, threads=2)
    calls = []
    if ahead > 1:
        decode = runner.decode

        def counted(*args):
            calls.append(decode(*args))
            return calls[-1]

        runner.decode = counted
    made = Engine(runner, **{"max_tokens_per_step": 16, "block_size": 4, "memory": "8MB", "ahead": ahead, **options})
    made.calls = calls
    return made


def overflowing():
    """Finite weights whose products are not."""
    weights = tiny("llama")[2]
    return {n: w * 1e30 if "gate_proj" in n or "up_proj" in n else w for n, w in weights.items()}


def tokens(outputs):
    return [(o.token_ids, o.completions[0].finish_reason, o.num_cached_tokens) for o in outputs]


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_tokens_do_not_depend_on_it(kind):
    changes = {"sliding_window": 9} if kind == "mistral" else None
    one, many = (engine_of(n, kind, changes=changes, max_sequences=5) for n in (1, 8))
    texts = [[5], *prompts(11)]
    for params in (SamplingParams(max_tokens=21), SamplingParams(max_tokens=2), SamplingParams(max_tokens=1)):
        assert tokens(many.generate(texts, params)) == tokens(one.generate(texts, params))
    assert max(len(c.rounds) for c in many.calls) == 8 and many.stats.num_generated_tokens == one.stats.num_generated_tokens
    assert many.stats.num_prompt_tokens == one.stats.num_prompt_tokens
    many.check_integrity()


def test_end_tokens_in_the_middle_end_it_there():
    one, many = engine_of(1), engine_of(8)
    ids = prompts(1)[0]
    whole = one.generate([ids], SamplingParams(max_tokens=20))[0].token_ids
    end = whole[7]
    params = SamplingParams(max_tokens=20, stop_token_ids=(end,))
    out = many.generate([ids], params)[0]
    assert out.token_ids == whole[:whole.index(end) + 1] and out.completions[0].finish_reason == "stop"
    assert many.calls[-1].tokens[0][-1] == end  # nothing is decoded behind it
    many.check_integrity()
    assert many.generate([ids], SamplingParams(max_tokens=20))[0].token_ids == whole  # from blocks that the first one filled


def test_only_greedy_requests_without_extras_run_ahead():
    one, many = engine_of(1), engine_of(8)
    texts = prompts(3)
    mixed = [Request(prompt=texts[0], params=SamplingParams(max_tokens=12)),
             Request(prompt=texts[1], params=SamplingParams(max_tokens=9, temperature=1.0, seed=3)),
             Request(prompt=texts[2], params=SamplingParams(max_tokens=5, logprobs=2))]
    assert tokens(many.generate(mixed)) == tokens(one.generate(mixed))
    assert [len(c.rounds) for c in many.calls] == [3]  # once the others are done, the greedy one goes on alone
    dynamic = engine_of(8, changes={"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}})
    dynamic.generate(texts, SamplingParams(max_tokens=6))
    assert dynamic.calls == []


def test_too_few_blocks_for_all_means_one_at_a_time():
    memory = 40 * 4 * 2 * 3 * 2 * 16 * 4  # 40 blocks of 4 tokens, heads padded to 16
    one, many = (engine_of(n, memory=memory, max_context=96, kv_dtype="float32") for n in (1, 8))
    texts = prompts(8, 20, 30)
    got, want = (e.generate(texts, SamplingParams(max_tokens=40)) for e in (many, one))
    assert [o.token_ids for o in got] == [o.token_ids for o in want]
    assert many.stats.num_preemptions > 0
    many.check_integrity()


def test_a_callback_ends_it_and_no_block_is_lost():
    many = engine_of(8)
    seen = []
    request = Request(prompt=[5, 6, 7], params=SamplingParams(max_tokens=60), on_delta=lambda d: seen.append(d) or len(seen) < 3)
    out = many.generate([request])[0]
    assert out.completions[0].finish_reason == "abort" and len(out.token_ids) == 1 + 8 + 8
    many.check_integrity()


def test_logits_that_are_not_numbers_are_an_error():
    many = engine_of(8)
    many.runner.load_weights(overflowing())
    table = np.zeros((1, 1, 2), dtype=np.int32)
    assert many.runner.decode([Ahead([5], 4, 4, frozenset())], table, 4, 4) == Gained([[]], [])
    out = many.generate([[9, 5, 6]], SamplingParams(max_tokens=12))[0].completions[0]
    assert out.finish_reason == "error" and "not numbers" in out.error
    many.check_integrity()


def test_a_call_that_ends_early_loses_nothing():
    many, one = engine_of(8), engine_of(1)
    ids = prompts(1)[0]
    whole = one.generate([ids], SamplingParams(max_tokens=12))[0].token_ids
    decode = many.runner.decode
    many.runner.decode = lambda s, tables, rounds, *rest: decode(s, tables, min(rounds, 3), *rest)  # as when the fourth step has no numbers
    assert many.generate([ids], SamplingParams(max_tokens=12))[0].token_ids == whole
    many.check_integrity()


def test_ahead_is_at_least_one():
    with pytest.raises(KaruiError, match="ahead"):
        engine_of(0)


def test_no_time_means_one_by_one(monkeypatch):
    many = engine_of(8)
    monkeypatch.setattr(engine_module, "AHEAD_S", 0.0)
    many.generate([[5, 6]], SamplingParams(max_tokens=9))
    assert many.calls == []  # so a large model looks at new requests after every token
