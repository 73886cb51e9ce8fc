"""Behavioural: balancing a mixture's experts while it trains does not depend on the cut, resumes to the same bits, and balances."""

import shutil

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from karui.configs.errors import KaruiError, UnsupportedError
from karui.configs.manifest import Manifest
from karui.configs.recipe import Recipe
from karui.inference.bundle import open_model
from karui.inference.engine import Engine
from karui.trainers import zero
from karui.trainers.data import collate, plan_epoch
from karui.trainers.loop import read_log
from karui.trainers.model import enable_recompute
from karui.trainers.objectives import make_objective
from karui.trainers.pipeline import run_pipeline
from karui.trainers.preflight import dry_run
from karui.trainers.run import prepare, run_recipe
from karui.trainers.step import accumulate
from tests.trainers.launching import forget_after, job, launch, weights
from tests.trainers.test_architectures import KINDS, folder_of  # noqa: F401
from tests.trainers.test_invariance import same

WEIGHTS = {"switch": 0.3, "sequence": 0.2}
OPTIM = {"lr": 1e-3, "batch": 8, "steps": 1, "micro_tokens": 4096}


@pytest.fixture
def recipe_of(make_recipe, folder_of):  # noqa: F811
    """recipe_of(kind, **sections): of a tiny random mixture."""
    folders = {}

    def make(kind, **sections):
        folders[kind] = folders.get(kind) or folder_of(kind)
        return make_recipe(**{"model": {"name": str(folders[kind])}, "prepare": [], "optim": OPTIM, **sections})

    return make


def loads_of(routers):
    """Uneven shares that stand for those of an update before."""
    draw = torch.Generator().manual_seed(5)
    return [torch.rand(r.experts, generator=draw).softmax(0) * 2 for r in routers.routers]


def gradients(recipe, *, loads=False, recompute=False):
    """Of the first update, by name, and the figures that `finish` gives."""
    accelerator = Accelerator(cpu=True)
    setup = prepare(recipe)
    loss = make_objective(setup)
    if recompute:
        enable_recompute(setup.model)
    if loads:
        loss.routers.loads = loads_of(loss.routers)
    loss.train()
    module = accelerator.prepare(loss)
    plan = plan_epoch(setup.samples.lengths, batch=recipe.optim.batch, micro_tokens=recipe.optim.micro_tokens,
                      rank=accelerator.process_index, world=accelerator.num_processes, seed=1, packing=recipe.data.packing)
    found = accumulate(accelerator, module, [collate([setup.samples[i] for i in micro]) for micro in plan[0]])
    return ({n: p.grad for n, p in loss.named_parameters() if p.grad is not None}, found,
            loss.routers.finish(accelerator, skipped=True))


MOE = {"switch": {"balance": "switch", "weight": WEIGHTS["switch"]},
       "sequence": {"balance": "sequence", "weight": WEIGHTS["sequence"], "z_loss": 0.1}}


@pytest.mark.parametrize("objective", [{"kind": "sft"}, {"kind": "distil", "label": 0.5}])
@pytest.mark.parametrize("balance", MOE)
def test_gradient_and_figures_are_the_same_for_every_cut(balance, objective, recipe_of):
    moe = MOE[balance]
    whole, found, figures = gradients(recipe_of("mixtral", moe=moe, objective=objective), loads=True)
    none, plain, unbalanced = gradients(recipe_of("mixtral", objective=objective))
    gates = [n for n in whole if n.endswith("gate.weight")]
    assert len(gates) == 2 and all(float((whole[n] - none[n]).norm() / none[n].norm()) > 0.1 for n in gates)
    assert found.loss == pytest.approx(plain.loss, rel=1e-6)  # the loss stays the objective's own
    assert {"moe_max_load", "moe_unused", "moe_entropy"} == unbalanced.keys() < figures.keys()
    for micro_tokens, packing in [(128, True), (64, True), (128, False)]:
        cut, _, also = gradients(recipe_of("mixtral", moe=moe, objective=objective, optim={**OPTIM, "micro_tokens": micro_tokens},
                                           data={"packing": packing}), loads=True)
        same(whole, cut, 3e-6)
        assert also == pytest.approx(figures, rel=1e-5)


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "gpt_oss"])
def test_gradient_is_that_of_transformers_losses(kind, recipe_of, monkeypatch):
    """An independent route: every document alone through the stock model, transformers' own loss over all of an update's tokens."""
    monkeypatch.setitem(KINDS, "qwen2_moe", dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64,
                                                 shared_expert_intermediate_size=64))
    recipe = recipe_of(kind, moe={"balance": "switch", "weight": 0.3})
    setup = prepare(recipe)
    model = AutoModelForCausalLM.from_pretrained(recipe.model.name, dtype=torch.float32, attn_implementation="eager")
    total, count, logits = 0.0, 0, []
    for i in plan_epoch(setup.samples.lengths, batch=8, micro_tokens=4096, seed=1)[0][0]:
        sample = setup.samples[i]
        ids, mask = torch.tensor(sample.ids).long(), torch.tensor(sample.loss_mask)
        out = model.model(input_ids=ids[None], output_router_logits=True)
        logits.append(out.router_logits)
        lost = torch.nn.functional.cross_entropy(model.lm_head(out.last_hidden_state)[0, :-1], ids[1:], reduction="none")
        total, count = total + lost[mask[1:]].sum(), count + int(mask[1:].sum())
    layers = [torch.cat([x.reshape(-1, x.shape[-1]) for x in parts]) for parts in zip(*logits)]
    balancing = 0.3 * sum(load_balancing_loss_func((x,), x.shape[-1], 2) for x in layers)
    (total / count + balancing).backward()
    theirs = {f"model.{n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    # one update sets the loads, the next of the same samples has them as those of the update before
    loss = make_objective(setup)
    loss.train()
    micros = [collate([setup.samples[i] for i in plan_epoch(setup.samples.lengths, batch=8, micro_tokens=4096, seed=1)[0][0]])]
    for _ in range(2):
        loss.zero_grad()
        accumulate(Accelerator(cpu=True), loss, micros)
        figures = loss.routers.finish(Accelerator(cpu=True), skipped=False)
    same(theirs, {n: p.grad for n, p in loss.named_parameters() if p.grad is not None}, 2e-5)
    assert figures["moe_balance_loss"] == pytest.approx(float(balancing.detach()), rel=1e-5)


def test_recomputing_layers_changes_nothing(recipe_of):
    for moe in MOE.values():
        recipe = recipe_of("mixtral", moe=moe)
        plain, _, figures = gradients(recipe, loads=True)
        again, _, also = gradients(recipe, loads=True, recompute=True)
        same(plain, again, 3e-6)
        assert also == pytest.approx(figures, rel=1e-6)


def test_the_first_update_of_the_batch_wise_loss_balances_nothing(recipe_of):
    """There is no load of an update before: the shares of an even one sum to the same whatever the router does."""
    first, _, _ = gradients(recipe_of("mixtral", moe=MOE["switch"]))
    none, _, _ = gradients(recipe_of("mixtral"))
    same(none, first, 1e-5)


RANKS = {
    "switch": ("mixtral", {"balance": "switch", "weight": 0.3, "z_loss": 0.01}, "none"),
    "sequence": ("mixtral", {"balance": "sequence", "weight": 0.3}, "fsdp2"),
    "buffer": ("deepseek_v3", {"balance": "bias", "weight": 0.01}, "none"),
    "parameter": ("ernie4_5_moe", {"balance": "bias", "speed": 0.02}, "fsdp2"),
}


def test_two_ranks_are_one(recipe_of, tmp_path):
    """From the start, and from a checkpoint of one process; DDP and FSDP2, where a bias that is a parameter is split."""
    def recipe(name, where, sharding):
        kind, moe, _ = RANKS[name]
        return recipe_of(kind, moe=moe, optim={"lr": 1e-3, "batch": 7, "steps": 4, "micro_tokens": 128},
                         run={"output": str(tmp_path / f"{name}-{where}"), "sharding": sharding, "checkpoint_every": 2, "keep": 4})

    alone = {name: run_recipe(recipe(name, "alone", "none")).folder for name in RANKS}
    jobs = [job(recipe(name, "two", sharding)) for name, (_, _, sharding) in RANKS.items()]
    for name, (_, _, sharding) in RANKS.items():
        there = recipe(name, "resumed", sharding)
        shutil.copytree(alone[name], there.output)
        forget_after(there.output, 2)
        jobs.append(job(there, resume=True))
    done = launch(tmp_path, jobs)
    assert done.returncode == 0, done.stderr[-3000:]
    for name in RANKS:
        for where in ("two", "resumed"):
            for mine, theirs in zip(read_log(tmp_path / f"{name}-{where}"), read_log(alone[name])):
                keys = [k for k in mine if k.startswith("moe_") or "loss" in k]
                assert [mine[k] for k in keys] == pytest.approx([theirs[k] for k in keys], rel=1e-5, abs=1e-6), (name, where)
            torch.testing.assert_close(weights(tmp_path / f"{name}-{where}"), weights(alone[name]), rtol=0, atol=2e-5)


@pytest.mark.parametrize(("kind", "moe"), [
    ("mixtral", {"balance": "switch", "weight": 0.3, "z_loss": 0.01}), ("deepseek_v3", {"balance": "bias", "weight": 0.01}),
    ("ernie4_5_moe", {"balance": "bias", "speed": 0.02}), ("minimax_m2", {"balance": "bias"})])
def test_a_resumed_run_ends_bit_identically(kind, moe, recipe_of):
    recipe = recipe_of(kind, moe=moe, optim={"lr": 1e-3, "batch": 4, "steps": 4, "micro_tokens": 128}, run={"checkpoint_every": 2})
    whole = run_recipe(recipe)
    first = load_file(whole.final / "model.safetensors")
    rows = [r for r in read_log(whole.folder) if "moe_max_load" in r]
    again = run_recipe(recipe, resume=whole.folder / "checkpoint-000002")
    second = load_file(again.final / "model.safetensors")
    assert first.keys() == second.keys() and all(first[n].equal(second[n]) for n in first)
    keys = [k for k in rows[0] if k.startswith("moe_")]
    after = [r for r in read_log(again.folder) if "moe_max_load" in r]
    assert [[r[k] for k in keys] for r in after] == [[r[k] for k in keys] for r in rows] and len(rows) == 4


@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe", "ernie4_5_moe", "minimax_m2"])
def test_the_bias_moves_once_an_update_and_is_served(kind, recipe_of):
    """Counts of all micro-batches, from the routers of the stock model; the bundle has the bias that was trained."""
    recipe = recipe_of(kind, moe={"balance": "bias", "speed": 0.05}, optim={"lr": 1e-3, "batch": 8, "steps": 2, "micro_tokens": 64},
                       export=[{"spec": "w4g16"}], eval={"speed": False})
    setup = prepare(recipe)
    model = AutoModelForCausalLM.from_pretrained(recipe.model.name, dtype=torch.float32, attn_implementation="eager")
    block = model.model.layers[-1].mlp
    chosen = []
    block.gate.register_forward_hook(lambda m, a, out: chosen.append(out[2]))
    for i in plan_epoch(setup.samples.lengths, batch=8, micro_tokens=64, seed=recipe.run.seed)[0]:
        for j in i:
            model.model(input_ids=torch.tensor(setup.samples[j].ids).long()[None])
    count = torch.bincount(torch.cat(chosen).flatten(), minlength=4).double()
    result = run_pipeline(recipe.model_copy(update={"optim": recipe.optim.model_copy(update={"steps": 1})}))
    name, before = next((n, v) for n, v in reversed(list(model.state_dict().items())) if n.endswith("e_score_correction_bias"))
    after = next(v for n, v in AutoModelForCausalLM.from_pretrained(result.run.final).state_dict().items() if n == name)
    expected = before + 0.05 * (count.mean() - count).sign().float().view_as(before)
    torch.testing.assert_close(after, expected)
    (bundle,) = result.bundles
    manifest = Manifest.read(bundle)
    assert manifest.parity["max_abs_dlogprob"] <= manifest.parity["bound"]
    served = open_model(bundle)
    assert any(torch.equal(served.weight(n).float().flatten(), expected.flatten()) for n in served.names if n.endswith("_bias"))
    assert len(Engine.load(bundle, max_context=64).generate(["what is 3"])[0].token_ids) > 0


def test_balancing_balances(recipe_of):
    """What the busiest expert of a layer has above the mean is less than half of what it is without, by each of the ways."""
    def above(kind, moe):
        recipe = recipe_of(kind, moe=moe, optim={"lr": 5e-3, "batch": 16, "steps": 20, "micro_tokens": 4096})
        run_recipe(recipe)
        rows = [r["moe_max_load"] - 1 for r in read_log(recipe.output) if "moe_max_load" in r]
        shutil.rmtree(recipe.output)
        return sum(rows[-3:]) / 3

    without = above("mixtral", {})
    assert above("mixtral", {"balance": "switch", "weight": 0.3}) < without / 2
    assert above("mixtral", {"balance": "sequence", "weight": 0.3}) < without / 2
    without = above("glm4_moe", {})
    assert above("glm4_moe", {"balance": "bias", "speed": 0.03}) < without / 2


@pytest.mark.parametrize(("kind", "by"), [("mixtral", "score"), ("minimax_m2", "count"), ("ernie4_5_moe", "random")])
def test_pruned_experts_are_balanced_and_served(kind, by, recipe_of):
    moe = {"balance": "switch"} if kind == "mixtral" else {"balance": "bias"}
    recipe = recipe_of(kind, prepare=[{"method": "prune-experts", "keep_experts": 3, "by": by, "samples": 4}], moe=moe,
                       optim={"lr": 3e-3, "batch": 8, "steps": 6, "micro_tokens": 256}, export=[{"spec": "w4g16"}],
                       eval={"speed": False})
    result = run_pipeline(recipe)
    metrics = result.run.metrics
    assert metrics["eval_loss"] < metrics["eval_loss_before"] and 1 <= metrics["moe_max_load"] <= 1.5
    (bundle,) = result.bundles
    manifest = Manifest.read(bundle)
    assert manifest.parity["max_abs_dlogprob"] <= manifest.parity["bound"]
    engine = Engine.load(bundle, max_context=64)
    assert engine.config.mixture.experts == 3 and len(engine.generate(["what is 3"])[0].token_ids) > 0


def test_an_adapter_run_logs_the_load(recipe_of):
    recipe = recipe_of("mixtral", prepare=[{"method": "lora", "rank": 4}], optim={"lr": 1e-3, "batch": 4, "steps": 2})
    run_recipe(recipe)
    rows = [r for r in read_log(recipe.output) if "loss" in r]
    assert all(1 <= r["moe_max_load"] <= 2 and 0 < r["moe_entropy"] <= 1 and r["moe_unused"] == 0 for r in rows) and len(rows) == 2


def test_a_dense_run_logs_no_load(make_recipe):
    recipe = make_recipe(optim={"steps": 1})
    run_recipe(recipe)
    assert not [k for r in read_log(recipe.output) for k in r if k.startswith("moe_")]


@pytest.mark.parametrize(("section", "message"), [
    ({"balance": "even"}, "'none', 'switch', 'sequence' or 'bias'"), ({"ballance": "switch"}, "valid here: balance, weight, speed, z_loss"),
    ({"weight": 0.1}, "weight belongs to balance: switch, sequence or bias"), ({"z_loss": -1}, "greater than or equal to 0"),
    ({"balance": "switch", "speed": 0.1}, "speed belongs to balance: bias"), ({"balance": "bias", "speed": 0}, "greater than 0")])
def test_sections_that_make_no_sense(section, message):
    with pytest.raises(KaruiError, match=message):
        Recipe.build({"model": "m", "data": {"train": "x"}, "moe": section})


def test_the_engine_of_zero_is_refused(recipe_of, monkeypatch):
    monkeypatch.setattr(zero, "find_spec", lambda name: name)
    recipe = recipe_of("mixtral", moe={"balance": "switch"}, run={"sharding": "zero2"})
    setup = prepare(recipe)
    with pytest.raises(UnsupportedError, match="balancing of experts"):
        zero.check(recipe, make_objective(setup), setup.stages)


def test_how_experts_are_chosen_belongs_to_them():
    with pytest.raises(KaruiError, match="by: count does not belong to prune-layers"):
        Recipe.build({"model": "m", "data": {"train": "x"}, "prepare": [{"method": "prune-layers", "keep_layers": 2, "by": "count"}]})


@pytest.mark.parametrize("run", [dry_run, run_recipe])
def test_what_cannot_be_balanced_is_refused_before_it_starts(run, make_recipe, recipe_of):
    with pytest.raises(KaruiError, match="moe.balance is switch, and a model of type llama has no mixture of experts.*upcycle-moe"):
        run(make_recipe(prepare=[], moe={"balance": "switch"}))
    with pytest.raises(KaruiError, match="moe.z_loss is 0.001, and a model of type llama"):
        run(make_recipe(prepare=[], moe={"z_loss": 0.001}))
    with pytest.raises(UnsupportedError, match="routers of a mixtral have no correction bias.*valid here: none, switch, sequence"):
        run(recipe_of("mixtral", moe={"balance": "bias"}))
    with pytest.raises(KaruiError, match=r"with an adapter \(lora\) the routers are frozen"):
        run(recipe_of("mixtral", prepare=[{"method": "lora", "rank": 4}], moe={"balance": "sequence"}))
    with pytest.raises(UnsupportedError, match="run.context_parallel cuts them"):
        run(recipe_of("mixtral", moe={"balance": "switch"}, run={"context_parallel": 2}))
    with pytest.raises(KaruiError, match="objective draft-medusa leaves the model as it is"):
        run(recipe_of("mixtral", moe={"balance": "switch"}, objective={"kind": "draft-medusa"}))
