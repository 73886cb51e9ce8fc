"""Behavioural: benchmarks/gpu.py is never broken when a GPU comes: its correctness half runs here, its recipes exist."""

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
    module = importlib.util.module_from_spec(spec)
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


@pytest.mark.slow
def test_correctness_half(tmp_path):
    out = tmp_path / "gpu.json"
    done = subprocess.run([sys.executable, "-W", "ignore", str(SCRIPT), "--only", "correctness", "--json", str(out)],
                          capture_output=True, text=True, env=os.environ)  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    figures = json.loads(out.read_text())["figures"]
    assert len(figures) > 30 and all(f["met"] for f in figures if f["name"].startswith("correct"))
