"""Behavioural: a student is pruned, healed by its own teacher, resumed, and left as an ordinary folder."""

import pytest
import torch
from safetensors.torch import load_file

from karui.catalogue import load_model_config
from karui.configs.errors import KaruiError, UnsupportedError
from karui.inference.bundle.reader import open_model
from karui.trainers.calibrated import Calibration
from karui.trainers.loop import read_log
from karui.trainers.model import weights_folder
from karui.trainers.pipeline import export_run
from karui.trainers.run import prepare, run_recipe
from karui.trainers.stages import planned


@pytest.mark.parametrize("step", [
    {"method": "prune-layers", "keep_layers": 1}, {"method": "prune-layers", "keep_layers": 1, "choice": "influence"},
    {"method": "prune-width", "intermediate": 64, "kv_heads": 1, "hidden": 48}])
def test_a_smaller_student_learns_from_the_model_it_came_from(step, make_recipe):
    from transformers import AutoModelForCausalLM

    recipe = make_recipe(prepare=[step], objective={"kind": "distil"}, optim={"steps": 12, "lr": 3e-3})
    done = run_recipe(recipe)
    rows = [r["loss_logits"] for r in read_log(done.folder) if "loss" in r]
    assert rows[-1] < rows[0]
    student = AutoModelForCausalLM.from_pretrained(done.final)
    config = student.config
    if step["method"] == "prune-layers":
        assert config.num_hidden_layers == 1
    else:
        assert (config.hidden_size, config.intermediate_size, config.num_key_value_heads, config.head_dim) == (48, 64, 1, 16)


@pytest.mark.parametrize("method", ["sparsegpt", "wanda", "magnitude"])
def test_masks_hold_through_training_and_a_resume(method, make_recipe):
    recipe = make_recipe(prepare=[{"method": method, "sparsity": "2:4"}], objective={"kind": "distil"},
                         optim={"weight_decay": 0.1}, run={"checkpoint_every": 3, "keep": 9})
    done = run_recipe(recipe)
    tensors = load_file(done.final / "model.safetensors")
    zeros = {n: v == 0 for n, v in tensors.items() if n.endswith("proj.weight")}
    assert len(zeros) == 14 and all((z.view(len(z), -1, 4).sum(-1) >= 2).all() for z in zeros.values())
    run_recipe(recipe, resume=done.folder / "checkpoint-000003")
    again = load_file(done.final / "model.safetensors")
    assert all(torch.equal(again[n], v) for n, v in tensors.items())


def test_a_sparse_model_goes_onto_a_grid_and_stays_sparse(make_recipe):
    """Pruned, put on its grid with the zeros held, its norms trained, exported: the codes of the bundle's weights are half zero."""
    done = run_recipe(make_recipe(prepare=[{"method": "sparsegpt", "sparsity": "2:4"},
                                           {"method": "gptq", "spec": "w4g32", "samples": 8, "length": 16}]))
    export_run(done.folder, output=done.folder / "bundle", spec="w4g32")
    weights = {n: v for n, v in dict(open_model(done.folder / "bundle").weights()).items() if n.endswith("proj.weight")}
    assert len(weights) == 14
    for v in weights.values():
        zeros = v.dequantize() == 0
        assert bool((zeros.view(len(zeros), -1, 4).sum(-1) >= 2).all())


def test_senseless_steps_are_refused(make_recipe):
    for pattern in (0, 1.5, -0.1, "4:2", "2:3", "half", "0:4"):
        with pytest.raises(KaruiError, match="neither a share between 0 and 1 nor n:m"):
            make_recipe(prepare=[{"method": "wanda", "sparsity": pattern}])
    for step, message in (({"method": "prune-layers", "keep_layers": 2}, "keep_layers is 2; expected 1 to 1 of the model's 2 layers"),
                          ({"method": "prune-width", "intermediate": 4096}, "intermediate is 4096; expected 1 to"),
                          ({"method": "prune-experts", "keep_experts": 2}, "has no experts to drop")):
        with pytest.raises(KaruiError, match=message):
            run_recipe(make_recipe(prepare=[step]), dry_run=True)
    with pytest.raises(KaruiError, match="keep_layers does not belong to sparsegpt"):
        make_recipe(prepare=[{"method": "sparsegpt", "sparsity": 0.5, "keep_layers": 3}])
    with pytest.raises(KaruiError, match="prune-width needs intermediate or kv_heads or hidden"):
        make_recipe(prepare=[{"method": "prune-width"}])
    with pytest.raises(KaruiError, match="choice: influence does not belong to prune-width"):
        make_recipe(prepare=[{"method": "prune-width", "kv_heads": 1, "choice": "influence"}])
    for adapter in ({"method": "lora", "rank": 4}, {"method": "vera"}, {"method": "ia3"}, {"method": "prompt"}):
        with pytest.raises(UnsupportedError, match="Prune and heal in one run"):
            run_recipe(make_recipe(prepare=[{"method": "prune-layers", "keep_layers": 1}, adapter]))
        with pytest.raises(UnsupportedError, match="Change and heal in one run"):
            run_recipe(make_recipe(prepare=[{"method": "merge-kv-heads", "kv_heads": 1}, adapter]))
    for grid in ({"method": "autoround", "spec": "w4g32"}, {"method": "rtn", "spec": "w1"}, {"method": "efficient_qat", "spec": "w2g32"},
                 {"method": "seq", "spec": "w2g32"}, {"method": "qat_lora", "spec": "w4g32", "rank": 2, "alpha": 4}):
        with pytest.raises(UnsupportedError, match=f"{grid['method']} on {grid['spec']} moves weights off the zeros that wanda made"):
            run_recipe(make_recipe(prepare=[{"method": "wanda", "sparsity": 0.5}, grid]))


def test_the_preflight_plans_with_the_student(make_recipe):
    for step in ({"method": "prune-layers", "keep_layers": 1}, {"method": "prune-layers", "keep_layers": 1, "choice": "influence"},
                 {"method": "prune-width", "intermediate": 32, "kv_heads": 1, "hidden": 32}):
        recipe = make_recipe(prepare=[step])
        before = load_model_config(weights_folder(recipe.model.name))
        got, lines = planned(recipe, before)
        want = prepare(recipe).model.config
        assert got.to_dict() == want.to_dict() != before.to_dict() and len(lines) == 1


@pytest.mark.parametrize("grid", [
    {"method": "lsq", "spec": "w3g32"}, {"method": "lsq_plus", "spec": "w4g32a"}, {"method": "bitnet_158", "spec": "w1.58g32"},
    {"method": "rtn", "spec": "nf4", "train": "rest"}])
def test_a_trained_grid_holds_the_zeros(grid, make_recipe):
    done = run_recipe(make_recipe(prepare=[{"method": "wanda", "sparsity": "2:4"}, grid], optim={"steps": 3}))
    weights = load_file(done.final / "model.safetensors")
    zeros = {n: v == 0 for n, v in weights.items() if n.endswith("proj.weight")}
    assert len(zeros) == 14 and all((z.view(len(z), -1, 4).sum(-1) >= 2).all() for z in zeros.values())


def test_an_export_keeps_the_zeros_or_is_refused(make_recipe):
    recipe = make_recipe(prepare=[{"method": "wanda", "sparsity": 0.5}], optim={"steps": 2})
    folder = run_recipe(recipe).folder
    for method, spec in (("autoround", "w4g32"), ("rtn", "w1")):
        with pytest.raises(UnsupportedError, match=f"{method} on {spec} moves weights off the zeros that wanda made"):
            export_run(folder, output=folder / method, spec=spec, how=Calibration(method=method, samples=8, length=32))
        assert not (folder / method).exists()
    report = export_run(folder, output=folder / "gptq", spec="w4g32", how=Calibration(method="gptq", samples=8, length=32))
    weights = {n: v for n, v in dict(open_model(report.path).weights()).items() if n.endswith("proj.weight")}
    assert len(weights) == 14 and all(float((w.dequantize() == 0).float().mean()) >= 0.5 for w in weights.values())
