"""Reference: every model family that the native runner takes against transformers; the others are refused with what is missing."""

from __future__ import annotations

import pytest
import torch

from karui.configs.errors import UnsupportedError
from karui.configs.quantspec import QuantSpec
from karui.inference.models.decoder import LoraWeights, TorchRunner
from karui.inference.models.native import NativeRunner
from karui.inference.models.weights import canonical, expected_shapes
from karui.kernels.native import available, isas
from karui.kernels.quantize import quantize
from tests.inference import test_decoder, test_newer_families
from tests.inference.conftest import tiny
from tests.inference.test_decoder import batch_of

pytestmark = pytest.mark.skipif(not available(), reason="no C++ compiler")
LLAMAS = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe")  # in test_end_to_end.py
CASES = {name: case for name, case in (test_decoder.CASES | test_newer_families.CASES).items() if case[0] not in LLAMAS}
LACKING = {"granitemoeshared": "shared feed-forward layer", "granitemoeshared-none": ""}
RUN = [name for name in CASES if not LACKING.get(name)]
CODED = ["gemma3", "phi3-partial", "bitnet", "olmo2", "glm4", "granite", "ernie4_5-biased", "smollm3-window", "exaone4", "cohere-biased", "hunyuan"]


def made(name):
    return test_newer_families.made(name) if name in test_newer_families.CASES else tiny(CASES[name][0], **CASES[name][1])


def logits(runner, ids, adapter=-1):
    runner.allocate(40, 16, "float32")
    step = batch_of((ids, 0, [3, 1, 5, 2, 4, 6, 7]), block_size=16)
    step.adapters = torch.tensor([adapter], dtype=torch.int32)
    return runner.forward(step).logits


def assert_logits_equal(model, runner):
    """Of 100 tokens in chunks of several sizes, over blocks in any order, those of the transformers model."""
    runner.allocate(40, 4, "float32")
    ids, blocks = torch.randint(3, 199, (100,)).tolist(), torch.randperm(39)[:25].add(1).tolist()
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
    got = [runner.forward(batch_of((ids[a:b], a, blocks))).logits for a, b in ((0, 17), (17, 18), (18, 41), (41, 99), (99, 100))]
    assert (torch.cat(got) - want).abs().max() < 1e-4 * max(1, want.abs().max())


@pytest.mark.parametrize("name", RUN)
def test_logits_equal_transformers(name):
    model, config, weights = made(name)
    assert_logits_equal(model, NativeRunner(config, weights, threads=2, activation_bits=16))


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("name", ["gemma2", "glm4", "bitnet", "cohere2", "hunyuan"])
def test_every_instruction_set(name, isa):
    """Soft caps, GELU, squared ReLU, norms behind and behind the rotation, centred norms, partial rotation."""
    model, config, weights = made(name)
    ids = torch.randint(3, 199, (80,)).tolist()
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
    got = logits(NativeRunner(config, weights, threads=2, activation_bits=16, isa=isa), ids)
    assert (got - want).abs().max() < 1e-4 * max(1, want.abs().max())


@pytest.mark.parametrize("name", CODED)
def test_codes_and_adapters_of_every_linear(name):
    """Fused linears in their parts: each weight's codes and each adapter's rows go where they belong; against the torch runner."""
    _, config, weights = made(name)
    ids = torch.randint(0, 199, (30,)).tolist()
    linears = [n.removesuffix(".weight") for n, s in expected_shapes(config).items() if ".layers." in n and len(s) == 2]
    adapters = {}
    for linear in linears:
        out, into = canonical(weights)[f"{linear}.weight"].shape
        adapters[linear] = LoraWeights(torch.randn(3, into) * 0.1, torch.randn(out, 3) * 0.1, 1.5, torch.rand(out) + 0.5)
    for spec in ("w4g16", "w8", "w4g16a", "mxfp4", "nf4"):
        group = QuantSpec.parse(spec).group_size or 1
        coded = {n: quantize(w, QuantSpec.parse(spec)) if n.removesuffix(".weight") in linears and w.shape[1] % group == 0 else w
                 for n, w in canonical(weights).items()}
        runners = NativeRunner(config, coded, threads=2, activation_bits=16), TorchRunner(config, coded)
        for runner in runners:
            runner.set_adapter(0, adapters)
        for adapter in (-1, 0):
            got, want = (logits(runner, ids, adapter) for runner in runners)
            assert (got - want).abs().max() < 2e-4 * want.abs().max(), (spec, adapter)


@pytest.mark.parametrize("name", ["gemma3", "bitnet", "olmo3", "granite", "cohere2", "hunyuan"])
def test_bits_do_not_depend_on_batch_chunks_or_threads(name):
    _, config, weights = made(name)
    weights = {n: quantize(w, QuantSpec.parse("w8")) if w.ndim == 2 else w for n, w in weights.items()}
    ids = torch.randint(0, 199, (90,)).tolist()
    whole = logits(NativeRunner(config, weights, threads=1), ids)
    runner = NativeRunner(config, weights, threads=3)
    runner.allocate(40, 16, "float32")
    cuts = [0, 1, 2, 40, 41, 88, 89, 90]
    parts = [runner.forward(batch_of((ids[a:b], a, [9, 8, 7, 6, 5, 4]), block_size=16)).logits for a, b in zip(cuts, cuts[1:])]
    assert torch.equal(torch.cat(parts), whole)
    other = torch.randint(0, 199, (25,)).tolist()
    step = batch_of((other, 0, [20, 21]), (ids, 0, [30, 31, 32, 33, 34, 35]), block_size=16)
    assert torch.equal(runner.forward(step).logits[25:], whole)


@pytest.mark.parametrize("name", [name for name, what in LACKING.items() if what])
def test_what_is_missing_is_said(name):
    _, config, weights = made(name)
    with pytest.raises(UnsupportedError, match=f"the native kernels have no {LACKING[name]}"):
        NativeRunner(config, weights)
