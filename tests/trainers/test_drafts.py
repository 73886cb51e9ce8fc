"""Behavioural: drafts trained through a recipe on a tiny model: kept states, resume, splits, bad input."""

import pytest
import torch
from safetensors.torch import load_file

from karui.configs.errors import UnsupportedError
from karui.trainers.loop import read_log
from karui.trainers.objectives import drafts, make_objective
from karui.trainers.run import prepare, run_recipe
from tests.trainers.test_distil import gradient

KINDS = {"eagle3": {"kind": "draft-eagle3", "vocabulary": 64, "intermediate": 32, "steps": 2}, "medusa": {"kind": "draft-medusa", "heads": 2}}


def losses(recipe):
    return [r["loss"] for r in read_log(recipe.output) if "loss" in r]


@pytest.mark.parametrize("kind", KINDS)
def test_kept_states_spare_the_model_and_change_nothing_but_their_last_bits(kind, make_recipe, monkeypatch):
    options = {"prepare": [], "optim": {"steps": None, "epochs": 3}}
    run_recipe(make_recipe(objective=KINDS[kind], **options))
    wanted = losses(make_recipe())
    runs = []
    of_kind = drafts.Eagle3Draft if kind == "eagle3" else drafts.MedusaDraft
    record = of_kind.record
    monkeypatch.setattr(of_kind, "record", lambda self, *a: runs.append(1) or record(self, *a))
    run_recipe(make_recipe(objective={**KINDS[kind], "keep_states": True}, **options))
    assert losses(make_recipe()) == pytest.approx(wanted, rel=2e-3)
    assert len(runs) == 24  # each document once: 20 to train on, 4 held out


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_resumes_exactly(kind, make_recipe):
    recipe = make_recipe(prepare=[], objective={**KINDS[kind], "keep_states": True}, optim={"steps": 8},
                         run={"checkpoint_every": 2, "keep": 9})
    run_recipe(recipe)
    wanted, rows = load_file(recipe.output / "checkpoint-000008" / "objective.safetensors"), losses(recipe)
    run_recipe(recipe, resume=recipe.output / "checkpoint-000004")
    found = load_file(recipe.output / "checkpoint-000008" / "objective.safetensors")
    assert wanted and all(torch.equal(found[k], v) for k, v in wanted.items()) and losses(recipe) == rows


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_does_not_depend_on_the_split(kind, make_recipe):
    recipe = make_recipe(prepare=[], objective=KINDS[kind])
    torch.manual_seed(0)
    whole, loss, count = gradient(recipe, 4096)
    torch.manual_seed(0)
    parts, split_loss, many = gradient(recipe, 128)
    assert many > count and split_loss == pytest.approx(loss, rel=1e-5) and whole
    for name, g in whole.items():
        torch.testing.assert_close(parts[name], g, rtol=1e-3, atol=1e-5 * max(1.0, g.abs().max().item()))


def test_a_value_beyond_fp16_is_kept_in_fp32():
    large = torch.tensor([1.0, 1e6])
    assert drafts._half(large).dtype == torch.float32 and drafts._half(torch.ones(2)).dtype == torch.float16
    assert drafts._half(torch.tensor([70000])).dtype == torch.int64


def test_a_draft_starts_where_its_model_reads(make_recipe):
    made = make_objective(prepare(make_recipe(prepare=[], objective=KINDS["eagle3"])))
    ids = made.ids
    head = made.model.get_output_embeddings().weight
    assert torch.equal(made.draft.lm_head.weight, head[ids]) and not any(p.requires_grad for p in made.model.parameters())


def test_an_adapter_is_merged_first(make_recipe):
    with pytest.raises(UnsupportedError, match="merge the adapter first"):
        make_objective(prepare(make_recipe(objective=KINDS["eagle3"])))
