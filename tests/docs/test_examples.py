"""End to end: the examples of docs/adapters.md, docs/data.md and docs/lowprec.md do what they say."""

import re
from pathlib import Path

import pytest
import torch
import yaml

from karui.configs.recipe import DataSection, Recipe

DOCS = Path(__file__).resolve().parents[2] / "docs"


def blocks(name, language):
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / name).read_text(), re.DOTALL)


@pytest.mark.parametrize("name", ["adapters.md", "data.md", "lowprec.md"])
def test_yaml_examples_are_recipes(name):
    found = blocks(name, "yaml")
    assert found
    for text in found:
        Recipe.build({"model": "x", "data": {"train": "y"}, **yaml.safe_load(text)})


def test_the_python_example_of_adapters(tmp_path):
    from tests.adapters.test_lora import IDS, tiny

    (text,) = blocks("adapters.md", "python")
    names = {"model": tiny(), "original": tiny(), "folder": tmp_path / "adapter"}
    exec(text, names)
    assert torch.allclose(names["again"](input_ids=IDS).logits, names["merged"](input_ids=IDS).logits, atol=2e-5)
    assert names["report"].base == "w4g32"


def test_the_python_example_of_data(tmp_path):
    from tests.trainers_data.conftest import CHATML, make_tokenizer

    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n' * 9 + '{"prompt": "c", "completion": "d"}\n')
    (text,) = blocks("data.md", "python")
    names = {"tokenizer": make_tokenizer(CHATML), "path": str(path)}
    exec(text, names)
    assert len(names["samples"]) == 2 and names["samples"].counts.duplicates == 8 and len(names["first_step"]) == 1


def test_the_python_examples_of_low_precision(capsys):
    from tests.adapters.test_lora import tiny

    model = tiny()
    before = {name: type(module) for name, module in model.named_modules()}
    names = {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3)}
    first, *rest = blocks("lowprec.md", "python")
    assert len(rest) == 2
    exec(first, names)
    assert "nvfp4" in capsys.readouterr().out and {name: type(module) for name, module in model.named_modules()} == before
    for text in rest:  # they go on from the first one's imports
        exec(text, names)


def test_every_key_that_the_page_explains_exists():
    words = set(re.findall(r"^- \*\*(\w+)\*\*", (DOCS / "data.md").read_text(), re.MULTILINE))
    assert len(words) >= 5 and words <= set(DataSection.model_fields)
