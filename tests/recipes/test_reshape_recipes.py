"""End to end: the shipped recipes that change an architecture, on a tiny model: training, parity gate, bundle, engine, resume."""

import json

import pytest
from safetensors.torch import load_file

from karui.configs.errors import KaruiError
from karui.configs.manifest import Manifest
from karui.configs.recipe import Recipe
from karui.inference.engine import Engine
from karui.trainers.estimate import outline
from karui.trainers.loop import read_log
from karui.trainers.preflight import dry_run
from karui.trainers.run import run_recipe
from tests.trainers.conftest import make_recipe  # noqa: F401

RECIPES = {
    "merge-kv-heads": ([], {"model_type": "llama", "num_key_value_heads": 1}, "KV cache 256 -> 128 bytes a token"),
    "sliding-window": (["prepare.0.window=8", "prepare.0.every=2"],
                       {"model_type": "ministral", "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
                       "at 512 tokens 0.1 -> 0.1 MB"),
    "upcycle-moe": ([], {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}, "per token)"),
    "sparse-attention": (["prepare.0.rank=32", "prepare.1.top_k=16", "prepare.1.index_head_dim=32"],
                         {"model_type": "deepseek_v32", "kv_lora_rank": 32, "index_topk": 16, "index_n_heads": 4},
                         "KV cache 192 -> 320 bytes a token"),
    "mla": (["prepare.0.rank=32"], {"model_type": "deepseek_v3", "kv_lora_rank": 32, "qk_rope_head_dim": 16},
            "KV cache 256 -> 192 bytes a token"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_the_shipped_recipe_ends_in_a_bundle_the_engine_runs(name, run_shipped, capfd):
    overrides, expected, told = RECIPES[name]
    recipe, result = run_shipped(name, *overrides, "optim.steps=8", "optim.lr=2e-3")
    (bundle,) = result.bundles
    config = json.loads((bundle / "config.json").read_text())
    assert {key: config[key] for key in expected} == expected
    manifest = Manifest.read(bundle)
    assert manifest.parity["max_abs_dlogprob"] <= manifest.parity["bound"]
    assert told in capfd.readouterr().out
    metrics = result.run.metrics
    assert metrics["eval_loss"] < metrics["eval_loss_before"]
    assert len(Engine.load(bundle, max_context=64).generate(["what is 3 plus 9"])[0].token_ids) > 0


def test_a_mixture_starts_at_the_loss_of_the_dense_model(make_recipe):  # noqa: F811
    optim = {"lr": 1e-3, "batch": 4, "steps": 1}
    before = [run_recipe(make_recipe(prepare=prepare, optim=optim)).metrics["eval_loss_before"]
              for prepare in ([], [{"method": "upcycle-moe", "experts": 4}], [{"method": "upcycle-moe", "experts": 8, "split": 2}])]
    assert before[1] == pytest.approx(before[0], rel=1e-6) and before[2] == pytest.approx(before[0], rel=1e-6)


@pytest.mark.parametrize("step", [{"method": "mla", "rank": 16}, {"method": "upcycle-moe", "experts": 4},
                                  {"method": "sliding-window", "window": 8, "every": 2}])
def test_a_resumed_run_ends_bit_identically(step, make_recipe):  # noqa: F811
    recipe = make_recipe(prepare=[step], optim={"lr": 1e-3, "batch": 4, "steps": 4}, run={"checkpoint_every": 2})
    whole = run_recipe(recipe)
    first = load_file(whole.final / "model.safetensors")
    again = run_recipe(recipe, resume=whole.folder / "checkpoint-000002")
    second = load_file(again.final / "model.safetensors")
    assert first.keys() == second.keys() and all(first[n].equal(second[n]) for n in first)


def test_steps_follow_one_another(make_recipe):  # noqa: F811
    """Fewer layers, one key-value head, and latent attention of that head, which loses nothing more."""
    optim = {"lr": 1e-3, "batch": 4, "steps": 1}
    pruned = [{"method": "prune-layers", "keep_layers": 1}, {"method": "merge-kv-heads", "kv_heads": 1}]
    runs = [run_recipe(make_recipe(prepare=prepare, optim=optim)).metrics["eval_loss_before"]
            for prepare in (pruned, [*pruned, {"method": "mla", "rank": 17}])]
    assert runs[1] == pytest.approx(runs[0], rel=1e-5)


def test_a_window_is_seen_by_the_loss(make_recipe):  # noqa: F811
    optim = {"lr": 1e-3, "batch": 4, "steps": 1}
    losses = [run_recipe(make_recipe(prepare=[{"method": "sliding-window", "window": w, "every": None}], optim=optim)).metrics
              for w in (2, 4, 400)]
    whole = run_recipe(make_recipe(prepare=[], optim=optim)).metrics
    assert losses[2]["eval_loss_before"] == pytest.approx(whole["eval_loss_before"], rel=1e-6)
    assert len({round(m["eval_loss_before"], 6) for m in losses}) == 3


@pytest.mark.parametrize("step,message", [
    ({"method": "merge-kv-heads", "kv_heads": 2}, "kv_heads is 2; the model has 2"),
    ({"method": "sliding-window", "window": 512}, "expected 1 to 511"),
    ({"method": "sliding-window", "window": 8}, "every is 4; expected 2 to 2"),
    ({"method": "upcycle-moe", "experts": 5, "top_k": 1, "split": 5}, "does not divide the 128 neurons"),
    ({"method": "mla", "rank": 64}, "rank is 64; expected 2 to 49"),
])
def test_a_dry_run_refuses_what_the_model_cannot_have(step, message, make_recipe):  # noqa: F811
    for run in (dry_run, run_recipe):
        with pytest.raises(KaruiError, match=message):
            run(make_recipe(prepare=[step]))


def test_a_plan_without_a_gpu_counts_the_changed_model(make_recipe):  # noqa: F811
    shapes = [outline(make_recipe(prepare=p)).shape for p in ([], [{"method": "merge-kv-heads", "kv_heads": 1}])]
    assert shapes[0].kv == 2 * shapes[1].kv and shapes[1].parameters == shapes[0].parameters - 2 * 2 * 16 * 64


def test_a_dry_run_counts_the_changed_model(make_recipe):  # noqa: F811
    whole, moe = (dry_run(make_recipe(prepare=p, objective={"kind": "sft"}))
                  for p in ([], [{"method": "upcycle-moe", "experts": 4}]))
    assert moe.parameters.total == whole.parameters.total + 2 * (3 * 3 * 64 * 128 + 4 * 64)
    assert "per token)" in moe.notes[0] and not [n for n in whole.notes if "KV cache" in n]


@pytest.mark.parametrize("step,message", [
    ({"method": "upcycle-moe", "experts": 1}, "greater than or equal to 2"),
    ({"method": "upcycle-moe", "experts": 2, "top_k": 3}, "top_k is 3, more than the 2 experts"),
    ({"method": "upcycle-moe", "experts": 5, "split": 2}, "does not divide the 5 experts"),
    ({"method": "upcycle-moe", "experts": 8, "split": 2, "top_k": 3}, "no whole number of copies"),
    ({"method": "sliding-window", "window": 0}, "greater than or equal to 1"),
    ({"method": "merge-kv-heads", "kv_heads": 0}, "greater than or equal to 1"),
    ({"method": "mla", "rank": 1}, "greater than or equal to 2"),
    ({"method": "mla", "rank": 8, "kv_heads": 1}, "unknown key"),
])
def test_recipes_that_make_no_sense(step, message):
    with pytest.raises(KaruiError, match=message):
        Recipe.build({"model": "m", "data": {"train": "x"}, "prepare": [step]})


def test_an_adapter_is_refused_at_once(make_recipe):  # noqa: F811
    recipe = make_recipe(prepare=[{"method": "merge-kv-heads", "kv_heads": 1}, {"method": "lora", "rank": 4}])
    with pytest.raises(KaruiError, match="whose architecture merge-kv-heads changes"):
        dry_run(recipe)


def test_losses_are_finite_while_it_heals(make_recipe):  # noqa: F811
    recipe = make_recipe(prepare=[{"method": "mla", "rank": 32}], optim={"lr": 2e-3, "batch": 4, "steps": 6, "micro_tokens": 128})
    run_recipe(recipe)
    seen = [r["loss"] for r in read_log(recipe.output) if "loss" in r]
    assert len(seen) == 6 and seen[-1] < seen[0]
