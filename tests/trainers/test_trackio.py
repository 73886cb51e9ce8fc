"""End to end: a run tracked by trackio, read back from the database it writes, without a network."""

import importlib.util
import json
import os
import sqlite3
import subprocess
import sys

import pytest

from tests.trainers.launching import ROOT, losses


@pytest.mark.skipif(importlib.util.find_spec("trackio") is None, reason="trackio is not installed")
def test_trackios_database_holds_every_step_the_recipe_preflight_and_answers(make_recipe, tmp_path):
    recipe, path = make_recipe(track={"to": "trackio", "project": "light"}, optim={"steps": 3}, export=[{"spec": "w8"}],
                               eval={"questions": ["what is 2 plus 2"], "speed": False}), tmp_path / "recipe.json"  # fmt: skip
    path.write_text(json.dumps(recipe.dump()))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-m", "karui.trainers.run", str(path)], cwd=ROOT, env=env, capture_output=True, text=True,
                          timeout=600, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (database,) = (tmp_path / "trackio").glob("light*.db")
    with sqlite3.connect(database) as opened:
        rows = [json.loads(text) for (text,) in opened.execute("select metrics from metrics order by step, id")]
        (config,) = (json.loads(stored) for (stored,) in opened.execute("select config from configs"))
    assert [r["train/loss"] for r in rows if "train/loss" in r] == pytest.approx(losses(recipe.output), rel=1e-6)
    assert any("eval/loss" in r for r in rows) and {"train/grad_norm", "train/tokens_per_s", "train/memory_bytes"} <= rows[1].keys()
    (answers,) = (r["answers"]["_value"] for r in rows if "answers" in r)
    assert answers[0]["question"] == "what is 2 plus 2" and answers[0]["answer"]
    assert config["optim.batch"] == recipe.optim.batch and config["preflight.steps"] == 3
