"""Behavioural: layers that are read from a file give the bits that they give from memory; what fails says why."""

from __future__ import annotations

import contextlib
import os

import pytest
import torch

from karui.configs.errors import CorruptError, KaruiError
from karui.configs.quantspec import QuantSpec
from karui.inference.engine import Engine
from karui.inference.models.native import NativeRunner
from karui.inference.models.streaming import streamed_layers
from karui.inference.requests import SamplingParams
from karui.kernels.native import available
from karui.kernels.quantize import quantize
from tests.inference.conftest import tiny
from tests.kernels_native.test_exact import run

pytestmark = pytest.mark.skipif(not available(), reason="no C++ compiler")
LAYERS = 8  # three buffers take as much as three layers: fewer than four are never left out


def weights_of(spec="w4g16", kind="qwen2", **changes):
    _, config, weights = tiny(kind, max_position_embeddings=512, num_hidden_layers=LAYERS, hidden_size=64,
                              intermediate_size=128, num_attention_heads=4, num_key_value_heads=4, head_dim=16, **changes)
    return config, {name: quantize(w, QuantSpec.parse(spec)) if w.dim() == 2 else w for name, w in weights.items()}


def make(config, weights, away, threads=2, **options):
    """A runner with `away` of its layers in the file: the largest budget that leaves so many out."""
    whole = NativeRunner(config, weights, threads=threads, weight_memory=10**9)
    layers = whole._held[0]
    size = -(-(sum(p.nbytes for p in layers[0]) + 64 * 40) // 4096) * 4096
    fixed = whole.weight_bytes() - sum(p.nbytes for layer in layers for p in layer)
    for slack in range(0, size, 512):
        with contextlib.suppress(KaruiError):
            runner = NativeRunner(config, weights, threads=threads, weight_memory=fixed + (LAYERS - away + 3) * size - slack, **options)
            if sum(layer.spilled_bytes > 0 for layer in runner._held[3]) == away:
                runner.allocate(80, 16, "int8")
                return runner
    raise AssertionError(f"no budget leaves {away} layers out")


@pytest.mark.parametrize("spec", ["w4g16a", "w8", "nf4"])
@pytest.mark.parametrize("away", [4, 7, LAYERS])
def test_the_same_bits(spec, away):
    config, weights = weights_of(spec)
    ids = torch.randint(0, 199, (70,)).tolist()
    plain = NativeRunner(config, weights, threads=2)
    plain.allocate(80, 16, "int8")
    spilled = make(config, weights, away)
    assert spilled.spilled_bytes and spilled.weight_bytes() == plain.weight_bytes()
    whole = run(plain, ids, [], list(range(5)))
    for cuts in ([], [1, 2, 40, *range(50, 70)]):
        assert torch.equal(run(spilled, ids, cuts, list(range(5, 10))), whole)


def test_decoding_ahead_adapters_and_new_weights():
    config, weights = weights_of()
    engines = [Engine(runner, memory="4MB", max_context=200, speculation=None)
               for runner in (NativeRunner(config, weights, threads=2), make(config, weights, 5))]
    prompts, params = [[5, 6, 7], list(range(60))], SamplingParams(max_tokens=20)
    for again in range(2):
        plain, spilled = ([o.token_ids for o in engine.generate(prompts, params)] for engine in engines)
        assert plain == spilled and all(plain)
        if not again:
            other = {name: quantize(torch.randn(w.shape) * 0.05, w.spec) if hasattr(w, "spec") else w for name, w in weights.items()}
            for engine in engines:
                engine.update_weights(other)
    assert engines[1].runner.spilled_bytes


def test_a_file_that_vanishes_is_told(tmp_path):
    config, weights = weights_of()
    runner = make(config, weights, LAYERS, offload_to=tmp_path)
    assert not list(tmp_path.iterdir())  # the file has no name
    os.truncate(runner._held[4]._handle, 0)
    with pytest.raises(KaruiError, match="could not be read"):
        for _ in range(2):  # what was read ahead serves for a while
            run(runner, [1, 2, 3], [], [0])


def test_what_cannot_be_is_refused(tmp_path, monkeypatch):
    config, weights = weights_of()
    with pytest.raises(KaruiError, match=r"weight_memory of 1,000 bytes is too little: .* another [\d,]+"):
        NativeRunner(config, weights, weight_memory=1000)
    with pytest.raises(KaruiError, match="cannot be put into .*No such file"):
        NativeRunner(config, weights, weight_memory=10**6, offload_to=tmp_path / "nowhere")
    monkeypatch.setattr("karui.kernels.native.spill.os.pwrite", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(KaruiError, match=r"no room for a layer of [\d,]+ bytes.*No space left"):
        NativeRunner(config, weights, weight_memory=10**6, offload_to=tmp_path)


def test_a_failed_load_changes_nothing():
    config, weights = weights_of()
    runner = make(config, weights, 4)
    before = run(runner, [1, 2, 3, 4], [], [0])
    damaged = dict(weights)
    damaged["model.layers.7.mlp.down_proj.weight"] = torch.full((64, 1), float("nan"))
    with pytest.raises(CorruptError, match="down_proj"):
        runner.load_weights(damaged)
    assert torch.equal(run(runner, [1, 2, 3, 4], [], [0]), before)


def test_the_fewest_layers_are_left_out_and_evenly():
    assert streamed_layers([10] * 6, 5, 65, 3) == [False] * 6
    assert streamed_layers([10] * 6, 5, 64, 3) == [False, True, True, False, True, True]
    assert streamed_layers([10] * 6, 5, 35, 3) == [True] * 6
    with pytest.raises(KaruiError, match="too little"):
        streamed_layers([10] * 6, 5, 34, 3)
