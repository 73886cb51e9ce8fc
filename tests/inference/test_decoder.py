"""Reference: the torch runner against transformers on tiny random models of every architecture and rope scaling."""

from __future__ import annotations

import pytest
import torch

from karui.configs.errors import CorruptError, KaruiError, UnsupportedError
from karui.inference.batch import StepBatch
from karui.inference.models.decoder import TorchRunner
from tests.inference.conftest import tiny

CASES = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", dict(tie_word_embeddings=True)),
    "llama-biased": ("llama", dict(attention_bias=True, mlp_bias=True)),
    "llama-mha": ("llama", dict(num_key_value_heads=6)),
    "linear": ("llama", dict(rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=2.0))),
    "dynamic": ("llama", dict(rope_parameters=dict(rope_type="dynamic", rope_theta=10000.0, factor=4.0))),
    "llama3": ("llama", dict(rope_parameters=dict(rope_type="llama3", rope_theta=5000.0, factor=8.0, low_freq_factor=1.0,
                                                  high_freq_factor=4.0, original_max_position_embeddings=32))),
    "yarn": ("llama", dict(rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=4.0,
                                                original_max_position_embeddings=32))),
    "yarn-mscale": ("qwen3", dict(rope_parameters=dict(
        rope_type="yarn", rope_theta=10000.0, factor=4.0, mscale=1.0, mscale_all_dim=0.7, beta_fast=16, beta_slow=2,
        original_max_position_embeddings=32))),
    "mistral-window": ("mistral", dict(sliding_window=7)),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", dict(use_sliding_window=True, sliding_window=5, max_window_layers=1)),
    "qwen3": ("qwen3", {}),
    "qwen3-tied": ("qwen3", dict(tie_word_embeddings=True, head_dim=16)),
    "bitnet": ("bitnet", dict(tie_word_embeddings=True)),
    "bitnet-silu": ("bitnet", dict(hidden_act="silu", tie_word_embeddings=True)),
    "mixtral": ("mixtral", dict(num_local_experts=5, num_experts_per_tok=2)),
    "mixtral-window": ("mixtral", dict(num_local_experts=3, num_experts_per_tok=1, sliding_window=7)),
    "qwen2_moe": ("qwen2_moe", dict(num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=40,
                                    num_experts_per_tok=2, mlp_only_layers=[1])),
    "qwen3_moe": ("qwen3_moe", dict(num_experts=6, moe_intermediate_size=24, num_experts_per_tok=3, norm_topk_prob=True)),
    "gemma": ("gemma", dict(tie_word_embeddings=True)),
    "gemma2": ("gemma2", dict(sliding_window=7, query_pre_attn_scalar=13, attn_logit_softcapping=5.0, final_logit_softcapping=7.0)),
    "gemma3": ("gemma3_text", dict(sliding_window=7, query_pre_attn_scalar=13, sliding_window_pattern=2)),
    "gemma3-scaled": ("gemma3_text", dict(sliding_window=5, num_hidden_layers=6, final_logit_softcapping=3.0, rope_parameters=dict(
        full_attention=dict(rope_type="linear", rope_theta=1e6, factor=8.0),
        sliding_attention=dict(rope_type="default", rope_theta=2e4)))),
    "phi3": ("phi3", dict(pad_token_id=0)),
    "phi3-partial": ("phi3", dict(pad_token_id=0, sliding_window=7, rope_parameters=dict(
        rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5))),
    "olmo2": ("olmo2", dict(pad_token_id=0)),
    "olmo3": ("olmo3", dict(pad_token_id=0, sliding_window=7, num_hidden_layers=4, rope_parameters=dict(
        full_attention=dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=32),
        sliding_attention=dict(rope_type="default", rope_theta=1e4)))),
    "gpt_oss": ("gpt_oss", dict(sliding_window=7, num_local_experts=6, num_experts_per_tok=2, swiglu_limit=1.0)),
    "gpt_oss-yarn": ("gpt_oss", dict(sliding_window=5, num_local_experts=4, num_experts_per_tok=3, rope_parameters=dict(
        rope_type="yarn", rope_theta=150000.0, factor=4.0, truncate=False, beta_fast=32.0, beta_slow=1.0,
        original_max_position_embeddings=32))),
    "qwen3_moe-sparse": ("qwen3_moe", dict(num_experts=4, moe_intermediate_size=24, num_experts_per_tok=2, decoder_sparse_step=2)),
}


def batch_of(*chunks: tuple[list[int], int, list[int]], block_size: int = 4) -> StepBatch:
    """A step over (new tokens, tokens already cached, blocks) of each sequence, with logits of every row."""
    tokens = [t for new, _, _ in chunks for t in new]
    positions = [past + i for new, past, _ in chunks for i in range(len(new))]
    slots = [blocks[p // block_size] * block_size + p % block_size
             for new, past, blocks in chunks for p in range(past, past + len(new))]
    starts = [0]
    for new, _, _ in chunks:
        starts.append(starts[-1] + len(new))
    width = max(len(blocks) for _, _, blocks in chunks)
    fields = (tokens, positions, slots, starts, [past + len(new) for new, past, _ in chunks],
              [blocks + [0] * (width - len(blocks)) for _, _, blocks in chunks], list(range(len(tokens))))
    return StepBatch(*(torch.tensor(x, dtype=torch.int32) for x in fields))


def assert_logits_are_the_model_s(runner, model, cuts):
    """Of 50 tokens, computed from each cut to the next."""
    runner.allocate(40, 4, "float32")
    ids = torch.randint(0, 199, (50,)).tolist()
    blocks = torch.randperm(39)[:13].add(1).tolist()
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
    got = [runner.forward(batch_of((ids[a:b], a, blocks))).logits for a, b in zip(cuts, cuts[1:])]
    assert (torch.cat(got) - want).abs().max() < 1e-4


def assert_greedy_tokens_are_generate_s(runner, model):
    runner.allocate(80, 4, "float32")
    ids, new = torch.randint(3, 199, (9,)).tolist(), 20
    want = model.generate(torch.tensor([ids]), max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)[0].tolist()
    blocks, got = list(range(20)), list(ids)
    for _ in range(new):
        past = 0 if len(got) == len(ids) else len(got) - 1
        got.append(int(runner.forward(batch_of((got[past:], past, blocks))).logits[-1].argmax()))
    assert got == want


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case):
    model, config, weights = tiny(CASES[case][0], **CASES[case][1])
    assert_logits_are_the_model_s(TorchRunner(config, weights), model, (0, 17, 18, 41, 50))


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_equal_generate(case):
    model, config, weights = tiny(CASES[case][0], **CASES[case][1])
    assert_greedy_tokens_are_generate_s(TorchRunner(config, weights), model)


def test_dynamic_scaling_past_the_trained_length_equals_decoding():
    model, config, weights = tiny("llama", max_position_embeddings=16,
                                  rope_parameters=dict(rope_type="dynamic", rope_theta=10000.0, factor=4.0))
    runner = TorchRunner(config, weights)
    runner.allocate(20, 4, "float32")
    ids = torch.randint(0, 199, (40,)).tolist()
    cache, want = None, []
    with torch.no_grad():
        for i in range(40):  # token by token, as decoding does
            out = model(torch.tensor([ids[i:i + 1]]), past_key_values=cache, position_ids=torch.tensor([[i]]), use_cache=True)
            cache = out.past_key_values
            want.append(out.logits[0, -1])
    got = runner.forward(batch_of((ids, 0, list(range(10))))).logits
    assert (got - torch.stack(want)).abs().max() < 1e-4


def assert_ragged_batch_is_right(runner, model):
    """Rests of several texts in one step, of one token and of many, against the transformers model."""
    runner.allocate(60, 4, "float32")
    texts = [torch.randint(0, 199, (n,)).tolist() for n in (12, 23, 5, 17)]
    tables = [list(range(10 * i, 10 * i + 8)) for i in range(4)]
    cut = [11, 10, 4, 16]
    runner.forward(batch_of(*[(t[:c], 0, b) for t, c, b in zip(texts, cut, tables)]))
    got = runner.forward(batch_of(*[(t[c:], c, b) for t, c, b in zip(texts, cut, tables)])).logits
    with torch.no_grad():
        want = torch.cat([model(torch.tensor([t])).logits[0, c:] for t, c in zip(texts, cut)])
    assert (got - want).abs().max() < 1e-4


@pytest.mark.parametrize("exact", [False, True])
def test_ragged_batch_of_chunks_and_decodes(exact):
    model, config, weights = tiny("qwen2", use_sliding_window=True, sliding_window=5, max_window_layers=1)
    assert_ragged_batch_is_right(TorchRunner(config, weights, bit_exact=exact), model)


def test_tree_rows_see_only_their_ancestors():
    _, config, weights = tiny("llama", sliding_window=None)
    runner = TorchRunner(config, weights)
    runner.allocate(40, 4, "float32")
    ids = torch.randint(0, 199, (7,)).tolist()
    runner.forward(batch_of((ids[:6], 0, [0, 1, 2, 3])))
    #            0 ids[6] - 1, 2 its children - 3 child of 1 - 4 child of 2
    draft, parents = [50, 60, 70, 80], {1: 0, 2: 0, 3: 1, 4: 2}
    mask = torch.eye(5, dtype=torch.bool)
    for row, parent in parents.items():
        mask[row] |= mask[parent]
    step = batch_of((ids[6:] + draft, 6, [0, 1, 2, 3]))
    step.positions = (6 + mask.sum(1) - 1).int()
    step.tree_masks = [mask]
    tree = runner.forward(step)
    for path, row in (([50, 70], 3), ([60, 80], 4)):
        alone = runner.forward(batch_of((ids + path, 0, [10, 11, 12, 13]))).logits[-1]
        assert (tree.logits[row] - alone).abs().max() < 1e-4


def test_hidden_and_residual_streams():
    model, config, weights = tiny("qwen3")
    runner = TorchRunner(config, weights)
    runner.allocate(10, 4, "float32")
    ids = torch.randint(0, 199, (9,)).tolist()
    step = batch_of((ids, 0, [0, 1, 2]))
    step.want_hidden, step.aux_layers = True, (1, 2)
    out = runner.forward(step)
    with torch.no_grad():
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    assert (out.hidden - states[-1][0]).abs().max() < 1e-4
    assert (out.aux - torch.cat([states[1][0], states[2][0]], -1)).abs().max() < 1e-4


@pytest.mark.parametrize("kv_dtype,bound", [("float16", 0.02), ("bfloat16", 0.2), ("int8", 0.25), ("fp8", 0.6)])
def test_cache_formats_stay_close(kv_dtype, bound):
    model, config, weights = tiny("llama")
    runner = TorchRunner(config, weights)
    runner.allocate(10, 4, kv_dtype)
    ids = torch.randint(0, 199, (30,)).tolist()
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
    error = (runner.forward(batch_of((ids, 0, list(range(8))))).logits - want).abs().max()
    assert 0 < error < bound * want.abs().max()


def test_copy_slots_moves_a_context():
    _, config, weights = tiny("llama")
    for kv_dtype in ("float32", "int8", "fp8"):
        runner = TorchRunner(config, weights)
        runner.allocate(20, 4, kv_dtype)
        ids = torch.randint(0, 199, (9,)).tolist()
        runner.forward(batch_of((ids[:8], 0, [0, 1, 2])))
        want = runner.forward(batch_of((ids[8:], 8, [0, 1, 2]))).logits
        runner.copy_slots(torch.arange(0, 8, dtype=torch.int32), torch.arange(40, 48, dtype=torch.int32))
        assert torch.equal(runner.forward(batch_of((ids[8:], 8, [10, 11, 12]))).logits, want)


def test_weights_are_checked():
    _, config, weights = tiny("qwen2")
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(CorruptError, match=f"missing: {name}"):
        TorchRunner(config, {k: v for k, v in weights.items() if k != name})
    with pytest.raises(CorruptError, match="not consumed: extra.weight"):
        TorchRunner(config, {**weights, "extra.weight": torch.zeros(1)})
    with pytest.raises(CorruptError, match=f"{name} holds NaN"):
        TorchRunner(config, {**weights, name: torch.full_like(weights[name], float("nan"))})
    with pytest.raises(CorruptError, match="has shape"):
        TorchRunner(config, {**weights, name: weights[name].T})
    _, tied, shared = tiny("llama", tie_word_embeddings=True)
    TorchRunner(tied, {**shared, "lm_head.weight": shared["model.embed_tokens.weight"].clone()})
    with pytest.raises(CorruptError, match="tied"):
        TorchRunner(tied, {**shared, "lm_head.weight": shared["model.embed_tokens.weight"] + 1})


def test_unknown_formats_are_refused():
    _, config, weights = tiny("llama")
    runner = TorchRunner(config, weights)
    with pytest.raises(UnsupportedError, match="float32, float16"):
        runner.allocate(4, 4, "int5")
    with pytest.raises(UnsupportedError, match="longrope"):
        tiny_config = config.__class__(**{**config.__dict__, "rope_scaling": {"rope_type": "longrope"}})
        TorchRunner(tiny_config, weights)
    runner.allocate(4, 4, "float32")
    step = batch_of(([1, 2], 0, [0]))
    step.adapters = torch.tensor([3], dtype=torch.int32)
    with pytest.raises(KaruiError, match="adapter slot 3"):
        runner.forward(step)
