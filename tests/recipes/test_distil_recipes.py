"""End to end: the shipped distillation recipes on a tiny model, up to their bundles."""

import json

from karui.inference.engine import Engine
from karui.trainers.loop import read_log


def test_distil_logits(run_shipped):
    recipe, result = run_shipped("distil-logits", "prepare.0.keep_layers=1", "objective.k=8")
    (bundle,) = result.bundles
    assert json.loads((bundle / "config.json").read_text())["num_hidden_layers"] == 1
    rows = [r for r in read_log(recipe.output) if "loss" in r]
    assert rows[-1]["loss_logits"] < rows[0]["loss_logits"] and rows[0]["loss_label"] > 0
    assert len(Engine.load(bundle, max_context=64).generate(["what is 3 plus 9"])[0].token_ids) > 0


def test_distil_on_policy(run_shipped):
    recipe, result = run_shipped("distil-on-policy", "prepare.0.keep_layers=1", "objective.max_new_tokens=8",
                                 "objective.off_policy_first=0.25")
    rows = [r for r in read_log(recipe.output) if "loss" in r]
    assert "rollout_tokens" not in rows[0] and rows[-1]["rollout_tokens"] > 0
    assert len(result.bundles) == 1
