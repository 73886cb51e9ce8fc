"""Reference and behavioural: caches of 2 and 4 bits against codes made by hand, and their exactness, by equality."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from karui.configs.errors import KaruiError, UnsupportedError
from karui.inference.cache.affine import decode, encode, row_bytes
from karui.inference.cache.kivi import KiviStore
from karui.inference.cache.kv import KVStore, bytes_per_token, staged_bytes_per_token
from karui.inference.engine import Engine
from karui.inference.handoff import Prefix
from karui.inference.models.decoder import TorchRunner
from karui.inference.requests import Request, SamplingParams
from karui.inference.speculate import Speculation
from karui.inference.speculative.config import SpeculationConfig
from karui.inference.speculative.factory import Speculator
from tests.inference.conftest import tiny
from tests.inference.test_decoder import batch_of

PACKED = ["int4", "kivi4", "kivi2"]
BITS = {"int4": 4, "kivi4": 4, "kivi2": 2}
BLOCK = 32


def rounded(x: np.ndarray, bits: int) -> np.ndarray:
    """One group [n], quantized and dequantized by hand in float64."""
    low = float(np.float16(x.min()))
    step = float(np.float16((np.float32(x.max()) - np.float32(low)) / (2**bits - 1)))
    if step == 0:
        return np.full_like(x, low)
    return np.clip(np.round((np.float32(x) - np.float32(low)) / np.float32(step)), 0, 2**bits - 1) * step + low


def by_hand(k: np.ndarray, v: np.ndarray, kv_dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values [C, G, D] as their codes say, all of them."""
    k, v, bits = k.copy(), v.copy(), BITS[kv_dtype]
    tokens, heads, width = k.shape
    group = np.gcd(width, 32)
    for h in range(heads):
        for t in range(tokens):
            for d in range(0, width, group):
                v[t, h, d:d + group] = rounded(v[t, h, d:d + group], bits)
                if kv_dtype == "int4":
                    k[t, h, d:d + group] = rounded(k[t, h, d:d + group], bits)
        for t in range(0, tokens // 32 * 32, 32):
            for d in range(width if kv_dtype != "int4" else 0):
                k[t:t + 32, h, d] = rounded(k[t:t + 32, h, d], bits)
    return k, v


def attention_by_hand(q: np.ndarray, k: np.ndarray, v: np.ndarray, kv_dtype: str, window: int | None) -> np.ndarray:
    """q [C, A, D] over k, v [C, G, D], query p sees keys 0..p: codes, but with KIVI those of its own block in fp16."""
    whole = [np.float16(x).astype(np.float64) for x in (k, v)]
    coded = by_hand(k, v, kv_dtype) if kv_dtype == "int4" else by_hand(*whole, kv_dtype)
    out = np.zeros_like(q)
    for p in range(len(q)):
        first = p // BLOCK * BLOCK if kv_dtype != "int4" else p + 1
        keys, values = (np.concatenate([c[:first], w[first:p + 1]])[:p + 1] for c, w in zip(coded, whole, strict=True))
        oldest = max(0, p + 1 - window) if window else 0
        for a in range(q.shape[1]):
            head = a // (q.shape[1] // k.shape[1])
            score = keys[oldest:, head] @ q[p, a] / np.sqrt(q.shape[2])
            weight = np.exp(score - score.max())
            out[p, a] = weight / weight.sum() @ values[oldest:, head]
    return out


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([2, 4]), st.sampled_from([8, 16, 32]), st.integers(1, 3), st.floats(1e-6, 1e4), st.integers(0, 2**20))
def test_codes_are_those_made_by_hand(bits, group, groups, size, seed):
    x = torch.randn(5, groups * group, generator=torch.Generator().manual_seed(seed)) * size
    x[0, :group] = 1.5
    data = encode(x, bits, group)
    assert data.dtype == torch.uint8 and data.shape == (5, row_bytes(groups * group, bits, group))
    found = decode(data, groups * group, bits, group, torch.float64)
    want = np.stack([np.concatenate([rounded(g, bits) for g in row.reshape(groups, group)]) for row in x.double().numpy()])
    np.testing.assert_allclose(found, want, rtol=2e-6, atol=1e-6 * size)
    codes = [[int(b) >> s & 2**bits - 1 for b in row[:groups * group * bits // 8] for s in range(0, 8, bits)] for row in data]
    assert max(map(max, codes)) == 2**bits - 1 and codes[0][:group] == [0] * group


def test_codes_of_what_is_no_number_or_too_large():
    x = torch.tensor([[float("nan")] + [1.0] * 7, [1e6] + [0.0] * 7])
    found = decode(encode(x, 4, 8), 8, 4, 8, torch.float32)
    assert found[0].isnan().any() and found[1, 0] == pytest.approx(65504, rel=1e-3)


def reference_attention(kv_dtype):
    def attention(module, query, key, value, mask, scaling, sliding_window=None, **_):
        q, k, v = (x[0].transpose(0, 1).double().numpy() for x in (query, key, value))
        return torch.from_numpy(attention_by_hand(q, k, v, kv_dtype, sliding_window)).float()[None], None
    return attention


@pytest.mark.parametrize("kv_dtype", PACKED)
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_logits_equal_transformers_over_caches_made_by_hand(kv_dtype, kind):
    from transformers import AttentionInterface

    AttentionInterface.register("by_hand", reference_attention(kv_dtype))
    changes = dict(sliding_window=41) if kind == "mistral" else {}
    model, config, weights = tiny(kind, head_dim=16, **changes)
    ids = torch.randint(0, 199, (90,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.no_grad():
        plain = model(torch.tensor([ids])).logits[0]
        model.set_attn_implementation("by_hand")
        want = model(torch.tensor([ids])).logits[0]
    runner = TorchRunner(config, weights)
    runner.allocate(6, BLOCK, kv_dtype)
    chunks = [runner.forward(batch_of((ids[a:b], a, [2, 0, 3]), block_size=BLOCK)).logits for a, b in ((0, 7), (7, 70), (70, 90))]
    found = torch.cat(chunks)
    assert (found - want).abs().max() < 0.02 * (plain - want).abs().max()
    assert (found - want).abs().mean() < 1e-3 * (plain - want).abs().mean()


@pytest.mark.parametrize("kv_dtype", PACKED)
def test_logits_of_a_row_are_the_same_however_it_is_run(kv_dtype):
    for seed, kind in enumerate(("llama", "mistral")):
        _, config, weights = tiny(kind, seed, head_dim=16, **(dict(sliding_window=50) if kind == "mistral" else {}))
        runner = TorchRunner(config, weights, bit_exact=True)
        runner.allocate(20, BLOCK, kv_dtype)
        g = torch.Generator().manual_seed(seed)
        ids, other = (torch.randint(0, 199, (n,), generator=g).tolist() for n in (101, 40))

        def run(*chunks, runner=runner):
            return runner.forward(batch_of(*chunks, block_size=BLOCK)).logits

        whole = run((ids, 0, [0, 1, 2, 3]))
        cuts = [0, *sorted(torch.randint(1, 101, (4,), generator=g).unique().tolist()), 101]
        assert torch.equal(torch.cat([run((ids[a:b], a, [9, 4, 5, 6])) for a, b in zip(cuts, cuts[1:])]), whole)
        assert torch.equal(run((other, 0, [7, 8]), (ids, 0, [13, 12, 11, 10]))[40:], whole)
        wrong = [*ids[:25], *torch.randint(0, 199, (15,), generator=g).tolist()]  # a draft that fills a block and is rejected
        run((wrong, 0, [14, 15]))
        assert torch.equal(torch.cat([run((ids[a:b], a, [14, 15, 16, 17])) for a, b in ((25, 33), (33, 64), (64, 101))]), whole[25:])


def engine_of(kv_dtype, bit_exact=True, **options):
    _, config, weights = tiny("llama", 0, head_dim=16)
    return Engine(TorchRunner(config, weights, bit_exact=bit_exact), kv_dtype=kv_dtype, block_size=BLOCK, **{"memory": "8MB", **options})


def said(engine: Engine, requests: list[Request]) -> list:
    return [[(c.token_ids, c.logprobs, c.score) for c in o.completions] for o in engine.generate(requests)]


def requests() -> list[Request]:
    g = torch.Generator().manual_seed(1)
    texts = [torch.randint(3, 199, (n,), generator=g).tolist() for n in (5, 31, 40, 70, 33)]
    settings = [dict(logprobs=2), dict(temperature=0.8, seed=1), dict(temperature=0.9, seed=2, n=3), dict(), dict(beams=3)]
    return [Request(prompt=t, params=SamplingParams(max_tokens=45, **s)) for t, s in zip(texts, settings, strict=True)]


@pytest.mark.parametrize("kv_dtype", PACKED)
def test_tokens_do_not_depend_on_how_they_are_computed(kv_dtype):
    """Alone, batched, in small chunks, over a warm cache, with forks, beams and preemption."""
    engine = engine_of(kv_dtype)
    alone = [said(engine, [r])[0] for r in requests()]
    assert [said(engine, [r])[0] for r in requests()] == alone and engine.stats.num_cached_prompt_tokens > 0
    assert said(engine_of(kv_dtype), requests()) == alone
    assert said(engine_of(kv_dtype, max_tokens_per_step=7, max_sequences=4), requests()) == alone
    runner, room = engine.runner, 11
    needed = runner.kv_bytes_per_token(kv_dtype) + runner.kv_staged_bytes_per_token(kv_dtype)
    tight = engine_of(kv_dtype, memory=room * BLOCK * needed)
    assert tight.pool.num_blocks == room and said(tight, requests()) == alone and tight.stats.num_preemptions > 0
    tight.check_integrity()


@pytest.mark.parametrize("kv_dtype", PACKED)
@pytest.mark.parametrize("drafts", ["ngram:9", "ngram:40"])
def test_drafts_change_nothing(kv_dtype, drafts):
    _, config, _ = tiny("llama", 0, head_dim=16)
    spec = SpeculationConfig(method="ngram", k=int(drafts[6:]), n_min=1, adaptive=False)
    speculation = Speculation(spec, Speculator(spec, config).new)
    prompt = [7, 8, 9, 10, 11] * 6
    asked = [Request(prompt=prompt, params=SamplingParams(max_tokens=80)), Request(prompt=prompt[3:], params=SamplingParams(max_tokens=70))]
    engine = engine_of(kv_dtype, speculation=speculation)
    assert said(engine, asked) == said(engine_of(kv_dtype), asked)
    assert 0 < engine.stats.num_accepted_tokens < engine.stats.num_drafted_tokens


@pytest.mark.parametrize("kv_dtype", ["kivi4", "kivi2"])
def test_pages_come_back_and_are_as_few_as_planned(kv_dtype):
    engine = engine_of(kv_dtype, bit_exact=False, max_sequences=3, max_tokens_per_step=40, memory="64MB")
    store = engine.runner._kv
    pages = store.pages.shape[2] // BLOCK
    assert isinstance(store, KiviStore) and pages == 2 * 3 + 2 < engine.pool.num_blocks
    fewest = [pages]
    forward = engine.runner.forward

    def counted(batch):
        out = forward(batch)
        fewest[0] = min(fewest[0], store.num_free_pages)
        return out

    engine.runner.forward = counted
    engine.generate(requests() * 2)
    assert fewest[0] < pages - 3
    store.settle(engine.pool.settled)
    assert store.num_free_pages == pages


@pytest.mark.parametrize("kv_dtype", PACKED)
def test_bytes_are_those_that_are_planned_with(kv_dtype):
    store = (KVStore(3, 256, 2, 64, kv_dtype, "cpu") if kv_dtype == "int4" else KiviStore(3, 4, 64, 2, 64, kv_dtype, "cpu", 2))
    tensors = [store.data] if isinstance(store, KVStore) else [store.keys, store.values]
    assert sum(t.nbytes for t in tensors) == 256 * bytes_per_token(3, 2, 64, kv_dtype)
    assert bytes_per_token(3, 2, 64, "float16") / bytes_per_token(3, 2, 64, kv_dtype) == 16 / (BITS[kv_dtype] + 1)
    if isinstance(store, KiviStore):
        assert store.pages.nbytes == 2 * 64 * staged_bytes_per_token(3, 2, 64, kv_dtype)
        for max_tokens in (4, 512):
            held = engine_of(kv_dtype, memory="90kB", max_sequences=2, max_tokens_per_step=max_tokens).runner._kv
            assert 70e3 < held.keys.nbytes + held.values.nbytes + held.pages.nbytes <= 90e3


@pytest.mark.parametrize("kv_dtype", ["kvquant4", "kvquant3"])
def test_the_triton_runner_refuses_kvquant(kv_dtype, monkeypatch):
    gpu = pytest.importorskip("karui.inference.models.gpu")
    monkeypatch.setattr(gpu, "unsuited", lambda config, device: "")
    _, config, weights = tiny("llama", head_dim=16)
    with pytest.raises(UnsupportedError, match=f"kv_dtype '{kv_dtype}' has no Triton kernel; use kivi4, int4, fp8 or int8, or .*runner='torch'"):
        Engine(gpu.TritonRunner(config, weights, "cpu", torch.float32), kv_dtype=kv_dtype, memory="8MB")


def test_what_does_not_fit_is_refused():
    _, config, weights = tiny("llama", head_dim=16)
    runner = TorchRunner(config, weights)
    with pytest.raises(UnsupportedError, match=r"groups of 32 tokens: block_size must be a multiple of that, got 16"):
        runner.allocate(4, 16, "kivi2")
    with pytest.raises(UnsupportedError, match="multiple of 8 dimensions, not 12"):
        TorchRunner(*tiny("llama", head_dim=12)[1:]).allocate(4, 32, "int4")
    for method, said_so in (("medusa", "medusa"), ("lookahead", "lookahead"), ("eagle3", "eagle3 with width=None")):
        class Trees:
            config = SpeculationConfig(method=method)
            check_chains = Speculation.check_chains
        with pytest.raises(UnsupportedError, match=f"kv_dtype 'kivi4' goes with drafts that are chains.*not {said_so}"):
            Engine(runner, kv_dtype="kivi4", memory="8MB", speculation=Trees())
    runner.allocate(4, 32, "kivi2")
    step = batch_of(([1, 2, 3], 0, [0]), block_size=32)
    step.tree_masks = [torch.eye(3, dtype=torch.bool)]
    with pytest.raises(UnsupportedError, match="no trees"):
        runner.forward(step)
    with pytest.raises(KaruiError, match="more in unfinished blocks"):
        Engine(runner, kv_dtype="kivi4", memory="10kB")


@pytest.mark.parametrize("kv_dtype", PACKED)
def test_a_prefix_is_handed_over(kv_dtype, tmp_path):
    prompt = torch.randint(3, 199, (75,), generator=torch.Generator().manual_seed(5)).tolist()
    asked = [Request(prompt=prompt, params=SamplingParams(max_tokens=40, logprobs=1, ignore_eos=True))]
    first = engine_of(kv_dtype)
    alone = said(first, asked)
    first.export_prefix(prompt).save(tmp_path / "p.safetensors")
    prefix = Prefix.load(tmp_path / "p.safetensors")
    decoder = engine_of(kv_dtype)
    assert decoder.import_prefix(prefix) == 64 == len(prefix.tokens)
    assert said(decoder, asked) == alone and decoder.stats.num_cached_prompt_tokens == 64
    assert torch.equal(decoder.export_prefix(prompt).data, prefix.data)
    other = Engine(first.runner, kv_dtype=kv_dtype, block_size=64, memory="8MB")
    if kv_dtype == "int4":
        assert other.import_prefix(prefix) == 64
    else:
        with pytest.raises(KaruiError, match="made in blocks of 32 tokens.*block_size=32"):
            other.import_prefix(prefix)
