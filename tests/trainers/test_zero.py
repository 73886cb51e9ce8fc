"""End to end with two CPU processes (gloo): DeepSpeed ZeRO 1, 2 and 3 train as one process does, and leave files any launch goes on from."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from karui.configs.errors import KaruiError, UnsupportedError
from karui.trainers import zero
from karui.trainers.run import run_recipe
from tests.trainers.launching import OPTIM, PREPARE, ROOT, forget_after, job, launch, losses, weights

needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
STAGES = (1, 2, 3)
LAUNCHED = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}


def agree(one, other, where):
    assert losses(one) == pytest.approx(losses(other), abs=2e-6), where
    torch.testing.assert_close(weights(one), weights(other), rtol=0, atol=2e-5, msg=lambda m: f"{where}: {m}")


@needs_deepspeed
def test_every_stage_trains_as_one_process_does_and_goes_on_from_one_rank_to_two_and_back(make_recipe, tmp_path):
    kinds = ("full", "qlora", "qat")

    def recipe(kind, where, sharding="auto"):
        run = {"output": str(tmp_path / where), "checkpoint_every": 2, "keep": 4, "sharding": sharding}
        return make_recipe(prepare=PREPARE[kind], optim=OPTIM, run=run)

    alone = {kind: run_recipe(recipe(kind, f"{kind}-alone")).folder for kind in kinds}
    ways = [(kind, stage) for kind in kinds for stage in STAGES]
    split = {(kind, stage): recipe(kind, f"{kind}-{stage}", f"zero{stage}") for kind, stage in ways}
    resumed = {(kind, stage): recipe(kind, f"{kind}-from-one-{stage}", f"zero{stage}") for kind, stage in ways}
    for (kind, _), there in resumed.items():
        shutil.copytree(alone[kind], there.output)
        forget_after(there.output, 2)
    done = launch(tmp_path, [*(job(r) for r in split.values()), *(job(r, resume=True) for r in resumed.values())])
    assert done.returncode == 0, done.stderr[-3000:]
    for (kind, stage), there in split.items():
        agree(there.output, alone[kind], f"{kind} under ZeRO {stage}")
        for name in ("checkpoint-000002", "checkpoint-000004"):
            found, wanted = (load_file(str(f / name / "optimizer.safetensors")) for f in (there.output, alone[kind]))
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
        agree(resumed[kind, stage].output, alone[kind], f"{kind}, from one rank to two, ZeRO {stage}")
        there = recipe(kind, f"{kind}-{stage}")
        forget_after(there.output, 2)
        run_recipe(there, resume=True)
        agree(there.output, alone[kind], f"{kind}, from two ranks to one, ZeRO {stage}")


@needs_deepspeed
def test_the_shipped_configuration_is_taken_up_and_a_step_that_is_not_finite_left_out(make_recipe, tmp_path):
    """`accelerate launch --config_file zero3.yaml`, and a loss of infinity in its second step."""
    recipe, path = make_recipe(optim={**OPTIM, "steps": 3}), tmp_path / "recipe.json"
    path.write_text(json.dumps(recipe.dump()))
    (tmp_path / "launch.py").write_text(
        "import sys\nfrom karui.trainers import loop, run\naccumulate = loop.accumulate\nnumber = [0]\n"
        "def spoiled(*given, **more):\n    from dataclasses import replace\n    number[0] += 1\n    found = accumulate(*given, **more)\n"
        "    return replace(found, loss=float('inf')) if number[0] == 2 else found\n"
        "loop.accumulate = spoiled\nsys.exit(run.main(sys.argv[1:]))\n")
    config = ROOT / "karui" / "configs" / "accelerate" / "zero3.yaml"
    done = subprocess.run([sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config), "--num_processes", "2",
                           "--mixed_precision", "no", str(tmp_path / "launch.py"), str(path)], cwd=ROOT, capture_output=True,
                          text=True, timeout=900, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in (recipe.output / "log.jsonl").read_text().splitlines()]
    steps = [r for r in rows if "loss" in r]
    assert [r["skipped"] for r in steps] == [False, True, False]
    alone = run_recipe(make_recipe(optim={**OPTIM, "steps": 3}, run={"output": str(tmp_path / "alone")})).folder
    assert steps[0]["loss"] == pytest.approx(losses(alone)[0], abs=2e-6)
    assert steps[2]["loss"] != pytest.approx(losses(alone)[2], abs=1e-4)  # one update fewer


def test_the_stage_is_what_recipe_and_launch_say_together(make_recipe, tmp_path):
    assert zero.stage_of(make_recipe(), {}) == 0
    assert zero.stage_of(make_recipe(run={"sharding": "zero2"}), {}) == 2
    assert zero.stage_of(make_recipe(), LAUNCHED) == 3
    with pytest.raises(KaruiError, match="run.sharding is fsdp2, but the run was launched with DeepSpeed ZeRO 3"):
        zero.stage_of(make_recipe(run={"sharding": "fsdp2"}), LAUNCHED)
    with pytest.raises(KaruiError, match="zero2, but .* ZeRO 3"):
        zero.stage_of(make_recipe(run={"sharding": "zero2"}), LAUNCHED)
    with pytest.raises(UnsupportedError, match="stage 0"):
        zero.stage_of(make_recipe(), LAUNCHED | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "0"})
    with pytest.raises(UnsupportedError, match="NVMe"):
        zero.stage_of(make_recipe(), LAUNCHED | {"ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "nvme"})


def test_it_needs_to_be_launched(make_recipe, monkeypatch):
    monkeypatch.setattr(zero, "find_spec", lambda name: name)  # as if it were installed
    with pytest.raises(KaruiError, match="needs to be launched"):
        run_recipe(make_recipe(run={"sharding": "zero1"}))


def test_the_engine_gets_the_launchers_file_and_the_recipes_clipping(make_recipe, tmp_path, caplog):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2, "reduce_bucket_size": 1000, "allgather_bucket_size": "auto"},
                                "train_batch_size": 8}))
    environment = LAUNCHED | {"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path)}
    assert zero.stage_of(make_recipe(), environment) == 2
    found = zero.configuration(make_recipe(optim={"clip": 0.5}), 2, environment)
    assert found["zero_optimization"] == {"overlap_comm": False, "reduce_bucket_size": 1000, "stage": 2}
    assert found["gradient_clipping"] == 0.5 and "train_batch_size" in caplog.text
    offloaded = zero.configuration(make_recipe(), 3, LAUNCHED | {"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"})
    assert offloaded["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}
    path.write_text("{")
    with pytest.raises(KaruiError, match="cannot be read"):
        zero.stage_of(make_recipe(), environment)


@needs_deepspeed
@pytest.mark.parametrize("sections, reason", [
    ({"optim": {"name": "adafactor"}}, "adafactor needs whole matrices"),
    ({"prepare": [{"method": "fp8-current"}]}, "scales of low-precision linears"),
    ({"prepare": [{"method": "sparsegpt", "sparsity": 0.5, "samples": 4}]}, "sparsegpt changes weights after a step"),
    ({"run": {"precision": "fp16"}}, "use bf16"),
    ({"model": {"dtype": "bfloat16"}, "prepare": []}, "not in float32"),
])
def test_what_the_engine_cannot_serve_is_refused_before_training(make_recipe, sections, reason):
    from karui.trainers.objectives import make_objective
    from karui.trainers.run import prepare

    recipe = make_recipe(**sections)
    setup = prepare(recipe)
    with pytest.raises(UnsupportedError, match=reason):
        zero.check(recipe, make_objective(setup), setup.stages)


def test_without_deepspeed_the_error_says_what_to_install(make_recipe, monkeypatch):
    monkeypatch.setattr(zero, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"pip install 'karui\[deepspeed\]'"):
        zero.check(make_recipe(), torch.nn.Linear(1, 1), [])
