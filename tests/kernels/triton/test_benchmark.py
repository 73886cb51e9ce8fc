"""Behavioural: benchmarks/gpu.py is never broken when a GPU comes: its correctness half runs here, and its speed half on tiny shapes."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
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
    assert kept == sorted(set(kept)) and len(kept) == 10 and kept[-1] == len(figures)
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
    monkeypatch.setattr(script, "left", lambda: -1.0)
    assert [f.note for f in script.correctness()] == ["no time was left"] * 3 and script.exit_code(script.correctness()) == 0


WORKER = """
import json, os, sys, time
half, names, out, seconds = sys.argv[2:]
with open(out, "a") as file:
    for name in json.loads(names):
        print(json.dumps({"begun": name}), file=file, flush=True)
        if name == "dies":
            sys.exit("a bus error")
        if name == "hangs":
            time.sleep(60)
        figure = {"name": "correct: " + name, "ours": 1.0, "unit": "error"}
        print(json.dumps({"done": name, "figures": [figure], "configurations": {name: half}}), file=file, flush=True)
        if name == "breaks":
            os._exit(3)
"""


def test_a_process_that_dies_or_hangs_costs_what_it_was_at(script, tmp_path):
    (tmp_path / "worker.py").write_text(WORKER)
    kept = []
    figures, chosen = script.in_processes("correctness", [["a", "dies", "b"], ["breaks", "c"], ["d", "hangs", "e"]], 4.0,
                                          lambda found: kept.append(len(found)), [["f", "hangs"]], tmp_path / "worker.py")  # fmt: skip
    notes = {f.name.removeprefix("correct: "): f.note for f in figures}
    assert len(figures) == len(notes) == kept[-1] and {n for n, note in notes.items() if not note} == {"a", "b", "breaks", "c", "d"}
    assert notes["dies"] == "failed: the process ended with 1 a bus error" and notes["hangs"] == "failed: its time was over"
    assert notes["e"] == "no time was left" and chosen == dict.fromkeys(["a", "b", "breaks", "c", "d"], "correctness")
    (tmp_path / "worker.py").write_text("import nothing_of_the_kind")
    figures, _ = script.in_processes("speed", [["a", "b"]], 20.0, script=tmp_path / "worker.py")
    assert [f.name for f in figures] == ["a", "b"] and all("No module named 'nothing_of_the_kind'" in f.note for f in figures)


def test_a_package_that_is_missing_is_named_with_a_way_to_bring_it():
    hidden = f"import runpy, sys; sys.modules['triton'] = None; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("triton not installed: pip install triton; for a machine without")


def installed(folder, *names):
    """A folder of links to these distributions and to all that they require, but for pydantic, which only some of their versions bring."""
    folder.mkdir()
    todo, done = list(names), {"pydantic"}
    while todo:
        name = re.match(r"[\w.-]+", todo.pop())[0].lower().replace("_", "-")
        if name in done:
            continue
        done.add(name)
        try:
            found = distribution(name)
        except PackageNotFoundError:  # of another platform or Python
            continue
        todo += [each for each in found.requires or [] if "extra ==" not in each]
        for top in {file.parts[0] for file in found.files if file.parts[0] not in ("..", "__pycache__")}:
            if not (folder / top).exists():
                (folder / top).symlink_to(found.locate_file(top))
    return folder


BARE = """
import ast, importlib, pathlib, runpy, torch
path, out = sys.argv[1:3]
script = runpy.run_path(path)
for node in ast.walk(ast.parse(pathlib.Path(path).read_text())):
    if isinstance(node, ast.ImportFrom) and node.module.startswith("karui"):
        importlib.import_module(node.module)
from karui.lowprec import LowPrecision, Precision
for recipe in script["RECIPES"]:
    LowPrecision(Precision.parse(recipe)).prepare(torch.nn.Sequential(torch.nn.Linear(256, 256)))
script["report"](script["qlora"](script["TINY"]), pathlib.Path(out))
assert not {"pydantic", "peft", "accelerate", "datasets"} & set(sys.modules)
sys.argv[:] = [path, *sys.argv[3:]]
runpy.run_path(path, run_name="__main__")
"""


def test_torch_triton_and_transformers_are_all_it_needs(script, tmp_path):
    """And what one of its processes writes."""
    site, out, found = installed(tmp_path / "site", "torch", "triton", "transformers"), tmp_path / "out", tmp_path / "found"
    code = f"import sys; sys.path.append({str(site)!r})" + BARE
    command = [sys.executable, "-S", "-E", "-s", "-c", code, str(SCRIPT), str(out), "--worker",
               "correctness", '["swiglu", "none such"]', str(found), "100"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-2000:]
    (figure,) = json.loads(out.read_text())["figures"]
    assert figure["name"].startswith("QLoRA step") and figure["note"] == "peft not installed"
    lines = [json.loads(line) for line in found.read_text().splitlines()]
    assert [line.get("begun") or line["done"] for line in lines] == ["swiglu", "swiglu", "none such", "none such"]
    good, bad = (script.Figure(**line["figures"][0]) for line in lines if "done" in line)
    assert good.met and bad.note.startswith("failed: KeyError")


def test_what_does_not_fit_is_no_failure(script):
    figure = script.failure("training", torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB"))
    assert figure.note == "does not fit on this card: CUDA out of memory. Tried to allocate 9 GiB" and script.exit_code([figure]) == 0


@pytest.mark.slow
def test_correctness_half(tmp_path):
    out = tmp_path / "gpu.json"
    done = subprocess.run([sys.executable, "-W", "ignore", str(SCRIPT), "--only", "correctness", "--json", str(out)],
                          capture_output=True, text=True, env=os.environ)  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    figures = json.loads(out.read_text())["figures"]
    assert len(figures) > 30 and all(f["met"] for f in figures if f["name"].startswith("correct"))
