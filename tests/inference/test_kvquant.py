"""Reference and behavioural: KVQuant's levels against brute force, its rows and attention by hand, and its exactness, by equality."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from karui.configs.errors import CorruptError, KaruiError, UnsupportedError
from karui.inference.bundle.export import export_model
from karui.inference.engine import Engine
from karui.inference.models.decoder import TorchRunner
from karui.inference.requests import Request, SamplingParams
from karui.inference.speculate import Speculation
from karui.inference.speculative.config import SpeculationConfig
from karui.inference.speculative.factory import Speculator
from karui.kernels.kvquant import BITS, KVLevels, file_of
from karui.qat.kvquant import calibrate, kmeans
from tests.inference.conftest import tiny
from tests.inference.test_decoder import batch_of
from tests.inference.test_kivi import requests, said

FORMATS = ["kvquant4", "kvquant3", "kvquant2"]


def cost(x, w, centres):
    return float((w * (x[:, None] - centres).abs().min(1).values.square()).sum())


def best_cost(x, w, count):
    """The optimum by dynamic programming over the sorted points, in O(n^2 k)."""
    x, order = x.double().sort()
    w = w.double()[order]
    n = len(x)

    def inside(a, b):
        total = w[a:b].sum()
        return 0.0 if total == 0 else float((w[a:b] * (x[a:b] - (w[a:b] * x[a:b]).sum() / total).square()).sum())

    table = [[inside(a, b) if a < b else 0.0 for b in range(n + 1)] for a in range(n + 1)]
    costs = table[0]
    for _ in range(count - 1):
        costs = [min(costs[a] + table[a][b] for a in range(b + 1)) for b in range(n + 1)]
    return costs[n]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**20), st.sampled_from([4, 8]), st.booleans())
def test_levels_are_near_the_best_there_are(seed, count, skewed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(40, generator=g)
    w = torch.rand(40, generator=g).pow(6 if skewed else 1) + 1e-3
    found = kmeans(x, w, count)
    assert (found.diff() >= 0).all()
    nearest = (x[:, None] - found).abs().argmin(1)
    for i in range(count):  # each is the weighted mean of the points that it is nearest to
        own = nearest == i
        if own.any():
            assert float(found[i]) == pytest.approx(float((w[own] * x[own]).sum() / w[own].sum()), abs=1e-4)
    assert cost(x, w, found) <= (1 + 1e-5) * best_cost(x, w, count) + 1e-9
    x, w = torch.randn(300, generator=g), torch.rand(300, generator=g).pow(6 if skewed else 1) + 1e-3
    coarse = kmeans(x, w, count, bins=60)  # what many points get: the best runs of bins, then Lloyd's iterations
    assert cost(x, w, coarse) <= 1.5 * cost(x, w, kmeans(x, w, count)) + 1e-9  # at most 1.27 of 2,800 draws


def test_levels_of_many_points():
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    found = kmeans(x, torch.ones_like(x), 8)
    lloyd_max = torch.tensor([-2.1519, -1.3439, -0.7560, -0.2451, 0.2451, 0.7560, 1.3439, 2.1519])  # of a normal density, Max (1960)
    assert (found - lloyd_max).abs().max() < 0.03
    heavy = kmeans(x, torch.where(x > 1, 100.0, 1.0), 8)
    assert (heavy > 0.9).sum() >= 4 > (found > 0.9).sum()
    with pytest.raises(KaruiError, match="not all zero"):
        kmeans(x, torch.zeros_like(x), 8)
    with pytest.raises(KaruiError, match="k-means of 3 points"):
        kmeans(x[:3], x[:3].abs(), 8)


def levels_of(kv_dtype="kvquant3", kind="llama", seed=0, **changes):
    model, config, weights = tiny(kind, seed, head_dim=16, **changes)
    rows = torch.randint(3, 199, (6, 60), generator=torch.Generator().manual_seed(9))
    return calibrate(model, rows, BITS[kv_dtype], outliers=0.05), model, config, weights


def row_by_hand(x, low, high, levels, kept):
    mid, half = (low + high) / 2, max((high - low) / 2, 1e-12) if np.isscalar(low) else np.maximum((high - low) / 2, 1e-12)
    z = (x - mid) / half
    out = levels[np.abs(z[:, None] - levels[None]).argmin(1)] * half + mid
    out[kept] = np.float16(x[kept])
    return out, z


def by_hand(levels, layer, k, v):
    """k, v [T, C] as their rows say."""
    k, v = k.copy(), v.copy()
    low, high = levels.key_low[layer].double().numpy(), levels.key_high[layer].double().numpy()
    for t in range(len(k)):
        size = np.abs(k[t] - (low + high) / 2) / np.maximum((high - low) / 2, 1e-12)
        kept = np.argsort(-size, kind="stable")[:levels.num_outliers[0]]
        k[t], _ = row_by_hand(k[t], low, high, levels.key_levels[layer].double().numpy(), kept)
        order, each = np.argsort(v[t], kind="stable"), levels.num_outliers[1] // 2
        kept = np.concatenate([order[:each], order[len(order) - each:]])
        ends = [float(np.float16(v[t][order[i]])) for i in (each, len(order) - 1 - each)]
        v[t], _ = row_by_hand(v[t], *ends, levels.value_levels[layer].double().numpy(), kept)
    return k, v


def test_rows_are_those_made_by_hand():
    levels, *_ = levels_of()
    assert levels.bits == 3 and levels.channels == 32 and levels.num_outliers == (4, 2) and levels.row_bytes == (12 + 16, 12 + 8 + 4)
    g = torch.Generator().manual_seed(2)
    k, v = (torch.randn(12, 32, generator=g) * 3 for _ in range(2))
    for layer in range(3):
        data = levels.encode_keys(layer, k), levels.encode_values(layer, v)
        assert [d.shape for d in data] == [(12, 28), (12, 24)]
        found = levels.decode_keys(layer, data[0]), levels.decode_values(layer, data[1])
        for x, want in zip(found, by_hand(levels, layer, k.double().numpy(), v.double().numpy()), strict=True):
            np.testing.assert_allclose(x, want, atol=1e-4)


def test_calibration_is_what_it_says():
    """Ranges and gradients against an independent run: transformers' cache holds the values, autograd of a copy the gradients."""
    levels, model, *_ = levels_of()
    rows = torch.randint(3, 199, (6, 60), generator=torch.Generator().manual_seed(9))
    seen, squares = [], []
    for row in rows:
        held = {}
        attention = model.model.layers[1].self_attn
        hook = attention.v_proj.register_forward_hook(lambda _m, _i, out, held=held: held.setdefault("v", out))
        loss = model(row[None], labels=row[None], use_cache=False).loss
        hook.remove()
        (gradient,) = torch.autograd.grad(loss, held["v"])
        seen.append(held["v"][0, 1:].detach())
        squares.append(gradient[0, 1:].square())
    v, f = torch.cat(seen), torch.cat(squares)
    each = levels.num_outliers[1] // 2
    ends = v.sort(-1).values[:, [each, 31 - each]]
    half = (ends[:, 1:] - ends[:, :1]) / 2
    z = (v - ends.mean(-1, keepdim=True)) / half
    inside = z.abs() <= 1 + 1e-6
    want = kmeans(z[inside], (f * half.square())[inside], 8)
    assert (levels.value_levels[1] - want).abs().max() < 1e-3
    assert all(p.requires_grad for p in model.parameters())
    k = torch.cat([model.model.layers[0].self_attn.k_proj(model.model.layers[0].input_layernorm(
        model.model.embed_tokens(row)))[1:].detach() for row in rows])
    assert (levels.key_low[0] - k.quantile(0.025, 0)).abs().max() < 1e-4 and (levels.key_high[0] - k.quantile(0.975, 0)).abs().max() < 1e-4


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_logits_equal_transformers_over_rows_made_by_hand(kind):
    """Keys before RoPE: k_proj (or its norm) and v_proj of the transformers model give what the rows hold."""
    levels, model, config, weights = levels_of("kvquant3", kind)
    ids = torch.randint(0, 199, (70,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.no_grad():
        plain = model(torch.tensor([ids])).logits[0]
    hooks = []
    for i, layer in enumerate(model.model.layers):
        keys = getattr(layer.self_attn, "k_norm", layer.self_attn.k_proj)

        def change(_m, _in, out, i=i, side=0):
            x = out[0].flatten(1).detach().double().numpy()
            coded = by_hand(levels, i, x, x)[side]
            coded[0] = np.float16(x[0])
            return torch.from_numpy(coded).float().reshape(out.shape)

        hooks.append(keys.register_forward_hook(change))
        hooks.append(layer.self_attn.v_proj.register_forward_hook(lambda m, a, out, i=i, f=change: f(m, a, out, i, 1)))
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
    runner = TorchRunner(config, weights)
    runner.set_kv_levels(levels)
    runner.allocate(3, 64, "kvquant3")
    found = torch.cat([runner.forward(batch_of((ids[a:b], a, [2, 0]), block_size=64)).logits for a, b in ((0, 7), (7, 66), (66, 70))])
    assert (found - want).abs().mean() < 0.02 * (plain - want).abs().mean()


def engine_of(kv_dtype, levels=None, **options):
    made, _, config, weights = levels_of(kv_dtype)
    runner = TorchRunner(config, weights, bit_exact=True)
    runner.set_kv_levels(levels or made)
    return Engine(runner, kv_dtype=kv_dtype, **{"memory": "8MB", **options})


def test_tokens_do_not_depend_on_how_they_are_computed():
    """Alone, batched, in small chunks, over a warm cache, with forks, beams, preemption and drafts."""
    kv_dtype = "kvquant3"
    asked = [dataclasses.replace(r, params=dataclasses.replace(r.params, max_tokens=12)) for r in requests()]
    asked.append(Request(prompt=[7, 8, 9] * 21, params=SamplingParams(max_tokens=20)))
    engine = engine_of(kv_dtype)
    alone = [said(engine, [r])[0] for r in asked]
    assert engine.pool.block_size == 64
    assert [said(engine, [r])[0] for r in asked] == alone and engine.stats.num_cached_prompt_tokens > 0
    assert said(engine_of(kv_dtype, max_tokens_per_step=7, max_sequences=4), asked) == alone
    tight = engine_of(kv_dtype, memory=4 * 64 * engine.runner.kv_bytes_per_token(kv_dtype))
    assert said(tight, asked) == alone and tight.stats.num_preemptions > 0
    spec = SpeculationConfig(method="ngram", k=9, n_min=1, adaptive=False)
    drafting = engine_of(kv_dtype, speculation=Speculation(spec, Speculator(spec, engine.config).new))
    assert said(drafting, asked) == alone and drafting.stats.num_accepted_tokens > 0


def test_bytes_are_those_that_are_planned_with():
    for kv_dtype in FORMATS:
        engine = engine_of(kv_dtype)
        store = engine.runner._kv
        held = store.keys.nbytes + store.values.nbytes + store.sinks.nbytes
        assert held == engine.pool.num_blocks * 64 * engine.runner.kv_bytes_per_token(kv_dtype)


def test_a_bundle_keeps_its_levels_and_a_wrong_file_is_refused(tmp_path):
    levels, model, *_ = levels_of()
    model.save_pretrained(tmp_path / "hf")
    export_model(tmp_path / "hf", "w8", tmp_path / "bundle", embedding_spec="w8")
    prompt = Request(prompt=[5, 6, 7], params=SamplingParams(max_tokens=5))
    load = dict(kv_dtype="kvquant3", memory="4MB")
    with pytest.raises(KaruiError, match=r"kvquant3\.safetensors is not there: make them with karui kv-levels --format kvquant3"):
        Engine.load(tmp_path / "bundle", **load)
    file = tmp_path / "bundle" / file_of("kvquant3")
    levels.save(file)
    again = KVLevels.load(file)
    assert all(torch.equal(getattr(again, n), getattr(levels, n)) for n in ("key_low", "key_high", "key_levels", "value_levels"))
    assert len(Engine.load(tmp_path / "bundle", **load).generate(prompt)[0].token_ids) == 5
    with pytest.raises(UnsupportedError, match="torch runner alone"):
        Engine.load(tmp_path / "bundle", runner="native", **load)
    dataclasses.replace(levels, target="0" * 64).save(file)
    with pytest.raises(KaruiError, match="other weights"):
        Engine.load(tmp_path / "bundle", **load)
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(CorruptError, match="does not hold levels"):
        Engine.load(tmp_path / "bundle", **load)
    other = levels_of("kvquant3", num_key_value_heads=3)[0]
    other.save(file)
    with pytest.raises(UnsupportedError, match="for 3 layers of 48 channels, all rotated alike; this model has 3 of 32"):
        Engine.load(tmp_path / "bundle", **load)


def test_what_does_not_fit_is_refused():
    levels, _, config, weights = levels_of()
    runner = TorchRunner(config, weights)
    with pytest.raises(UnsupportedError, match="needs levels fitted to this model"):
        Engine(runner, kv_dtype="kvquant3")
    runner.set_kv_levels(levels)
    with pytest.raises(UnsupportedError, match="block_size must be a multiple of 64, got 16"):
        Engine(runner, kv_dtype="kvquant3", block_size=16)
    with pytest.raises(KaruiError, match="do not belong together"):
        dataclasses.replace(levels, key_levels=levels.key_levels[:, :4])
    with pytest.raises(KaruiError, match=r"outliers must be from 0 to 0\.2"):
        dataclasses.replace(levels, outliers=0.5)
    with pytest.raises(UnsupportedError, match="k_proj and v_proj, which this model has not"):
        calibrate(torch.nn.Linear(2, 2), torch.zeros(1, 4, dtype=torch.long), 3)
    engine = engine_of("kvquant3")
    engine.generate(Request(prompt=list(range(3, 80)), params=SamplingParams(max_tokens=2)))
    with pytest.raises(UnsupportedError, match="not handed over"):
        engine.export_prefix(list(range(3, 80)))
