"""Behavioural: on-policy distillation through a recipe on a tiny model: it learns, resumes exactly, and says when it cannot."""

import json

import pytest
import torch
from safetensors.torch import load_file

from karui.configs.errors import KaruiError
from karui.trainers.loop import read_log
from karui.trainers.objectives.engine_sampler import dense_weights
from karui.trainers.run import prepare, run_recipe
from tests.trainers.test_distil import teacher_folder  # noqa: F401

SHORT = {"max_new_tokens": 12}


def rows_of(folder):
    return [r for r in read_log(folder) if "loss" in r]


@pytest.fixture
def same_vocabulary(tiny_folder, tmp_path):
    """A teacher of the student's shape with other weights that ends its answers often."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    g = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.add_(0.05 * torch.randn(p.shape, generator=g))
    folder = tmp_path / "same"
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_folder).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("options", [
    {}, {"divergence": "reverse_kl"}, {"loss": "policy-gradient"}, {"on_policy": 0.5, "staleness": 2, "engine": "w8", "max_drift": 1.0},
    {"loss": "policy-gradient", "on_policy": 0.5, "off_policy_first": 0.5, "temperature": 2.0}], ids=str)
@pytest.mark.parametrize("prepare_", [[], [{"method": "lora", "rank": 4, "alpha": 8}]], ids=["whole", "lora"])
def test_it_runs_and_reports(options, prepare_, make_recipe, same_vocabulary):
    recipe = make_recipe(prepare=prepare_, objective={"kind": "on-policy", "teacher": str(same_vocabulary), **SHORT, **options})
    run_recipe(recipe)
    rows = rows_of(recipe.output)
    assert len(rows) == 6 and all(r["loss"] == r["loss"] for r in rows)
    written = [r for r in rows if "rollout_tokens" in r]
    first = options.get("off_policy_first", 0)
    assert len(written) >= (1 if first else 5) and all(r["rollout_tokens"] > 0 for r in written)
    assert max(r["staleness"] for r in written) <= options.get("staleness", 0)
    drifts = [r["drift_mean"] for r in rows if "drift_mean" in r]
    assert drifts and max(drifts) < (1e-3 if options.get("engine") is None else 0.5)


def test_the_student_moves_towards_its_teacher(make_recipe, same_vocabulary):
    recipe = make_recipe(prepare=[], objective={"kind": "on-policy", "teacher": str(same_vocabulary), "divergence": "reverse_kl", **SHORT},
                         optim={"steps": 30, "lr": 3e-3, "batch": 8})
    run_recipe(recipe)
    losses = [r["loss"] for r in rows_of(recipe.output)]
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])


@pytest.mark.parametrize("stop_at", [2, 3])
def test_rollouts_resume_exactly(stop_at, make_recipe, same_vocabulary):
    """Also between two pushes, where the buffer holds what older weights wrote."""
    recipe = make_recipe(objective={"kind": "on-policy", "teacher": str(same_vocabulary), "staleness": 1, "on_policy": 0.7, **SHORT},
                         run={"checkpoint_every": 1, "keep": 9})
    run_recipe(recipe)
    wanted = load_file(recipe.output / "checkpoint-000006" / "adapter_model.safetensors")
    losses = [r["loss"] for r in rows_of(recipe.output)]
    held = (recipe.output / f"checkpoint-00000{stop_at}" / "objective.safetensors").is_file()
    assert held == (stop_at % 2 == 1)
    run_recipe(recipe, resume=recipe.output / f"checkpoint-00000{stop_at}")
    found = load_file(recipe.output / "checkpoint-000006" / "adapter_model.safetensors")
    assert all(torch.equal(found[k], v) for k, v in wanted.items())
    assert [r["loss"] for r in rows_of(recipe.output)] == losses


def test_weights_of_an_adapter_are_merged_for_the_sampler(make_recipe):
    from karui.configs.quantspec import QuantSpec

    setup = prepare(make_recipe())
    with torch.no_grad():
        for n, p in setup.model.named_parameters():
            if "lora_B" in n:
                p.normal_()
    found = dense_weights(setup.model, QuantSpec.parse("none"))
    merged = setup.model.merge_and_unload().state_dict()
    assert set(found) == set(merged) - {"lm_head.weight"}
    for name, value in found.items():
        torch.testing.assert_close(value, merged[name])


def test_rollouts_that_never_end(make_recipe, tiny_folder):
    recipe = make_recipe(objective={"kind": "on-policy", "max_new_tokens": 1, "unfinished": "drop"}, optim={"steps": 2})
    with pytest.raises(KaruiError, match="none of 4 rollouts came to an end within objective.max_new_tokens=1"):
        run_recipe(recipe)


def test_a_sampler_that_is_not_the_student_is_noticed(make_recipe, same_vocabulary, monkeypatch):
    from karui.trainers.objectives.engine_sampler import EngineSampler

    monkeypatch.setattr(EngineSampler, "push", lambda self, model, version: setattr(self, "version", version))
    recipe = make_recipe(prepare=[], objective={"kind": "on-policy", "teacher": str(same_vocabulary), "max_drift": 0.02, **SHORT},
                         optim={"lr": 3e-2})
    with pytest.raises(KaruiError, match="its text is not the student's"):
        run_recipe(recipe)


def test_a_teacher_that_does_not_know_all_tokens_is_refused(make_recipe, tiny_folder, tmp_path):
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder = tmp_path / "small"
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer) - 9, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                                 num_attention_heads=2, num_key_value_heads=1)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with pytest.raises(KaruiError, match="tokens that its teacher does not know"):
        run_recipe(make_recipe(objective={"kind": "on-policy", "teacher": str(folder)}))


def test_the_temperature_of_the_loss_is_not_the_samplers(make_recipe, same_vocabulary, monkeypatch):
    from karui.trainers.objectives.engine_sampler import EngineSampler

    drawn = []
    generate = EngineSampler.generate

    def spy(self, *args, **options):
        found = generate(self, *args, **options)
        drawn.append([d.tokens for d in found])
        return found

    monkeypatch.setattr(EngineSampler, "generate", spy)
    losses = []
    for options in ({}, {"temperature": 3.0}, {"sample_temperature": 3.0}):
        recipe = make_recipe(objective={"kind": "on-policy", "teacher": str(same_vocabulary), **SHORT, **options}, optim={"steps": 1})
        run_recipe(recipe)
        losses.append(rows_of(recipe.output)[0]["loss"])
    same, other = (str(drawn[0]) == str(x) for x in drawn[1:])
    assert same and not other and losses[0] != losses[1]


def test_top_p_below_one_is_said_to_bias(make_recipe, caplog):
    run_recipe(make_recipe(objective={"kind": "on-policy", "top_p": 0.9, **SHORT}, optim={"steps": 1}))
    assert any("biases the gradient" in r.message for r in caplog.records)
    assert json.loads((make_recipe().output / "metrics.json").read_text())["steps"] == 1
