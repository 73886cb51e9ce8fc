"""Behavioural: benchmarks/lowprec.py on a tiny job: every optimizer it holds to a band, its table, its cache, runs side by side."""

import importlib
import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "lowprec.py"


@pytest.fixture
def script(monkeypatch):
    """Imported by its own name, by which the processes of its runs find it."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module(SCRIPT.stem)


def text(folder):
    paths = {}
    for name in ("train", "held"):
        paths[name] = folder / f"{name}.txt"
        paths[name].write_text(f"{name}: the sum of three and nine is twelve. " * 40)
    return paths


def test_every_optimizer_with_small_states_is_in_the_table(script):
    from karui.lowprec.optim import OPTIMIZERS

    named = {name.removeprefix("optimizer ") for name in script.runs(script.QUICK) if name.startswith("optimizer ")}
    # fp32 AdamW is what the others are held against; bitsandbytes pages on CUDA alone
    assert named | {"bnb-adamw8bit"} == set(script.BANDS) == set(OPTIMIZERS) - {"adamw", "bnb-paged-adamw8bit"}


def test_losses_and_states_are_held_to_their_bands(script, tmp_path):
    job = script.Job(steps=6, width=64, blocks=1, batch=2, length=16, windows=4, lr=1e-3)
    names = ["fp32", *(f"optimizer {n}" for n in ("adamw8bit", "paged-adamw8bit", "paged-adamw-fp8", "adafactor", "muon"))]
    done = dict(script.train_all(names, job, text(tmp_path), workers=1, threads=1))
    assert done["optimizer paged-adamw8bit"]["windows"] == done["optimizer adamw8bit"]["windows"]
    rows = {f.name: f for f in script.figures(done)}
    for name in names[1:]:
        loss, states = rows[name], rows[f"{name}, states"]
        assert loss.peer_name == "fp32, mean of 1" and 1 < loss.goal <= 1.05 and loss.met is (loss.ratio <= loss.goal)
        assert states.peer_name == "fp32 AdamW" and states.goal <= 0.6 and "all the way" in loss.note
        assert states.met or name == "optimizer muon"  # embedding and head, which AdamW keeps, are a third of this model
    # two fp32 moments and a step for every parameter of AdamW; one byte each where a tensor has 4,096 values
    assert done["fp32"]["state_bytes"] == pytest.approx(8 * done["fp32"]["parameters"], rel=0.01)
    assert 0.25 < rows["optimizer adamw8bit, states"].ratio < 0.28 and 0.4 < rows["optimizer muon, states"].ratio < 0.9


@pytest.mark.slow
def test_runs_side_by_side_are_those_one_by_one_and_are_kept(script, tmp_path, monkeypatch, capsys):
    paths = text(tmp_path)
    how = ["x", "--quick", "--steps", "3", "--train", str(paths["train"]), "--held", str(paths["held"]), "--only", "fp32", "mxfp8"]
    found = []
    for workers in ("1", "2"):
        out, cache = tmp_path / f"{workers}.json", tmp_path / f"cache-{workers}"
        monkeypatch.setattr(sys, "argv", [*how, "--workers", workers, "--cache", str(cache), "--json", str(out),
                                          "--plot", str(tmp_path / "plot.png")])  # fmt: skip
        monkeypatch.setattr(script, "QUICK", script.Job(steps=3, width=32, blocks=1, batch=2, length=16, windows=4, lr=1e-3))
        script.main()
        found.append([(f["name"], f["ours"], f["peer"]) for f in json.loads(out.read_text())["figures"]])
        assert sorted(p.name for p in cache.iterdir()) == ["fp32-3-0.001.json", "mxfp8-3-0.001.json"]
    assert found[0] == found[1] and len(found[0]) == 1 and (tmp_path / "plot.png").stat().st_size > 1000
    monkeypatch.setattr(script, "train_one", None)  # what is kept is not run again
    script.main()
    assert "mxfp8" in capsys.readouterr().out
