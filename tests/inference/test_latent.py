"""Reference: latent and sparse attention and DeepSeek's mixtures against transformers on tiny random models, and what the engine
promises for them."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from karui.configs.errors import CorruptError, UnsupportedError
from karui.configs.quantspec import QuantSpec
from karui.inference.engine import Engine
from karui.inference.models import latent
from karui.inference.models.config import from_hf
from karui.inference.models.decoder import LoraWeights, TorchRunner
from karui.inference.models.rope import inverse_frequencies
from karui.inference.models.weights import expected_shapes
from karui.inference.requests import Request, SamplingParams
from karui.inference.speculate import Speculation
from karui.inference.speculative.config import SpeculationConfig
from karui.inference.speculative.factory import Speculator
from karui.kernels.quantize import quantize
from karui.kernels.sparse_attention import largest
from tests.inference.conftest import assert_bits_do_not_depend_on_the_way, tiny
from tests.inference.test_decoder import assert_logits_are_the_model_s, batch_of

pytestmark = pytest.mark.usefixtures("first_of_equals")

YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, mscale=0.7, mscale_all_dim=0.9, beta_fast=16, beta_slow=2,
            original_max_position_embeddings=32)
SIZES: dict[str, Any] = dict(num_attention_heads=6, num_key_value_heads=6, q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=12,
                             qk_rope_head_dim=8, v_head_dim=16, n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=2,
                             moe_intermediate_size=16, first_k_dense_replace=1, routed_scaling_factor=1.7)
V3: dict[str, Any] = dict(n_group=4, topk_group=2, norm_topk_prob=True)
DSA: dict[str, Any] = dict(V3, index_n_heads=8, index_head_dim=16, index_topk=9)
CASES = {
    "v2": ("deepseek_v2", dict(topk_method="greedy")),
    "v2-groups": ("deepseek_v2", dict(topk_method="group_limited_greedy", n_group=4, topk_group=2, mlp_bias=True)),
    "v2-lite": ("deepseek_v2", dict(topk_method="greedy", q_lora_rank=None, rope_parameters=YARN)),
    "v3": ("deepseek_v3", V3),
    "v3-yarn": ("deepseek_v3", dict(V3, rope_parameters=YARN, attention_bias=True)),
    "v3-halves": ("deepseek_v3", dict(V3, rope_interleave=False, norm_topk_prob=False, tie_word_embeddings=True)),
    "v3-wide-values": ("deepseek_v3", dict(V3, q_lora_rank=None, v_head_dim=28, rms_norm_eps=1e-3)),
    "v3-dense": ("deepseek_v3", dict(V3, first_k_dense_replace=3)),
    "v32": ("deepseek_v32", DSA),
    "v32-yarn": ("deepseek_v32", dict(DSA, rope_parameters=YARN)),
    "v32-all": ("deepseek_v32", dict(DSA, index_topk=64)),
    "glm": ("glm_moe_dsa", dict(DSA, n_group=1, topk_group=1)),
    "glm-shared": ("glm_moe_dsa", dict(DSA, n_group=1, topk_group=1, indexer_types=["full", "shared", "full"])),
}


def made(case: str, seed: int = 0, **changes: Any):
    kind, own = CASES[case]
    model, config, weights = tiny(kind, seed, **{**SIZES, **own, **changes})
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # starts as zeros
            buffer.copy_(torch.randn_like(buffer) * 0.1)
            weights[name] = buffer.clone()
    return model, config, weights


class Wide:
    """`torch` for a module of transformers, whose fp32 parts then run in float64."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def test_a_choice_does_not_depend_on_the_rows_beside_it():
    scores = torch.relu(torch.randn(40, 300, generator=torch.Generator().manual_seed(0)) - 1)  # most are 0
    whole = largest(scores, 90)
    assert torch.equal(torch.cat([largest(part, 90) for part in scores.split(7)]), whole)
    zeros = scores.gather(1, whole) == 0
    assert zeros.any() and all((row[z].diff() > 0).all() for row, z in zip(whole, zeros, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case):
    """Prefills, which materialize, and single steps, which absorb."""
    model, config, weights = made(case)
    assert_logits_are_the_model_s(TorchRunner(config, weights), model, (0, 23, 24, 25, 28, 47, 48, 49, 50))


@pytest.mark.parametrize("case", ["v3-yarn", "v3-wide-values", "v32-yarn", "glm-shared"])
def test_float64_to_nine_digits(case, monkeypatch):
    """The same numbers where rounding hides nothing; transformers' norms and softmax, which are fp32, are widened for it."""
    model, config, weights = made(case)
    monkeypatch.setattr(sys.modules[type(model).__module__], "torch", Wide())
    model = model.double()
    model.config._experts_implementation = "eager"  # the grouped product has no float64
    runner = TorchRunner(config, weights, dtype=torch.float64)
    runner.allocate(20, 4, "float32")
    for cells in (runner._kv._cells, runner._kv._index):  # the cache has no float64
        cells.tensors = [t.double() for t in cells.tensors]
    ids = torch.randint(0, 199, (50,)).tolist()
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
    got = torch.cat([runner.forward(batch_of((ids[a:b], a, list(range(13))))).logits for a, b in ((0, 30), (30, 31), (31, 50))])
    assert (got - want).abs().max() < 1e-9 * want.abs().max()


@pytest.mark.parametrize("case", ["v2-groups", "v3-yarn", "v32", "glm-shared"])
def test_greedy_tokens_equal_generate(case):
    model, config, weights = made(case)
    ids, new = torch.randint(3, 199, (9,)).tolist(), 20
    want = model.generate(torch.tensor([ids]), max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)[0].tolist()
    engine = Engine(TorchRunner(config, weights), kv_dtype="float32", block_size=4, memory="1MiB")
    assert ids + engine.generate([ids], SamplingParams(max_tokens=new, ignore_eos=True))[0].token_ids == want


@pytest.mark.parametrize("case", ["v3-yarn", "v32"])
@pytest.mark.parametrize("exact", [False, True])
def test_ragged_batch_of_chunks_and_decodes(case, exact):
    """Padded decodes beside chunks, long and short."""
    model, config, weights = made(case)
    runner = TorchRunner(config, weights, bit_exact=exact)
    runner.allocate(80, 4, "float32")
    texts = [torch.randint(0, 199, (n,)).tolist() for n in (12, 33, 5, 27, 30)]
    tables = [list(range(12 * i, 12 * i + 9)) for i in range(5)]
    cut = [11, 12, 4, 26, 27]
    runner.forward(batch_of(*[(t[:c], 0, b) for t, c, b in zip(texts, cut, tables)]))
    got = runner.forward(batch_of(*[(t[c:], c, b) for t, c, b in zip(texts, cut, tables)])).logits
    with torch.no_grad():
        want = torch.cat([model(torch.tensor([t])).logits[0, c:] for t, c in zip(texts, cut)])
    assert (got - want).abs().max() < 1e-4


@pytest.mark.parametrize("case", ["v3", "v32"])
def test_both_forms_give_the_same(case, monkeypatch):
    _, config, weights = made(case)
    runner, ids, out = TorchRunner(config, weights, dtype=torch.float64), torch.randint(0, 199, (40,)).tolist(), []
    for answer in (True, False):
        monkeypatch.setattr(latent, "_materializes", lambda *_, answer=answer: answer)
        runner.allocate(10, 4, "float32")
        out.append(runner.forward(batch_of((ids, 0, list(range(10))))).logits)
    assert 0 < (out[0] - out[1]).abs().max() < 1e-6


@pytest.mark.parametrize("case", ["v3", "v32"])
def test_pieces_give_the_same(case, monkeypatch):
    """Heads of a prefill and rows of a short chunk go one by one where memory is short."""
    _, config, weights = made(case)
    runner, ids, out = TorchRunner(config, weights), torch.randint(0, 199, (50,)).tolist(), []
    for held in (latent._HELD, 1):
        monkeypatch.setattr(latent, "_HELD", held)
        runner.allocate(13, 4, "float32")
        out.append(torch.cat([runner.forward(batch_of((ids[a:b], a, list(range(13))))).logits for a, b in ((0, 40), (40, 44), (44, 50))]))
    assert (out[0] - out[1]).abs().max() < 1e-4


@pytest.mark.parametrize("case", ["v3", "v32"])
@pytest.mark.parametrize("exact", [False, True])
def test_tree_rows_see_only_their_ancestors(case, exact):
    """In exact mode a row of a tree has the bits of its path; the sparse case chooses among its ancestors only."""
    _, config, weights = made(case)
    runner = TorchRunner(config, weights, bit_exact=exact)
    runner.allocate(40, 4, "float32")
    ids = torch.randint(0, 199, (21,)).tolist()
    runner.forward(batch_of((ids[:20], 0, list(range(7)))))
    draft, parents = [50, 60, 70, 80], {1: 0, 2: 0, 3: 1, 4: 2}
    mask = torch.eye(5, dtype=torch.bool)
    for row, parent in parents.items():
        mask[row] |= mask[parent]
    step = batch_of((ids[20:] + draft, 20, list(range(7))))
    step.positions, step.tree_masks = (20 + mask.sum(1) - 1).int(), [mask]
    tree = runner.forward(step).logits
    for path, row in (([50, 70], 3), ([60, 80], 4)):
        alone = runner.forward(batch_of((ids + path, 0, list(range(10, 17))))).logits[-1]
        assert torch.equal(tree[row], alone) if exact else (tree[row] - alone).abs().max() < 1e-4


def test_few_keys_make_sparse_attention_dense():
    """With as many keys as it picks, or fewer, the indexer has no say: the model is the one without it, bit for bit."""
    model, config, weights = made("v32-all")
    dense = from_hf({**model.config.to_dict(), "model_type": "deepseek_v3"})
    plain = {k: v for k, v in weights.items() if "indexer" not in k}
    ids, out = torch.randint(0, 199, (50,)).tolist(), []
    for one in (TorchRunner(config, weights), TorchRunner(dense, plain)):
        one.allocate(13, 4, "float32")
        out.append([one.forward(batch_of((ids[a:b], a, list(range(13))))).logits for a, b in ((0, 40), (40, 41), (41, 50))])
    assert all(torch.equal(a, b) for a, b in zip(*out))


def test_decoding_reads_the_chosen_keys_only(monkeypatch):
    _, config, weights = made("v32")
    engine = Engine(TorchRunner(config, weights), kv_dtype="float16", block_size=4, memory="1MiB")
    store, read = engine.runner._kv, {"cells": 0, "index": 0}
    for kind, part in (("cells", store._cells), ("index", store._index)):
        def counted(layer, slots, dtype, kind=kind, read_one=part.read, item=part.tensors[0]):
            read[kind] += slots.numel() * item.shape[2] * item.shape[3] * item.element_size()
            return read_one(layer, slots, dtype)

        monkeypatch.setattr(part, "read", counted)
    engine.add(Request(prompt=list(range(3, 43)), params=SamplingParams(max_tokens=9, ignore_eos=True)))
    engine.step()
    for context in range(41, 46):
        read["cells"] = read["index"] = 0
        engine.step()
        assert read == {"cells": 3 * 9 * (32 + 8) * 2, "index": 3 * context * 16 * 2}
        assert sum(read.values()) == latent.bytes_read(config, "float16", context)


@pytest.mark.parametrize("case,per_layer,indexed", [("v3", 40, 0), ("v32", 40, 48), ("glm-shared", 40, 32)])
def test_bytes_are_those_of_the_tensors(case, per_layer, indexed):
    _, config, weights = made(case)
    runner = TorchRunner(config, weights)
    for kv_dtype, item, scales in (("float32", 4, 0), ("float16", 2, 0), ("bfloat16", 2, 0), ("int8", 1, 4 / 8), ("fp8", 1, 4 / 8)):
        runner.allocate(5, 4, kv_dtype)
        held = sum(t.numel() * t.element_size() for c in (runner._kv._cells, runner._kv._index) for t in c.tensors)
        assert held == 20 * runner.kv_bytes_per_token(kv_dtype) == 20 * (3 * per_layer + indexed) * (item + scales)
    with pytest.raises(UnsupportedError, match="kv_dtype 'kivi2' is not supported for latent attention; use one of float32"):
        runner.kv_bytes_per_token("kivi2")


@pytest.mark.parametrize("case", ["v2-groups", "v3-yarn", "v32", "glm-shared"])
@pytest.mark.parametrize("dtype,bound", [(torch.bfloat16, 0.15), (torch.float16, 0.02)])
def test_half_precision_stays_close(case, dtype, bound):
    _, config, weights = made(case)
    ids, out = torch.randint(0, 199, (40,)).tolist(), []
    for kept in (torch.float32, dtype):
        runner = TorchRunner(config, weights, dtype=kept)
        runner.allocate(10, 4, runner.default_kv_dtype)
        out.append(torch.cat([runner.forward(batch_of((ids[a:b], a, list(range(10))))).logits for a, b in ((0, 36), (36, 37), (37, 40))]))
    error = (out[1] - out[0]).norm(dim=-1) / out[0].norm(dim=-1)
    assert 0 < error.median() < bound


@pytest.mark.parametrize("case", ["v3", "v32"])
@pytest.mark.parametrize("kv_dtype,bound", [("float16", 0.02), ("bfloat16", 0.2), ("int8", 0.1), ("fp8", 0.3)])
def test_cache_formats_stay_close(case, kv_dtype, bound):
    """Median over the rows: where rounding changes which keys are chosen, a row may be another one."""
    model, config, weights = made(case)
    runner = TorchRunner(config, weights)
    runner.allocate(10, 4, kv_dtype)
    ids = torch.randint(0, 199, (30,)).tolist()
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
    error = (runner.forward(batch_of((ids, 0, list(range(8))))).logits - want).norm(dim=-1) / want.norm(dim=-1)
    assert 0 < error.median() < bound


@pytest.mark.parametrize("case", ["v3", "v32", "glm-shared"])
@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "int8", "fp8"])
def test_what_is_handed_over_is_decoded_as_by_a_lone_engine(case, kv_dtype, tmp_path):
    from karui.inference.handoff import Prefix

    _, config, weights = made(case)
    runner = TorchRunner(config, weights)

    def engine():
        return Engine(TorchRunner(config, weights, bit_exact=True), kv_dtype=kv_dtype, block_size=4, memory="1MiB")

    def answer(engine, count):
        return engine.generate([prompt], SamplingParams(max_tokens=count, ignore_eos=True))[0].token_ids

    prompt = torch.randint(3, 199, (38,), generator=torch.Generator().manual_seed(5)).tolist()
    first, second = engine(), engine()
    answer(first, 1)
    first.export_prefix(prompt).save(tmp_path / "p.safetensors")
    prefix = Prefix.load(tmp_path / "p.safetensors")
    assert tuple(prefix.data.shape) == (1, 3, 36, *runner.config.cache_shape[1:])
    assert second.import_prefix(prefix) == 36
    assert answer(second, 12) == answer(engine(), 12)
    again = second.export_prefix(prompt)
    assert torch.equal(again.data, prefix.data) and (prefix.scale is None or torch.equal(again.scale, prefix.scale))


@pytest.mark.parametrize("case", ["v3", "v32"])
@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_bits_do_not_depend_on_the_way(case, kv_dtype):
    """Alone, batched, in small chunks, over a warm cache, preempted, and with drafts: equal to the last bit of every logprob."""
    _, config, weights = made(case)
    runner = TorchRunner(config, weights, bit_exact=True)
    g = torch.Generator().manual_seed(1)
    texts = [torch.randint(3, 199, (n,), generator=g).tolist() for n in (3, 17, 26)]
    requests = [Request(prompt=t * 2, params=SamplingParams(max_tokens=14, logprobs=2, temperature=i % 2 * 0.8, seed=i,
                                                            ignore_eos=True)) for i, t in enumerate(texts)]

    said, make, alone = assert_bits_do_not_depend_on_the_way(runner, kv_dtype, requests, blocks=26)
    spec = SpeculationConfig(method="ngram", k=4, n_min=1)
    engine = make(speculation=Speculation(spec, Speculator(spec, config).new))
    assert [[c[0] for c in o] for o in said(engine, requests)] == [[c[0] for c in o] for o in alone]
    assert engine.stats.num_drafted_tokens > 0


@pytest.mark.parametrize("grid", ["w8", "w4g8", "w8a8", "fp8"])
def test_quantized_weights(grid):
    """Codes give what their dequantized weights give; with rounded inputs (w8a8) both forms round the same latent."""
    _, config, weights = made("v32")
    spec = QuantSpec.parse(grid)
    coded = {name: quantize(w, spec) if name.endswith("_proj.weight") and w.ndim == 2 and "indexer" not in name else w
             for name, w in weights.items()}
    ids = torch.randint(0, 199, (40,)).tolist()
    plain = {name: w if isinstance(w, torch.Tensor) else w.dequantize() for name, w in coded.items()}
    out = []
    for given in (coded, plain):
        runner = TorchRunner(config, given)
        runner.allocate(10, 4, "float32")
        whole = runner.forward(batch_of((ids[:30], 0, list(range(10))))).logits
        out.append(torch.cat([whole, *(runner.forward(batch_of((ids[i:i + 1], i, list(range(10))))).logits for i in range(30, 40))]))
    error = (out[0] - out[1]).norm(dim=-1) / out[1].norm(dim=-1)
    assert error.max() < 1e-4 if grid != "w8a8" else 0 < error.median() < 0.1


def test_adapters_of_every_linear():
    """A batch of the base and two adapters equals each alone, merged into the weights; one has gains as DoRA does."""
    _, config, weights = made("v3-yarn")
    modules = [n.removesuffix(".weight") for n, s in expected_shapes(config).items() if ".self_attn." in n and len(s) == 2]
    runner, merged = TorchRunner(config, weights), [weights]
    for slot in (0, 1):
        layers = {}
        for name in modules:
            out, into = weights[f"{name}.weight"].shape
            gain = torch.rand(out) + 0.5 if slot else None
            layers[name] = LoraWeights(torch.randn(3, into) * 0.1, torch.randn(out, 3) * 0.1, 1.5, gain)
        runner.set_adapter(slot, layers)
        new = {f"{n}.weight": (weights[f"{n}.weight"] + 1.5 * w.b @ w.a) * (1 if w.row_scale is None else w.row_scale[:, None])
               for n, w in layers.items()}
        merged.append({**weights, **new})
    runner.allocate(60, 4, "float32")
    texts = [torch.randint(0, 199, (n,)).tolist() for n in (31, 22, 17)]
    tables = [list(range(10 * i, 10 * i + 8)) for i in range(3)]

    def step(cuts):
        batch = batch_of(*[(t[a:b], a, table) for t, (a, b), table in zip(texts, cuts, tables)])
        batch.adapters = torch.tensor([-1, 0, 1], dtype=torch.int32)
        return runner.forward(batch).logits.split([b - a for a, b in cuts])

    got = [torch.cat(parts) for parts in zip(step([(0, 30), (0, 21), (0, 15)]), step([(30, 31), (21, 22), (15, 16)]))]
    for text, own, logits in zip(texts, merged, got):
        alone = TorchRunner(config, own)
        alone.allocate(10, 4, "float32")
        want = alone.forward(batch_of((text[:len(logits)], 0, list(range(10))))).logits
        assert (logits - want).abs().max() < 2e-4 * want.abs().max()


def test_adapters_of_what_chooses_are_refused():
    _, config, weights = made("v32")
    runner = TorchRunner(config, weights)
    for module in ("model.layers.1.self_attn.indexer.weights_proj", "model.layers.1.mlp.gate"):
        out, into = weights[f"{module}.weight"].shape
        with pytest.raises(UnsupportedError, match=f"{module}'.*are not run"):
            runner.set_adapter(0, {module: LoraWeights(torch.zeros(2, into), torch.zeros(out, 2), 1.0)})


def test_experts_of_files_and_of_state_dicts():
    """Names on the hub (experts.N.gate_proj) and in a state dict (one tensor for all) are one model; a layer for multi-token
    prediction is passed over."""
    _, config, weights = made("v3", num_mtp_layers=1)
    assert any(w.ndim == 3 for w in weights.values()) and config.extra_layers == 1
    listed = {}
    for name, w in weights.items():
        if w.ndim == 3 and "gate_up" in name:
            for e, one in enumerate(w):
                for part, half in zip(("gate_proj", "up_proj"), one.chunk(2)):
                    listed[name.replace("gate_up_proj", f"{e}.{part}.weight")] = half
        elif w.ndim == 3:
            listed |= {name.replace("down_proj", f"{e}.down_proj.weight"): one for e, one in enumerate(w)}
        else:
            listed[name] = w
    listed["model.layers.3.eh_proj.weight"] = torch.zeros(4, 8)
    ids, out = torch.randint(0, 199, (20,)).tolist(), []
    for given in (weights, listed):
        runner = TorchRunner(config, given)
        runner.allocate(10, 4, "float32")
        out.append(runner.forward(batch_of((ids, 0, list(range(5))))).logits)
    assert torch.equal(*out)
    with pytest.raises(CorruptError, match="not consumed: model.layers.4"):
        TorchRunner(config, {**listed, "model.layers.4.eh_proj.weight": torch.zeros(4, 8)})
    with pytest.raises(CorruptError, match="missing: model.layers.1.mlp.gate.e_score_correction_bias"):
        TorchRunner(config, {k: v for k, v in weights.items() if k != "model.layers.1.mlp.gate.e_score_correction_bias"})


def test_files_on_the_hub_say_the_same_as_transformers_writes():
    """Configs as DeepSeek publishes them: rope_scaling with a type, no mlp_layer_types, a layer for multi-token prediction."""
    from transformers import AutoConfig

    common = dict(SIZES, vocab_size=99, hidden_size=48, intermediate_size=80, num_hidden_layers=5, max_position_embeddings=640,
                  rms_norm_eps=1e-6, rope_theta=10000, tie_word_embeddings=False, hidden_act="silu", attention_bias=False,
                  moe_layer_freq=1, rope_scaling=dict(beta_fast=32, beta_slow=1, factor=40, mscale=0.707, mscale_all_dim=0.707,
                                                      original_max_position_embeddings=16, type="yarn"))
    for kind, own in (
        ("deepseek_v2", dict(topk_method="greedy", scoring_func="softmax", q_lora_rank=None, norm_topk_prob=False, n_group=1,
                             topk_group=1)),
        ("deepseek_v3", dict(V3, topk_method="noaux_tc", scoring_func="sigmoid", num_nextn_predict_layers=1)),
        ("deepseek_v32", dict(DSA, topk_method="noaux_tc", scoring_func="sigmoid")),
        ("glm_moe_dsa", dict(DSA, scoring_func="sigmoid", index_topk_freq=2)),
    ):
        old = from_hf({"model_type": kind, **common, **own})
        hf = AutoConfig.for_model(kind, **{k: dict(v) if isinstance(v, dict) else v for k, v in {**common, **own}.items()})
        new = from_hf(hf.to_dict())
        assert replace(old, rope_scaling={}) == replace(new, rope_scaling={}), kind
        (f, factor), (g, other) = inverse_frequencies(old), inverse_frequencies(new)
        assert torch.equal(f, g) and factor == other == pytest.approx(1.0)
        assert old.latent.scale == pytest.approx(20**-0.5 * (0.1 * 0.707 * math.log(40) + 1) ** 2)
    assert old.latent.indexer.layers == (True, True, False, True, False)


def test_other_runners_and_odd_configs_are_refused():
    from karui.inference.models.gpu import unsuited

    model, config, _ = made("v32")
    assert "latent attention" in config.beyond_llama and unsuited(config, torch.device("cpu"))
    hf = model.config.to_dict()
    for changes, said in ((dict(num_key_value_heads=2), "2 key heads for 6 heads"), (dict(q_lora_rank=None), "needs q_lora_rank"),
                          (dict(topk_group=1, num_experts_per_tok=3), "3 of 8 experts cannot be chosen from 1 of 4 groups"),
                          (dict(model_type="deepseek_v2", norm_topk_prob=True), "norm_topk_prob True"),
                          (dict(scoring_func="softmax"), "scoring_func 'softmax' is not supported"),
                          (dict(moe_layer_freq=2), "moe_layer_freq 2")):
        with pytest.raises(UnsupportedError, match=said):
            from_hf({**hf, **changes})
