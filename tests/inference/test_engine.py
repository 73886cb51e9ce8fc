"""Behavioural: the engine on tiny random models, its tokens against transformers' generate."""

from __future__ import annotations

import pytest
import torch

from karui.configs.errors import KaruiError, UnsupportedError
from karui.inference.engine import Engine
from karui.inference.models.decoder import TorchRunner
from karui.inference.requests import Request, SamplingParams
from tests.inference.conftest import tiny


def engine_of(kind: str = "llama", seed: int = 0, changes: dict | None = None, **options):
    model, config, weights = tiny(kind, seed, **(changes or {}))
    runner = TorchRunner(config, weights, bit_exact=options.pop("bit_exact", False))
    return model, Engine(runner, **{"max_tokens_per_step": 16, "block_size": 4, "memory": "8MB", **options})


def prompts(count: int, low: int = 3, high: int = 40, seed: int = 1) -> list[list[int]]:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(low, high, (count,), generator=g).tolist()
    return [torch.randint(3, 199, (n,), generator=g).tolist() for n in lengths]


def greedy(model, ids: list[int], new: int, **options) -> list[int]:
    out = model.generate(torch.tensor([ids]), max_new_tokens=new, do_sample=False, pad_token_id=0,
                         **{"eos_token_id": None, **options})
    return out[0, len(ids):].tolist()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
def test_batched_chunked_greedy_equals_generate(kind):
    model, engine = engine_of(kind, changes=dict(sliding_window=9) if kind == "mistral" else None, max_sequences=5)
    texts = prompts(12)
    outputs = engine.generate(texts, SamplingParams(max_tokens=12))
    for ids, output in zip(texts, outputs, strict=True):
        assert output.token_ids == greedy(model, ids, 12)
        assert output.completions[0].finish_reason == "length"
    engine.check_integrity()


def test_end_tokens_and_ignore_eos():
    model, engine = engine_of()
    ids = prompts(1)[0]
    tokens = greedy(model, ids, 20)
    end = tokens[7]
    first = tokens.index(end)
    engine.eos = frozenset({end})
    out = engine.generate([ids], SamplingParams(max_tokens=20))[0].completions[0]
    assert (out.token_ids, out.finish_reason, out.stop_reason) == (tokens[:first + 1], "stop", end)
    assert engine.generate([ids], SamplingParams(max_tokens=20, ignore_eos=True))[0].token_ids == tokens
    engine.eos = frozenset()
    out = engine.generate([ids], SamplingParams(max_tokens=20, stop_token_ids=(end,)))[0].completions[0]
    assert out.token_ids == tokens[:first + 1]


def test_preemption_by_recompute_keeps_the_tokens():
    model, engine = engine_of(memory=40 * 4 * 2 * 3 * 2 * 8 * 4, max_context=96)  # 40 blocks of 4 tokens
    assert engine.pool.num_blocks == 40
    texts = prompts(8, 20, 30)
    outputs = engine.generate(texts, SamplingParams(max_tokens=40))
    assert engine.stats.num_preemptions > 0
    for ids, output in zip(texts, outputs, strict=True):
        assert output.token_ids == greedy(model, ids, 40)
    engine.check_integrity()


def test_a_warm_prefix_is_not_computed_again():
    model, engine = engine_of(max_context=100)
    shared = prompts(1, 40, 41)[0]
    cold = engine.generate([shared], SamplingParams(max_tokens=6))[0]
    assert cold.num_cached_tokens == 0
    warm = engine.generate([shared], SamplingParams(max_tokens=6))[0]
    assert warm.num_cached_tokens == (len(shared) - 1) // 4 * 4
    assert warm.token_ids == cold.token_ids == greedy(model, shared, 6)
    longer = engine.generate([[*shared, 7, 8, 9]], SamplingParams(max_tokens=6))[0]
    assert longer.num_cached_tokens == 40 and longer.token_ids == greedy(model, [*shared, 7, 8, 9], 6)
    salted = engine.generate([Request(prompt=shared, params=SamplingParams(max_tokens=6), cache_salt="x")])[0]
    assert salted.num_cached_tokens == 0 and salted.token_ids == cold.token_ids
    assert engine.stats.num_cached_prompt_tokens == warm.num_cached_tokens + longer.num_cached_tokens


@pytest.mark.parametrize("length_penalty", [1.0, 0.3])
def test_beam_search_equals_transformers(length_penalty):
    model, engine = engine_of("qwen3")
    for ids in prompts(4, seed=5):
        want = model.generate(torch.tensor([ids]), max_new_tokens=9, num_beams=3, num_return_sequences=2, do_sample=False,
                              eos_token_id=[11, 40, 71, 105], pad_token_id=0, length_penalty=length_penalty, early_stopping=False)
        params = SamplingParams(max_tokens=9, beams=3, n=2, stop_token_ids=(11, 40, 71, 105), length_penalty=length_penalty)
        got = engine.generate([Request(prompt=ids, params=params)])[0]
        for row, completion in zip(want[:, len(ids):].tolist(), got.completions, strict=True):
            assert completion.token_ids == row[:len(completion.token_ids)] and not any(row[len(completion.token_ids):])
        engine.check_integrity()


def test_beams_survive_preemption():
    _, roomy = engine_of("qwen3")
    _, tight = engine_of("qwen3", memory=14 * 4 * 2 * 3 * 2 * 8 * 4, max_context=50)
    params = SamplingParams(max_tokens=20, beams=4, n=4)
    requests = [Request(prompt=ids, params=params) for ids in prompts(3, 10, 20)]
    want, got = roomy.generate(requests), tight.generate(requests)
    assert tight.stats.num_preemptions > 0
    assert [[c.token_ids for c in o.completions] for o in got] == [[c.token_ids for c in o.completions] for o in want]
    tight.check_integrity()


def test_forked_continuations_equal_separate_requests():
    _, engine = engine_of()
    ids = prompts(1, 18, 19)[0]
    params = SamplingParams(max_tokens=10, temperature=1.0, seed=4, n=3, logprobs=0)
    together = engine.generate([Request(prompt=ids, params=params)])[0].completions
    assert len({tuple(c.token_ids) for c in together}) == 3
    from karui.inference.sampling import child_seed
    for i, c in enumerate(together):
        alone = engine.generate([ids], SamplingParams(max_tokens=10, temperature=1.0, seed=child_seed(4, i)))[0]
        assert alone.token_ids == c.token_ids and c.index == i
    engine.check_integrity()


def test_seeds_do_not_depend_on_the_batch():
    _, engine = engine_of(bit_exact=True)
    texts = prompts(6)
    requests = [Request(prompt=t, params=SamplingParams(max_tokens=8, temperature=0.9, top_k=30, top_p=0.9, seed=i))
                for i, t in enumerate(texts)]
    together = [o.token_ids for o in engine.generate(requests)]
    alone = [engine.generate([r])[0].token_ids for r in reversed(requests)][::-1]
    assert together == alone


def test_logprobs_are_raw_and_processed():
    model, engine = engine_of()
    ids = prompts(1)[0]
    sampled = SamplingParams(max_tokens=5, logprobs=3, temperature=0.7, seed=1, top_k=5)
    for params in (SamplingParams(max_tokens=5, logprobs=3), sampled):
        out = engine.generate([ids], params)[0].completions[0]
        with torch.no_grad():
            logits = model(torch.tensor([ids + out.token_ids])).logits[0, len(ids) - 1:-1].double()
        raw = logits.log_softmax(-1)
        for i, (token, found) in enumerate(zip(out.token_ids, out.logprobs, strict=True)):
            assert found.token == token and abs(found.raw - raw[i, token].item()) < 1e-4
            assert [t for t, _ in found.top] == raw[i].topk(3).indices.tolist()
            kept = logits[i].topk(5)
            processed = 0.0 if params.greedy else (kept.values / 0.7).log_softmax(-1)[kept.indices == token].item()
            assert abs(found.processed - processed) < 1e-4


def test_score_equals_transformers():
    model, engine = engine_of(max_context=120)
    texts = [*prompts(5, 2, 110), [5]]
    for ids, got in zip(texts, engine.score(texts), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        want = logits.gather(1, torch.tensor(ids[1:], dtype=torch.long)[:, None])[:, 0]
        assert got.shape == want.shape and torch.allclose(got, want, rtol=0, atol=1e-4)
    engine.check_integrity()


def test_priorities_and_admission_order():
    _, engine = engine_of(max_sequences=1)
    order: list[str] = []
    for name, priority in (("a", 5), ("b", 0), ("c", 5), ("d", -1)):
        engine.add(Request(prompt=[3, 4, 5], params=SamplingParams(max_tokens=3), priority=priority, id=name,
                           on_delta=lambda d: order.append(d.request_id) if d.finish_reason else None))
    while engine.has_work:
        engine.step()
    assert order == ["d", "b", "a", "c"]


def test_an_urgent_request_takes_the_place_of_another():
    model, engine = engine_of(max_sequences=1)
    engine.add(Request(prompt=[3, 4, 5], params=SamplingParams(max_tokens=30), priority=1, id="slow"))
    for _ in range(5):
        engine.step()
    done: list[str] = []
    while engine.has_work:
        if not done and engine.stats.num_running and engine.stats.num_waiting == 0 and "fast" not in engine._groups:
            engine.add(Request(prompt=[9, 8, 7], params=SamplingParams(max_tokens=3), priority=0, id="fast"))
        done += [d.request_id for d in engine.step() if d.finish_reason]
    assert done[0] == "fast" and engine.stats.num_preemptions >= 1


def test_streaming_cancelling_and_callbacks():
    model, engine = engine_of()
    ids = prompts(1)[0]
    want = greedy(model, ids, 12)
    deltas = list(engine.stream(Request(prompt=ids, params=SamplingParams(max_tokens=12))))
    assert [t for d in deltas for t in d.token_ids] == want and deltas[-1].finish_reason == "length"
    stream = engine.stream(Request(prompt=ids, params=SamplingParams(max_tokens=50)))
    next(stream)
    stream.close()
    engine.check_integrity()
    got: list[int] = []

    def three(delta):
        got.extend(delta.token_ids)
        return len(got) < 3

    out = engine.generate([Request(prompt=ids, params=SamplingParams(max_tokens=50), on_delta=three)])[0]
    assert out.completions[0].finish_reason == "abort" and out.token_ids[:3] == want[:3]
    engine.check_integrity()


def test_new_weights_invalidate_what_the_old_ones_computed():
    old, engine = engine_of(seed=0)
    new, _, weights = tiny("llama", seed=9)
    ids = prompts(1, 30, 31)[0]
    engine.generate([ids], SamplingParams(max_tokens=4))
    engine.add(Request(prompt=ids, params=SamplingParams(max_tokens=20), id="running", cache_salt="own"))
    for _ in range(5):
        engine.step()
    assert engine.update_weights(weights) == 1
    out = engine.generate([ids], SamplingParams(max_tokens=6))[0]
    assert out.num_cached_tokens == 0 and out.token_ids == greedy(new, ids, 6)
    while engine.has_work:
        engine.step()
    assert engine.update_weights({"model.norm.weight": weights["model.norm.weight"] * 0 + 1}, version="step-7") == "step-7"
    with pytest.raises(KaruiError, match="not consumed"):
        engine.update_weights({"nonsense": torch.zeros(1)})
    engine.check_integrity()


def test_a_failing_step_is_tried_again_and_the_culprit_found(caplog):
    model, engine = engine_of()
    forward, poison = engine.runner.forward, 150

    def faulty(batch):
        if (batch.tokens == poison).any():
            raise RuntimeError("no such token today")
        return forward(batch)

    engine.runner.forward = faulty
    texts = [[t for t in p if t != poison] for p in prompts(4)]
    texts[2][1] = poison
    outputs = engine.generate(texts, SamplingParams(max_tokens=6))
    assert outputs[2].completions[0].finish_reason == "error" and "no such token" in outputs[2].completions[0].error
    for i in (0, 1, 3):
        want = greedy(model, texts[i], 6)
        assert outputs[i].token_ids == want[:len(outputs[i].token_ids)]
        assert outputs[i].completions[0].finish_reason == ("error" if poison in want[:5] else "length")
    engine.check_integrity()


def test_logits_that_are_not_numbers_end_the_request_only():
    _, engine = engine_of()
    forward = engine.runner.forward

    def broken(batch):
        out = forward(batch)
        out.logits = out.logits + float("nan")
        return out

    engine.runner.forward = broken
    for params in (SamplingParams(max_tokens=3), SamplingParams(max_tokens=3, temperature=1.0)):
        out = engine.generate([[3, 4, 5]], params)[0].completions[0]
        assert out.finish_reason == "error" and "not numbers" in out.error
    engine.check_integrity()


def test_impossible_requests_are_refused_before_they_run():
    _, engine = engine_of(max_context=50)
    for request, told in (
        (Request(prompt=[3] * 50), "the prompt has 50 tokens; the context holds 50"),
        (Request(prompt=[]), "empty"), (Request(prompt=[3, 199]), "token 199 is outside"), (Request(prompt=[3, -1]), "token -1"),
        (Request(prompt="text"), "needs a tokenizer"), (Request(prompt=[3], adapter="x"), "adapter 'x' is not loaded"),
        (Request(prompt=[3], params=SamplingParams(stop=("x",))), "stop texts need"),
    ):
        with pytest.raises(KaruiError, match=told):
            engine.add(request)
    with pytest.raises(KaruiError, match="1 to 50"):
        engine.score([[3] * 51])
    engine.add(Request(prompt=[3], id="one"))
    with pytest.raises(KaruiError, match="in use"):
        engine.add(Request(prompt=[3], id="one"))
    engine.abort("one")
    engine.step()
    with pytest.raises(KaruiError, match="outside"):
        engine.generate([[3, 4], [5, 500]])
    engine.check_integrity()


def test_memory_is_planned_in_words():
    _, config, weights = tiny("llama")
    runner = TorchRunner(config, weights)
    per_token = 2 * 3 * 2 * 8 * 4
    assert Engine(runner, memory=per_token * 64, block_size=4).max_context == 64
    with pytest.raises(KaruiError, match="one context of 100 tokens needs 38,400 bytes"):
        Engine(runner, memory=per_token * 64, block_size=4, max_context=100)
    for odd in ("lots", "9" * 400):
        with pytest.raises(KaruiError, match="is not a size"):
            Engine(runner, memory=odd)
    with pytest.raises(KaruiError, match="max_context is 1,000"):
        Engine(runner, max_context=1000)
    with pytest.raises(KaruiError, match="max_sequences must be at least 1"):
        Engine(runner, max_sequences=0)
    with pytest.raises(UnsupportedError, match="int5"):
        Engine(runner, kv_dtype="int5")


@pytest.mark.parametrize("context", [2, 16])
def test_a_context_that_one_block_holds(context):
    """One sequence of one block asks for a pool of one, which has none to spare."""
    _, engine = engine_of(max_context=context, max_sequences=1, block_size=16)
    assert len(engine.generate([[5]], SamplingParams(max_tokens=30, ignore_eos=True))[0].token_ids) == context - 1


@pytest.mark.parametrize("wrong", [dict(temperature=-1), dict(top_p=0), dict(top_p=1.5), dict(top_k=-1), dict(max_tokens=0),
                                   dict(max_tokens=-3), dict(n=0), dict(min_p=1.0), dict(repetition_penalty=0), dict(stop=("",)),
                                   dict(temperature=float("nan")), dict(beams=2, temperature=1.0), dict(logprobs=-1),
                                   dict(presence_penalty=3)])
def test_sampling_limits(wrong):
    with pytest.raises(KaruiError, match="sampling: "):
        SamplingParams(**wrong)


def test_drawing_where_the_logits_are(monkeypatch):
    """As on a GPU: rows are drawn by `kernels.sampling`, each by its own seed and place; with alternatives, by the plain sampler."""
    from karui.inference.rows import Rows

    plain = engine_of()[1]
    monkeypatch.setattr(Rows, "on_gpu", True)
    _, engine = engine_of(max_sequences=3)
    texts = prompts(5)
    hot = [SamplingParams(max_tokens=9, temperature=1.3, top_k=40, top_p=0.9, seed=i) for i in range(5)]
    requests = [Request(prompt=t, params=p) for t, p in zip(texts, hot, strict=True)]
    together = [o.token_ids for o in engine.generate(requests)]
    assert together == [engine.generate(r)[0].token_ids for r in requests]
    assert len({tuple(t) for t in together}) == 5
    # one candidate leaves nothing to draw; forks and logprobs keep working beside
    narrow = SamplingParams(max_tokens=6, temperature=1.0, top_k=1, n=2)
    out = engine.generate([texts[0]], narrow)[0]
    monkeypatch.setattr(Rows, "on_gpu", False)
    want = plain.generate([texts[0]], SamplingParams(max_tokens=6))[0].token_ids
    assert [c.token_ids for c in out.completions] == [want, want]
    monkeypatch.setattr(Rows, "on_gpu", True)
    logged = SamplingParams(max_tokens=6, temperature=1.0, seed=4, logprobs=2)
    got = engine.generate([texts[1]], logged)[0].completions[0]
    monkeypatch.setattr(Rows, "on_gpu", False)
    assert got.token_ids == plain.generate([texts[1]], logged)[0].token_ids and len(got.logprobs) == 6
    # without alternatives the token's own two logprobs come from the GPU as well
    monkeypatch.setattr(Rows, "on_gpu", True)
    cut = SamplingParams(max_tokens=6, temperature=0.7, top_k=30, seed=4, logprobs=0)
    got = engine.generate([texts[1]], cut)[0].completions[0]
    score = engine.score([[*texts[1], *got.token_ids]])[0][-6:]
    assert (torch.tensor([t.raw for t in got.logprobs]) - score).abs().max() < 1e-4
    assert all(t.token == i and t.processed > t.raw for t, i in zip(got.logprobs, got.token_ids, strict=True))
