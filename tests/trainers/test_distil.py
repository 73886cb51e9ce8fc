"""Behavioural: distillation through a recipe on a tiny model: every kind of row, caches, invariance, resume, bad input."""

import json

import pytest
import torch

from karui.configs.errors import CorruptError, KaruiError
from karui.configs.recipe import Recipe
from karui.trainers.loop import read_log
from karui.trainers.objectives import make_objective
from karui.trainers.run import prepare, run_recipe


def losses(folder):
    return [row["loss"] for row in read_log(folder) if "loss" in row]


def gradient(recipe, micro_tokens):
    recipe = Recipe.build({**recipe.dump(), "optim": {**recipe.dump()["optim"], "micro_tokens": micro_tokens}})
    setup = prepare(recipe)
    objective = make_objective(setup)
    objective.before_step(0, 1)
    from karui.trainers.data import collate, plan_epoch

    plan = plan_epoch(setup.samples.lengths, batch=len(setup.samples), micro_tokens=micro_tokens, shuffle=False)
    total = sum(objective(b.tokens, b.positions, b.cu_seqlens, b.targets)
                for b in (collate([setup.samples[i] for i in micro]) for micro in plan[0]))
    total.backward()
    return {n: p.grad for n, p in objective.named_parameters() if p.grad is not None}, total.item(), len(plan[0])


OBJECTIVES = {
    "forward_kl": {},
    "jsd": {"divergence": "jsd", "parameter": 0.5, "label": 0.5},
    "topk": {"rows": "topk", "k": 8},
    "sampled": {"rows": "sampled", "k": 8, "label": [1.0, 0.0]},
    "cached": {"rows": "topk", "k": 8, "cache": "auto"},
    "features": {"features": [{"loss": "mse", "layers": "uniform"}], "relations": [{"relation": "value", "heads": 2}, {"relation": "distance"}]},
}


@pytest.fixture
def teacher_folder(tiny_folder, tmp_path):
    """A teacher that is wider and deeper than the tiny student, with its tokenizer and more rows in its head."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    config = LlamaConfig(vocab_size=len(tokenizer) + 5, hidden_size=96, intermediate_size=128, num_hidden_layers=3,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512)
    folder = tmp_path / "teacher"
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_trains_and_its_gradient_does_not_depend_on_the_split(name, make_recipe, teacher_folder):
    recipe = make_recipe(prepare=[], objective={"kind": "distil", "teacher": str(teacher_folder), **OBJECTIVES[name]})
    whole, loss, once = gradient(recipe, 10_000)
    parts, same, many = gradient(recipe, 64)
    assert once == 1 and many > 4 and same == pytest.approx(loss, rel=1e-5)
    for key, value in whole.items():
        torch.testing.assert_close(parts[key], value, rtol=1e-3, atol=1e-5 * value.abs().max().item() + 1e-9)
    run_recipe(recipe)
    logged = losses(recipe.output)
    assert len(logged) == 6 and all(v == v for v in logged)


def test_a_student_that_is_its_teacher_has_no_loss(make_recipe):
    recipe = make_recipe(objective={"kind": "distil"}, optim={"steps": 1})
    run_recipe(recipe)
    assert abs(losses(recipe.output)[0]) < 1e-5


def test_a_cache_serves_a_second_student_without_its_teacher_running(make_recipe, teacher_folder, monkeypatch, tmp_path):
    objective = {"kind": "distil", "teacher": str(teacher_folder), "rows": "topk", "k": 8, "cache": str(tmp_path / "rows")}
    run_recipe(make_recipe(objective=objective))
    first = losses(make_recipe().output)
    from karui.trainers.objectives import cached

    def refuse(*args):
        raise AssertionError("the teacher ran again")

    monkeypatch.setattr(cached, "score", refuse)
    run_recipe(make_recipe(objective=objective))
    assert losses(make_recipe().output) == first
    folder = next((tmp_path / "rows").iterdir())
    stored = json.loads((folder / "cache.json").read_text())["identity"]
    assert stored["k"] == 8 and stored["kind"] == "topk"
    with pytest.raises(KaruiError, match="holds another teacher's cache .*k: 8 there, 4 needed"):
        run_recipe(make_recipe(objective={**objective, "k": 4, "cache": str(folder)}))


@pytest.mark.parametrize("change", ["teacher", "template", "temperature", "data"])
def test_a_cache_from_another_teacher_or_template_is_not_read(change, make_recipe, teacher_folder, tiny_folder, tmp_path):
    """Left to itself the run fills another; pointed at, it is refused, and the message names what differs."""
    objective = {"kind": "distil", "teacher": str(teacher_folder), "rows": "topk", "k": 8, "cache": str(tmp_path / "rows")}
    recipe = make_recipe(objective=objective)

    def make(values, recipe=recipe):
        setup = prepare(Recipe.build({**recipe.dump(), "objective": {**recipe.dump()["objective"], **values}}))
        if change == "template" and values:
            setup.tokenizer.chat_template += " "
        return make_objective(setup)

    make({})
    (first,) = (tmp_path / "rows").iterdir()
    values = {"teacher": {"teacher": str(tiny_folder)}, "temperature": {"temperature": 2.0}}.get(change, {"label": 0.5})
    other = make_recipe(objective=objective, data={"holdout": 8}) if change == "data" else recipe
    make(values, other)
    assert len(list((tmp_path / "rows").iterdir())) == 2
    with pytest.raises(KaruiError, match=f"another teacher's cache .*{change}: .* there, .* needed"):
        make({**values, "cache": str(first)}, other)


def test_weights_of_a_mixture_move_linearly_over_the_run(make_recipe, teacher_folder):
    recipe = make_recipe(objective={"kind": "distil", "teacher": str(teacher_folder), "label": [1.0, 0.0], "logits": 0.0})
    setup = prepare(recipe)
    objective = make_objective(setup)
    from karui.trainers.data import collate

    batch, found = collate([setup.samples[0]]), []
    for step in range(5):
        objective.before_step(step, 5)
        found.append(objective(batch.tokens, batch.positions, batch.cu_seqlens, batch.targets).item())
    assert found == pytest.approx([found[0] * share for share in (1.0, 0.75, 0.5, 0.25, 0.0)], rel=1e-4) and found[0] > 1


def test_a_cached_teacher_gives_the_online_teachers_loss(make_recipe, teacher_folder):
    objective = {"kind": "distil", "teacher": str(teacher_folder), "rows": "topk", "k": 8}
    run_recipe(make_recipe(objective=objective))
    online = losses(make_recipe().output)
    run_recipe(make_recipe(objective={**objective, "cache": "auto"}))
    assert losses(make_recipe().output) == pytest.approx(online, rel=2e-3)


def test_projections_resume_exactly(make_recipe, teacher_folder, tmp_path):
    from safetensors.torch import load_file

    objective = {"kind": "distil", "teacher": str(teacher_folder), "features": [{"loss": "cosine"}]}
    recipe = make_recipe(prepare=[], objective=objective, run={"checkpoint_every": 3, "keep": 9})
    run_recipe(recipe)
    wanted = {n: load_file(recipe.output / "checkpoint-000006" / n) for n in ("model.safetensors", "objective.safetensors")}
    run_recipe(recipe, resume=recipe.output / "checkpoint-000003")
    for name, tensors in wanted.items():
        found = load_file(recipe.output / "checkpoint-000006" / name)
        assert all(torch.equal(found[k], v) for k, v in tensors.items()), name


def test_vocabularies_that_cannot_be_aligned_are_refused(make_recipe, tiny_folder, tmp_path):
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder = tmp_path / "stranger"
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    LlamaForCausalLM(LlamaConfig(vocab_size=300, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                                 num_key_value_heads=1)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    values = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = values["model"]["vocab"]
    a, b = list(vocabulary)[10:12]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    (folder / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(KaruiError, match="different ids in the two vocabularies"):
        run_recipe(make_recipe(objective={"kind": "distil", "teacher": str(folder)}))
    for divergence in ("forward_kl", "sorted_l1"):
        run_recipe(make_recipe(objective={"kind": "distil", "teacher": str(folder), "align": "bytes", "divergence": divergence},
                               optim={"steps": 2}))
        assert all(v > 0 for v in losses(make_recipe().output))


def test_a_quantized_teacher_teaches_almost_the_same(make_recipe, teacher_folder):
    plain = {"kind": "distil", "teacher": str(teacher_folder)}
    run_recipe(make_recipe(objective=plain, optim={"steps": 1}))
    wanted = losses(make_recipe().output)[0]
    run_recipe(make_recipe(objective={**plain, "teacher": {"name": str(teacher_folder), "base": "w8"}}, optim={"steps": 1}))
    assert losses(make_recipe().output)[0] == pytest.approx(wanted, rel=0.05)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_offloaded_teacher_teaches_the_same_and_shares_its_cache(dtype, make_recipe, teacher_folder, tmp_path):
    teacher = {"name": str(teacher_folder), "dtype": dtype}
    found = []
    for objective in ({}, {"rows": "topk", "cache": str(tmp_path / "rows")}):
        for section in (teacher, {**teacher, "offload": True}):
            run_recipe(make_recipe(objective={"kind": "distil", "teacher": section, **objective}, optim={"steps": 1}))
            found.append(losses(make_recipe().output)[0])
    assert found[1] == pytest.approx(found[0], rel=1e-4 if dtype == "float32" else 0.02)
    assert found[3] == found[2] and len(list((tmp_path / "rows").iterdir())) == 1


def test_an_offloaded_teacher_is_whole_or_refused(make_recipe, teacher_folder):
    from safetensors.torch import load_file, save_file

    tensors = load_file(teacher_folder / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, teacher_folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CorruptError, match="missing or misshapen: model.norm.weight"):
        run_recipe(make_recipe(objective={"kind": "distil", "teacher": {"name": str(teacher_folder), "offload": True}}))


def test_nan_teacher_logits_are_named(make_recipe, teacher_folder):
    from safetensors.torch import load_file, save_file

    tensors = load_file(teacher_folder / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, teacher_folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(KaruiError, match="teacher's logits are not finite"):
        run_recipe(make_recipe(objective={"kind": "distil", "teacher": str(teacher_folder)}))
