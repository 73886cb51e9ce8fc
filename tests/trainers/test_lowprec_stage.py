"""End to end on a tiny model: low-precision steps of a recipe, their resume, their faults, and the same scales on every rank."""

import pytest
import torch
from safetensors.torch import load_file

from karui.configs.errors import KaruiError, UnsupportedError
from karui.configs.steps.lowprec import RecipeName
from karui.lowprec import LowPrecision
from karui.trainers.loop import read_log
from karui.trainers.pipeline import export_run
from karui.trainers.run import STAGES, run_recipe
from tests.trainers.launching import job, launch, losses

RECIPES = RecipeName.__args__
OPTIM = {"lr": 5e-3, "batch": 4, "steps": 6, "micro_tokens": 128}
ADAPTER = {"method": "lora", "rank": 4, "alpha": 8}


def rows(folder):
    return [(r["step"], r["loss"], r["grad_norm"]) for r in read_log(folder) if "loss" in r]


def state(checkpoint):
    return {k.partition("/")[2]: v for k, v in load_file(str(checkpoint / STAGES)).items()}


def same(a, b):
    return set(a) == set(b) and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("method", RECIPES)
def test_every_recipe_trains_and_leaves_an_ordinary_model(make_recipe, method, capsys):
    result = run_recipe(make_recipe(prepare=[{"method": method}], optim=OPTIM))
    assert result.metrics["eval_loss"] < result.metrics["eval_loss_before"]
    plain = run_recipe(make_recipe(prepare=[], optim=OPTIM, run={"output": str(result.folder) + "-plain"}))
    assert 0 < abs(result.metrics["loss"] - plain.metrics["loss"]) < 0.3
    assert set(load_file(str(result.final / "model.safetensors"))) == set(load_file(str(plain.final / "model.safetensors")))
    shown = capsys.readouterr()
    text = shown.out + shown.err
    assert f"{method}" in text and "emulate" in text and "output head" in text  # the report, before training


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("method", ["fp8-delayed", "nvfp4"])
def test_a_resume_gives_the_same_bits_and_the_same_state(make_recipe, tmp_path, method, adapter):
    prepare = [*([ADAPTER] if adapter else []),
               {"method": method, "history": 4, "policy": {"first_blocks": 0, "last_blocks": 0}}]  # fmt: skip

    def recipe(where):
        return make_recipe(prepare=prepare, optim=OPTIM, run={"output": str(tmp_path / where), "checkpoint_every": 2, "keep": 9})

    whole = run_recipe(recipe("whole")).folder
    half = run_recipe(recipe("half")).folder
    again = run_recipe(recipe("half"), resume=half / "checkpoint-000002").folder
    assert rows(again) == rows(whole)
    ours, theirs = state(again / "checkpoint-000006"), state(whole / "checkpoint-000006")
    assert same(ours, theirs) and int(ours["step"]) == 6 and ours["scale"].any()
    name = "adapter_model" if adapter else "model"
    assert same(load_file(str(again / f"final/{name}.safetensors")), load_file(str(whole / f"final/{name}.safetensors")))


def test_a_resume_with_another_recipe_is_refused(make_recipe):
    run = {"checkpoint_every": 2}
    folder = run_recipe(make_recipe(prepare=[{"method": "fp8-delayed", "history": 4}], optim={**OPTIM, "steps": 2}, run=run)).folder
    for other in ({"method": "mxfp8"}, {"method": "fp8-delayed", "history": 8}, {"method": "fp8-delayed", "history": 4, "wgrad": "high"}):
        with pytest.raises(KaruiError, match="prepare.*belongs to another run|belongs to another run.*prepare"):
            run_recipe(make_recipe(prepare=[other], optim={**OPTIM, "steps": 2}, run=run), resume=folder)


def test_a_schedule_of_formats_is_followed(make_recipe):
    schedule = [{"step": 3, "gemm": "all", "to": "high"}]
    mixed = run_recipe(make_recipe(prepare=[{"method": "nvfp4", "schedule": schedule}], optim=OPTIM)).folder
    low = run_recipe(make_recipe(prepare=[{"method": "nvfp4"}], optim=OPTIM, run={"output": str(mixed) + "-low"})).folder
    a, b = rows(mixed), rows(low)
    assert a[:3] == b[:3] and all(x != y for x, y in zip(a[3:], b[3:]))


def test_a_step_that_saturation_would_hide_is_left_out_and_the_layer_named(make_recipe, monkeypatch, capsys):
    """An Inf in the input saturates to 448: loss and gradient are finite, only the amax shows it."""
    prepare = LowPrecision.prepare

    def poisoned(self, model, **where):
        prepare(self, model, **where)
        layer, calls = model.get_submodule("model.layers.1.mlp.down_proj"), []

        def once(module, inputs):
            if module.training:
                calls.append(1)
                if len(calls) == 3:
                    x = inputs[0].clone()
                    x[0, 0, 0] = float("inf")
                    return (x,)
            return None

        layer.register_forward_pre_hook(once)
        return model

    monkeypatch.setattr(LowPrecision, "prepare", poisoned)
    run = run_recipe(make_recipe(prepare=[{"method": "fp8-delayed", "frozen": "master"}], data={"max_length": 64},
                                 optim={**OPTIM, "micro_tokens": 512}, run={"checkpoint_every": 6}))
    skipped = [r for r in read_log(run.folder) if r.get("skipped")]
    assert len(skipped) == 1 and run.metrics["skipped_steps"] == 1
    assert int(state(run.folder / "checkpoint-000006")["skipped"]) == 1
    text = "".join(capsys.readouterr())
    assert "model.layers.1.mlp.down_proj (input)" in text


def test_two_ranks_agree_on_the_scales(make_recipe, tmp_path):
    """The amax of all ranks: the history of two ranks is the history of one process on the same batches."""
    def recipe(where):
        (tmp_path / where).mkdir()
        return make_recipe(prepare=[{"method": "fp8-delayed", "history": 8}], optim=OPTIM,
                           run={"output": str(tmp_path / where / "run"), "checkpoint_every": 3})

    alone = run_recipe(recipe("one")).folder
    done = launch(tmp_path, [job(recipe("two"))])
    assert done.returncode == 0, done.stderr[-3000:]
    both = tmp_path / "two" / "run"
    assert losses(both) == pytest.approx(losses(alone), rel=2e-3)
    ours, theirs = state(both / "checkpoint-000003"), state(alone / "checkpoint-000003")
    weight, inputs = (theirs["history"][:, r] for r in (1, 0))
    assert torch.equal(ours["history"][:, 1, -3], weight[:, -3])  # weights of step 0 are the same
    torch.testing.assert_close(ours["history"][:, 0, -3], inputs[:, -3], rtol=1e-2, atol=0)


def test_the_adapter_on_an_fp8_base_reaches_its_bundle(make_recipe, tmp_path):
    result = run_recipe(make_recipe(prepare=[ADAPTER, {"method": "fp8-current"}], optim=OPTIM))
    assert result.is_adapter and result.metrics["eval_loss"] < result.metrics["eval_loss_before"]
    report = export_run(result.folder, spec="w8", output=tmp_path / "bundle")
    assert report.manifest.parity["max_abs_dlogprob"] < 2e-3


def test_a_backend_that_cannot_serve_is_an_error(make_recipe):
    with pytest.raises(UnsupportedError, match="scaled_mm: no scaled_mm path for nvfp4"):
        run_recipe(make_recipe(prepare=[{"method": "nvfp4", "backend": "scaled_mm"}]))
    with pytest.raises(UnsupportedError, match="TransformerEngine|triton"):
        run_recipe(make_recipe(prepare=[{"method": "fp8-current", "backend": "te"}]))
