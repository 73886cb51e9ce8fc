"""Reference: the GPU runner on tiny random models, in the interpreter in fp32, against the plain torch runner, step by step."""

import dataclasses

import pytest
import torch

from karui.configs.errors import UnsupportedError
from karui.configs.quantspec import QuantSpec
from karui.inference.batch import StepBatch
from karui.inference.models.config import Mixture, ModelConfig
from karui.inference.models.decoder import LoraWeights, TorchRunner
from karui.inference.models.weights import expected_shapes
from karui.kernels.quantize import quantize
from tests.inference.test_decoder import batch_of

CONFIG = ModelConfig(model_type="qwen3", vocab_size=29, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2,
                     head_dim=8, norm_eps=1e-5, rope_theta=1e4, max_context=64, tied=True, qk_norm=True)  # fmt: skip


MIXTURES = {
    "mixtral": dict(mixture=Mixture(5, 2, 24, True, 0, (True, True)), sliding_window=(3, None)),
    "qwen2_moe": dict(mixture=Mixture(4, 2, 24, False, 40, (True, False)), qkv_bias=True),
    "qwen3_moe": dict(mixture=Mixture(6, 3, 24, True, 0, (False, True)), qk_norm=True),
}


def with_experts(kind, **changes):
    plain = dataclasses.replace(CONFIG, model_type=kind, qk_norm=False, tied=False)
    return dataclasses.replace(plain, **(MIXTURES[kind] | changes))


def weights(config, seed=0):
    g, made = torch.Generator().manual_seed(seed), {}
    for name, shape in expected_shapes(config).items():
        made[name] = torch.randn(shape, generator=g)
        if not name.endswith("bias"):
            made[name] = made[name] * 0.3 if len(shape) > 1 else made[name] * 0.1 + 1
    return made


def steps():
    """Prefill of two sequences, then a decode of both, then a tree of three rows for one: block size 4, tables out of order."""
    tables = torch.tensor([[3, 1, 5], [2, 7, 0]])
    slot = lambda s, j: int(tables[s, j // 4] * 4 + j % 4)  # noqa: E731
    t = torch.tensor
    yield StepBatch(tokens=t([1, 2, 3, 4, 5, 6, 7, 8]), positions=t([0, 1, 2, 3, 4, 0, 1, 2]), query_starts=t([0, 5, 8]),
                    slots=t([slot(0, j) for j in range(5)] + [slot(1, j) for j in range(3)]), context_lens=t([5, 3]),
                    block_tables=tables, logit_rows=t([4, 7]))  # fmt: skip
    yield StepBatch(tokens=t([9, 10]), positions=t([5, 3]), query_starts=t([0, 1, 2]), slots=t([slot(0, 5), slot(1, 3)]),
                    context_lens=t([6, 4]), block_tables=tables, logit_rows=t([0, 1]))  # fmt: skip
    tree = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    yield StepBatch(tokens=t([11, 12, 13]), positions=t([6, 7, 7]), query_starts=t([0, 3]), slots=t([slot(0, j) for j in (6, 7, 8)]),
                    context_lens=t([9]), block_tables=tables[:1], logit_rows=t([0, 1, 2]), tree_masks=[tree], want_hidden=True,
                    aux_layers=(1,))  # fmt: skip


def compare(config, made, kv_dtype="float32", adapter=False, device="cpu", bound=1e-4, **options):
    from karui.inference.models.gpu import TritonRunner

    exact = device.type == "cpu"
    dtype = torch.float32 if exact else torch.bfloat16
    fast, plain = TritonRunner(config, made, device, dtype, **options), TorchRunner(config, made, device, dtype)
    for runner in (fast, plain):
        runner.allocate(8, 4, kv_dtype)
        if adapter:
            g = torch.Generator().manual_seed(5)
            runner.set_adapter(0, {f"model.layers.1.{n}": LoraWeights(torch.randn(2, i, generator=g), torch.randn(o, 2, generator=g), 0.5)
                                   for n, i, o in (("self_attn.k_proj", 32, 16), ("mlp.up_proj", 32, 64), ("mlp.down_proj", 64, 32))})  # fmt: skip
    for batch in steps():
        if adapter and not batch.tree_masks:
            batch = dataclasses.replace(batch, adapters=torch.tensor([-1, 0]))
        got, want = fast.forward(batch), plain.forward(batch)
        for a, b in ((got.logits, want.logits), (got.hidden, want.hidden), (got.aux, want.aux)):
            assert (a is None) == (b is None)
            if a is not None:
                assert (a - b).abs().max() <= (bound if exact else max(bound, 6e-2)) * b.abs().max(), batch
    return fast, plain


def test_dense(device):
    fast, plain = compare(CONFIG, weights(CONFIG), device=device)
    assert fast.weight_bytes() == plain.weight_bytes()


@pytest.mark.parametrize("kind", ["qwen2", "seed_oss"])
def test_windows_biases_and_an_own_head(kind, device):
    config = dataclasses.replace(CONFIG, model_type=kind, o_bias=kind == "seed_oss", mlp_bias=kind == "seed_oss", qk_norm=False, qkv_bias=True, tied=False, sliding_window=(3, None))
    compare(config, weights(config), device=device)


def on_grid(spec, config=CONFIG):
    """All linears but those that choose or weigh experts, as every method leaves them."""
    kept = ("embed_tokens.weight", "mlp.gate.weight", "shared_expert_gate.weight")
    return {n: quantize(w, QuantSpec.parse(spec)) if w.ndim == 2 and not n.endswith(kept) else w for n, w in weights(config).items()}


@pytest.mark.parametrize("kind", MIXTURES)
def test_mixtures(kind, device):
    """Dense experts: views of one product, updated in parts; nothing of a step asks the host where tokens went."""
    config = with_experts(kind)
    fast, plain = compare(config, weights(config), device=device)
    assert fast.weight_bytes() == plain.weight_bytes() and fast.supports_partial_weights
    for module in ("self_attn.v_proj", "mlp.experts.2.up_proj", "mlp.experts.0.down_proj", "mlp.gate"):
        layer = config.mixture.layers.index(True)
        assert torch.equal(fast.dense_weight(f"model.layers.{layer}.{module}"), plain.dense_weight(f"model.layers.{layer}.{module}"))
    name = f"model.layers.{layer}.mlp.experts.3.gate_proj.weight"
    for runner in (fast, plain):
        runner.load_weights({name: weights(config)[name] * -2}, partial=True)
    got, want = (runner.forward(next(steps())).logits for runner in (fast, plain))
    assert (got - want).abs().max() <= (1e-4 if device.type == "cpu" else 6e-2) * want.abs().max()


@pytest.mark.parametrize(("kind", "spec"), [("mixtral", "w4g32"), ("qwen2_moe", "w8a8"), ("qwen3_moe", "nvfp4"), ("qwen3_moe", "w4g16")])
def test_experts_on_a_grid(kind, spec, device):
    """Codes stay packed; a grid without a kernel is decoded when it is loaded."""
    config = with_experts(kind, hidden_size=64)
    config = dataclasses.replace(config, mixture=dataclasses.replace(config.mixture, width=32, shared_width=64 if config.mixture.shared_width else 0))
    fast, plain = compare(config, on_grid(spec, config), device=device)
    layer = config.mixture.layers.index(True)
    for module in (f"model.layers.{layer}.mlp.experts.1.up_proj", f"model.layers.{layer}.mlp.experts.3.down_proj"):
        assert torch.equal(fast.dense_weight(module), plain.dense_weight(module))
    assert fast._packed is (spec != "w4g16") and (fast.weight_bytes() < plain.weight_bytes()) is (spec in ("w4g32", "nvfp4"))


def test_experts_on_two_grids_are_decoded_once(device, caplog):
    config = with_experts("qwen3_moe")
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    made = on_grid("w8", config) | {name: quantize(weights(config)[name], QuantSpec.parse("fp8"))}
    with caplog.at_level("INFO", "karui.inference.models.gpu"):
        compare(config, made, device=device)
    assert [r.getMessage() for r in caplog.records] == [
        "model.layers.1.mlp.experts.down is dequantized once, here: its parts are on different grids"]


def test_experts_with_inputs_in_fp8(device):
    config = with_experts("qwen3_moe")
    compare(config, on_grid("fp8", config), device=device, activation_bits=8, bound=0.35)


def test_an_adapter_of_experts_or_their_router_is_refused(device):
    from karui.inference.models.gpu import TritonRunner

    config = with_experts("mixtral")
    runner = TritonRunner(config, weights(config), device, torch.float32)
    for module, said in (("mlp.experts.0.up_proj", "adapters of experts"), ("mlp.gate", "adapters of experts and their router")):
        with pytest.raises(UnsupportedError, match=said):
            runner.set_adapter(0, {f"model.layers.0.{module}": LoraWeights(torch.ones(1, 32), torch.ones(5, 1), 1.0)})


@pytest.mark.parametrize(("spec", "kv_dtype"), [("fp8", "fp8"), ("nvfp4", "float16"), ("w8a8", "int8"), ("w1.58a8", "float32"), ("w4g32", "int4")])
def test_grids_and_caches(spec, kv_dtype, device):
    fast, plain = compare(CONFIG, on_grid(spec), kv_dtype, device=device)
    assert fast._packed and not fast.supports_partial_weights
    for module in ("model.layers.0.self_attn.k_proj", "model.layers.1.mlp.up_proj"):
        assert torch.equal(fast.dense_weight(module), plain.dense_weight(module))


@pytest.mark.parametrize("kv_dtype", ["kivi4", "kivi2"])
def test_codes_of_whole_blocks(kv_dtype, device):
    """Steps that fill blocks, through the engine's calls: pages come back, forks copy them, prefixes are read; trees are refused."""
    from karui.inference.models.gpu import TritonRunner

    exact, ids = device.type == "cpu", torch.randint(0, 29, (60,), generator=torch.Generator().manual_seed(2)).tolist()
    dtype = torch.float32 if exact else torch.bfloat16
    fast, plain = (kind(CONFIG, weights(CONFIG), device, dtype) for kind in (TritonRunner, TorchRunner))
    steps = [((ids[:40], 0, [3, 0]), (ids[:30], 0, [2, 4])), ((ids[40:41], 40, [3, 0]), (ids[30:34], 30, [2, 4])),
             ((ids[41:42], 41, [3, 0]), (ids[34:35], 34, [2, 4]))]
    for runner in (fast, plain):
        runner.allocate(6, 32, kv_dtype, 4)
    assert fast.kv_bytes_per_token(kv_dtype) == plain.kv_bytes_per_token(kv_dtype)
    for step in steps:
        batch = batch_of(*step, block_size=32)
        got, want = fast.forward(batch).logits, plain.forward(batch).logits
        assert (got - want).abs().max() <= (1e-3 if exact else 6e-2) * want.abs().max()
        for runner in (fast, plain):
            runner.settle([3] if step is steps[0] else [2])
    for runner in (fast, plain):
        runner.copy_slots(torch.arange(0, 10), torch.arange(160, 170))  # block 0, a fork's last one, to block 5
        assert runner._kv.num_free_pages == 1
    fork = batch_of((ids[42:43], 42, [3, 5]), block_size=32)
    got, want = fast.forward(fork).logits, plain.forward(fork).logits
    assert (got - want).abs().max() <= (1e-3 if exact else 6e-2) * want.abs().max()
    assert torch.equal(fast.read_slots(torch.arange(96, 128))[0], plain.read_slots(torch.arange(96, 128))[0]) or not exact
    with pytest.raises(UnsupportedError, match="only chains"):
        fast.forward(dataclasses.replace(fork, tree_masks=[torch.ones(1, 1, dtype=torch.bool)]))


@pytest.mark.parametrize(("spec", "packs"), [("w8", True), ("nvfp4", True), ("w4g16", False)])
def test_a_tied_embedding_on_a_grid(spec, packs, device):
    """Held once: packed, as the head reads it; a grid without a kernel stays codes."""
    name = "model.embed_tokens.weight"
    made = weights(CONFIG) | {name: quantize(weights(CONFIG)[name], QuantSpec.parse(spec))}
    fast, plain = compare(CONFIG, made, device=device)
    assert (name in fast._weights) is not packs and fast.supports_partial_weights is not packs
    assert torch.equal(fast.dense_weight("model.embed_tokens"), plain.dense_weight("model.embed_tokens"))
    assert torch.equal(fast.embed(torch.tensor([3, 0, 28])), plain.embed(torch.tensor([3, 0, 28])))
    assert fast.weight_bytes() < plain.weight_bytes() if spec == "nvfp4" else fast.weight_bytes() == plain.weight_bytes()


def test_activations_in_fp8(device):
    """Rounding the inputs to E4M3 moves the logits a little, and only then."""
    fast, plain = compare(CONFIG, on_grid("fp8"), device=device, activation_bits=8, bound=0.25)
    got, want = (runner.forward(next(steps())).logits for runner in (fast, plain))
    assert (got - want).abs().max() > 1e-3 * want.abs().max()


def test_a_gpu_without_fp8_refuses_activations_in_fp8(monkeypatch):
    from karui.inference.models import gpu

    monkeypatch.setattr(gpu, "obstacle", lambda device, needs=80: "it needs compute capability 89, this GPU has 80" if needs > 80 else "")
    with pytest.raises(UnsupportedError, match=r"needs compute capability 89.*activation_bits=16 FP8 weights are decoded"):
        gpu.TritonRunner(CONFIG, on_grid("fp8"), "cpu", activation_bits=8)


def test_nothing_is_held_twice(device):
    """Dense parts are views of their fused product, and a partial update reaches it."""
    from karui.inference.models.gpu import TritonRunner

    made = weights(CONFIG)
    runner = TritonRunner(CONFIG, made, device, torch.float32)
    name = "model.layers.0.self_attn.k_proj.weight"
    fused = runner._products["model.layers.0.self_attn.qkv"].weight
    assert runner._weights[name].untyped_storage().data_ptr() == fused.untyped_storage().data_ptr()
    runner.load_weights({name: made[name] * 2}, partial=True)
    assert torch.equal(runner._products["model.layers.0.self_attn.qkv"].weight[32:48].cpu(), made[name] * 2)
    assert torch.equal(runner.dense_weight("model.layers.0.self_attn.q_proj").cpu(), made[name.replace("k_proj", "q_proj")])


def test_packed_weights_int8_cache_and_adapters(device):
    made = on_grid("w4g32")
    fast, plain = compare(CONFIG, made, "int8", adapter=True, device=device)
    for module in ("model.layers.0.self_attn.v_proj", "model.layers.1.mlp.down_proj"):
        assert torch.equal(fast.dense_weight(module), plain.dense_weight(module))
    assert fast.weight_bytes() < plain.weight_bytes()
    with pytest.raises(UnsupportedError, match="whole sets"):
        fast.load_weights({}, partial=True)


def test_a_model_it_cannot_serve():
    from karui.inference.models.gpu import TritonRunner

    with pytest.raises(UnsupportedError, match="model type gemma"):
        TritonRunner(dataclasses.replace(CONFIG, model_type="gemma"), {}, "cpu")
