"""End to end: the shipped recipes of full training and of adapters, as they are but for model, data and length, on a tiny model."""

from pathlib import Path

import pytest

from karui.configs.recipe import shipped_recipes

RECIPES = {"sft-full": [], "lora": [], "qlora": [], "dora": [], "rslora-r64": ["prepare.0.rank=32"], "loftq": [], "pissa": [],
           "lora-plus": []}  # rank 64 is above the tiny model's dimensions


@pytest.mark.parametrize("name", RECIPES)
def test_the_shipped_recipe_trains_exports_and_compares(name, run_shipped):
    recipe, result = run_shipped(name, *RECIPES[name])
    metrics = result.run.metrics
    assert metrics["steps"] == recipe.optim.steps and metrics["eval_loss"] < metrics["eval_loss_before"]
    (bundle,) = result.bundles
    assert (bundle / "manifest.json").is_file() and len(result.reports) == 2


def test_every_shipped_recipe_is_run_by_a_test_of_this_folder():
    tests = "".join(p.read_text(encoding="utf-8") for p in Path(__file__).parent.glob("test_*.py"))
    shipped = set(shipped_recipes()) - {"demo"}  # qlora on other data, run by `karui demo`
    assert [name for name in sorted(shipped) if f'"{name}"' not in tests] == []
