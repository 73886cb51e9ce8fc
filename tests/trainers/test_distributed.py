"""End to end with two CPU processes (gloo): DDP and FSDP2 train as one process does, and leave files that any number goes on from."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from karui.trainers.loop import read_log
from karui.trainers.run import run_recipe

ROOT = Path(__file__).resolve().parents[2]
OPTIM = {"lr": 5e-3, "batch": 6, "steps": 4, "micro_tokens": 64}
PREPARE = {
    "full": [],
    "lora": [{"method": "lora", "rank": 4, "alpha": 8}],
    "qlora": [{"method": "qlora", "rank": 4, "alpha": 8}],
}


def launch(recipe, *arguments, processes=2, env=None):
    """The run in `processes` ranks, as torchrun starts them."""
    path = recipe.output.parent / "recipe.json"
    path.write_text(json.dumps(recipe.dump()))
    code = recipe.output.parent / "launch.py"
    code.write_text("import sys, json\nfrom karui.configs.recipe import Recipe\nfrom karui.trainers.run import run_recipe\n"
                    "run_recipe(Recipe.build(json.load(open(sys.argv[1]))), resume=len(sys.argv) > 2)\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes), str(code),
               str(path), *arguments]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}, capture_output=True,
                          text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[:3000]


def losses(folder):
    return [r["loss"] for r in read_log(folder) if "loss" in r]


def weights(folder):
    return load_file(str(next((folder / "final").glob("*model.safetensors"))))


def same(a, b, tolerance):
    assert set(a) == set(b)
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", ["full", "lora", "qlora"])
def test_fsdp2_trains_as_one_process_does_and_saves_whole_files(make_recipe, tmp_path, kind):
    def recipe(where, **run):
        return make_recipe(prepare=PREPARE[kind], optim=OPTIM, run={"output": str(tmp_path / where / "run"), **run})

    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    alone = run_recipe(recipe("one", checkpoint_every=2, keep=4)).folder
    launch(recipe("two", sharding="fsdp2", checkpoint_every=2, keep=4))
    split = tmp_path / "two" / "run"
    assert losses(split) == pytest.approx(losses(alone), abs=2e-6)
    same(weights(split), weights(alone), 2e-5)
    for name in ("checkpoint-000002", "checkpoint-000004"):
        same(load_file(str(split / name / "optimizer.safetensors")), load_file(str(alone / name / "optimizer.safetensors")), 1e-4)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_run_goes_on_with_another_number_of_ranks(make_recipe, tmp_path, kind):
    def recipe(where, **run):
        return make_recipe(prepare=PREPARE[kind], optim=OPTIM, run={"output": str(tmp_path / where / "run"), "keep": 4, **run})

    for where in ("whole", "two", "one"):
        (tmp_path / where).mkdir()
    reference = run_recipe(recipe("whole", checkpoint_every=2)).folder
    # from one to two
    alone = run_recipe(recipe("one", checkpoint_every=2)).folder
    forget_after(alone, 2)
    launch(recipe("one", checkpoint_every=2, sharding="fsdp2"), "resume")
    assert losses(alone) == pytest.approx(losses(reference), abs=2e-6)
    same(weights(alone), weights(reference), 2e-5)
    # from two to one
    launch(recipe("two", checkpoint_every=2, sharding="fsdp2"))
    split = tmp_path / "two" / "run"
    forget_after(split, 2)
    run_recipe(recipe("two", checkpoint_every=2), resume=True)
    assert losses(split) == pytest.approx(losses(reference), abs=2e-6)
    same(weights(split), weights(reference), 2e-5)


def forget_after(folder, step):
    """What a kill right after `step` would have left."""
    import shutil

    for path in folder.glob("checkpoint-*"):
        if int(path.name.rpartition("-")[2]) > step:
            shutil.rmtree(path)
    shutil.rmtree(folder / "final")


def test_an_accelerate_configuration_with_fsdp_is_taken_up(make_recipe, tmp_path):
    recipe = make_recipe(optim=OPTIM)
    launch(recipe, env={"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"})
    assert len(losses(recipe.output)) == 4


def test_fsdp_in_version_1_is_refused(make_recipe, monkeypatch):
    from karui.configs.errors import UnsupportedError

    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "1")
    with pytest.raises(UnsupportedError, match="fsdp_version: 2"):
        run_recipe(make_recipe())
