"""End to end: the shipped quantization-aware recipes and every training step on a tiny model, up to a bundle that the engine runs."""

import json

import pytest
import torch

from karui.configs.errors import KaruiError
from karui.configs.manifest import Manifest
from karui.configs.recipe import Recipe
from karui.inference.bundle.decode import read_stored, values
from karui.inference.engine import Engine
from karui.trainers.converted import load_converted
from karui.trainers.loop import read_log
from karui.trainers.run import run_recipe
from tests.trainers.conftest import make_recipe  # noqa: F401


def check_bundle(result, specs):
    """The bundle holds the codes that were trained, passed the gate, and runs."""
    (bundle,) = result.bundles
    manifest = Manifest.read(bundle)
    assert manifest.parity["max_abs_dlogprob"] <= manifest.parity["bound"]
    codes = load_converted(result.run.final)
    found = {name: (record, parts) for name, record, parts in
             ((n, manifest.tensors[n], p) for n, p in read_stored(bundle, manifest)) if name in codes}
    assert set(found) == set(codes) and {str(q.spec) for q in codes.values()} == specs
    for name, (record, parts) in found.items():
        assert torch.equal(torch.from_numpy(values(parts, record)), codes[name].dequantize()), name
    assert len(Engine.load(bundle, max_context=64).generate(["what is 3 plus 9"])[0].token_ids) > 0


def losses(recipe):
    return [r["loss"] for r in read_log(recipe.output) if "loss" in r]


@pytest.mark.parametrize("name", ["efficientqat-w2", "efficientqat-w4"])
def test_efficientqat(name, run_shipped):
    spec = f"{name[-2:]}g64"
    recipe, result = run_shipped(name, "prepare.0.samples=8", "prepare.0.length=64", "optim.batch=20", "optim.steps=10",  # all rows each step
                                 "optim.lr=2e-4")
    check_bundle(result, {spec})
    rows = [r for r in read_log(recipe.output) if "loss_logits" in r]
    if spec == "w2g64":  # at 4 bits a tiny model has next to nothing left to gain
        assert rows[-1]["loss_logits"] < rows[0]["loss_logits"]


def test_bitnet_from_pretrained(run_shipped):
    _, result = run_shipped("bitnet-from-pretrained", "prepare.0.warmup=4", "optim.steps=8")
    check_bundle(result, {"w1.58g64a8"})


def test_a_run_that_ends_before_lambda_is_one_is_refused(run_shipped):
    with pytest.raises(KaruiError, match="lambda is still 0.700"):
        run_shipped("bitnet-from-pretrained", "prepare.0.warmup=10", "optim.steps=8")


def test_bitnet_scratch(run_shipped):
    recipe, result = run_shipped("bitnet-scratch", "optim.steps=30")
    check_bundle(result, {"w1.58a8"})
    seen = losses(recipe)
    assert seen[-1] < 0.8 * seen[0]


def test_llm_qat_trains_on_what_the_model_wrote(run_shipped):
    recipe, result = run_shipped("llm-qat", "prepare.0.generate=12", "prepare.0.length=24", "optim.steps=4")
    check_bundle(result, {"w4g64a8"})
    assert losses(recipe)


def test_qat_lora_changes_nothing_but_the_adapter(run_shipped):
    recipe, result = run_shipped("qat-lora", "prepare.0.rank=4", "optim.lr=1e-2", "optim.steps=20")
    check_bundle(result, {"w4g64"})
    seen = losses(recipe)
    assert seen[-1] < seen[0]


STEPS = {
    "lsq": ("w4g32", {}), "lsq_plus": ("w4g32a", {}), "pact": ("w4g32a8", {}), "seq": ("w2g32", {"stored": "w3g32"}),
    "bitnet": ("w1a8", {}), "qat_lora": ("w4g32", {"learn_steps": True}),
}


@pytest.mark.parametrize("method", STEPS)
def test_every_step_ends_in_a_bundle(method, make_recipe):  # noqa: F811
    from karui.trainers.pipeline import run_pipeline

    spec, extra = STEPS[method]
    stored = extra.pop("stored", spec)
    recipe = make_recipe(prepare=[{"method": method, "spec": spec, **extra}], optim={"lr": 2e-3, "batch": 4, "steps": 12},
                         export=[{"spec": spec}], eval={"speed": False})
    result = run_pipeline(recipe)
    check_bundle(result, {stored})
    seen = losses(recipe)
    assert seen[-1] < seen[0]


@pytest.mark.parametrize("step", [{"method": "lsq_plus", "spec": "w4g32a"}, {"method": "bitnet_158", "spec": "w1.58", "warmup": 2}])
def test_a_resumed_run_ends_bit_identically(step, make_recipe):  # noqa: F811
    optim = {"lr": 1e-3, "batch": 4, "steps": 4}
    whole = run_recipe(make_recipe(prepare=[step], optim=optim, run={"checkpoint_every": 2}))
    first = load_converted(whole.final)
    again = run_recipe(make_recipe(prepare=[step], optim=optim, run={"checkpoint_every": 2}),
                       resume=whole.folder / "checkpoint-000002")
    second = load_converted(again.final)
    for name, q in first.items():
        assert torch.equal(q.codes, second[name].codes) and torch.equal(q.scale, second[name].scale), name


def test_a_model_with_sub_norms_ends_in_a_bundle_the_engine_runs(make_recipe):  # noqa: F811
    from karui.trainers.pipeline import run_pipeline

    step = {"method": "bitnet_158", "sub_norms": True}
    optim = {"lr": 1e-3, "batch": 4, "steps": 3}
    result = run_pipeline(make_recipe(prepare=[step], optim=optim, export=[{"spec": "w1.58a8"}], eval={"speed": False}))
    assert json.loads((result.run.final / "config.json").read_text())["model_type"] == "bitnet"
    check_bundle(result, {"w1.58a8"})


@pytest.mark.parametrize("step,message", [
    ({"method": "seq", "spec": "w4g32"}, "SEQ serves w2 and w1.58"),
    ({"method": "lsq", "spec": "w4g48"}, "group size 48 does not divide"),
    ({"method": "lsq", "spec": "w4g32", "targets": ["no_such_proj"]}, "pattern 'no_such_proj' matches no linear"),
    ({"method": "efficient_qat", "spec": "w2g32", "settings": {"epoch": 1}}, "unknown setting 'epoch'"),
])
def test_bad_steps_are_explained(step, message, make_recipe):  # noqa: F811
    with pytest.raises(KaruiError, match=message):
        run_recipe(make_recipe(prepare=[step]))


@pytest.mark.parametrize("step,message", [
    ({"method": "bitnet", "spec": "w1.58"}, "bitnet trains binary weights"),
    ({"method": "bitnet_158", "start": "scratch", "warmup": 5}, "random weights have nothing to lose"),
    ({"method": "lsq", "spec": "none"}, "training on a grid needs one"),
])
def test_recipes_that_make_no_sense(step, message):
    with pytest.raises(KaruiError, match=message):
        Recipe.build({"model": "m", "data": {"train": "x"}, "prepare": [step]})
