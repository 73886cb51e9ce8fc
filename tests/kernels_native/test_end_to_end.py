"""Reference: the native runner against transformers (fp32) and the torch runner (quantized) on tiny random models."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from karui.configs.errors import CorruptError, KaruiError, UnsupportedError
from karui.configs.quantspec import QuantSpec
from karui.inference.models.decoder import LoraWeights, TorchRunner
from karui.inference.models.native import NativeRunner
from karui.kernels.native import available, isas
from karui.kernels.quantize import quantize
from tests.inference.conftest import tiny
from tests.inference.test_decoder import CASES, batch_of

pytestmark = pytest.mark.skipif(not available(), reason="no C++ compiler")


def quantized(weights, spec):
    return {name: quantize(w, QuantSpec.parse(spec)) if w.dim() == 2 else w for name, w in weights.items()}


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("case", [c for c, (kind, _) in CASES.items() if kind in ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe")])
def test_logits_equal_transformers(case, isa):
    model, config, weights = tiny(CASES[case][0], **CASES[case][1])
    runner = NativeRunner(config, weights, threads=2, activation_bits=16, isa=isa)
    runner.allocate(40, 4, "float32")
    ids = torch.randint(0, 199, (1, 100)).tolist()[0]
    blocks = torch.randperm(39)[:25].add(1).tolist()
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
    got = [runner.forward(batch_of((ids[a:b], a, blocks))).logits for a, b in ((0, 17), (17, 18), (18, 41), (41, 100))]
    assert (torch.cat(got) - want).abs().max() < 1e-4


def test_experts_are_not_read_from_a_file():
    _, config, weights = tiny(CASES["mixtral"][0], **CASES["mixtral"][1])
    with pytest.raises(UnsupportedError, match="no layers with experts from a file"):
        NativeRunner(config, weights, weight_memory=1000)


@pytest.mark.parametrize("spec", ("w4g16", "w8", "w8a8", "w1.58a8", "w4g16a"))
@pytest.mark.parametrize("activation_bits", (8, 16))
def test_quantized_model_equals_the_torch_runner(spec, activation_bits):
    """A16 against dequantized weights; A8 against the torch runner's emulation where the spec asks for 8-bit activations."""
    _, config, weights = tiny("llama", tie_word_embeddings=True)
    weights = quantized(weights, spec)
    asked = QuantSpec.parse(spec).activation_bits == 8
    if asked != (activation_bits == 8):
        pytest.skip("the torch runner quantizes activations exactly when the spec says so")
    ids, got = torch.randint(0, 199, (40,)).tolist(), []
    for runner in (NativeRunner(config, weights, threads=2, activation_bits=activation_bits), TorchRunner(config, weights)):
        runner.allocate(4, 16, "float32")
        got.append(runner.forward(batch_of((ids, 0, [1, 0, 2]), block_size=16)).logits)
    # A rounding tie of an activation may fall the other way, so A8 is close in most rows rather than in all.
    difference = (got[0] - got[1]).abs().amax(-1)
    assert difference.max() < 1e-4 if activation_bits == 16 else difference.median() < 0.05 * got[1].std()


@pytest.mark.parametrize("kv_dtype, bound", (("float16", 0.02), ("int8", 0.3)))
def test_cache_formats_stay_close(kv_dtype, bound):
    _, config, weights = tiny("llama")
    ids, got = torch.randint(0, 199, (70,)).tolist(), []
    for dtype in ("float32", kv_dtype):
        runner = NativeRunner(config, weights, activation_bits=16)
        runner.allocate(6, 16, dtype)
        got.append(runner.forward(batch_of((ids, 0, [3, 1, 5, 2, 4]), block_size=16)).logits)
    assert 0 < (got[0] - got[1]).abs().max() < bound * got[0].std()


def test_a_cache_format_of_the_gpu_is_refused():
    from karui.inference.engine import Engine

    _, config, weights = tiny("llama")
    with pytest.raises(UnsupportedError, match="'fp8' is not supported by the native kernels; use float32, float16, int8"):
        Engine(NativeRunner(config, weights), kv_dtype="fp8")


def test_tree_rows_equal_a_dense_masked_reference():
    model, config, weights = tiny("qwen3")
    runner = NativeRunner(config, weights, threads=2, activation_bits=16)
    runner.allocate(20, 4, "float32")
    ids, parents = torch.randint(0, 199, (30,)).tolist(), [-1, 0, 0, 1, 2, 2]
    draft = torch.randint(0, 199, (6,)).tolist()
    mask = torch.eye(6, dtype=torch.bool)
    for i, p in enumerate(parents):
        if p >= 0:
            mask[i] |= mask[p]
    blocks = list(range(10))
    runner.forward(batch_of((ids, 0, blocks)))
    step = batch_of((draft, 30, blocks))
    step.positions = (29 + mask.sum(1)).to(torch.int32)
    step.tree_masks = [mask]
    got = runner.forward(step).logits
    for i in range(6):
        path = [draft[j] for j in range(6) if mask[i, j]]
        with torch.no_grad():
            want = model(torch.tensor([ids + path])).logits[0, -1]
        assert (got[i] - want).abs().max() < 1e-4


@pytest.mark.parametrize("dora", (False, True))
@pytest.mark.parametrize("kind, changes", (("llama", dict(attention_bias=True, mlp_bias=True)), ("qwen2", {})))
def test_adapters_per_sequence(kind, changes, dora):
    _, config, weights = tiny(kind, **changes)
    torch.manual_seed(5)
    shapes = {n.removesuffix(".weight"): w.shape for n, w in weights.items() if w.dim() == 2 and "layers" in n}
    adapters = [{n: LoraWeights(torch.randn(r, s[1]) * 0.1, torch.randn(s[0], r) * 0.1, 0.7, torch.rand(s[0]) + 0.5 if dora else None)
                 for n, s in shapes.items() if keep in n} for r, keep in ((3, "proj"), (5, "q_proj"), (2, "down"))]
    ids, got = torch.randint(0, 199, (3, 20)).tolist(), []
    for runner in (NativeRunner(config, weights, threads=2, activation_bits=16), TorchRunner(config, weights)):
        runner.allocate(8, 16, "float32")
        for slot, layers in enumerate(adapters):
            runner.set_adapter(slot, layers)
        step = batch_of((ids[0], 0, [0, 1]), (ids[1], 0, [2, 3]), (ids[2], 0, [4, 5]), block_size=16)
        base = runner.forward(step).logits
        mixed = runner.forward(replace(step, adapters=torch.tensor([1, -1, 2], dtype=torch.int32))).logits
        first = runner.forward(replace(step, adapters=torch.tensor([0, 0, -1], dtype=torch.int32))).logits
        assert torch.equal(base[20:40], mixed[20:40]) and torch.equal(base[40:], first[40:])
        got.append((mixed, first))
    assert (got[0][0] - got[1][0]).abs().max() < 2e-4
    assert (got[0][1] - got[1][1]).abs().max() < 2e-4
    assert (got[0][0][:20] - base[:20]).abs().max() > 1e-2


def test_adapters_can_be_removed_and_unknown_modules_are_refused():
    _, config, weights = tiny("llama")
    runner = NativeRunner(config, weights)
    runner.allocate(4, 16, "float32")
    runner.set_adapter(1, {"model.layers.0.mlp.up_proj": LoraWeights(torch.ones(1, 48), torch.ones(80, 1), 1.0)})
    step = batch_of(([1, 2], 0, [0]), block_size=16)
    with pytest.raises(KaruiError, match="slot 0 is empty"):
        runner.forward(replace(step, adapters=torch.tensor([0], dtype=torch.int32)))
    runner.set_adapter(1, None)
    with pytest.raises(KaruiError, match="slot 1 is empty"):
        runner.forward(replace(step, adapters=torch.tensor([1], dtype=torch.int32)))
    with pytest.raises(KaruiError, match="lm_head"):
        runner.set_adapter(0, {"lm_head": LoraWeights(torch.ones(1, 48), torch.ones(199, 1), 1.0)})


def test_hidden_and_residual_streams():
    _, config, weights = tiny("llama")
    ids, got = torch.randint(0, 199, (20,)).tolist(), []
    for runner in (NativeRunner(config, weights, threads=2, activation_bits=16), TorchRunner(config, weights)):
        runner.allocate(4, 16, "float32")
        step = replace(batch_of((ids, 0, [2, 1]), block_size=16), want_hidden=True, aux_layers=(0, 2))
        got.append(runner.forward(step))
    for name in ("logits", "hidden", "aux"):
        a, b = getattr(got[0], name), getattr(got[1], name)
        assert a.shape == b.shape and (a - b).abs().max() < 1e-4, name


def test_weights_are_replaced_and_the_cache_stays():
    (_, config, old), (_, _, new) = tiny("llama", seed=0), tiny("llama", seed=1)
    runner, other = NativeRunner(config, old), NativeRunner(config, new)
    for r in (runner, other):
        r.allocate(4, 16, "float32")
    step = batch_of(([1, 2, 3], 0, [0]), block_size=16)
    before = runner.forward(step).logits
    runner.load_weights(new)
    after = runner.forward(step).logits
    assert torch.equal(after, other.forward(step).logits) and not torch.equal(before, after)
    broken = {**old, "model.norm.weight": torch.full((48,), float("nan"))}
    with pytest.raises(CorruptError, match=r"model\.norm\.weight"):
        runner.load_weights(broken)
    assert torch.equal(runner.forward(step).logits, other.forward(step).logits)


def test_bad_requests_are_told():
    _, config, weights = tiny("llama")
    runner = NativeRunner(config, weights)
    step = batch_of(([1, 2, 3], 0, [0]), block_size=16)
    with pytest.raises(KaruiError, match="allocate"):
        runner.forward(step)
    with pytest.raises(UnsupportedError, match="int3"):
        runner.allocate(4, 16, "int3")
    runner.allocate(2, 16, "float32")
    with pytest.raises(KaruiError, match="vocabulary of 199"):
        runner.forward(batch_of(([1, 199], 0, [0]), block_size=16))
    with pytest.raises(KaruiError, match="32 allocated"):
        runner.forward(batch_of(([1], 0, [2]), block_size=16))
    with pytest.raises(KaruiError, match="threads"):
        NativeRunner(config, weights, threads=0)
