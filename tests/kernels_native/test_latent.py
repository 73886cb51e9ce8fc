"""Reference: latent and sparse attention and DeepSeek's mixtures on the native runner, against transformers and the torch runner.
Behavioural: its bits depend on neither batch, chunks, threads, block layout nor speculation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from karui.configs.errors import UnsupportedError
from karui.configs.quantspec import QuantSpec
from karui.inference.models.decoder import LoraWeights, TorchRunner
from karui.inference.models.native import NativeRunner
from karui.inference.models.weights import canonical, expected_shapes
from karui.inference.requests import Request, SamplingParams
from karui.inference.speculate import Speculation
from karui.inference.speculative.config import SpeculationConfig
from karui.inference.speculative.factory import Speculator
from karui.kernels.native import address, available, isas, load
from karui.kernels.quantize import quantize
from tests.inference.conftest import assert_bits_do_not_depend_on_the_way
from tests.inference.test_decoder import batch_of
from tests.inference.test_latent import CASES, made
from tests.kernels_native.test_exact import assert_a_tree_path_has_the_bits
from tests.kernels_native.test_families import assert_logits_equal

pytestmark = pytest.mark.skipif(not available(), reason="no C++ compiler")
SETTINGS = [(isa, spec, bits, kv) for isa in isas() for spec, bits, kv in (
    ("w4g16", 8, "int8"), ("w8", 8, "float16"), ("w8a8", 8, "float32"), ("w4g16a", 16, "float16"))]
WIDE = dict(num_attention_heads=24, num_key_value_heads=24, kv_lora_rank=80, qk_rope_head_dim=20, v_head_dim=20, head_dim=20,
            index_n_heads=21, index_head_dim=40, index_topk=70, max_position_embeddings=512)
KINDS = ("v3-yarn", "v32", "glm-shared")
# wide enough for the codes of the cache to be multiplied as they are
CODED = dict(kv_lora_rank=128, qk_rope_head_dim=64, head_dim=64, index_head_dim=64, index_n_heads=9, index_topk=70)


def coded(weights, spec):
    spec, group = QuantSpec.parse(spec), QuantSpec.parse(spec).group_size or 1
    return {name: quantize(w, spec) if w.ndim == 2 and w.shape[1] % group == 0 else w for name, w in canonical(weights).items()}


def run(runner, ids, cuts, blocks, adapter=-1):
    def step(a, b):
        batch = batch_of((ids[a:b], a, blocks), block_size=16)
        batch.adapters = torch.tensor([adapter], dtype=torch.int32)
        return runner.forward(batch).logits

    cuts = [0, *cuts, len(ids)]
    return torch.cat([step(a, b) for a, b in zip(cuts, cuts[1:])])


def make(isa, spec, bits, kv, threads=2, case="v3-yarn", **changes):
    _, config, weights = made(case, **changes)
    runner = NativeRunner(config, coded(weights, spec), threads=threads, activation_bits=bits, isa=isa)
    runner.allocate(80, 16, kv)
    return runner


@pytest.mark.parametrize(("case", "isa"), [(case, isas()[0]) for case in CASES] + [(case, isa) for isa in isas()[1:] for case in ("v3-yarn", "v32")])
@pytest.mark.parametrize("changes", [{}, WIDE], ids=["small", "wide"])
def test_logits_equal_transformers(case, isa, changes):
    """Also where neither the latent nor a head's parts fill registers, and heads do not fill a tile. An indexer has so many heads that none
    of its scores is zero: transformers' choice among equals is any."""
    own = {k: v for k, v in {"index_n_heads": 24, **changes}.items() if case.startswith(("v32", "glm")) or not k.startswith("index")}
    model, config, weights = made(case, **{**own, **({"v_head_dim": 28} if case == "v3-wide-values" else {})})
    assert_logits_equal(model, NativeRunner(config, weights, threads=2, activation_bits=16, isa=isa))


@pytest.mark.parametrize("spec", ["w4g16", "w8", "w3g16", "w1.58", "w4g16a", "w6g16a", "w8t", "w8a8", "mxfp4", "nvfp4", "nf4", "nf4dq", "fp8"])
def test_codes_and_adapters_of_every_linear(spec):
    """Each weight's codes and each adapter's rows go where they belong; against the torch runner."""
    _, config, weights = made("v3-yarn", kv_lora_rank=64)
    linears = [n.removesuffix(".weight") for n, s in expected_shapes(config).items() if ".self_attn." in n and len(s) == 2]
    adapters = {}
    for linear in linears:
        out, into = weights[f"{linear}.weight"].shape
        adapters[linear] = LoraWeights(torch.randn(3, into) * 0.1, torch.randn(out, 3) * 0.1, 1.5, torch.rand(out) + 0.5)
    given = {**canonical(weights), **{n: w for n, w in coded(weights, spec).items() if n.removesuffix(".weight") in linears}}
    ids = torch.randint(0, 199, (30,)).tolist()
    bits = 8 if spec == "w8a8" else 16
    runners = NativeRunner(config, given, threads=2, activation_bits=bits), TorchRunner(config, given, bit_exact=True)
    for runner in runners:
        runner.set_adapter(0, adapters)
        runner.allocate(10, 16, "float32")
    for adapter in (-1, 0):
        got, want = (run(runner, ids, [20, 21], [1, 0], adapter) for runner in runners)
        error = (got - want).norm(dim=-1) / want.norm(dim=-1)
        assert error.max() < 1e-4 if bits == 16 else error.median() < 0.02, (spec, adapter)  # rounding may fall otherwise


def test_up_to_top_keys_it_is_dense_attention_bit_for_bit():
    _, config, weights = made("v32", index_topk=64)
    dense = {n: w for n, w in weights.items() if ".indexer." not in n}
    ids, out = torch.randint(0, 199, (64,)).tolist(), []
    for latent, given in ((config.latent, weights), (replace(config.latent, indexer=None), dense)):
        runner = NativeRunner(replace(config, latent=latent), coded(given, "w4g16"), threads=2)
        runner.allocate(10, 16, "int8")
        out.append(run(runner, ids, [33, 63], [3, 1, 5, 0]))
    assert torch.equal(*out)


@pytest.mark.parametrize("isa", isas())
def test_choice_is_that_of_a_stable_sort(isa):
    """Equals, zeros of both signs, infinities and few distinct numbers included."""
    g = torch.Generator().manual_seed(0)
    for n, top in ((2, 1), (9, 8), (33, 5), (100, 99), (1000, 64), (5001, 2048)):
        drawn = torch.randn(n, generator=g)
        for x in (drawn, drawn.round(), drawn.relu() * 1e-40, torch.zeros(n).copysign(drawn), torch.where(drawn > 1, drawn / 0, -drawn)):
            got = torch.empty(top, dtype=torch.int32)
            load(isa).choose(address(x), n, top, address(got))
            assert got.tolist() == x.sort(descending=True, stable=True).indices[:top].sort().values.tolist(), (n, top)


@pytest.mark.parametrize("spec", ["w4g16", "w8", "w4g16a", "w6g16a", "nvfp4"])
def test_rounding_what_w_uk_and_w_uv_read_costs_no_more_than_of_other_linears(spec):
    """The scales that are folded into the query must not widen its range beyond use."""
    _, config, weights = made("v3-dense", kv_lora_rank=64)
    ids, given, errors = torch.randint(0, 199, (60,)).tolist(), coded(weights, spec), {}
    for which in ("kv_b_proj", "o_proj"):
        part, out = {n: given[n] if which in n else w for n, w in canonical(weights).items()}, []
        for bits in (16, 8):
            runner = NativeRunner(config, part, threads=2, activation_bits=bits)
            runner.allocate(10, 16, "float32")
            out.append(run(runner, ids, [], list(range(4))))
        errors[which] = ((out[1] - out[0]).norm(dim=-1) / out[0].norm(dim=-1)).median()
    assert 0 < errors["kv_b_proj"] < 2 * errors["o_proj"]


@pytest.mark.parametrize("kv", ["float32", "float16", "int8"])
@pytest.mark.parametrize("case", KINDS)
def test_slots_are_those_of_the_torch_runner(kv, case):
    """What was cached by one is decoded by the other, and copied slots go on like the original."""
    _, config, weights = made(case, **({} if case == "v3-yarn" else {"index_topk": 64}))  # rounding may choose otherwise
    runners = NativeRunner(config, weights, threads=2, activation_bits=16), TorchRunner(config, weights)
    ids, slots = torch.randint(0, 199, (40,)).tolist(), torch.arange(16, 55)
    out = []
    for runner in runners:
        runner.allocate(20, 16, kv)
        run(runner, ids[:39], [], [1, 2, 3])
        out.append(runner.read_slots(slots))
    (data, scale), (other, other_scale) = out
    assert data.shape == other.shape and data.dtype == other.dtype
    close = dict(atol=1.5) if kv == "int8" else dict(rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(data.float(), other.float(), **{"rtol": 0.0, **close})
    if scale is not None:
        torch.testing.assert_close(scale, other_scale)
    native = runners[0]
    want = run(native, ids, [39], [1, 2, 3])[39:]
    native.write_slots(slots + 80, data, scale)
    assert torch.equal(native.forward(batch_of((ids[39:], 39, [6, 7, 8]), block_size=16)).logits, want)
    native.copy_slots(slots, slots + 144)
    assert torch.equal(native.forward(batch_of((ids[39:], 39, [10, 11, 12]), block_size=16)).logits, want)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("case", ["v3", "v32"])
def test_products_of_cached_codes_cost_no_more_than_rounding_the_cache(case, isa):
    """Queries are rounded as finely as the cache; without experts, whose choice magnifies any rounding."""
    changes = CODED if case == "v32" else {k: v for k, v in CODED.items() if not k.startswith("index")}
    ids, errors = torch.randint(0, 199, (120,), generator=torch.Generator().manual_seed(0)).tolist(), []
    for bits in (8, 16):
        rounded, exact = (run(make(isa, "w8", bits, kv, case=case, first_k_dense_replace=3, **changes), ids, [], list(range(10)))
                          for kv in ("int8", "float32"))
        errors.append(((rounded - exact).norm(dim=-1) / exact.norm(dim=-1)).median())
    assert 0 < errors[0] < 2 * errors[1], errors


@pytest.mark.parametrize(("setting", "changes"), [(s, c) for s in SETTINGS for c in ("small", "wide", "sparse", "sparse-wide", "coded", "sparse-coded")
                                                  if s[1:] == ("w4g16", 8, "int8") or s[0] == isas()[0] and not c.endswith("coded")], ids=str)
def test_chunks_threads_batches_and_layout(setting, changes):
    changes = {"small": {}, "wide": WIDE, "sparse": dict(case="glm-shared"), "sparse-wide": dict(WIDE, case="v32"), "coded": CODED,
               "sparse-coded": dict(CODED, case="v32")}[changes]
    changes = {"max_position_embeddings": 512, **changes}
    if "case" not in changes:
        changes = {k: v for k, v in changes.items() if not k.startswith("index")}
    ids = torch.randint(0, 199, (230,)).tolist()
    blocks = torch.randperm(64)[:15].tolist()
    runner = make(*setting, **changes)
    whole = run(runner, ids, [], list(range(15)))
    assert torch.equal(run(make(*setting, threads=3, **changes), ids, [1, 2, 65, 66, 129, 200], blocks), whole)
    assert torch.equal(run(make(*setting, threads=1, **changes), ids, [64, 190, *range(220, 230)], blocks), whole)
    other = torch.randint(0, 199, (40,)).tolist()
    step = batch_of((other, 0, list(range(65, 68))), (ids[99:], 99, list(range(15))), (ids[:100], 0, list(range(70, 77))), block_size=16)
    assert torch.equal(runner.forward(step).logits[40:], torch.cat([whole[99:], whole[:100]]))
    assert torch.isfinite(whole).all() and whole.std() > 0


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("past", (20, 62, 126))
@pytest.mark.parametrize("case", ["v3", "v32"])
def test_a_tree_path_has_the_bits_of_plain_decoding(setting, past, case):
    """Also where the tree's own rows straddle a chunk of 64 keys, or the number of keys that are chosen; then the accepted path is compacted
    and decoding goes on."""
    assert_a_tree_path_has_the_bits(lambda: make(*setting, case=case, **({"index_topk": 63} if case == "v32" else {})), run, past)


@pytest.mark.parametrize("kv", ["float32", "float16", "int8"])
@pytest.mark.parametrize("case", ["v3", "glm-shared"])
def test_engine_says_the_same_whatever_the_way(kv, case):
    """Alone, batched, in small chunks, over a warm cache, preempted, several steps in one call, and with drafts."""
    _, config, weights = made(case)
    runner = NativeRunner(config, coded(weights, "w4g16"), threads=2)
    g = torch.Generator().manual_seed(1)
    texts = [torch.randint(3, 199, (n,), generator=g).tolist() for n in (3, 17, 26)]
    requests = [Request(prompt=t * 2, params=SamplingParams(max_tokens=14, logprobs=2, temperature=i % 2 * 0.8, seed=i,
                                                            ignore_eos=True)) for i, t in enumerate(texts)]
    said, make_engine, alone = assert_bits_do_not_depend_on_the_way(runner, kv, requests, blocks=26)
    greedy = [Request(prompt=r.prompt, params=SamplingParams(max_tokens=30, ignore_eos=True)) for r in requests]
    want = [[c[0] for c in o] for o in said(make_engine(ahead=1), greedy)]
    assert [[c[0] for c in o] for o in said(make_engine(), greedy)] == want
    for drafts in (dict(method="ngram", k=4, n_min=1), dict(method="lookahead")):
        spec = SpeculationConfig(adaptive=False, **drafts)
        engine = make_engine(speculation=Speculation(spec, Speculator(spec, config).new))
        assert [[c[0] for c in o] for o in said(engine, greedy)] == want and engine.stats.num_drafted_tokens > 0


def test_what_is_not_done_is_said():
    _, config, weights = made("v3")
    runner = NativeRunner(config, weights)
    with pytest.raises(UnsupportedError, match="kivi4' is not supported for latent attention; use float32, float16 or int8"):
        runner.allocate(4, 32, "kivi4")
    with pytest.raises(UnsupportedError, match="no layers with latent attention from a file"):
        NativeRunner(replace(config, mixture=None), weights, weight_memory=1000)
