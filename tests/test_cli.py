"""Unit tests of the command line: it is lean, and every verb explains itself."""

import io
import subprocess
import sys
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from karui import cli
from karui.cli import app

HEAVY = ("torch", "transformers", "peft", "accelerate", "datasets", "wandb", "numpy", "bitsandbytes")


@pytest.mark.parametrize("statement", ["import karui", "import karui.cli", "import karui.configs"])
def test_importing_is_lean(statement):
    code = f"{statement}; import sys; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_verb_has_help():
    for command in app.registered_commands:
        name = command.name or command.callback.__name__
        done = CliRunner().invoke(app, [name, "--help"])
        assert done.exit_code == 0 and len(command.callback.__doc__) > 20, name


def test_models_and_recipes_are_listed():
    assert "smollm2-135m" in CliRunner().invoke(app, ["models"]).output
    listing = CliRunner().invoke(app, ["recipes"]).output
    assert "qlora" in listing and "demo" in listing
    assert "method: qlora" in CliRunner().invoke(app, ["recipes", "qlora"]).output


@pytest.mark.parametrize("stopped, code", [("SIGINT", 130), (None, 0)])
def test_a_stopped_run_is_told_by_its_exit_code(monkeypatch, stopped, code):
    run = SimpleNamespace(run=SimpleNamespace(interrupted=stopped))
    monkeypatch.setattr("karui.trainers.pipeline.run_pipeline", lambda *args, **kwargs: run)
    assert CliRunner().invoke(app, ["train", "demo"]).exit_code == code


@pytest.mark.parametrize("given", [["quantize", "m", "-o", "x", "--samples", "-1"], ["export", "r", "-o", "x", "--length", "0"],
                                   ["kv-levels", "m", "--calibration", "t", "--samples", "0"]])  # fmt: skip
def test_calibration_needs_rows_and_tokens(given):
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 2 and "Invalid value for" in done.output


def test_quantize_lists_methods_with_their_papers():
    output = CliRunner().invoke(app, ["quantize", "--list"]).output
    assert "gptq" in output and "2210.17323" in output


@pytest.mark.parametrize("verb", ["generate", "chat", "eval", "bench", "serve"])
def test_what_runs_a_model_says_where_and_in_how_much_memory(verb, monkeypatch):
    asked = {}

    def load(engine_class, path, **options):
        asked.update(options)
        raise RuntimeError("seen")

    monkeypatch.setattr("karui.inference.loading.load", load)
    options = ["--device", "cuda:1", "--kv-dtype", "int8", "--memory", "3GiB", "--max-context", "900", "--weight-memory", "9GiB"]
    model = "smollm2-135m"
    if verb == "eval":
        from karui.trainers import compare

        monkeypatch.setattr(compare, "compare", lambda models, engine, **_: load(None, models[0], **engine))
    given = [verb, model, *(["a prompt"] if verb == "generate" else []), *options]
    done = CliRunner().invoke(app, given, input="\n")
    assert str(done.exception) == "seen"
    assert {k: asked[k] for k in ("device", "kv_dtype", "memory", "max_context", "weight_memory")} == {
        "device": "cuda:1", "kv_dtype": "int8", "memory": "3GiB", "max_context": 900, "weight_memory": "9GiB"}  # fmt: skip


def test_a_terminal_without_the_letters_and_a_closed_input_are_no_traceback(monkeypatch, capsys):
    said = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", said)
    monkeypatch.setattr(sys, "argv", ["karui", "--version"])
    with pytest.raises(SystemExit):
        cli.main()
    said.write("naïve 軽い")
    said.flush()
    assert said.buffer.getvalue().endswith(b"na?ve ??")
    monkeypatch.setattr(sys, "stdin", None)
    monkeypatch.setattr(sys, "argv", ["karui", "generate", "nowhere", "-"])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert "nowhere" in capsys.readouterr().err
