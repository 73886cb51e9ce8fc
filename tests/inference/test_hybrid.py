"""Reference: hybrid models against transformers, and their recurrences against themselves in float64, chunked and row by row."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from karui.configs.errors import CorruptError, UnsupportedError
from karui.inference.batch import StepBatch
from karui.inference.models.config import from_hf
from karui.inference.models.decoder import TorchRunner
from karui.inference.models.recurrent import delta_net, mamba2
from karui.inference.models.recurrent.conv import causal_conv
from karui.inference.models.weights import canonical_name, expected_shapes
from tests.inference.conftest import tiny
from tests.inference.test_decoder import batch_of

MAMBA: dict[str, Any] = dict(layer_types=["linear_attention", "full_attention", "linear_attention"], mamba_n_heads=6,
                             mamba_d_head=16, mamba_d_state=10)
DELTA: dict[str, Any] = dict(linear_key_head_dim=8, linear_value_head_dim=12, linear_num_key_heads=2, linear_num_value_heads=4)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("lfm2", dict(layer_types=["conv", "full_attention", "conv"], tie_word_embeddings=True, block_multiple_of=16)),
    "lfm2-biased": ("lfm2", dict(layer_types=["conv", "conv", "full_attention"], conv_bias=True, conv_L_cache=5,
                                 block_auto_adjust_ff_dim=False)),
    "lfm2-experts": ("lfm2_moe", dict(layer_types=["conv", "full_attention", "conv"], num_experts=6, num_experts_per_tok=3,
                                      moe_intermediate_size=24, num_dense_layers=1, routed_scaling_factor=1.5)),
    "lfm2-experts-plain": ("lfm2_moe", dict(layer_types=["full_attention", "conv", "conv"], num_experts=4, num_experts_per_tok=2,
                                            moe_intermediate_size=24, num_dense_layers=0, use_expert_bias=False)),
    "qwen3_next": ("qwen3_next", dict(DELTA, num_hidden_layers=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
                                      shared_expert_intermediate_size=32, mlp_only_layers=[1])),
    "qwen3_next-dense": ("qwen3_next", dict(DELTA, layer_types=["linear_attention", "full_attention", "linear_attention"],
                                            linear_num_key_heads=4, num_experts=0, head_dim=16)),
    "qwen3_5": ("qwen3_5_text", dict(DELTA, num_hidden_layers=4, head_dim=16)),
    "qwen3_5-experts": ("qwen3_5_moe_text", dict(DELTA, layer_types=["full_attention", "linear_attention", "linear_attention"],
                                                 num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
                                                 shared_expert_intermediate_size=32)),
    "bamba": ("bamba", dict(attn_layer_indices=[1], mamba_n_heads=6, mamba_d_head=16, mamba_n_groups=2, mamba_d_state=10)),
    "bamba-biased": ("bamba", dict(attn_layer_indices=[0, 2], mamba_n_heads=4, mamba_d_head=24, mamba_d_state=16, mlp_bias=True,
                                   mamba_proj_bias=True, mamba_conv_bias=False, attention_bias=True)),
    "granite": ("granitemoehybrid", dict(MAMBA, mamba_n_groups=3, num_local_experts=0, shared_intermediate_size=64,
                                         embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.7,
                                         attention_multiplier=0.2)),
    "granite-experts": ("granitemoehybrid", dict(MAMBA, num_local_experts=4, num_experts_per_tok=2, intermediate_size=40,
                                                 shared_intermediate_size=64, position_embedding_type="rope")),
}  # fmt: skip


def hybrid(case: str, seed: int = 0) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """`tiny` with weights a third as large: large random ones make chaos of fp32's last digits, in transformers too."""
    kind, changes = CASES[case]
    model, config, weights = tiny(kind, seed, **changes)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.mul_(0.33)
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias"):
                buffer.normal_()
    return model, config, {name: w.clone() for name, w in model.state_dict().items() if name in weights}


def double_runner(config: Any, weights: dict[str, torch.Tensor], num_blocks: int) -> TorchRunner:
    """A runner whose cache is float64 too."""
    runner = TorchRunner(config, weights, dtype=torch.float64)
    runner.allocate(num_blocks, 4, "float32")
    runner._kv.data = runner._kv.data.double()  # type: ignore[union-attr]
    return runner


def run_of(ids: list[int], past: int, blocks: list[int], before: int, after: int) -> StepBatch:
    step = batch_of((ids, past, blocks))
    step.states = torch.tensor([[0, len(ids), before, after]], dtype=torch.int32)
    return step


def in_chunks(runner: TorchRunner, ids: list[int], cuts: list[int], blocks: list[int]) -> torch.Tensor:
    """Logits of all rows; each chunk reads the page that the one before it wrote."""
    ends = [*cuts, len(ids)]
    return torch.cat([runner.forward(run_of(ids[a:b], a, blocks, i, i + 1)).logits
                      for i, (a, b) in enumerate(zip([0, *cuts], ends, strict=True))])


@contextlib.contextmanager
def all_double(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What transformers computes in fp32 whatever the model's dtype, it computes in float64."""
    with monkeypatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str) -> None:
    model, config, weights = hybrid(case)
    runner = TorchRunner(config, weights)
    runner.allocate(40, 4, "float32")
    runner.allocate_states(60)
    ids = torch.randint(0, 199, (50,)).tolist()
    blocks = torch.randperm(39)[:13].add(1).tolist()
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
    assert want.abs().max() > 0.5
    assert (in_chunks(runner, ids, [17, 18, 41], blocks) - want).abs().max() < 1e-4
    assert (in_chunks(runner, ids, list(range(1, 50)), blocks) - want).abs().max() < 1e-4


@pytest.mark.parametrize("case", CASES)
def test_float64_equals_transformers(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than a chunk of both. What is left is rounding: nothing is computed otherwise."""
    model, config, weights = hybrid(case)
    runner = double_runner(config, weights, 40)
    runner.allocate_states(4)
    ids = torch.randint(0, 199, (120,)).tolist()
    model.double()
    if config.mixture:
        model.set_experts_implementation("eager")
    with torch.no_grad(), all_double(monkeypatch):
        want = model(torch.tensor([ids])).logits[0]
        got = in_chunks(runner, ids, [3, 100], list(range(30)))  # the angles of the rotation, too
    assert got.dtype == want.dtype == torch.float64
    assert (got - want).abs().max() < 1e-9


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_equal_generate(case: str) -> None:
    model, config, weights = hybrid(case)
    runner = TorchRunner(config, weights)
    runner.allocate(80, 4, "float32")
    runner.allocate_states(30)
    ids, new = torch.randint(3, 199, (9,)).tolist(), 20
    want = model.generate(torch.tensor([ids]), max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)[0].tolist()
    got = list(ids)
    for page in range(new):
        past = 0 if len(got) == len(ids) else len(got) - 1
        logits = runner.forward(run_of(got[past:], past, list(range(20)), page, page + 1)).logits
        got.append(int(logits[-1].argmax()))
    assert got == want


@pytest.mark.parametrize("case", CASES)
def test_a_row_is_the_same_however_it_is_run(case: str) -> None:
    """bit_exact: whole, in chunks, row by row and beside others, to the last bit."""
    _, config, weights = hybrid(case, seed=1)
    runner = TorchRunner(config, weights, bit_exact=True)
    runner.allocate(60, 4, "float32")
    runner.allocate_states(80)
    ids, other = torch.randint(0, 199, (33,)).tolist(), torch.randint(0, 199, (21,)).tolist()
    whole = in_chunks(runner, ids, [], list(range(9)))
    assert torch.equal(in_chunks(runner, ids, [5, 6, 20], list(range(20, 29))), whole)
    assert torch.equal(in_chunks(runner, ids, list(range(1, 33)), list(range(30, 39))), whole)
    beside = batch_of((other, 0, list(range(40, 46))), (ids, 0, list(range(10, 19))))
    # with a page in the middle of the second, as the prefix cache wants it
    beside.states = torch.tensor([[0, 21, 0, 70], [21, 33, 0, 71], [33, 54, 71, 72]], dtype=torch.int32)
    assert torch.equal(runner.forward(beside).logits[21:], whole)


def test_decodes_together_equal_decodes_alone() -> None:
    """One-row runs are computed together, and a draft's rows one behind the other."""
    for case in ("lfm2", "qwen3_next", "bamba"):
        _, config, weights = hybrid(case)
        runner = double_runner(config, weights, 60)
        runner.allocate_states(50)
        texts = [torch.randint(0, 199, (n,)).tolist() for n in (12, 5, 17)]
        tables = [list(range(10 * i, 10 * i + 8)) for i in range(3)]
        whole = [in_chunks(runner, t, [], b)[-3:] for t, b in zip(texts, tables, strict=True)]
        for i, (t, b) in enumerate(zip(texts, tables, strict=True)):
            runner.forward(run_of(t[:-3], 0, b, 0, 10 + i))
        step = batch_of(*[(t[-3:], len(t) - 3, b) for t, b in zip(texts, tables, strict=True)])
        step.states = torch.tensor([[3 * i + j, 3 * i + j + 1, 10 * (j + 1) + i, 10 * (j + 2) + i] for i in range(3)
                                    for j in range(3)], dtype=torch.int32)
        assert (runner.forward(step).logits - torch.cat(whole)).abs().max() < 1e-10, case


@pytest.mark.parametrize("rows", [1, 2, 63, 64, 65, 200])
def test_chunked_recurrences_equal_row_by_row(rows: int) -> None:
    g = torch.Generator().manual_seed(rows)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    q, k, v = normal(2, rows, 3, 8), torch.nn.functional.normalize(normal(2, rows, 3, 8), dim=-1), normal(2, rows, 3, 5)
    decay, b, memory = -normal(2, rows, 3).abs(), normal(2, rows, 3).sigmoid(), normal(2, 3, 8, 5)
    for ours, theirs in zip(delta_net.chunked(q, k, v, decay, b, memory), delta_net.recur(q, k, v, decay, b, memory), strict=True):
        assert (ours - theirs).abs().max() < 1e-11
    # and what the rule says: with full strength and no decay a key returns the value last written under it
    o, memory = delta_net.recur(k, k, v, torch.zeros_like(decay), torch.ones_like(b), memory)
    assert (o - v).abs().max() < 1e-11
    x, state = normal(2, rows, 3, 4), normal(2, 3, 4, 8)
    for ours, theirs in zip(mamba2.chunked(x, decay, k, q, state), mamba2.recur(x, decay, k, q, state), strict=True):
        assert (ours - theirs).abs().max() < 1e-11


@pytest.mark.parametrize("taps", [2, 3, 4])
def test_convolution_equals_torch(taps: int) -> None:
    x, weight, bias = torch.randn(2, 9, 6), torch.randn(6, 1, taps), torch.randn(6)
    want = torch.nn.functional.conv1d(x.transpose(1, 2), weight, bias, padding=taps - 1, groups=6)[..., :9].transpose(1, 2)
    tail = torch.zeros(2, taps - 1, 6)
    y, behind = causal_conv(x, tail, weight, bias, torch.float32)
    assert (y - want).abs().max() < 1e-5 and torch.equal(behind, x[:, -(taps - 1):])
    single = []
    for t in range(9):
        one, tail = causal_conv(x[:, t:t + 1], tail, weight, bias, torch.float32)
        single.append(one)
    assert torch.equal(torch.cat(single, 1), y)


def test_bfloat16_keeps_what_decays_in_fp32() -> None:
    model, config, weights = hybrid("qwen3_next-dense")
    runner = TorchRunner(config, weights, dtype=torch.bfloat16)
    layer = "model.layers.0.linear_attn."
    assert runner._weights[layer + "A_log"].dtype == runner._weights[layer + "dt_bias"].dtype == torch.float32  # type: ignore[union-attr]
    runner.allocate(40, 4, "bfloat16")
    runner.allocate_states(4)
    ids = torch.randint(0, 199, (60,)).tolist()
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
    error = (in_chunks(runner, ids, [40], list(range(16))).float() - want).abs()
    assert error.mean() < 0.03 * want.abs().max()


def test_bytes_of_a_state_and_of_a_token() -> None:
    _, config, weights = hybrid("qwen3_next")
    runner = TorchRunner(config, weights)
    channels = 2 * 2 * 8 + 4 * 12  # queries, keys, values
    assert runner.state_bytes == 3 * 4 * (3 * channels + 4 * 8 * 12)
    assert runner.kv_bytes_per_token("float32") == 1 * 2 * 2 * 8 * 4  # one attention layer of four
    assert TorchRunner(*tiny("llama")[1:]).state_bytes == 0


def test_names_of_files() -> None:
    _, config, weights = hybrid("lfm2")
    assert {canonical_name(name) for name in weights} == set(expected_shapes(config))
    assert canonical_name("model.layers.3.feed_forward.w2.weight") == "model.layers.3.mlp.down_proj.weight"
    assert canonical_name("model.layers.3.self_attn.out_proj") == "model.layers.3.self_attn.o_proj"
    assert canonical_name("model.layers.3.conv.out_proj.weight") == "model.layers.3.conv.out_proj.weight"
    old = "model.layers.0.block_sparse_moe."
    assert canonical_name(old + "input_linear.weight") == "model.layers.0.mlp.experts.gate_up_proj"
    assert canonical_name(old + "router.layer.weight") == "model.layers.0.mlp.gate.weight"
    assert canonical_name(old + "experts.5.w1.weight") == "model.layers.0.mlp.experts.5.gate_proj.weight"


def test_configs_are_read_or_refused() -> None:
    kind, changes = CASES["lfm2"]
    given = {"model_type": kind, "vocab_size": 199, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3,
             "num_attention_heads": 6, "max_position_embeddings": 128, "conv_L_cache": 3, **changes}
    assert from_hf(given).intermediate_size == 64 and from_hf({**given, "block_multiple_of": 50}).intermediate_size == 100
    old = {**given, "layer_types": None, "full_attn_idxs": [1], "block_ff_dim": 60, "block_auto_adjust_ff_dim": False}
    assert from_hf(old).recurrent == from_hf(given).recurrent and from_hf(old).intermediate_size == 60
    assert from_hf(given).tied and not from_hf({**given, "tie_embedding": False}).tied and from_hf(given).rope_theta == 1e6
    assert from_hf({**given, "layer_types": ["full_attention"] * 3}).recurrent is None
    with pytest.raises(UnsupportedError, match=r"layer_types \['mamba'\]; expected 3, each conv or full_attention"):
        from_hf({**given, "layer_types": ["mamba", "conv", "full_attention"]})
    with pytest.raises(UnsupportedError, match="layer_types of 2 layers; expected 3"):
        from_hf({**given, "layer_types": ["conv", "full_attention"]})
    with pytest.raises(UnsupportedError, match="without an attention layer"):
        from_hf({**given, "layer_types": ["conv"] * 3})
    bamba = {**given, "model_type": "bamba", "layer_types": None, "attn_layer_indices": [1], "mamba_expand": 2, "mamba_n_heads": 6,
             "mamba_d_head": "auto", "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_d_conv": 4}
    made: Any = from_hf({**bamba, "time_step_limit": [0.0, {"__float__": "Infinity"}]}).recurrent
    assert made.head_dim == 16 and made.limits == (0.0, float("inf"))
    with pytest.raises(UnsupportedError, match="5 heads of 16 in 1 groups"):
        from_hf({**bamba, "mamba_n_heads": 5, "mamba_d_head": 16})
    _, config, weights = hybrid("qwen3_next-dense")
    TorchRunner(config, {**weights, "mtp.fc.weight": torch.zeros(3, 3)})  # multi-token prediction is passed over
    with pytest.raises(CorruptError, match=r"not consumed: mpt"):
        TorchRunner(config, {**weights, "mpt.fc.weight": torch.zeros(3, 3)})
    _, config, weights = hybrid("lfm2")
    with pytest.raises(CorruptError, match=r"missing: model\.layers\.0\.conv\.conv\.weight"):
        TorchRunner(config, {k: v for k, v in weights.items() if not k.endswith("0.conv.conv.weight")})
