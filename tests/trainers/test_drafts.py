"""Behavioural: drafts trained through a recipe on a tiny model: kept states, resume, splits, bad input."""

import pytest
import torch
from safetensors.torch import load_file

from karui.configs.errors import KaruiError, UnsupportedError
from karui.trainers.loop import read_log
from karui.trainers.objectives import drafts, make_objective
from karui.trainers.run import prepare, run_recipe
from tests.trainers.test_distil import gradient

KINDS = {"eagle3": {"kind": "draft-eagle3", "vocabulary": 64, "intermediate": 32, "steps": 2}, "medusa": {"kind": "draft-medusa", "heads": 2},
         "medusa, own": {"kind": "draft-medusa", "heads": 2, "projection": "own", "num_layers": 2},
         "medusa, few tokens": {"kind": "draft-medusa", "heads": 2, "vocabulary": 40}}


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


def test_states_of_the_engine_are_the_models(make_recipe):
    """On fp32 weights to the engine's cache format; on a grid those of the codes, which are not the original model's."""
    tokens, positions = torch.arange(3, 40), torch.arange(37)
    made, medusa = {}, {}
    for name, steps in (("plain", []), ("quantized", [{"method": "rtn", "spec": "w2g32"}])):
        for states in ("model", "engine"):
            draft = make_objective(prepare(make_recipe(prepare=steps, objective={**KINDS["eagle3"], "states": states, "chunk_tokens": 8})))
            with torch.no_grad():
                made[name, states] = draft.record(tokens, positions)
            section = {**KINDS["medusa"], "states": states, "chunk_tokens": 8}
            with torch.no_grad():
                (medusa[name, states],) = make_objective(prepare(make_recipe(prepare=steps, objective=section))).record(tokens, positions)
    assert all(torch.equal(hidden, made[key][1]) for key, hidden in medusa.items())
    for name, tolerance in (("plain", 0.01), ("quantized", 0.05)):
        for ours, theirs in list(zip(made[name, "engine"], made[name, "model"]))[:2]:
            assert ours.shape == theirs.shape and (ours - theirs).norm() < tolerance * theirs.norm()
    assert torch.equal(made["plain", "engine"][2], made["plain", "model"][2])
    off = made["quantized", "engine"][1] - made["plain", "model"][1]
    assert off.norm() > 0.2 * made["plain", "model"][1].norm()


@pytest.mark.parametrize("start", ["copy", "random"])
def test_both_starts_train_and_a_copying_one_is_calibrated(start, make_recipe):
    recipe = make_recipe(prepare=[], objective={**KINDS["eagle3"], "start": start, "kv_heads": 4}, optim={"steps": 10})
    made = make_objective(prepare(recipe))
    assert made.draft.midlayer.self_attn.k_proj.weight.shape[0] == 64
    assert bool((made.draft.norm.weight == 1).all()) == (start == "random")
    run_recipe(recipe)
    assert losses(recipe)[-1] < losses(recipe)[0]


def test_a_shared_projection_is_the_model_s_and_is_not_trained(make_recipe):
    recipe = make_recipe(prepare=[], objective=KINDS["medusa, few tokens"], optim={"steps": 3})
    made = make_objective(prepare(recipe))
    head = made.model.get_output_embeddings().weight
    assert torch.equal(made.draft.rows(1), head[made.draft.ids]) and len(made.draft.ids) == 40
    assert {n for n, p in made.draft.named_parameters() if p.requires_grad} == {f"heads.{i}.0.linear.{part}" for i in range(2)
                                                                              for part in ("weight", "bias")}
    run_recipe(recipe)
    saved = load_file(recipe.output / "final" / "medusa.safetensors")
    assert set(saved) == {"d2t", *(f"{i}.0.linear.{part}" for i in range(2) for part in ("weight", "bias"))}
    assert any("right_0" in row for row in read_log(recipe.output))


def test_a_vocabulary_needs_the_shared_projection(make_recipe):
    with pytest.raises(KaruiError, match="a vocabulary goes with projection: shared"):
        make_recipe(prepare=[], objective={**KINDS["medusa, own"], "vocabulary": 40})


def test_heads_that_cannot_share_are_named(make_recipe):
    with pytest.raises(KaruiError, match="4 heads cannot share 3 key-value heads"):
        make_objective(prepare(make_recipe(prepare=[], objective={**KINDS["eagle3"], "kv_heads": 3})))
