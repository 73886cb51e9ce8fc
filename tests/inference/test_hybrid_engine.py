"""Behavioural: hybrids through the engine, by equality: alone, batched, chunked, over a warm cache, preempted, drafted, forked."""

from __future__ import annotations

import itertools
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from karui.configs.errors import KaruiError, UnsupportedError
from karui.inference.cache.states import StatePool
from karui.inference.engine import Engine
from karui.inference.models.decoder import TorchRunner
from karui.inference.requests import Request, SamplingParams
from karui.inference.speculate import Speculation
from karui.inference.speculative.base import Context, Draft
from karui.inference.speculative.config import SpeculationConfig
from karui.inference.speculative.draft_model import RunnerDrafter
from tests.inference.test_exact import said
from tests.inference.test_hybrid import CASES, hybrid

KINDS = ["lfm2", "qwen3_next", "bamba", "granite"]


def make(runner: TorchRunner, **options: Any) -> Engine:
    return Engine(runner, **{"kv_dtype": "float32", "block_size": 4, "memory": "8MB", **options})


def texts_of(seed: int) -> list[list[int]]:
    g = torch.Generator().manual_seed(seed)
    lengths = [*torch.randint(2, 40, (2,), generator=g).tolist(), 32, 33]  # the last two: around the end of a block
    return [torch.randint(3, 199, (n,), generator=g).tolist() for n in lengths]


@pytest.mark.parametrize("case", KINDS)
def test_tokens_and_logprobs_do_not_depend_on_what_runs_beside(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, config, weights = hybrid(case)
    runner = TorchRunner(config, weights, bit_exact=True)
    requests = [Request(prompt=t, params=SamplingParams(max_tokens=14, logprobs=2, temperature=i % 2 * 0.8, seed=i))
                for i, t in enumerate(texts_of(KINDS.index(case)))]
    engine = make(runner)
    alone = [said(engine, [r])[0] for r in requests]
    warm = [said(engine, [r])[0] for r in requests]
    full = sum((len(r.prompt) - 1) // 4 * 4 for r in requests)
    assert warm == alone and engine.stats.num_cached_prompt_tokens == full  # a repeated prompt is all found
    engine.check_integrity()
    assert said(make(runner), requests) == alone
    engine = make(runner, max_tokens_per_step=7, max_sequences=3)
    assert said(engine, requests) == alone
    engine.check_integrity()
    engine = make(runner)
    step, steps = engine.step, itertools.count(1)

    def disturbed() -> Any:
        if next(steps) % 6 == 0:
            engine.scheduler.preempt_all()  # everything goes on from a page of the prefix cache
        return step()

    monkeypatch.setattr(engine, "step", disturbed)
    assert said(engine, requests) == alone
    assert engine.stats.num_preemptions > 4 and engine.scheduler.num_cached_tokens > 4 * 4
    engine.check_integrity()


@pytest.mark.parametrize("case", KINDS)
def test_answers_equal_transformers(case: str) -> None:
    """Not bit-exact: chunked recurrences in the prefill, decodes side by side, pages in the middle of chunks, warm and cold."""
    model, config, weights = hybrid(case)
    texts = texts_of(11)
    want = [model.generate(torch.tensor([t]), max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0)[0, len(t):]
            .tolist() for t in texts]
    runner = TorchRunner(config, weights)
    for options in ({}, dict(max_tokens_per_step=11), dict(max_sequences=2)):
        engine = make(runner, **options)
        for _ in range(2):
            outputs = engine.generate(texts, SamplingParams(max_tokens=16))  # type: ignore[arg-type]
            assert [o.token_ids for o in outputs] == want
        assert engine.stats.num_failed_steps == 0 and engine.stats.num_cached_prompt_tokens > 0
        engine.check_integrity()


class Half:
    """Knows what a request will say and drafts it, with a mistake in most drafts."""

    needs_hidden, aux_layers = False, ()

    def __init__(self, known: list[list[int]], rng: random.Random) -> None:
        self.known, self.rng = known, rng

    def propose(self, context: Context) -> Draft:
        text = next(k for k in self.known if k[:len(context.tokens)] == list(context.tokens))
        tokens = text[len(context.tokens):][:min(context.limit, context.depth, 5)]
        if tokens and self.rng.random() < 0.7:
            at = self.rng.randrange(len(tokens))
            tokens[at] = (tokens[at] + 1) % 199
        return Draft(tokens=tokens)

    def observe(self, seen: object) -> None: ...

    def reset(self) -> None: ...


@pytest.mark.parametrize("case", KINDS)
def test_drafts_equal_plain_decoding(case: str) -> None:
    """Accepted and rejected drafts, each of whose rows has a page of its own; also with no page to spare for some of them."""
    _, config, weights = hybrid(case)
    runner = TorchRunner(config, weights, bit_exact=True)
    requests = [Request(prompt=t, params=SamplingParams(max_tokens=18, logprobs=1)) for t in texts_of(7)]
    plain = said(make(runner), requests)
    known = [[*r.prompt, *answer[0][0]] for r, answer in zip(requests, plain, strict=True)]
    for size in ("8MB", 44 * runner.state_bytes + 40000):
        rng = random.Random(1)
        drafts = Speculation(SpeculationConfig(method="ngram", adaptive=False), lambda rng=rng: Half(known, rng))
        engine = make(runner, speculation=drafts, memory=size, max_sequences=5)
        assert said(engine, requests) == plain
        stats = engine.stats
        assert 10 < stats.num_accepted_tokens < stats.num_drafted_tokens
        engine.check_integrity()


@pytest.mark.parametrize("case", ["lfm2", "qwen3_next"])
def test_forks_equal_requests_of_their_own(case: str) -> None:
    """Samples and beams share their parent's page; with few places they wait and find it, or compute it, again."""
    _, config, weights = hybrid(case)
    runner = TorchRunner(config, weights, bit_exact=True)
    texts = texts_of(4)[1:]
    requests = [Request(prompt=t, params=SamplingParams(max_tokens=9, n=3, temperature=0.9, seed=3)) for t in texts]
    requests += [Request(prompt=t, params=SamplingParams(max_tokens=9, n=2, beams=3)) for t in texts]
    engine = make(runner)
    want = [said(engine, [r])[0] for r in requests]
    for options in ({}, dict(max_sequences=2), dict(max_sequences=4, max_tokens_per_step=9)):
        engine = make(runner, **options)
        assert said(engine, requests) == want
        engine.check_integrity()
    assert len({tuple(tokens) for tokens, _ in want[0]}) > 1


def test_scores_equal_transformers_and_leave_the_cache_alone() -> None:
    model, config, weights = hybrid("granite")
    engine = make(TorchRunner(config, weights))
    texts = [torch.randint(3, 199, (n,)).tolist() for n in (40, 7)]
    with torch.no_grad():
        for text, got in zip(texts, engine.score(texts), strict=True):
            want = model(torch.tensor([text])).logits[0, :-1].log_softmax(-1).gather(1, torch.tensor(text)[1:, None])[:, 0]
            assert (got - want).abs().max() < 1e-4
    assert engine.stats.num_cached_states == 0
    engine.check_integrity()


def cached(engine: Engine, prompt: list[int], max_tokens: int = 1) -> tuple[int, list[int]]:
    output = engine.generate(Request(prompt=prompt, params=SamplingParams(max_tokens=max_tokens)))[0]
    return output.num_cached_tokens, output.token_ids


def test_what_the_prefix_cache_finds() -> None:
    """A state is kept at a prompt's end, at a branch once it is seen to be one, and at the end of what was generated."""
    _, config, weights = hybrid("lfm2")
    engine = make(TorchRunner(config, weights))
    g = torch.Generator().manual_seed(0)
    shared, *rest = (torch.randint(3, 199, (n,), generator=g).tolist() for n in (22, 9, 9, 9))
    assert cached(engine, shared + rest[0])[0] == 0
    assert cached(engine, shared + rest[1])[0] == 0  # its blocks are there, no state is: one is left at the branch
    assert cached(engine, shared + rest[2])[0] == 20
    assert cached(engine, shared + rest[0])[0] == 28
    prompt = shared[:6]
    found, answer = cached(engine, prompt, 30)
    said_so_far = prompt + answer
    assert found == 0 and cached(engine, said_so_far + [5, 6])[0] == 32  # 35 tokens were computed
    before = engine.stats.num_cached_states
    cached(engine, said_so_far + [7], 30)
    assert engine.stats.num_cached_states <= before + 2  # one at its prompt's end, one that went along
    engine.update_weights({name: w * 1.01 for name, w in weights.items() if "conv" in name})
    assert cached(engine, shared + rest[0])[0] == 0
    engine.check_integrity()


def test_states_are_forgotten_with_their_blocks_and_with_the_longest_unused_first() -> None:
    _, config, weights = hybrid("lfm2")
    runner = TorchRunner(config, weights)
    per_block = 4 * runner.kv_bytes_per_token("float32")
    engine = make(runner, memory=60 * runner.state_bytes + 12 * per_block, max_sequences=1, max_context=40)
    g = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 199, (30,), generator=g).tolist() for _ in range(8)]
    for prompt in prompts:
        cached(engine, prompt)
        states = engine.scheduler.states
        assert states is not None
        assert all(engine.pool.index.find(name) is not None for name in states._page_of)  # none without its block
    assert engine.pool.num_evicted > 0 and cached(engine, prompts[-1])[0] == 28 and cached(engine, prompts[0])[0] == 0
    engine = make(runner, max_sequences=1)
    engine.scheduler.states = StatePool(4)  # each prompt takes one page and leaves another at its end
    engine.pool.on_forget = engine.scheduler.states.forget
    for prompt in prompts[:4]:
        cached(engine, prompt)
    assert [cached(engine, p)[0] for p in (prompts[3], prompts[2], prompts[0])] == [28, 28, 0]
    engine.check_integrity()


def test_memory_is_planned_and_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    _, config, weights = hybrid("qwen3_next")
    runner = TorchRunner(config, weights)
    page = runner.state_bytes
    engine = make(runner, memory=40 * page, max_sequences=8, max_context=32)
    assert engine.scheduler.states is not None and engine.scheduler.states.num_pages == 19  # half of the budget, with the zeros
    assert engine.pool.num_blocks * 4 * runner.kv_bytes_per_token("float32") <= 20 * page
    assert f"recurrent states: 19 pages of {page} bytes, whatever the context: two for each of 6 sequences, 7 for drafts" in caplog.text
    assert "6 sequences run at once instead of 8: the memory holds no more recurrent states" in caplog.text
    engine = make(runner, memory=6 * page, max_sequences=8, max_context=8)
    assert engine.scheduler.max_sequences == 1 and len(engine.generate([[3, 4]], SamplingParams(max_tokens=5))[0].token_ids) == 5
    with pytest.raises(KaruiError, match="do not hold the three pages"):
        make(runner, memory=5 * page)


@pytest.mark.parametrize("kv_dtype", ["int8", "kivi4"])
def test_other_cache_formats_hold_the_attention_layers(kv_dtype: str) -> None:
    _, config, weights = hybrid("bamba")
    runner = TorchRunner(config, weights, bit_exact=True)
    prompt = torch.randint(3, 199, (40,)).tolist()
    engine = make(runner, kv_dtype=kv_dtype, block_size=32)
    first = cached(engine, prompt, 12)
    assert cached(engine, prompt, 12) == (32, first[1])
    assert first[1] == cached(make(runner, kv_dtype=kv_dtype, block_size=32, max_tokens_per_step=9), prompt, 12)[1]


@pytest.mark.parametrize(("case", "modules"), [("lfm2", ["in_proj", "out_proj", "w2", "q_proj"]),
                                               ("qwen3_next-dense", ["in_proj_qkvz", "out_proj", "q_proj"]),
                                               ("granite", ["in_proj", "out_proj", "input_linear", "o_proj"])])
def test_adapters_equal_peft(case: str, modules: list[str], tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model, config, weights = hybrid(case)
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=modules)).eval()
    with torch.no_grad():
        for name, p in adapted.named_parameters():
            if "lora_" in name:
                p.copy_(torch.randn_like(p) * 0.2)
    adapted.save_pretrained(tmp_path)
    engine = make(TorchRunner(config, weights))
    engine.load_adapter("a", tmp_path)
    text = torch.randint(3, 199, (20,)).tolist()
    with torch.no_grad():
        logprobs = adapted(torch.tensor([text])).logits[0, :-1].log_softmax(-1)
    want = logprobs.gather(1, torch.tensor(text)[1:, None])[:, 0]
    assert (engine.score([text], adapter="a")[0] - want).abs().max() < 1e-4
    assert (engine.score([text])[0] - want).abs().max() > 1e-2


def test_what_is_refused() -> None:
    _, config, weights = hybrid("lfm2")
    runner = TorchRunner(config, weights)
    for method in ("lookahead", "medusa", "eagle3"):
        drafts = Speculation(SpeculationConfig(method=method), lambda: Half([], random.Random(0)))
        with pytest.raises(UnsupportedError, match=f"speculation '{method}.*' does not go with recurrent layers"):
            make(runner, speculation=drafts)
    engine = make(runner)
    cached(engine, list(range(3, 30)))
    with pytest.raises(UnsupportedError, match="prefixes of lfm2 are not handed over"):
        engine.export_prefix(list(range(3, 30)))
    with pytest.raises(UnsupportedError, match="draft model: a lfm2 has recurrent layers"):
        RunnerDrafter(runner, max_context=64)
    native = pytest.importorskip("karui.inference.models.native")
    with pytest.raises(UnsupportedError, match="the native kernels have no recurrent layers"):
        native.NativeRunner(config, weights)
    from karui.inference.models.gpu import unsuited

    assert unsuited(config, torch.device("cpu"))


def test_no_rank_of_several_serves_a_hybrid(monkeypatch: pytest.MonkeyPatch) -> None:
    from karui.inference.models import parallel

    _, config, weights = hybrid("bamba")
    monkeypatch.setattr(parallel.dist, "is_initialized", lambda: True)
    for kind in (parallel.TensorParallelRunner, parallel.PipelineRunner):
        with pytest.raises(UnsupportedError, match="a bamba has recurrent layers, which are not cut or dealt out"):
            kind(config, weights)


def test_every_case_is_a_hybrid() -> None:
    assert all(hybrid(case)[1].recurrent is not None for case in CASES)
