"""End to end on a tiny model: a post-training method, then training of what is left, then the very codes in a bundle."""

from __future__ import annotations

import json
from typing import get_args

import pytest
import torch

from karui.configs import KaruiError
from karui.configs.steps import PostTrainingStep
from karui.inference.bundle import open_model
from karui.kernels.qtensor import QTensor
from karui.qat.methods import METHODS
from karui.trainers.converted import load_converted
from karui.trainers.pipeline import export_run
from karui.trainers.run import prepare, run_recipe

STEP = {"method": "gptq", "spec": "w2g32", "samples": 8, "length": 64}
NAMES = get_args(PostTrainingStep.model_fields["method"].annotation)


def test_every_method_of_the_step_exists():
    assert set(NAMES) <= set(METHODS)


@pytest.mark.parametrize("method", NAMES)
def test_codes_of_the_step_are_what_the_bundle_holds(make_recipe, method):
    spec = "w8a8" if method in ("smoothquant", "llm_int8") else "w3g32"
    settings = {"iterations": 2} if method == "autoround" else {}
    recipe = make_recipe(prepare=[{**STEP, "method": method, "spec": spec, "settings": settings}],
                         optim={"lr": 1e-2, "steps": 4}, eval={"speed": False, "held_out": False})  # fmt: skip
    result = run_recipe(recipe)
    codes = load_converted(result.final)
    assert len(codes) == 2 * 7
    report = export_run(result.folder, output=result.folder / "bundle", spec="w4g32")
    stored = open_model(report.path)
    for name, q in codes.items():
        found = stored.weight(name)
        assert isinstance(found, QTensor) and torch.equal(found.codes, q.codes) and torch.equal(found.scale, q.scale)
    assert report.manifest.parity["max_abs_dlogprob"] < report.manifest.parity["bound"]


def test_only_norms_train_and_they_win_back_some_of_the_loss(make_recipe):
    recipe = make_recipe(prepare=[STEP], optim={"lr": 2e-2, "steps": 20, "schedule": "constant"})
    setup = prepare(recipe)
    trained = {n for n, p in setup.model.named_parameters() if p.requires_grad}
    assert trained and all("norm" in n for n in trained)
    result = run_recipe(recipe)
    lines = [json.loads(line) for line in (result.folder / "log.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert sum(losses[-4:]) < sum(losses[:4]) - 0.1
    rest = prepare(make_recipe(prepare=[{**STEP, "train": "rest"}]))
    assert {n for n, p in rest.model.named_parameters() if p.requires_grad} == trained | {"model.embed_tokens.weight"}


def test_resume_is_exact(make_recipe, tmp_path):
    whole = run_recipe(make_recipe(prepare=[STEP], run={"output": str(tmp_path / "whole")}))
    first = make_recipe(prepare=[STEP], run={"output": str(tmp_path / "cut"), "checkpoint_every": 3})
    run_recipe(first)
    again = run_recipe(first, resume=tmp_path / "cut" / "checkpoint-000003")
    from safetensors.torch import load_file

    a, b = (load_file(r.final / "model.safetensors") for r in (whole, again))
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize(("change", "text"), [
    ({"spec": "none"}, "needs a grid"),
    ({"settings": {"dmap": 0.1}}, "unknown setting 'dmap'.*Did you mean 'damp'"),
    ({"skip": ["*.nothing"]}, "matches no linear"),
    ({"length": 100_000}, "fewer than one calibration row"),
    ({"spec": "w4g48"}, "group size 48 does not divide"),
])  # fmt: skip
def test_bad_steps(make_recipe, change, text):
    with pytest.raises(KaruiError, match=text):
        prepare(make_recipe(prepare=[{**STEP, **change}]))


def test_an_adapter_on_top_is_refused(make_recipe):
    with pytest.raises(KaruiError, match="each own the result"):
        prepare(make_recipe(prepare=[STEP, {"method": "lora", "rank": 4, "alpha": 8}]))
