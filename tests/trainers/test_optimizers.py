"""End to end on a tiny model: the optimizers a recipe may name, and their resume bit for bit."""

import pytest
import torch
from safetensors.torch import load_file

from karui.configs.errors import KaruiError, UnsupportedError
from karui.trainers.loop import read_log
from karui.trainers.run import run_recipe

OURS = ["adamw", "adamw8bit", "adamw-fp8", "paged-adamw8bit", "adafactor", "muon", "bnb-adamw8bit"]


def rows(folder):
    return [(r["step"], r["loss"], r["grad_norm"]) for r in read_log(folder) if "loss" in r]


@pytest.mark.parametrize("name", OURS)
def test_it_learns_and_resumes_bit_for_bit(make_recipe, tmp_path, name):
    optim = {"name": name, "lr": 0.02 if name == "adafactor" else 5e-3, "batch": 4, "steps": 8, "micro_tokens": 128, "weight_decay": 0.1}

    def recipe():
        return make_recipe(prepare=[], optim=optim, run={"output": str(tmp_path / "run"), "checkpoint_every": 4, "keep": 9})

    result = run_recipe(recipe())
    assert result.metrics["eval_loss"] < result.metrics["eval_loss_before"]
    whole, weights = rows(result.folder), load_file(str(result.final / "model.safetensors"))
    again = run_recipe(recipe(), resume=result.folder / "checkpoint-000004")
    assert rows(again.folder) == whole
    assert all(torch.equal(v, weights[k]) for k, v in load_file(str(again.final / "model.safetensors")).items())


def test_states_of_one_byte_are_stored_as_such(make_recipe):
    folder = run_recipe(make_recipe(prepare=[], optim={"name": "adamw8bit", "steps": 2, "batch": 4})).folder
    states = load_file(str(folder / "checkpoint-000002" / "optimizer.safetensors"))
    big = {k: v for k, v in states.items() if k.startswith(("exp_avg/", "exp_root/")) and v.numel() >= 4096}
    assert big and all(v.dtype == torch.uint8 for v in big.values())


def test_an_optimizer_is_not_resumed_as_another(make_recipe):
    folder = run_recipe(make_recipe(optim={"name": "adamw", "steps": 2})).folder
    with pytest.raises(KaruiError, match="optim.name"):
        run_recipe(make_recipe(optim={"name": "adamw8bit", "steps": 2}), resume=folder)


def test_names_that_cannot_serve(make_recipe):
    with pytest.raises(KaruiError, match="optim.name"):
        make_recipe(optim={"name": "adam8"})
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedError, match="CUDA devices only; use paged-adamw8bit"):
            run_recipe(make_recipe(optim={"name": "bnb-paged-adamw8bit"}))
