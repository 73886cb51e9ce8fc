"""End to end: the shipped low-precision recipes, as they are but for model, data and length, on a tiny model."""

import json

import pytest

from karui.trainers.loop import read_log


@pytest.mark.parametrize("name, overrides", [
    ("fp8-full", ["optim.lr=3e-3"]),
    ("nvfp4-lora", ["optim.lr=5e-3", "prepare.1.schedule.0.step=3", "prepare.1.policy.first_blocks=0", "prepare.1.policy.last_blocks=0"]),
])
def test_the_shipped_recipe_trains_exports_and_compares(name, overrides, run_shipped):
    recipe, result = run_shipped(name, *overrides)
    metrics = result.run.metrics
    assert metrics["steps"] == recipe.optim.steps and metrics["eval_loss"] < metrics["eval_loss_before"]
    assert len([r for r in read_log(result.run.folder) if "loss" in r]) == 4
    (bundle,) = result.bundles
    manifest = json.loads((bundle / "manifest.json").read_text())
    assert any(s["method"] in ("fp8-current", "nvfp4") for s in manifest["recipe"]["prepare"]) and len(result.reports) == 2
