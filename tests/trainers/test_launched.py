"""Behavioural: what accelerate's configuration says about FP8 becomes a low-precision step, or a clear error."""

import json
import os
import subprocess
import sys

import pytest
import yaml

from karui.configs.errors import UnsupportedError
from karui.trainers.launched import resolve_precision
from karui.trainers.loop import read_log
from karui.trainers.run import run_recipe

FP8 = {"ACCELERATE_MIXED_PRECISION": "fp8"}


@pytest.mark.parametrize("environment, expected", [
    (FP8, {"method": "fp8-current", "compat": None}),
    (FP8 | {"ACCELERATE_FP8_BACKEND": "AO"}, {"method": "fp8-current", "compat": "ao"}),
    (FP8 | {"ACCELERATE_FP8_BACKEND": "TE", "ACCELERATE_FP8_AMAX_HISTORY_LEN": "16", "ACCELERATE_FP8_MARGIN": "1"},
     {"method": "fp8-delayed", "history": 16, "margin": 1}),
])
def test_the_launchers_fp8_is_a_step(make_recipe, environment, expected):
    got = resolve_precision(make_recipe(), environment, cuda=False)
    assert got.run.precision == "no" and [s.method for s in got.prepare] == ["lora", expected["method"]]
    assert {k: getattr(got.prepare[1], k) for k in expected} == expected
    assert resolve_precision(make_recipe(), environment, cuda=True).run.precision == "bf16"


def test_the_recipes_own_step_and_words_count(make_recipe, caplog):
    own = make_recipe(prepare=[{"method": "mxfp8"}])
    assert resolve_precision(own, FP8, cuda=False) == own
    asked = resolve_precision(make_recipe(run={"precision": "fp8"}), {}, cuda=False)
    assert asked.prepare[-1].method == "fp8-current" and asked.run.precision == "no"
    assert resolve_precision(make_recipe(), {"ACCELERATE_MIXED_PRECISION": "bf16"}, cuda=False) == make_recipe()
    assert "run.precision, no, counts" in caplog.text


def test_what_cannot_be_served(make_recipe):
    with pytest.raises(UnsupportedError, match="backend 'MSAMP'"):
        resolve_precision(make_recipe(), FP8 | {"ACCELERATE_FP8_BACKEND": "MSAMP"}, cuda=True)


def test_a_run_under_the_launchers_environment(make_recipe, monkeypatch):
    """The backend of accelerate's fp8_config is the launcher's word to us; accelerate itself wraps nothing."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "AO")
    folder = run_recipe(make_recipe(prepare=[], optim={"steps": 3})).folder
    assert os.environ["ACCELERATE_FP8_BACKEND"] == "AO"
    for name in ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_FP8_BACKEND"):
        monkeypatch.delenv(name)
    own = [{"method": "fp8-current", "compat": "ao"}]
    same = run_recipe(make_recipe(prepare=own, optim={"steps": 3}, run={"output": f"{folder}-b"})).folder
    assert [r["loss"] for r in read_log(folder) if "loss" in r] == [r["loss"] for r in read_log(same) if "loss" in r]


def launch(folder, recipe, **config):
    """`accelerate launch --config_file` of a recipe on one CPU process."""
    path, yaml_file = folder / "r.yaml", folder / "a.yaml"
    path.write_text(json.dumps(recipe.dump()))
    yaml_file.write_text(yaml.safe_dump({"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", "use_cpu": True,
                                         "num_processes": 1, **config}))  # fmt: skip
    done = subprocess.run([sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(yaml_file), "-m",
                           "karui.trainers.run", str(path)], capture_output=True, text=True, timeout=240,
                          env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout + done.stderr


def test_accelerate_launch_with_our_recipes_fp8(make_recipe, tmp_path):
    """mixed_precision no, and FP8 from the recipe: needs no FP8 package."""
    said = launch(tmp_path, make_recipe(run={"precision": "fp8"}, optim={"steps": 2}), mixed_precision="no")
    assert "fp8-current" in said and "emulate" in said


@pytest.mark.peer
def test_accelerate_launch_with_fp8_from_yaml(make_recipe, tmp_path):
    """accelerate asks for torchao before it hands fp8 on; karui's linears train, with torchao's rounding."""
    pytest.importorskip("torchao")
    recipe = make_recipe(optim={"steps": 2})
    said = launch(tmp_path, recipe, mixed_precision="fp8", fp8_config={"backend": "AO"})
    assert "fp8-current" in said and "emulate" in said
