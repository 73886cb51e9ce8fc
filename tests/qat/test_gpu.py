"""Behavioural: every method calibrates on a GPU that is not there (`pretend`): what mixes devices fails, and the codes are a CPU's."""

from __future__ import annotations

import pytest
import torch

from karui.configs import KaruiError
from karui.kernels.qtensor import QTensor
from karui.qat.methods import METHODS
from karui.trainers.quantize import found_device
from tests.kernels.triton.pretend import PretendGpu, backward_too
from tests.qat.conftest import rows, run, tiny
from tests.qat.test_run import QUICK, names_for


class Gpu(PretendGpu):
    """Leaves `torch.device("cuda")` what it says."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {})) if func is torch.device else super().__torch_function__(func, types, args, kwargs)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
@pytest.mark.parametrize("method", METHODS)
def test_a_block_is_calibrated_on_the_device(method, monkeypatch):
    settings, module, seen = dict(QUICK.get(method, {})), METHODS[method].load(), []
    if "precision" in module.CONFIG.model_fields:
        settings["precision"] = "float32"
    real, node = module.quantize_block, torch.autograd.function.BackwardCFunction

    def watched(block, config):
        seen.extend(m.weight.is_cuda for m in block.linears.values())
        real(block, config)

    model, other = tiny(num_hidden_layers=1), tiny(num_hidden_layers=1)
    here = run(other, method, names_for(method), rows(8, 16), settings=settings)
    monkeypatch.setattr(module, "quantize_block", watched)
    monkeypatch.setattr(node, "apply", backward_too(node.apply))
    with Gpu():
        there = run(model, method, names_for(method), rows(8, 16), settings=settings, device="cuda")
        assert not any(p.is_cuda for p in model.parameters())  # home again
        assert not any(v.codes.is_cuda or v.scale.is_cuda for v in there.weights.values() if isinstance(v, QTensor))
    assert len(seen) == 7 and all(seen)
    for name, value in here.weights.items():
        if isinstance(value, QTensor):
            assert (value.codes != there.weights[name].codes).float().mean() < 0.05, name


def test_devices():
    assert found_device("cpu") == "cpu" and found_device("auto") == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(KaruiError, match="'gpu' is not known; use auto, cpu or cuda"):
        found_device("gpu")
    if not torch.cuda.is_available():
        with pytest.raises(KaruiError, match="device cuda:1: torch finds no GPU here"):
            found_device("cuda:1")
