"""Runs in several ranks; many runs in one launch, because starting processes takes longer than training."""

import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

from safetensors.torch import load_file

from karui.trainers.loop import read_log
from tests.processes import ROOT, ranks

OPTIM = {"lr": 5e-3, "batch": 6, "steps": 4, "micro_tokens": 64}
PREPARE = {
    "full": [],
    "lora": [{"method": "lora", "rank": 4, "alpha": 8}],
    "qlora": [{"method": "qlora", "rank": 4, "alpha": 8}],
    # at this learning rate codes tip by a last bit: from searched steps 25 of 4,096 weights of one matrix ended apart; at 1e-4 none
    "qat": [{"method": "lsq", "spec": "w4g32", "start": "paper"}],
}
SCRIPT = """
import json, sys
from karui.configs.recipe import Recipe
from karui.trainers.run import run_recipe
from karui.trainers.tracking import Tracker
Tracker.leave = lambda self: self.accelerator.free_memory()  # the next run uses the same process group
{before}
for job in json.load(open(sys.argv[1])):
    run_recipe(Recipe.build(job["recipe"]), resume=job["resume"] or None)
"""


def job(recipe, *, resume=False):
    return {"recipe": recipe.dump(), "resume": resume}


def launch(folder, jobs, *, processes=2, before="", env=None, torchrun=False, **limits) -> SimpleNamespace | subprocess.CompletedProcess:
    """The finished ranks; `before` is code that every rank runs first. Started by torchrun where its part is what is tested."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    (folder / "launch.py").write_text(SCRIPT.format(before=before))
    given = [str(folder / "launch.py"), str(folder / "jobs.json")]
    if not torchrun:
        return ranks(*given, processes=processes, env=env, **limits)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes), *given]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}, capture_output=True,
                          text=True, timeout=900, check=False)


def losses(folder):
    return [r["loss"] for r in read_log(folder) if "loss" in r]


def weights(folder):
    return load_file(str(next((folder / "final").glob("*model.safetensors"))))


def forget_after(folder, step):
    """What a kill right after `step` would have left."""
    for path in folder.glob("checkpoint-*"):
        if int(path.name.rpartition("-")[2]) > step:
            shutil.rmtree(path)
    shutil.rmtree(folder / "final")
