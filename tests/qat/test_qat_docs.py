"""End to end: the examples of docs/qat.md run as they stand, on a tiny model."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from karui.cli import app
from karui.configs.recipe import Recipe
from karui.trainers.pipeline import run_pipeline
from tests.trainers.conftest import _fresh_accelerate_state, rows_file, tiny_folder  # noqa: F401

PAGE = (Path(__file__).parents[2] / "docs" / "qat.md").read_text(encoding="utf-8")


def examples(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("line", [x for block in examples("console") for x in block.strip().splitlines()])
def test_the_commands(line, tiny_folder, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("the sum of three and nine is twelve. " * 60, encoding="utf-8")
    words = [{"MODEL": str(tiny_folder), "TEXT": str(text)}.get(w, w) for w in shlex.split(line)]
    assert words[0] == "karui"
    done = CliRunner().invoke(app, words[1:])
    assert done.exit_code == 0, (line, done.output, done.exception)
    assert (Path(words[words.index("-o") + 1]) / "manifest.json").is_file()


@pytest.mark.parametrize("index", range(len(examples("yaml"))))
def test_the_recipes(index, tiny_folder, rows_file, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("KARUI_CACHE", str(tmp_path / "cache"))
    base = {
        "name": "docs", "model": str(tiny_folder), "data": {"train": str(rows_file), "holdout": 4, "max_length": 128},
        "optim": {"lr": 1e-3, "batch": 4, "steps": 3, "micro_tokens": 256}, "track": {"to": "none"}, "eval": {"speed": False},
    }
    result = run_pipeline(Recipe.build({**base, **yaml.safe_load(examples("yaml")[index]),
                                        "run": {"output": str(tmp_path / "run"), "threads": 1}}))
    assert len(result.bundles) == 1 and (result.bundles[0] / "manifest.json").is_file()


def test_every_step_is_named_on_the_page():
    from typing import get_args

    from karui.configs.steps import qat

    methods = [m for step in get_args(qat.QatStep) for m in get_args(step.model_fields["method"].annotation)]
    assert len(methods) == 9 and [m for m in methods if f"`{m}`" not in PAGE] == []
