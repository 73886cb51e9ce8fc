"""Behavioural: the order of prepare steps, a stage's state through a resume, and weights trained on a grid up to their bundle."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from karui.configs.errors import CorruptError, KaruiError
from karui.configs.manifest import Manifest
from karui.configs.quantspec import QuantSpec
from karui.inference.bundle.decode import read_stored, values
from karui.kernels.qtensor import QTensor, flatten, unflatten
from karui.kernels.quantize import quantize
from karui.trainers import stages
from karui.trainers.converted import QUANTIZED, load_converted
from karui.trainers.pipeline import export_run
from karui.trainers.run import run_recipe


def test_steps_in_a_senseless_order_are_refused_before_anything_is_loaded(make_recipe):
    recipe = make_recipe(prepare=[{"method": "fp8-current"}, {"method": "lora", "rank": 4}])
    with pytest.raises(KaruiError, match="fp8-current.*wrong way round; write it as lora, fp8-current"):
        run_recipe(recipe)


@pytest.mark.parametrize("spec", ["w4g32", "w4g32a", "nf4dq", "nvfp4", "none"])
def test_flatten_is_undone_by_unflatten(spec):
    w = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    value = w if spec == "none" else quantize(w, QuantSpec.parse(spec))
    back = unflatten(*flatten({"a.weight": value, "b": w}))
    assert torch.equal(back["b"], w)
    if isinstance(value, QTensor):
        assert torch.equal(back["a.weight"].dequantize(), value.dequantize())
        assert torch.equal(back["a.weight"].scale.float(), value.scale.float()) and back["a.weight"].spec == value.spec
    else:
        assert torch.equal(back["a.weight"], w)


def stored_tensors(bundle):
    manifest = Manifest.read(bundle)
    return [(name, manifest.tensors[name], parts) for name, parts in read_stored(bundle, manifest)]


class GridStage(stages.Stage):
    """Rounds the weights of the linears to a grid at the end, and counts steps in a checkpointed tensor."""

    order = 20
    is_on_grid = True
    seen = None

    def prepare(self, model):
        self.count = torch.zeros(1)
        GridStage.seen = self
        return model

    def before_step(self, step, total):
        self.count += 1

    def state(self):
        return {"count": self.count}

    def load(self, state):
        self.count = state["count"].clone()

    def convert(self, model):
        spec = QuantSpec.parse("w4g32")
        # scales that rounding again would not find: what is exported must be these codes
        return {
            name: quantize(p.detach() * 1.5, spec, name=name)
            for name, p in model.state_dict().items()
            if ".layers." in name and p.ndim == 2
        }


@pytest.fixture
def grid_stage(monkeypatch):
    monkeypatch.setattr(stages, "stage_class", lambda step: GridStage)


def test_codes_of_a_stage_reach_the_bundle_as_they_are(make_recipe, grid_stage, tmp_path):
    recipe = make_recipe(prepare=[{"method": "lora"}], optim={"lr": 1e-3, "batch": 4, "steps": 3})
    result = run_recipe(recipe)
    codes = load_converted(result.final)
    assert codes and set(load_file(str(result.final / "model.safetensors"))) >= set(codes)
    report = export_run(result.folder, spec="w4g32", output=tmp_path / "bundle")
    assert report.manifest.parity["max_abs_dlogprob"] < 2e-3
    for name, record, parts in stored_tensors(tmp_path / "bundle"):
        if name in codes:
            assert np.array_equal(values(parts, record), codes.pop(name).dequantize().numpy()), name
    assert not codes


def test_state_of_a_stage_survives_a_resume(make_recipe, grid_stage):
    optim = {"lr": 1e-3, "batch": 4, "steps": 4}
    first = run_recipe(make_recipe(prepare=[{"method": "lora"}], optim=optim, run={"checkpoint_every": 2}))
    assert float(GridStage.seen.count) == 4
    again = run_recipe(make_recipe(prepare=[{"method": "lora"}], optim=optim, run={"checkpoint_every": 2}),
                       resume=first.folder / "checkpoint-000002")
    assert float(GridStage.seen.count) == 4
    assert (again.final / QUANTIZED).is_file()


def test_a_damaged_file_of_codes_is_named(tmp_path):
    (tmp_path / QUANTIZED).write_bytes(b"not safetensors")
    with pytest.raises(CorruptError, match="quantized.safetensors cannot be read"):
        load_converted(tmp_path)
