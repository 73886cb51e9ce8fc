"""Behavioural: `karui plan` of a recipe for GPUs that are not there."""

import json

import pytest
import yaml
from typer.testing import CliRunner

from karui.cli import app
from karui.configs.errors import KaruiError
from karui.lowprec.plan import GPUS
from karui.trainers import estimate
from karui.trainers.estimate import skeleton
from karui.trainers.precision_plan import lines, plan_recipe, rows


def test_a_plan_for_every_gpu(make_recipe):
    recipe = make_recipe(prepare=[{"method": "nvfp4", "policy": {"first_blocks": 1, "last_blocks": 0}}])
    for name, gpu in GPUS.items():
        plan = plan_recipe(recipe, name)
        assert len(plan.layers) == 15 and plan.fits  # 2 blocks of 7, and the head
        assert {x.formats for x in plan.layers if ".1." in x.name} == {"nvfp4"} and {x.formats for x in plan.layers if ".0." in x.name} == {"high"}
        assert ("emulated" in str(rows(plan))) == (not gpu.fp4)
        assert gpu.source in lines(plan)[-1]


def test_a_frozen_base_takes_no_weight_gradient_and_saves_nothing(make_recipe):
    full = plan_recipe(make_recipe(prepare=[{"method": "fp8-current"}]), "H100", tokens=1000)
    lora = plan_recipe(make_recipe(prepare=[{"method": "lora", "rank": 4}, {"method": "fp8-current"}]), "H100", tokens=1000)
    # a byte per value of each input: of q, k, v together, of o, of gate and up together, of down; tokens and blocks
    assert full.saved_bytes == pytest.approx(2 * 1000 * (64 + 64 + 64 + 128), abs=10) and lora.saved_bytes == 0
    assert lora.memory.gradients < full.memory.gradients / 5
    assert full.peak_bytes < full.memory.peak


def test_one_byte_optimizer_states_are_counted(make_recipe):
    bytes_of = {n: plan_recipe(make_recipe(prepare=[{"method": "mxfp8"}], optim={"name": n}), "B200").memory.optimizer
                for n in ("adamw", "adamw8bit", "paged-adamw8bit")}  # fmt: skip
    assert bytes_of["adamw8bit"] == pytest.approx(bytes_of["adamw"] / 4, rel=0.02) and bytes_of["paged-adamw8bit"] == 0


def test_what_cannot_be_planned(make_recipe):
    with pytest.raises(KaruiError, match="no low-precision step to plan.*--method"):
        plan_recipe(make_recipe(), "H100")
    with pytest.raises(KaruiError, match="GPU 'V100' is not in the table"):
        plan_recipe(make_recipe(), "V100", method="mxfp8")
    with pytest.raises(KaruiError, match="'fp8' is not known"):
        plan_recipe(make_recipe(), "H100", method="fp8")


def test_the_verb(make_recipe, tmp_path, monkeypatch):
    path, out = tmp_path / "r.yaml", tmp_path / "plan.json"
    path.write_text(yaml.safe_dump(json.loads(json.dumps(make_recipe(prepare=[{"method": "fp8-current"}]).dump()))))
    made = []
    monkeypatch.setattr(estimate, "skeleton", lambda config: made.append(config) or skeleton(config))
    done = CliRunner().invoke(app, ["plan", str(path), "--gpu", "h100", "--json", str(out)])
    assert len(made) == 1  # both plans look at one model
    assert done.exit_code == 0 and "q_proj" in done.output and "times as fast" in done.output
    assert json.loads(out.read_text())["gpu"]["name"] == "H100"
