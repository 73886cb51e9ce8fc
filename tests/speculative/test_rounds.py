"""Behavioural tests: rounds of drafting and verifying in one native call say what plain decoding says, and draft what one by one drafts."""

from __future__ import annotations

import time

import pytest
import torch

from karui.inference import engine as engine_module
from karui.inference.requests import Request, SamplingParams
from karui.inference.speculate import Speculation
from karui.inference.speculative.config import SpeculationConfig
from karui.inference.speculative.eagle3 import Eagle3, Eagle3Config
from karui.inference.speculative.factory import Speculator
from karui.inference.speculative.medusa import MedusaHeads
from karui.kernels import native
from tests.speculative.conftest import tiny_config, tiny_engine, tiny_weights

pytestmark = pytest.mark.skipif(not native.available(), reason="no compiler for the native kernels")

VOCAB = 13  # few tokens, so that a random draft is right now and then and texts repeat themselves
CONFIGS = {
    "ngram": SpeculationConfig(method="ngram", k=5, n_min=1, adaptive=False),
    "ngram, long": SpeculationConfig(method="ngram", k=20, n_min=2, n_max=6, adaptive=False),
    "eagle3": SpeculationConfig(method="eagle3", k=3, width=4, nodes=9, least=0.0, adaptive=False),
    "medusa": SpeculationConfig(method="medusa", k=6, width=3, adaptive=False),
    "eagle3 chain": SpeculationConfig(method="eagle3", k=4, width=1, nodes=4, least=0.0, adaptive=False),
}
PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [9], [10, 11, 12, 4, 5, 6, 7, 8, 9, 0, 1, 2, 3]]
GREEDY = SamplingParams(max_tokens=70)


@pytest.fixture(autouse=True)
def _time_enough(monkeypatch):
    monkeypatch.setattr(engine_module, "AHEAD_S", 1e9)  # a busy machine must not decide what is tested


def engine(config=None, **options):
    """A tiny native engine; `rounds` lists (draft depth, accepted) of every verification, `gained` the tokens of every call."""
    made = tiny_engine(native=True, vocab=VOCAB, **{"block_size": 4, **options})
    made.rounds, made.gained = [], []
    if config is not None:
        torch.manual_seed(7)
        heads = Eagle3(Eagle3Config.of(tiny_config(VOCAB)), None).eval() if config.method == "eagle3" else None
        if config.method == "medusa":
            heads = MedusaHeads(3, tiny_config(VOCAB).hidden_size, VOCAB, shared=True).eval()
        speculator = Speculator(config, tiny_config(VOCAB), heads=heads, embedding=lambda: made.runner.embedding,
                                head=lambda: tiny_weights(tiny_config(VOCAB))["model.embed_tokens.weight"],
                                packed_head=lambda: made.runner.head)
        made.speculation = Speculation(config, speculator.new)
        timed = made.speculation.timed
        made.speculation.timed = lambda n, verdicts, seconds: made.rounds.extend(verdicts) or timed(n, verdicts, seconds)
    decode = made.runner.decode

    def watched(*args):
        found = decode(*args)
        made.gained.append(found.tokens)
        return found

    made.runner.decode = watched
    return made


def said(made, params=GREEDY, prompts=PROMPTS):
    outputs = made.generate([list(p) for p in prompts], params)
    made.check_integrity()
    return [(o.token_ids, o.completions[0].finish_reason) for o in outputs]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kv_dtype", ["float16", "int8"])
def test_tokens_are_plain_ones_and_drafts_those_of_one_by_one(name, kv_dtype):
    rounds, alone = engine(CONFIGS[name], kv_dtype=kv_dtype), engine(CONFIGS[name], ahead=1, kv_dtype=kv_dtype)
    wanted = said(engine(kv_dtype=kv_dtype))
    assert said(rounds) == said(alone) == wanted
    assert rounds.rounds == alone.rounds and sum(accepted for _, accepted in rounds.rounds) > 10
    assert rounds.stats.num_accepted_tokens == alone.stats.num_accepted_tokens > 0
    assert rounds.stats.num_drafted_tokens == alone.stats.num_drafted_tokens
    assert rounds.stats.num_generated_tokens == alone.stats.num_generated_tokens
    assert rounds.gained and not alone.gained
    # Again, from blocks that the first time filled: nothing but accepted tokens may be found in them.
    longer = [p + t[:40] for p, (t, _) in zip(PROMPTS, wanted)]
    assert said(rounds, SamplingParams(max_tokens=30), longer) == [(t[40:], "length") for t, _ in wanted]
    assert rounds.stats.num_cached_prompt_tokens > 0


@pytest.mark.parametrize("name", ["ngram", "eagle3", "medusa"])
def test_a_call_gains_about_as_much_as_asked(name):
    made = engine(CONFIGS[name])
    said(made, prompts=PROMPTS[:1])
    nodes = made.speculation.native["nodes"]
    assert all(8 <= len(t) <= 16 + nodes for call in made.gained[:-1] for t in call)
    assert max(len(t) for call in made.gained for t in call) > 8


@pytest.mark.parametrize("name", CONFIGS)
def test_end_tokens_and_limits_inside_an_accepted_run(name):
    made, plain = engine(CONFIGS[name]), engine()
    whole = said(plain, prompts=PROMPTS[:1])[0][0]
    for end in set(whole):
        got = said(made, SamplingParams(max_tokens=70, stop_token_ids=(end,)), PROMPTS[:1])
        assert got == [(whole[: whole.index(end) + 1], "stop")]
    for limit in range(1, 24):
        assert said(made, SamplingParams(max_tokens=limit), PROMPTS[:1]) == [(whole[:limit], "length")]
    assert made.stats.num_accepted_tokens > 0


@pytest.mark.parametrize("name", CONFIGS)
def test_the_context_s_end_and_block_borders(name):
    for size, context in ((1, 37), (3, 50), (16, 48)):
        made = engine(CONFIGS[name], block_size=size, max_context=context)
        assert said(made, SamplingParams()) == said(engine(block_size=size, max_context=context), SamplingParams())
        assert made.stats.num_drafted_tokens > 0


@pytest.mark.parametrize("name", CONFIGS)
def test_too_few_blocks_and_preemption_change_nothing(name):
    prompts = [[(5 * i + j) % VOCAB for j in range(14)] for i in range(3)] + [[3, 4] * 7]
    params = SamplingParams(max_tokens=40)
    plain = engine()
    memory = plain.runner.kv_bytes_per_token(plain.kv_dtype) * 128  # the four need 4 * 54 tokens
    tight = engine(CONFIGS[name], memory=memory, max_context=80)
    assert said(tight, params, prompts) == said(plain, params, prompts)
    assert tight.stats.num_preemptions > 0 and tight.gained and tight.stats.num_drafted_tokens > 0


def test_a_narrow_step_bounds_the_drafts():
    narrow = engine(CONFIGS["eagle3"], max_tokens_per_step=6)
    assert said(narrow) == said(engine(max_tokens_per_step=6))
    assert narrow.gained


@pytest.mark.parametrize("name", ["ngram", "eagle3", "medusa"])
def test_chunks_that_leave_one_token_of_a_prompt_over(name):
    """13 = 2 * 6 + 1, and 8 = 7 + 1: the last row of the prompt is the first of the rounds."""
    for width, prompt in ((6, PROMPTS[2]), (7, PROMPTS[0])):
        made = engine(CONFIGS[name], max_tokens_per_step=width)
        assert said(made, prompts=[prompt]) == said(engine(), prompts=[prompt])
        assert made.stats.num_drafted_tokens > 0 and made.gained


@pytest.mark.parametrize("name", ["ngram", "eagle3", "medusa"])
def test_cancelling_between_two_calls(name):
    made, seen = engine(CONFIGS[name]), []
    request = Request(prompt=PROMPTS[0], params=GREEDY, on_delta=lambda d: seen.append(d) or len(seen) < 4)
    out = made.generate([request])[0]
    assert out.completions[0].finish_reason == "abort" and len(made.gained) == 3
    made.check_integrity()
    assert said(made) == said(engine())


@pytest.mark.parametrize("name", ["ngram", "eagle3", "medusa"])
def test_beside_requests_that_are_sampled(name):
    """They go one by one together; when the sampled one is over, the others go on in rounds."""
    sampled = SamplingParams(max_tokens=12, temperature=0.8, seed=3)
    requests = [Request(prompt=PROMPTS[0], params=GREEDY), Request(prompt=PROMPTS[1], params=sampled)]
    made, plain = engine(CONFIGS[name]), engine()
    got, wanted = made.generate(requests), plain.generate(requests)
    assert [o.token_ids for o in got] == [o.token_ids for o in wanted]
    assert made.gained and len(made.rounds) > len(made.gained)


@pytest.mark.parametrize("name", ["ngram", "eagle3", "medusa"])
def test_switched_off_it_decodes_plainly_and_drafts_again_later(name):
    config = SpeculationConfig(**{**vars(CONFIGS[name]), "adaptive": True})
    made = engine(config)
    controller = made.speculation._controller(1)
    controller.plain_s, controller.on, controller.patience = 1.0, False, 20
    assert said(made, prompts=PROMPTS[:1]) == said(engine(), prompts=PROMPTS[:1])
    steps = made.stats.num_steps
    assert made.gained and controller.plain_s < 1.0
    assert steps - len(made.rounds) >= 20  # plain ones first
    controller.on, controller.waited, controller.patience = False, 0, 1 << 20
    drafts = len(made.rounds)
    assert said(made, prompts=PROMPTS[:1]) == said(engine(), prompts=PROMPTS[:1])
    assert len(made.rounds) == drafts and not controller.on


def test_a_long_prompt_does_not_keep_rounds_back(monkeypatch):
    """What the next call may take is judged by decoding steps: behind a prompt's step, drafts would go whole and one by one."""
    monkeypatch.setattr(engine_module, "AHEAD_S", 0.9)
    made, forwards = engine(CONFIGS["medusa"]), []
    said(made, prompts=PROMPTS[2:])
    made._step_s, forward = 1e-3, made.runner.forward
    made.runner.forward = lambda batch: (len(batch.tokens) > 1 and time.sleep(1.0)) or forwards.append(len(batch.tokens)) or forward(batch)
    assert said(made, prompts=PROMPTS[:1]) == said(engine(), prompts=PROMPTS[:1])
    assert forwards == [len(PROMPTS[0])]


@pytest.mark.parametrize("spelling", ["lookahead:4,3,3", "medusa:6", "draft:x:3"])
def test_what_drafts_in_python_lets_the_runner_go_ahead_while_it_is_off(spelling):
    """No drafts for a while: several plain steps a call; then it drafts again, from what it saw last."""
    made, calls = tiny_engine(spelling, native=True, vocab=VOCAB, block_size=4), []
    decode = made.runner.decode
    made.runner.decode = lambda *a: calls.append(a[2]) or decode(*a)
    controller = made.speculation._controller(1)
    controller.plain_s, controller.on, controller.patience = 1e9, False, 21
    assert said(made, prompts=PROMPTS[:1]) == said(tiny_engine(native=True, vocab=VOCAB, block_size=4), prompts=PROMPTS[:1])
    assert len(calls) >= 3 and sum(calls[:3]) == 21
    assert made.stats.num_drafted_tokens > 0


def test_only_so_much_is_verified_as_is_worth_it():
    """A random layer promises next to nothing; a text that repeats itself earns long drafts."""
    config = SpeculationConfig(**{**vars(CONFIGS["eagle3"]), "adaptive": True, "nodes": 40, "width": 9})
    made = engine(config)
    made.speculation.drafts = lambda sequences: True
    assert said(made) == said(engine())
    repeating = engine(SpeculationConfig(method="ngram", k=8, n_min=1))
    repeating.speculation.drafts = lambda sequences: True
    odds = repeating.speculation._probe.odds.copy()
    whole = said(engine(), SamplingParams(max_tokens=120), [[1, 2] * 12])
    assert said(repeating, SamplingParams(max_tokens=120), [[1, 2] * 12]) == whole
    assert repeating.rounds and (repeating.speculation._probe.odds != odds).any()


def test_logits_that_are_not_numbers_are_an_error():
    weights = {n: w * 1e30 if "gate_proj" in n or "up_proj" in n else w for n, w in tiny_weights(tiny_config(VOCAB)).items()}
    made = engine(CONFIGS["ngram"])
    made.runner.load_weights(weights)
    out = made.generate([[1, 2, 1, 2, 1]], GREEDY)[0].completions[0]
    assert out.finish_reason == "error" and "not numbers" in out.error
    made.check_integrity()
