"""Reference: what the families of 2025 have of their own, against transformers on tiny random models, and the engine's promises."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from karui.configs.errors import CorruptError, UnsupportedError
from karui.configs.quantspec import QuantSpec
from karui.inference.models.config import from_hf
from karui.inference.models.decoder import LoraWeights, TorchRunner
from karui.inference.models.gpu import unsuited
from karui.inference.models.weights import CORRECTION, expected_shapes, transformers_name
from karui.inference.requests import Request, SamplingParams
from karui.kernels.kvquant import KVLevels
from karui.kernels.quantize import quantize
from tests.inference.conftest import assert_bits_do_not_depend_on_the_way, tiny
from tests.inference.test_decoder import (
    assert_greedy_tokens_are_generate_s,
    assert_logits_are_the_model_s,
    assert_ragged_batch_is_right,
    batch_of,
)
from tests.inference.test_families import assert_adapters_and_codes, logits_of

SCALES = dict(embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.6, logits_scaling=2.5)
PARTIAL = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)
ROUTED = dict(n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=16)
LATENT = dict(ROUTED, n_group=4, topk_group=2, q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=16)
CASES = {
    "granite": ("granite", dict(SCALES, attention_bias=True, mlp_bias=True)),
    "granite-tied": ("granite", dict(SCALES, tie_word_embeddings=True)),
    "granitemoe": ("granitemoe", dict(SCALES, num_local_experts=5, num_experts_per_tok=2, attention_bias=True)),
    "granitemoeshared": ("granitemoeshared", dict(SCALES, num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=56)),
    "granitemoeshared-none": ("granitemoeshared", dict(SCALES, num_local_experts=4, shared_intermediate_size=0)),
    "smollm3": ("smollm3", dict(no_rope_layer_interval=2, pad_token_id=0)),
    "smollm3-window": ("smollm3", dict(no_rope_layers=[0, 1, 0], use_sliding_window=True, sliding_window=7, pad_token_id=0,
                                       tie_word_embeddings=False, attention_bias=True)),
    "seed_oss": ("seed_oss", {}),
    "seed_oss-biased": ("seed_oss", dict(attention_out_bias=True, mlp_bias=True, rope_parameters=dict(
        rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=32))),
    "olmoe": ("olmoe", dict(num_experts=5, num_experts_per_tok=2)),
    "olmoe-normalized": ("olmoe", dict(num_experts=4, num_experts_per_tok=3, norm_topk_prob=True, attention_bias=True)),
    "glm4": ("glm4", dict(pad_token_id=0)),
    "glm4-whole": ("glm4", dict(pad_token_id=0, head_dim=12, attention_bias=False, rope_parameters={
        **PARTIAL, "partial_rotary_factor": 1.0})),
    "glm4_moe": ("glm4_moe", dict(n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=2, moe_intermediate_size=16, n_group=4,
                                  topk_group=2, routed_scaling_factor=1.7, use_qk_norm=True, attention_bias=True)),
    "glm4_moe-plain": ("glm4_moe", dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=False,
                                        first_k_dense_replace=2, rope_parameters={**PARTIAL, "partial_rotary_factor": 0.25})),
    "glm": ("glm", dict(pad_token_id=0)),
    "glm4_moe_lite": ("glm4_moe_lite", dict(LATENT, num_key_value_heads=6, head_dim=8)),
    "solar_open": ("solar_open", dict(ROUTED, attention_bias=True)),
    "dots1": ("dots1", dict(ROUTED, n_shared_experts=1, first_k_dense_replace=1, max_window_layers=2, sliding_window=7)),
    "exaone_moe": ("exaone_moe", dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=16, sliding_window=7,
                                      sliding_window_pattern=2)),
    "cwm": ("cwm", dict(sliding_window=7)),
    "ernie4_5": ("ernie4_5", {}),
    "ernie4_5-biased": ("ernie4_5", dict(use_bias=True, tie_word_embeddings=False)),
    "ernie4_5_moe": ("ernie4_5_moe", dict(moe_num_experts=6, moe_k=3, moe_intermediate_size=24, moe_num_shared_experts=1)),
    "ernie4_5_moe-every": ("ernie4_5_moe", dict(moe_num_experts=4, moe_k=2, moe_intermediate_size=24, moe_num_shared_experts=0,
                                                num_hidden_layers=5, moe_layer_interval=2, moe_layer_end_index=3)),
    "exaone4": ("exaone4", dict(sliding_window=7, sliding_window_pattern=2)),
    "exaone4-whole": ("exaone4", dict(sliding_window=None, layer_types=["full_attention"] * 3)),
    "hunyuan": ("hunyuan_v1_dense", dict(attention_bias=True)),
    "hunyuan-alpha": ("hunyuan_v1_dense", dict(tie_word_embeddings=True, rope_parameters=dict(
        rope_type="dynamic", rope_theta=1e4, alpha=1000.0, factor=1.0, beta_fast=32, beta_slow=1, mscale=1.0))),
    "minimax_m2": ("minimax_m2", dict(num_local_experts=6, num_experts_per_tok=2, rope_parameters=PARTIAL)),
    "cohere": ("cohere", dict(logit_scale=0.25)),
    "cohere-biased": ("cohere", dict(attention_bias=True, tie_word_embeddings=False)),
    "cohere2": ("cohere2", dict(sliding_window=7, num_hidden_layers=4, sliding_window_pattern=2)),
}
MIXTURES = ["granitemoeshared", "olmoe", "glm4_moe", "ernie4_5_moe", "minimax_m2"]


def made(case: str, **changes):
    """`tiny` with corrections of routers that are not zero."""
    model, config, weights = tiny(CASES[case][0], **{**CASES[case][1], **changes})
    for name, buffer in (*model.named_buffers(), *model.named_parameters()):
        if name.endswith(CORRECTION):
            buffer.data.copy_(torch.randn_like(buffer) * 0.2)
            weights[name] = buffer.detach().clone()
    return model, config, weights


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case):
    """In chunks and single steps, in a ragged batch, and token by token."""
    model, config, weights = made(case)
    runner = TorchRunner(config, weights)
    assert_logits_are_the_model_s(runner, model, (0, 17, 18, 41, 42, 43, 50))
    assert_ragged_batch_is_right(runner, model)
    assert_ragged_batch_is_right(TorchRunner(config, weights, bit_exact=True), model)


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_equal_generate(case):
    model, config, weights = made(case)
    assert_greedy_tokens_are_generate_s(TorchRunner(config, weights), model)


@pytest.mark.parametrize("case", ["granite", "smollm3-window", "glm4", "ernie4_5_moe", "exaone4", "hunyuan", "minimax_m2", "cohere2"])
@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_bits_do_not_depend_on_the_way(case, kv_dtype):
    """Alone, batched, in small chunks, over a warm cache, preempted: equal to the last bit of every logprob."""
    _, config, weights = made(case)
    runner = TorchRunner(config, weights, bit_exact=True)
    g = torch.Generator().manual_seed(1)
    requests = [Request(prompt=torch.randint(3, 199, (n,), generator=g).tolist(),
                        params=SamplingParams(max_tokens=8, logprobs=2, temperature=i % 2 * 0.8, seed=i, ignore_eos=True))
                for i, n in enumerate((5, 14, 21))]
    assert_bits_do_not_depend_on_the_way(runner, kv_dtype, requests, blocks=None)


@pytest.mark.parametrize("case", ["granite", "smollm3", "glm4", "ernie4_5", "exaone4", "hunyuan", "minimax_m2", "cohere2"])
def test_coded_caches_stay_close(case):
    """int8, and codes of whole blocks, over keys that were reordered, not rotated, or normalized behind the rotation."""
    _, config, weights = made(case, head_dim=32)
    ids = torch.randint(0, 199, (64,)).tolist()
    runner, found = TorchRunner(config, weights), {}
    for kv_dtype in ("float32", "int8", "kivi4", "kivi2"):
        runner.allocate(4, 32, kv_dtype)
        found[kv_dtype] = runner.forward(batch_of((ids, 0, [2, 1]), block_size=32)).logits.log_softmax(-1)
    error = {kind: ((found["float32"].exp() * (found["float32"] - found[kind])).sum(-1)).mean() for kind in found}
    assert 0 < error["int8"] < 0.02 and error["int8"] < error["kivi4"] < error["kivi2"] < 1.5, error


@pytest.mark.parametrize("case", ["granite", "granitemoeshared", "glm4", "ernie4_5-biased", "hunyuan", "cohere", "olmoe", "seed_oss"])
def test_adapters_and_codes_of_every_linear(case):
    """An adapter equals its merge, and codes their dequantized weights, fused linears included; experts are not adapted."""
    _, config, weights = made(case)
    weights = dict(TorchRunner(config, weights)._weights)
    linears = [n.removesuffix(".weight") for n, s in expected_shapes(config).items()
               if ".layers." in n and len(s) == 2 and not n.endswith(".mlp.gate.weight")]
    assert_adapters_and_codes(config, weights, linears, [n for n in linears if "experts" not in n])


@pytest.mark.parametrize("case", ["granitemoe", "olmoe", "glm4_moe", "ernie4_5_moe", "minimax_m2", "hunyuan"])
def test_tensors_as_files_name_them(case):
    """What `save_pretrained` writes: experts one by one or stacked, routers and corrections under their released names."""
    from transformers.core_model_loading import revert_weight_conversion

    model, config, weights = made(case)
    stored = revert_weight_conversion(model, model.state_dict())
    want = TorchRunner(config, weights)._weights
    got = TorchRunner(config, {n: w for n, w in stored.items() if not (config.tied and n == "lm_head.weight")})._weights
    assert want.keys() == got.keys() and all(torch.equal(want[n], got[n]) for n in want)
    assert set(stored) != set(weights) or case == "hunyuan"
    held = {**model.state_dict(), **{n: b for n, b in model.named_buffers() if n.endswith(CORRECTION)}}
    beside = [{n for n in names if ".experts." not in n} for names in (map(transformers_name, stored), held)]
    assert beside[0] == beside[1]


def test_layers_beyond_the_last_are_passed_over():
    _, config, weights = made("glm4_moe", num_mtp_layers=1)
    TorchRunner(config, {**weights, f"model.layers.{config.num_layers}.eh_proj.weight": torch.zeros(2, 2)})
    _, config, weights = made("ernie4_5_moe")
    TorchRunner(config, {**weights, "model.mtp_block.0.mlp.up_proj.weight": torch.zeros(2, 2)})
    with pytest.raises(CorruptError, match="not consumed: model.layers.3.eh_proj.weight"):
        TorchRunner(config, {**weights, "model.layers.3.eh_proj.weight": torch.zeros(2, 2)})


def test_released_config_files_say_the_same():
    """Keys as on the hub (rope_theta and partial_rotary_factor at the top, what equals a default left out) and as transformers 5 has
    them."""
    from transformers import AutoConfig

    common = dict(vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=8, num_attention_heads=4,
                  num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-6)
    moe = dict(moe_intermediate_size=16, num_experts_per_tok=2)
    for kind, old in (
        ("granite", dict(rope_theta=1e7, attention_multiplier=0.01, embedding_multiplier=12.0, residual_multiplier=0.22,
                         logits_scaling=8.0, tie_word_embeddings=True, rope_scaling=None)),
        ("smollm3", dict(rope_theta=5e6, no_rope_layers=[1, 1, 1, 0] * 2, use_sliding_window=False, sliding_window=None)),
        ("smollm3", dict(use_sliding_window=True, sliding_window=16)),
        ("seed_oss", dict(rope_theta=1e7, rope_scaling=dict(rope_type="default"))),
        ("olmoe", dict(rope_theta=1e4, num_experts=4, num_experts_per_tok=2, clip_qkv=None)),
        ("glm4", dict(rope_theta=1e4, partial_rotary_factor=0.5, attention_bias=True)), ("glm4", {}),
        ("glm4_moe", dict(moe, rope_theta=1e6, head_dim=8, n_routed_experts=4, num_nextn_predict_layers=1, use_qk_norm=True)),
        ("ernie4_5", dict(rope_theta=5e5, use_bias=False)),
        ("ernie4_5_moe", dict(moe_intermediate_size=16, moe_num_experts=8, moe_k=2, moe_layer_interval=1, rope_theta=5e5)),
        ("exaone4", dict(rope_theta=1e6, sliding_window=16, layer_types=["sliding_attention"] * 7 + ["full_attention"])),
        ("exaone4", dict(sliding_window=None, sliding_window_pattern=None, layer_types=["full_attention"] * 8, rope_scaling=dict(
            rope_type="llama3", factor=16.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32))),
        ("hunyuan_v1_dense", dict(head_dim=8, rope_theta=1e4, rope_scaling=dict(
            alpha=1000.0, beta_fast=32, beta_slow=1, factor=1.0, mscale=1.0, mscale_all_dim=1.0, type="dynamic"))),
        ("minimax_m2", dict(num_local_experts=4, num_experts_per_tok=2, head_dim=8, rotary_dim=4, rope_theta=5e6)),
        ("dots1", dict(moe, rope_theta=1e7, n_routed_experts=4, head_dim=8, n_shared_experts=1, norm_topk_prob=True, sliding_window=16,
                       max_window_layers=3)),
        ("glm4_moe_lite", dict(moe, num_key_value_heads=4, n_routed_experts=4, kv_lora_rank=16, q_lora_rank=16, qk_nope_head_dim=8,
                               qk_rope_head_dim=8, v_head_dim=8, rope_theta=1e6, num_nextn_predict_layers=1)),
        ("solar_open", dict(moe, rope_theta=1e6, n_routed_experts=4, n_shared_experts=1)),
        ("exaone_moe", dict(moe, rope_theta=1e6, num_experts=8, head_dim=8, sliding_window=16, layer_types=[
            "sliding_attention", "full_attention"] * 4, mlp_layer_types=["dense"] + ["sparse"] * 7)),
        ("cwm", dict(sliding_window=16)), ("glm", dict(rope_theta=1e4, partial_rotary_factor=0.5)),
        ("cohere", dict(rope_theta=75e6, logit_scale=0.0625, use_qk_norm=False)),
        ("cohere2", dict(rope_theta=5e4, sliding_window=16, sliding_window_pattern=4)),
    ):
        new = AutoConfig.for_model(kind, **{**common, **{k: dict(v) if isinstance(v, dict) else v for k, v in old.items()}}).to_dict()
        got, want = from_hf({"model_type": kind, **common, **old}), from_hf(new)
        assert got.rope_scaling.items() <= want.rope_scaling.items()
        assert replace(got, rope_scaling={}, extra_layers=0) == replace(want, rope_scaling={}, extra_layers=0), kind


def test_what_other_runners_lack():
    native = pytest.importorskip("karui.inference.models.native")
    for case in ("granitemoeshared", "cohere", "hunyuan", "glm4_moe"):
        _, config, weights = made(case)
        assert unsuited(config, torch.device("cpu")) == f"model type {config.model_type}"
        if case == "granitemoeshared":
            with pytest.raises(UnsupportedError, match="the native kernels have no shared feed-forward layer"):
                native.NativeRunner(config, weights)
    for case in ("smollm3", "ernie4_5", "hunyuan"):
        _, config, weights = made(case)
        width = config.num_kv_heads * config.head_dim
        ranges, marks = torch.ones(config.num_layers, width), torch.arange(4.0).expand(config.num_layers, 4)
        levels = KVLevels(key_low=-ranges, key_high=ranges, key_levels=marks, value_levels=marks, outliers=0.0)
        with pytest.raises(UnsupportedError, match="which (rotate in two ways|rotate interleaved|are normalized behind)"):
            TorchRunner(config, weights).set_kv_levels(levels)


@pytest.mark.parametrize("case", ["seed_oss", "seed_oss-biased", "cwm", "ernie4_5", "ernie4_5-biased", "ernie4_5_moe"])
def test_what_runs_natively(case):
    """Llamas with biases, and with RoPE of other pairs, whose rows of q and k are reordered: transformers' logits; codes, adapters."""
    native = pytest.importorskip("karui.inference.models.native")
    model, config, weights = made(case, hidden_size=64, num_attention_heads=8)
    assert_ragged_batch_is_right(native.NativeRunner(config, weights, threads=1, activation_bits=16), model)
    ids = torch.randint(0, 199, (30,)).tolist()
    held = dict(TorchRunner(config, weights)._weights)
    for spec, linears in (("w4g8", "_proj.weight"), ("w4g8a", "_proj.weight"), ("w8t", "q_proj.weight"), ("nf4dq", "k_proj.weight")):
        coded = {n: quantize(w, QuantSpec.parse(spec)) if n.endswith(linears) else w for n, w in held.items()}
        runners = (native.NativeRunner(config, coded, threads=1, activation_bits=16), TorchRunner(config, coded))
        adapters = {f"model.layers.{i}.self_attn.{x}_proj": LoraWeights(
            torch.randn(3, 64) * 0.1, torch.randn(out, 3) * 0.1, 1.5, torch.rand(out) + 0.5)
            for i in range(2) for x, out in (("q", 64), ("k", 16), ("v", 16))}
        for runner in runners:
            runner.set_adapter(0, adapters)
        got, want = (torch.stack([logits_of(runner, ids), logits_of(runner, ids, adapter=0)]) for runner in runners)
        assert (got - want).abs().max() < 2e-4 * want.abs().max(), spec
        assert (want[0] - want[1]).abs().max() > 0.05 * want.abs().max()


def test_refusals():
    hf = {case: tiny(CASES[case][0], **CASES[case][1])[0].config.to_dict() for case in ("olmoe", "ernie4_5_moe", "cohere", "exaone4")}
    for case, changes, said in (
        ("olmoe", dict(clip_qkv=8.0), "clip_qkv 8.0"), ("ernie4_5_moe", dict(use_bias=True), "use_bias"),
        ("cohere", dict(use_qk_norm=True), "use_qk_norm"),
        ("exaone4", dict(sliding_window_pattern="LLLG", layer_types=None), "no layer_types"),
        ("exaone4", dict(hidden_act="gelu"), "hidden_act 'gelu' is not supported"),
    ):
        with pytest.raises(UnsupportedError, match=said):
            from_hf({**hf[case], **changes})
    with pytest.raises(CorruptError, match="config.json of a exaone4 has no 'intermediate_size'"):
        from_hf({k: v for k, v in hf["exaone4"].items() if k != "intermediate_size"})
