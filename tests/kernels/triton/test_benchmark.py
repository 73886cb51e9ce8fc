"""Behavioural: benchmarks/gpu.py is never broken when a GPU comes: its correctness half runs here, its recipes exist."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "gpu.py"


def test_the_recipes_it_steps_exist():
    from karui.lowprec import Precision

    sys.path.insert(0, str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("gpu_benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.remove(str(SCRIPT.parent))
    assert [Precision.parse(name).uses_history for name in module.RECIPES] == [False] * len(module.RECIPES)


@pytest.mark.slow
def test_correctness_half(tmp_path):
    out = tmp_path / "gpu.json"
    done = subprocess.run([sys.executable, "-W", "ignore", str(SCRIPT), "--only", "correctness", "--json", str(out)],
                          capture_output=True, text=True, env=os.environ)  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    figures = json.loads(out.read_text())["figures"]
    assert len(figures) > 30 and all(f["met"] for f in figures if f["name"].startswith("correct"))
