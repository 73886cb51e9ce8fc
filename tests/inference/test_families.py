"""Behavioural: what sets families apart (windows in some layers, soft caps, sinks, norms, fused linears) keeps the engine's
promises. Their logits are compared with transformers' in test_decoder.py."""

from __future__ import annotations

import pytest
import torch

from karui.configs.errors import CorruptError, UnsupportedError
from karui.configs.quantspec import QuantSpec
from karui.inference.batch import StepBatch
from karui.inference.models.attention import sdpa
from karui.inference.models.config import from_hf
from karui.inference.models.decoder import LoraWeights, TorchRunner
from karui.inference.models.weights import expected_shapes
from karui.inference.requests import Request, SamplingParams
from karui.kernels.quantize import quantize
from tests.inference.conftest import assert_bits_do_not_depend_on_the_way, tiny
from tests.inference.test_decoder import CASES, assert_ragged_batch_is_right, batch_of

FAMILIES = ["gemma2", "gemma3", "phi3-partial", "olmo3", "gpt_oss"]


def logits_of(runner: TorchRunner, ids: list[int], adapter: int | None = None) -> torch.Tensor:
    runner.allocate(13, 4, "float32")
    step: StepBatch = batch_of((ids, 0, list(range(13))))
    step.adapters = None if adapter is None else torch.tensor([adapter], dtype=torch.int32)
    return runner.forward(step).logits


@pytest.mark.parametrize("case", FAMILIES)
@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_bits_do_not_depend_on_the_way(case, kv_dtype):
    """Alone, batched, in small chunks, over a warm cache, preempted: equal to the last bit of every logprob."""
    _, config, weights = tiny(CASES[case][0], **CASES[case][1])
    runner = TorchRunner(config, weights, bit_exact=True)
    g = torch.Generator().manual_seed(1)
    requests = [Request(prompt=torch.randint(3, 199, (n,), generator=g).tolist(),
                        params=SamplingParams(max_tokens=12, logprobs=2, temperature=i % 2 * 0.8, seed=i, ignore_eos=True))
                for i, n in enumerate((5, 19, 30))]

    assert_bits_do_not_depend_on_the_way(runner, kv_dtype, requests, blocks=None)


@pytest.mark.parametrize("case", FAMILIES)
def test_ragged_batch_of_chunks_and_decodes(case):
    model, config, weights = tiny(CASES[case][0], **CASES[case][1])
    assert_ragged_batch_is_right(TorchRunner(config, weights), model)


def test_layers_with_a_window_read_no_more_than_it(monkeypatch):
    """One sequence decoding, several, and a chunk: the window's keys, and as many more as a chunk has rows."""
    _, config, weights = tiny(CASES["gemma3"][0], **CASES["gemma3"][1])
    assert config.sliding_window == (7, None, 7)
    runner = TorchRunner(config, weights)
    runner.allocate(40, 4, "float32")
    read, real = {}, runner._kv.read
    monkeypatch.setattr(runner._kv, "read", lambda layer, slots, dtype: read.update({layer: slots.shape}) or real(layer, slots, dtype))
    ids, tables = torch.randint(0, 199, (40,)).tolist(), [list(range(10)), list(range(20, 30))]
    for chunks, want in (([(ids[:30], 0, tables[0])], (30,)), ([(ids[30:31], 30, tables[0])], (7,)),
                         ([(ids[31:36], 31, tables[0])], (7 + 4,)), ([(ids[:36], 0, tables[1])], (36,)),
                         ([(ids[36:37], 36, table) for table in tables], (2, 7))):
        runner.forward(batch_of(*chunks))
        assert tuple(read[0]) == tuple(read[2]) == want and tuple(read[1])[-1] == sum(len(c[0]) for c in chunks[:1]) + chunks[0][1]


@pytest.mark.parametrize("case", ["gemma3", "phi3-partial", "olmo3"])
def test_adapters_and_codes_of_every_linear(case):
    """An adapter equals its merge, and codes their dequantized weights, fused linears included."""
    _, config, weights = tiny(CASES[case][0], **CASES[case][1])
    linears = [n.removesuffix(".weight") for n, s in expected_shapes(config).items() if ".layers." in n and len(s) == 2]
    assert_adapters_and_codes(config, weights, linears, linears)


def assert_adapters_and_codes(config, weights, linears, adapted):
    """An adapter of `adapted` equals its merge, and codes of `linears` their dequantized weights."""
    ids = torch.randint(0, 199, (30,)).tolist()
    runner, layers = TorchRunner(config, weights), {}
    for name in adapted:
        out, into = weights[f"{name}.weight"].shape
        layers[name] = LoraWeights(torch.randn(3, into) * 0.1, torch.randn(out, 3) * 0.1, 1.5)
    runner.set_adapter(0, layers)
    merged = {**weights, **{f"{n}.weight": weights[f"{n}.weight"] + 1.5 * w.b @ w.a for n, w in layers.items()}}
    want = logits_of(TorchRunner(config, merged), ids)
    assert (logits_of(runner, ids, adapter=0) - want).abs().max() < 1e-4 * want.abs().max()
    coded = {**weights, **{f"{n}.weight": quantize(weights[f"{n}.weight"], QuantSpec.parse("w4g8")) for n in linears}}
    plain = {n: w if isinstance(w, torch.Tensor) else w.dequantize() for n, w in coded.items()}
    assert torch.equal(logits_of(TorchRunner(config, coded), ids), logits_of(TorchRunner(config, plain), ids))


def test_attention_with_cap_and_sinks_by_hand():
    """One row in float64: caps before the mask, the sink a key without a value."""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 1, 4, 8).double(), torch.randn(1, 5, 2, 8).double(), torch.randn(1, 5, 2, 8).double()
    mask, sinks = torch.tensor([True, False, True, True, True])[None, None, None], torch.randn(4).double()
    got = sdpa(q, k, v, mask, 1.5, sinks)
    for head in range(4):
        scores = [1.5 * torch.tanh(q[0, 0, head] @ k[0, c, head // 2] / 8**0.5 / 1.5) for c in (0, 2, 3, 4)]
        total = sum(s.exp() for s in scores) + sinks[head].exp()
        want = sum(s.exp() / total * v[0, c, head // 2] for s, c in zip(scores, (0, 2, 3, 4)))
        assert (got[0, 0, head] - want).abs().max() < 1e-12


def test_old_config_files_say_the_same():
    """Keys as on the hub (rope_local_base_freq, sliding_window_pattern, rope_scaling) and as transformers 5 writes them."""
    from transformers import AutoConfig

    common = dict(vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=8, num_attention_heads=4,
                  num_key_value_heads=2, head_dim=8, max_position_embeddings=64, rms_norm_eps=1e-6)
    for kind, old in (
        ("gemma3_text", dict(rope_theta=5e5, rope_local_base_freq=2e4, sliding_window=16, sliding_window_pattern=3,
                             rope_scaling=dict(rope_type="linear", factor=8.0), query_pre_attn_scalar=9, tie_word_embeddings=True)),
        ("gemma2", dict(sliding_window=16, query_pre_attn_scalar=8, attn_logit_softcapping=50.0, final_logit_softcapping=30.0,
                        tie_word_embeddings=True, rope_theta=1e4)),
        ("gemma", dict(hidden_act="gelu", rope_theta=1e4, tie_word_embeddings=True)),
        ("olmo3", dict(rope_theta=5e5, sliding_window=16, rope_scaling=dict(
            rope_type="yarn", factor=2.0, original_max_position_embeddings=32, attention_factor=1.2, beta_fast=32, beta_slow=1))),
        ("gpt_oss", dict(rope_theta=150000, sliding_window=16, num_local_experts=4, num_experts_per_tok=2, rope_scaling=dict(
            rope_type="yarn", factor=2.0, original_max_position_embeddings=32, truncate=False, beta_fast=32.0, beta_slow=1.0))),
        ("phi3", dict(rope_theta=1e4, partial_rotary_factor=0.75, sliding_window=16, head_dim=8)),
    ):
        new = AutoConfig.for_model(kind, **{**common, **{k: dict(v) if isinstance(v, dict) else v for k, v in old.items()}}).to_dict()
        assert from_hf({"model_type": kind, **common, **old}) == from_hf(new), kind


def test_experts_of_gpt_oss_are_checked():
    _, config, weights = tiny(CASES["gpt_oss"][0], **CASES["gpt_oss"][1])
    name = "model.layers.1.mlp.experts.down_proj_bias"
    with pytest.raises(CorruptError, match=r"6 missing: model.layers.1.mlp.experts.0.down_proj.bias"):
        TorchRunner(config, {k: v for k, v in weights.items() if k != name})


def test_refusals():
    hf = tiny("gemma3_text")[0].config.to_dict()
    for changes, said in ((dict(use_bidirectional_attention=True), "the engine generates"),
                          (dict(attn_logit_softcapping=50.0), "transformers ignores it"),
                          (dict(hidden_activation="gelu"), "hidden_act 'gelu' is not supported")):
        with pytest.raises(UnsupportedError, match=said):
            from_hf({**hf, **changes})
    local = {**hf["rope_parameters"], "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}
    with pytest.raises(UnsupportedError, match="layers with a window"):
        from_hf({**hf, "rope_parameters": local})
    with pytest.raises(UnsupportedError, match="longrope"):
        _, config, weights = tiny("phi3", pad_token_id=0, original_max_position_embeddings=32, rope_parameters=dict(
            rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 4, long_factor=[2.0] * 4))
        TorchRunner(config, weights)
