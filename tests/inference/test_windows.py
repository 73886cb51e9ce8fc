"""Behavioural: layers with a window give their blocks back, and nothing but the memory held changes by it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from karui.configs.errors import KaruiError
from karui.inference.cache.groups import groups_of, most_blocks, num_dead, one_group
from karui.inference.engine import Engine
from karui.inference.handoff import Prefix
from karui.inference.models.decoder import TorchRunner
from karui.inference.models.native import NativeRunner
from karui.inference.requests import Request, SamplingParams
from karui.inference.speculate import Speculation
from karui.inference.speculative.config import SpeculationConfig
from karui.inference.speculative.factory import Speculator
from karui.kernels.native import available
from tests.inference.conftest import preempting, tiny

CASES = {
    "mistral": ("mistral", dict(sliding_window=20)), "phi3": ("phi3", dict(pad_token_id=0, sliding_window=20)),
    "gemma2": ("gemma2", dict(sliding_window=20, query_pre_attn_scalar=13)),
    "gemma3": ("gemma3_text", dict(sliding_window=7, query_pre_attn_scalar=13, sliding_window_pattern=4, num_hidden_layers=5)),
    "gpt_oss": ("gpt_oss", dict(sliding_window=7, num_local_experts=4, num_experts_per_tok=2)),
}  # fmt: skip


def runner_of(case, native=False):
    kind, changes = CASES[case]
    _, config, weights = tiny(kind, **{"head_dim": 32 if native else 16, "max_position_embeddings": 256, **changes})
    return NativeRunner(config, weights) if native else TorchRunner(config, weights, bit_exact=True)


def keeping(runner):
    """The runner as it is without windows' blocks coming back."""
    runner.kv_groups = lambda kv_dtype: one_group(runner.config.num_kv_layers)
    return runner


def engine_of(runner, kv_dtype="float32", drafts=None, **options):
    if drafts:
        drafts = SpeculationConfig.parse(drafts)
        options["speculation"] = Speculation(drafts, Speculator(drafts, runner.config).new)
    block = 32 if kv_dtype.startswith("kivi") else 4
    return Engine(runner, kv_dtype=kv_dtype, **{"block_size": block, "memory": "4MB", "max_context": 192, **options})


def said(engine, requests):
    outputs = [[(c.token_ids, c.logprobs, c.score) for c in o.completions] for o in engine.generate(requests)]
    engine.check_integrity()
    return outputs


def requests(length=60, count=14):
    g = torch.Generator().manual_seed(1)
    shared = torch.randint(3, 199, (length,), generator=g).tolist()
    texts = [shared, [*shared[:length // 2], 5, 6, 7], [*shared, 8], [7, 8, 9] * 9]
    settings = [dict(logprobs=2), dict(temperature=0.9, seed=2, n=2), dict(beams=2), dict(temperature=0.8, seed=3)]
    return [Request(prompt=t, params=SamplingParams(max_tokens=count, ignore_eos=True, **s)) for t, s in zip(texts, settings, strict=True)]


@pytest.mark.parametrize(("case", "kv_dtype"), [("gemma3", "float32"), ("gpt_oss", "int8"), ("gemma2", "kivi4"), ("phi3", "int4")])
def test_tokens_are_those_of_an_engine_that_keeps_all_keys(case, kv_dtype):
    """Batched, with forks and beams; in small chunks, preempted, over what is left in the prefix cache."""
    coded = kv_dtype == "kivi4"
    asked = requests(100 if coded else 40, 8)
    want = said(engine_of(keeping(runner_of(case)), kv_dtype), asked)
    runner = runner_of(case)
    engine = engine_of(runner, kv_dtype)
    assert any(engine.groups.windows) and said(engine, asked) == want
    assert said(engine, asked) == want and engine.stats.num_cached_prompt_tokens > 0  # over a warm cache
    assert said(preempting(engine_of(runner, kv_dtype, max_tokens_per_step=9, max_sequences=4), 7), asked) == want


@pytest.mark.skipif(not available(), reason="no C++ compiler here")
@pytest.mark.parametrize(("case", "kv_dtype"), [("mistral", "float16"), ("mistral", "int8"), ("mistral", "kivi2"), ("gemma3", "float32"),
                                                ("gemma2", "int8"), ("gpt_oss", "float16")])
def test_the_native_runner_too(case, kv_dtype):
    """Several steps in one call, drafts in C++, chains and trees, and step by step; forks and beams."""
    asked = [Request(prompt=r.prompt, params=SamplingParams(max_tokens=40, ignore_eos=True)) for r in requests(100)]
    several = requests(40, 8)
    kept, runner = (make(runner_of(case, native=True)) for make in (keeping, lambda r: r))
    want, want_several = said(engine_of(kept, kv_dtype), asked), said(engine_of(kept, kv_dtype), several)
    engine = engine_of(runner, kv_dtype)
    assert engine.groups.windows == ((20,) if case == "mistral" else runner_of(case).kv_groups(kv_dtype).windows)
    assert said(engine, asked) == want and said(engine, asked) == want and engine.stats.num_cached_prompt_tokens > 0
    assert said(engine_of(runner, kv_dtype), several) == want_several
    for method in ("ngram", "lookahead") if kv_dtype != "kivi2" else ("ngram",):
        spec = SpeculationConfig(method=method, adaptive=False, n_min=1)
        drafting = engine_of(runner, kv_dtype, speculation=Speculation(spec, Speculator(spec, runner.config).new))
        assert said(drafting, asked) == want and drafting.stats.num_drafted_tokens > 0
    assert said(preempting(engine_of(runner, kv_dtype, max_tokens_per_step=9, max_sequences=4, ahead=1), 7), asked) == want


@pytest.mark.parametrize("drafts", ["ngram:9", "lookahead:3,2,2"])
def test_rejected_drafts(drafts):
    """Chains and trees: what a window gives back was seen for the last time, whatever a verification takes back."""
    asked = [Request(prompt=[7, 8, 9, 10, 11] * 6, params=SamplingParams(max_tokens=30, ignore_eos=True))]
    engine = engine_of(runner_of("gemma3"), drafts=drafts)
    assert said(engine, asked) == said(engine_of(keeping(runner_of("gemma3"))), asked) and engine.stats.num_drafted_tokens > 0


@pytest.mark.parametrize(("case", "kv_dtype", "native"), [
    ("gemma3", "int8", False), ("mistral", "float32", False), ("gemma2", "kivi4", False), ("gemma3", "int8", True), ("gpt_oss", "float16", True)])
def test_prefixes_are_handed_over(case, kv_dtype, native, tmp_path):
    if native and not available():
        pytest.skip("no C++ compiler here")
    asked = requests(110, 8)[:1]
    first, second = (engine_of(runner_of(case, native), kv_dtype) for _ in range(2))
    want = said(first, asked)
    first.export_prefix(asked[0].prompt).save(tmp_path / "p.safetensors")
    prefix = Prefix.load(tmp_path / "p.safetensors")
    length = len(prefix.tokens)
    assert max(prefix.starts) > length // 2 and min(prefix.starts) == (0 if None in first.groups.windows else prefix.starts[0])
    assert second.import_prefix(prefix) == length and said(second, asked) == want
    assert second.stats.num_cached_prompt_tokens == length
    again = second.export_prefix(asked[0].prompt)
    assert torch.equal(again.data, prefix.data) and again.starts == prefix.starts
    with pytest.raises(KaruiError, match="from token .* on alone"):
        engine_of(keeping(runner_of(case, native)), kv_dtype).import_prefix(prefix)
    full = engine_of(keeping(runner_of(case, native)), kv_dtype)  # the other way: all keys into an engine that keeps some
    said(full, asked)
    third = engine_of(runner_of(case, native), kv_dtype)
    assert third.import_prefix(full.export_prefix(asked[0].prompt)) == length and said(third, asked) == want


@pytest.mark.parametrize("case", ["mistral", "gemma3"])
@pytest.mark.parametrize("native", [False, pytest.param(True, marks=pytest.mark.skipif(not available(), reason="no C++ compiler here"))])
def test_what_is_held_is_what_was_planned(case, native):
    """A long text through little memory, the plan's figure never passed, and far less than all keys."""
    runner = runner_of(case, native)
    runner.bit_exact = False
    engine = engine_of(runner, max_tokens_per_step=8, max_sequences=1, max_context=250, ahead=1)
    most = engine.groups.most_blocks(250, 8, 4)
    assert engine.pool.num_blocks == most < len(engine.groups) * 63 * (0.2 if case == "mistral" else 0.7)
    held, forward = [], runner.forward
    runner.forward = lambda batch: held.append(engine.pool.num_blocks - engine.pool.num_free) or forward(batch)
    engine.generate(Request(prompt=list(range(3, 183)), params=SamplingParams(max_tokens=60, ignore_eos=True)))
    assert 0.7 * most < max(held) <= most and engine.stats.num_preemptions == 0
    with pytest.raises(KaruiError, match="one context of 250 tokens needs"):
        engine_of(runner, max_tokens_per_step=8, max_context=250,
                  memory=4 * (most - 1) * engine.groups.size * runner.kv_bytes_per_token("float32") // runner.config.num_layers)


@given(st.integers(1, 40), st.integers(0, 120), st.integers(1, 20), st.integers(1, 9))
def test_a_dead_block_is_one_that_no_later_query_sees(window, computed, chunk, size):
    dead = num_dead(window, computed, size)
    behind = sum((i + 1) * size - 1 <= computed - window for i in range(computed // size))
    assert dead == max(0, min(behind, computed // size - 1))
    assert -(-(computed + chunk) // size) - dead <= most_blocks(window, computed + chunk, chunk, size)


def test_groups_of_models():
    def sizes(windows, context=10_000):
        found = groups_of(windows, context)
        assert all(windows[i] == found.windows[g] for i, (g, _) in enumerate(found.places)) or len(found) == 1
        assert len({*found.places}) == len(windows) and max(n for _, n in found.places) < found.size
        return found.windows, found.size

    assert sizes([4096] * 32) == ((4096,), 32) and sizes([None] * 5) == ((None,), 5)
    assert sizes([4096] * 32, context=4096) == ((None,), 32)  # no query is so far from a key
    assert sizes([4096, None] * 13) == ((None, 4096), 13)  # gemma 2 2B
    assert sizes(([512] * 5 + [None]) * 4 + [512] * 2) == ((None, *[512] * 6), 4)  # gemma 3 1B
    assert sizes([128, None] * 12) == ((None, 128), 12)  # gpt-oss 20B
    assert sizes([None] * 27 + [512]) == ((None,), 28)  # so few that a long context would take as many bytes
    assert sizes([64, 256, None] * 2) == ((None, 64, 256), 2)
