"""Behavioural: benchmarks/gpu.py is never broken when a GPU comes: its correctness half runs here, and its speed half on tiny shapes."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "gpu.py"


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("gpu_benchmark", SCRIPT)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where dataclasses look it up
    spec.loader.exec_module(module)
    sys.path.remove(str(SCRIPT.parent))
    return module


def test_the_recipes_it_steps_exist(script):
    from karui.lowprec import Precision

    assert [Precision.parse(name).uses_history for name in script.RECIPES] == [False] * len(script.RECIPES)


def test_its_two_qlora_steps_do_the_same(script):
    """karui's and peft's over bitsandbytes, on a tiny model: the same base, so the same losses for as long as steps are small."""
    pytest.importorskip("bitsandbytes")
    tiny = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    tokens = torch.randint(0, 96, (2, 12), device=script.DEVICE)
    ours, peers = (make(script.llama(1, **tiny), tokens) for make in (script.qlora_step, script.peft_step))
    losses = [(float(ours()), float(peers())) for _ in range(2)]
    assert losses[1][0] < losses[0][0] and all(abs(a - b) < 2e-3 for a, b in losses), losses


def test_the_speed_half_runs_whole_on_tiny_shapes(script):
    kept = []
    figures = script.speed(script.TINY, lambda found: kept.append(len(found)))
    assert not [f.note for f in figures if script.FAILED in f.note] and script.exit_code(figures) == 0
    assert kept == sorted(set(kept)) and len(kept) == 9 and kept[-1] == len(figures)
    assert all(f.ours is not None and 0 < f.ours < float("inf") for f in figures if not f.note.endswith(("not installed", "need a GPU")))
    assert {f.name for f in figures} >= {"ceiling: copy", "W4A16 g128, 1 rows, 32x256", "step, mxfp8", "engine decode bf16, batch 1",
                                         "engine decode with an adapter, batch 1"}


def test_a_part_that_fails_says_so_and_the_others_run(script, monkeypatch):
    def broken(*given):
        raise RuntimeError("an illegal memory access")

    def fine(*given):
        return [script.Figure(name="fine", ours=1.0, unit="ms")]

    for name in ("gemms", "experts", "quantizers", "decoding", "attention", "training", "qlora", "lora", "engine"):
        monkeypatch.setattr(script, name, broken if name in ("attention", "engine") else fine)
    monkeypatch.setattr(script, "ceilings", broken)
    figures = script.speed(script.TINY)
    failed = {f.name: f.note for f in figures if f.note}
    assert set(failed) == {"ceilings", "attention", "engine"} and script.exit_code(figures) == 1
    assert failed["engine"] == "failed: RuntimeError: an illegal memory access" and len(figures) == 10


def test_a_comparison_that_fails_is_no_success(script, monkeypatch):
    monkeypatch.setattr(script, "checks", lambda: {"one": (1.0, lambda: 2.0), "two": (1.0, lambda: 1 / 0), "three": (1.0, lambda: 0.5)})
    figures = script.correctness()
    assert [f.met for f in figures] == [False, None, True] and figures[1].note.startswith("failed: ZeroDivisionError")
    assert [script.exit_code([f]) for f in figures] == [1, 1, 0]
    monkeypatch.setattr(script, "left", lambda: 10.0)
    assert [f.note for f in script.correctness()] == ["no time was left"] * 3 and script.exit_code(script.correctness()) == 0


@pytest.mark.slow
def test_correctness_half(tmp_path):
    out = tmp_path / "gpu.json"
    done = subprocess.run([sys.executable, "-W", "ignore", str(SCRIPT), "--only", "correctness", "--json", str(out)],
                          capture_output=True, text=True, env=os.environ)  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    figures = json.loads(out.read_text())["figures"]
    assert len(figures) > 30 and all(f["met"] for f in figures if f["name"].startswith("correct"))
