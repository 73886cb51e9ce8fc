"""End to end: the shipped distillation recipes on a tiny model, up to their bundles."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from karui.configs.errors import KaruiError
from karui.inference.bundle import export_model, open_model
from karui.inference.engine import Engine
from karui.inference.loading import load_tokenizer
from karui.inference.requests import SamplingParams
from karui.inference.speculative.config import SpeculationConfig
from karui.inference.speculative.factory import copy_draft, draft_target
from karui.inference.speculative.target import TargetIdentity
from karui.trainers.loop import read_log
from karui.trainers.objectives.drafts import pack_drafts


def test_distil_logits(run_shipped):
    recipe, result = run_shipped("distil-logits", "prepare.0.keep_layers=1", "objective.k=8")
    (bundle,) = result.bundles
    assert json.loads((bundle / "config.json").read_text())["num_hidden_layers"] == 1
    rows = [r for r in read_log(recipe.output) if "loss" in r]
    assert rows[-1]["loss_logits"] < rows[0]["loss_logits"] and rows[0]["loss_label"] > 0
    assert len(Engine.load(bundle, max_context=64).generate(["what is 3 plus 9"])[0].token_ids) > 0
    # the student drafts for the model it learned from
    asked = ["what is 3 plus 9"], SamplingParams(max_tokens=24, ignore_eos=True)
    config = SpeculationConfig(method="draft", path=str(bundle), k=3, adaptive=False)
    drafting = Engine.load(recipe.model.name, max_context=96, speculation=config)
    assert drafting.generate(*asked)[0].token_ids == Engine.load(recipe.model.name, max_context=96).generate(*asked)[0].token_ids
    assert drafting.stats.num_drafted_tokens > drafting.stats.num_accepted_tokens > 0


@pytest.mark.parametrize(("name", "override"), [("minitron", "prepare.0.intermediate=64"), ("sparsegpt", "prepare.0.samples=8")])
def test_a_pruned_student_is_healed_and_exported_as_it_is(name, override, run_shipped):
    recipe, result = run_shipped(name, override, "optim.steps=12", "optim.lr=2e-3", "export.0.samples=8", "export.0.length=32")
    (bundle,) = result.bundles
    metrics = result.run.metrics
    assert metrics["eval_loss"] < metrics["eval_loss_before"]
    if name == "minitron":
        assert json.loads((bundle / "config.json").read_text())["intermediate_size"] == 64
    else:
        weights = [v.dequantize() for n, v in dict(open_model(bundle).weights()).items() if n.endswith("proj.weight")]
        assert len(weights) == 14 and all(float((w == 0).float().mean()) >= 0.5 for w in weights)
    assert len(Engine.load(bundle, max_context=64).generate(["what is 3 plus 9"])[0].token_ids) > 0


def test_distil_on_policy(run_shipped):
    recipe, result = run_shipped("distil-on-policy", "prepare.0.keep_layers=1", "objective.max_new_tokens=8",
                                 "objective.off_policy_first=0.25")
    rows = [r for r in read_log(recipe.output) if "loss" in r]
    assert "rollout_tokens" not in rows[0] and rows[-1]["rollout_tokens"] > 0
    assert len(result.bundles) == 1


SMALL = ["objective.vocabulary=64", "objective.intermediate=32", "objective.kv_heads=null"]


@pytest.mark.parametrize(("name", "file"), [("draft-eagle3", "eagle3"), ("draft-medusa", "medusa")])
def test_drafts(name, file, run_shipped):
    recipe, result = run_shipped(name, *([*SMALL, "objective.steps=2", "optim.lr=5e-3"] if file == "eagle3" else []), "optim.steps=12")
    (bundle,) = result.bundles
    rows = [r for r in read_log(recipe.output) if "loss" in r]
    losses = [r["loss"] for r in rows]
    assert sum(losses[-4:]) < sum(losses[:4]) and (bundle / f"{file}.safetensors").is_file()
    prompts = ["what is 3 plus 9", "what is 5 plus 25"]
    plain = Engine.load(bundle, max_context=96).generate(prompts, SamplingParams(max_tokens=24, ignore_eos=True))
    drafting = Engine.load(bundle, max_context=96, speculation=SpeculationConfig(method=file, k=3, adaptive=False, least=0.0))
    drafted = drafting.generate(prompts, SamplingParams(max_tokens=24, ignore_eos=True))
    assert [o.token_ids for o in drafted] == [o.token_ids for o in plain]
    assert drafting.stats.num_drafted_tokens > 0


def test_a_draft_for_another_target_is_refused(run_shipped, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    recipe, _ = run_shipped("draft-eagle3", *SMALL, "optim.steps=1", "export=[]")
    other = tmp_path / "other"
    LlamaForCausalLM(LlamaConfig(vocab_size=259, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                                 num_key_value_heads=1)).save_pretrained(other)
    with pytest.raises(KaruiError, match="a draft for another model"):
        pack_drafts(recipe.output / "final", other)


@pytest.mark.parametrize(("name", "file"), [("draft-eagle3", "eagle3"), ("draft-medusa", "medusa")])
def test_a_draft_is_marked_and_packed_for_its_model_alone(name, file, run_shipped, tiny_folder, tmp_path, caplog):
    recipe, result = run_shipped(name, *(SMALL if file == "eagle3" else []), "optim.steps=1")
    final, (bundle,) = recipe.output / "final", result.bundles
    for folder in (final, bundle):  # both serve it
        assert draft_target(folder, file) == TargetIdentity.of(open_model(folder), load_tokenizer(folder))
        Engine.load(folder, max_context=64, speculation=f"{file}:3")
    assert draft_target(final, file) != draft_target(bundle, file) and "does not say" not in caplog.text

    tuned = tmp_path / "tuned"
    shutil.copytree(tiny_folder, tuned)
    weights = load_file(tuned / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"] += 0.01
    save_file(weights, tuned / "model.safetensors", metadata={"format": "pt"})
    other = export_model(tuned, "w4g32", tmp_path / "tuned-w4g32").path
    with pytest.raises(KaruiError, match="the shapes are the same, the weights are not"):
        pack_drafts(final, other)
    assert not (other / f"{file}.safetensors").exists()
    assert pack_drafts(final, other, any_target=True) == [f"{file}.safetensors"]
    Engine.load(other, max_context=64, speculation=f"{file}:3")
    # from bundle to bundle of the same codes
    twin = tmp_path / "twin"
    shutil.copytree(bundle, twin)
    (twin / f"{file}.safetensors").unlink()
    assert pack_drafts(bundle, twin) == [f"{file}.safetensors"]
    # of a run from before the mark
    older = tmp_path / "older"
    older.mkdir()
    copy_draft(file, final, older, None)
    assert pack_drafts(older, twin) == [f"{file}.safetensors"] and draft_target(twin, file) is None
    assert "does not say which model it was trained for" in caplog.text
