"""Sweeps: parsing, the plan, the ranking of real runs on a tiny model, and going on where one was left."""

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from karui.configs.errors import KaruiError
from karui.trainers import sweep
from tests.processes import Forked


@pytest.mark.parametrize(
    ("items", "wanted"),
    [
        (["optim.lr=1e-4,3e-4"], {"optim.lr": [1e-4, 3e-4]}),
        (["prepare.0.rank=8,16", "run.seed=0"], {"prepare.0.rank": [8, 16], "run.seed": [0]}),
        (["prepare.0.targets=all-linear,[q_proj, v_proj]"], {"prepare.0.targets": ["all-linear", ["q_proj", "v_proj"]]}),
    ],
)
def test_values_are_read(items, wanted):
    assert sweep.parse_over(items) == wanted


@pytest.mark.parametrize("items", [[], ["optim.lr"], ["=3"], ["optim.lr="], ["optim.lr=[1"], ["run.seed=1", "run.seed=2"]])
def test_what_is_no_list_of_values_is_refused(items):
    with pytest.raises(KaruiError, match="--over"):
        sweep.parse_over(items)


@given(st.lists(st.floats(1e-8, 1e3) | st.integers(-5, 5) | st.sampled_from(["a", "w4g32", "all-linear"]), min_size=1, max_size=4))
def test_what_is_spelled_for_yaml_comes_back(values):
    assert sweep.parse_over(["key=" + ",".join(sweep._yaml(v) for v in values)]) == {"key": values}


def trial(loss):
    return sweep.Trial(values={}, folder="", loss=loss, metrics={})


def test_the_best_comes_first_and_failures_last():
    assert [t.loss for t in sweep.rank([trial(None), trial(2.0), trial(float("nan")), trial(1.0)])][:2] == [1.0, 2.0]


@pytest.fixture
def recipe_file(make_recipe, tmp_path, monkeypatch):
    script = tmp_path / "run.py"
    script.write_text("import runpy, sys\nrunpy.run_module('karui.trainers.run', run_name='__main__')\n")

    def run(command, stderr, text, check):
        assert command[1:3] == ["-m", "karui.trainers.run"]
        process = Forked(script, *command[3:])
        process.wait(timeout=300)
        return process

    monkeypatch.setattr(sweep.subprocess, "run", run)
    recipe = make_recipe(optim={"lr": 1e-3, "batch": 4, "steps": 3})
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(json.loads(json.dumps(recipe.dump()))))
    return path


def test_every_combination_is_a_recipe_with_its_own_folder(recipe_file):
    plan = sweep.plan(recipe_file, {"optim.lr": [1e-4, 3e-4], "prepare.0.rank": [2, 4]}, ["run.seed=9"])
    assert [(r.optim.lr, r.prepare[0].rank, r.run.seed) for _, r in plan] == [(1e-4, 2, 9), (1e-4, 4, 9), (3e-4, 2, 9), (3e-4, 4, 9)]
    assert len({r.output for _, r in plan}) == 4 and len({r.output.parent for _, r in plan}) == 1
    with pytest.raises(KaruiError, match=r"prepare\.0\.rnak"):
        sweep.plan(recipe_file, {"prepare.0.rnak": [2]})


def test_runs_are_ranked_and_not_repeated(recipe_file):
    said = []
    over = {"optim.lr": [1e-6, 1e-2]}
    ranked = sweep.sweep(recipe_file, over, notify=said.append)
    assert [t.values["optim.lr"] for t in ranked] == [1e-2, 1e-6] and ranked[0].loss < ranked[1].loss - 0.05
    root = sweep.plan(recipe_file, over)[0][1].output.parent
    stored = json.loads((root / "sweep.json").read_text())
    assert [row["loss"] for row in stored] == [t.loss for t in ranked]
    assert (root / "sweep.png").read_bytes().startswith(b"\x89PNG")
    logs = {p: p.stat().st_mtime_ns for p in root.rglob("log.jsonl")}
    assert len(logs) == 2
    stored = next(root.glob("*/recipe.json"))
    older = json.loads(stored.read_text())
    del older["run"]["sharding"]
    stored.write_text(json.dumps(older))  # as a version without that key wrote it
    again = sweep.sweep(recipe_file, over, notify=said.append)
    assert [t.loss for t in again] == [t.loss for t in ranked]
    assert {p: p.stat().st_mtime_ns for p in root.rglob("log.jsonl")} == logs


def test_a_failing_combination_is_told_and_does_not_end_the_rest(recipe_file):
    ranked = sweep.sweep(recipe_file, {"prepare.0.rank": [4096, 4]}, notify=lambda _: None)
    assert [t.values["prepare.0.rank"] for t in ranked] == [4, 4096]
    assert ranked[1].loss is None and "rank 4096" in ranked[1].error
    with pytest.raises(KaruiError, match="all 1 runs of the sweep failed.*rank 4096"):
        sweep.sweep(recipe_file, {"prepare.0.rank": [4096]}, notify=lambda _: None)
