"""End to end: the examples of docs/quantization.md run as they stand, on a tiny model."""

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
from tests.trainers.conftest import rows_file, tiny_folder  # noqa: F401 - fixtures

PAGE = (Path(__file__).parents[2] / "docs" / "quantization.md").read_text(encoding="utf-8")


def examples(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, re.S)


@pytest.fixture(scope="module")
def place(tiny_folder, rows_file, tmp_path_factory):  # noqa: F811
    """What the examples' words stand for: a model, a text, a finished run."""
    folder = tmp_path_factory.mktemp("docs")
    text = folder / "text.txt"
    text.write_text("".join(f"The {i}th sheep is {i * i} days old, and {i % 7} of its lambs are black.\n" for i in range(60)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KARUI_CACHE", str(folder / "cache"))
        values = {
            "name": "tiny", "model": str(tiny_folder), "data": {"train": str(rows_file), "holdout": 4, "max_length": 128},
            "optim": {"lr": 5e-3, "batch": 4, "steps": 3, "micro_tokens": 128}, "track": {"to": "none"},
            "run": {"output": str(folder / "run"), "threads": 1}, "eval": {"speed": False, "held_out": False},
        }  # fmt: skip
        run = run_pipeline(Recipe.build({**values, "prepare": [{"method": "qlora", "rank": 4, "alpha": 8}]})).run.folder
        yield {"MODEL": str(tiny_folder), "TEXT": str(text), "RUN": str(run)}, values


def test_the_commands(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [line for block in examples("console") for line in block.strip().splitlines()]
    assert len(lines) >= 4
    for line in lines:
        for word, value in place[0].items():
            line = re.sub(rf"\b{word}\b", value, line)
        words = shlex.split(line)
        assert words[0] == "karui"
        done = CliRunner().invoke(app, words[1:])
        assert done.exit_code == 0, (line, done.output, done.exception)
        assert (Path(words[words.index("-o") + 1]) / "manifest.json").is_file()


@pytest.mark.parametrize("index", range(len(examples("yaml"))))
def test_the_recipes(place, tmp_path, index):
    values = {**place[1], **yaml.safe_load(examples("yaml")[index]), "name": "docs"}
    result = run_pipeline(Recipe.build({**values, "run": {"output": str(tmp_path / "run"), "threads": 1}}))
    assert len(result.bundles) == 1 and (result.bundles[0] / "manifest.json").is_file()


def test_the_python_example(place, tmp_path, capsys):
    import torch

    (code,) = examples("python")
    scope = {"folder": place[0]["MODEL"], "scratch": tmp_path / "work", "rows": torch.randint(3, 250, (8, 64))}
    exec(compile(code, "docs/quantization.md", "exec"), scope)
    assert "model.layers.0.mlp.down_proj.weight w8" in capsys.readouterr().out
    assert set(scope["weights"]) >= {"model.embed_tokens.weight"}


def test_every_method_is_named_on_the_page():
    from karui.qat.methods import METHODS

    assert [m for m in METHODS if f"`{m}`" not in PAGE] == []
