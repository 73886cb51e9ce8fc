"""Behavioural and reference: training of models with sparse attention, and of their indexers by what attention looks at."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from karui.configs.errors import KaruiError, UnsupportedError
from karui.configs.recipe import Recipe
from karui.kernels.sparse_attention.reference import sparse_attention as dense_reference
from karui.trainers.data import IGNORE, collate, plan_epoch
from karui.trainers.loop import read_log
from karui.trainers.model import ATTENTION, LossSum, enable_recompute, register_attention
from karui.trainers.objectives import make_objective
from karui.trainers.objectives.indexed import IndexedSft
from karui.trainers.preflight import dry_run
from karui.trainers.run import make_optimizer, prepare, run_recipe
from karui.trainers.sparse import Indexing, LeanSparse, indexers, install_sparse_attention
from karui.trainers.step import accumulate
from tests.processes import ranks
from tests.trainers.test_invariance import same

SIZES = dict(vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4,
             q_lora_rank=24, kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8, max_position_embeddings=64,
             n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=16, first_k_dense_replace=1, n_group=1,
             topk_group=1, index_n_heads=24, index_head_dim=12, index_topk=6)
KINDS = {"deepseek_v32": {}, "glm_moe_dsa": {}, "shared": {"indexer_types": ["full", "shared", "full"]}}
LENGTHS = (9, 20, 4, 13)
STEPS = [{"method": "mla", "rank": 24}, {"method": "sparse-attention", "top_k": 8, "index_heads": 4, "index_head_dim": 24}]
OPTIM = {"lr": 1e-3, "batch": 8, "steps": 4, "micro_tokens": 128}


def tiny(kind):
    torch.manual_seed(1)
    name = "glm_moe_dsa" if kind == "shared" else kind
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **{**SIZES, **KINDS[kind]}), attn_implementation="eager")
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.ndim >= 2:
                tensor.normal_(std=0.2)
    return model


def lean(model):
    register_attention()
    model.set_attn_implementation(ATTENTION)
    install_sparse_attention(model)
    return model


def packed():
    g = torch.Generator().manual_seed(2)
    documents = [torch.randint(0, 60, (n,), generator=g) for n in LENGTHS]
    targets = torch.cat([torch.cat([d[1:], torch.tensor([IGNORE])]) for d in documents])
    targets[:4] = IGNORE
    return documents, (torch.cat(documents), torch.cat([torch.arange(n) for n in LENGTHS]), torch.tensor([0, *LENGTHS]).cumsum(0), targets)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_are_computed_as_transformers_computes_each(kind):
    documents, row = packed()
    ours, theirs = lean(tiny(kind)), tiny(kind)
    got = LossSum(ours, 16)(*row)
    logits = torch.cat([theirs(d[None], use_cache=False).logits[0] for d in documents])
    want = torch.nn.functional.cross_entropy(logits, row[3], ignore_index=IGNORE, reduction="sum")
    assert abs(got - want) < 1e-5 * want
    got.backward()
    want.backward()
    grads = dict(ours.named_parameters())
    for name, parameter in theirs.named_parameters():
        if parameter.grad is not None:
            assert (grads[name].grad - parameter.grad).norm() <= 1e-4 * parameter.grad.norm() + 1e-6, name
    assert all(p.grad is None for m in indexers(ours) for p in m.parameters())


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_the_indexers_loss_is_that_of_whole_matrices_over_transformers_own_attention(kind, dense):
    """Attention probabilities and index scores as transformers' modules make them, document by document."""
    documents, row = packed()
    model, theirs = lean(tiny(kind)), tiny(kind)
    theirs.config.index_topk = 6
    weight = torch.rand(len(row[0]))
    indexing = Indexing(dense=dense, weight=weight)
    with torch.set_grad_enabled(not dense):
        model.model(input_ids=row[0][None], position_ids=row[1][None], cu_seqlens=row[2], indexing=indexing, use_cache=False)
    assert sorted(indexing.losses) == [i for i, m in enumerate(model.model.layers) if m.self_attn.indexer is not None]
    # a dense pass of transformers is one in which every key is among the best
    for layer in theirs.model.layers:
        if layer.self_attn.indexer is not None:
            layer.self_attn.indexer.index_topk = 100 if dense else 6
    at, sums = 0, dict.fromkeys(indexing.losses, 0.0)
    for document in documents:
        n, seen = len(document), {}
        handles = [layer.self_attn.register_forward_hook(
            lambda m, _, kw, out, i=i, seen=seen: seen.update({i: (kw["hidden_states"].detach(), kw["position_embeddings"], out[1].detach())}),
            with_kwargs=True) for i, layer in enumerate(theirs.model.layers)]
        theirs(document[None], use_cache=False)
        for handle in handles:
            handle.remove()
        for i in sums:
            module = theirs.model.layers[i].self_attn
            x, (cosine, sine), shares = seen[i]
            residual = module.q_a_layernorm(module.q_a_proj(x)).detach()
            copy = LeanSparse(module)
            iq, ik, iw = copy._index(x[0], residual[0], (cosine[0], sine[0]))
            # queries and keys whose softmax is the probabilities that transformers gave
            logs = shares.clamp_min(1e-30).log()
            q, k = logs, torch.eye(n).expand(1, 4, n, n)
            _, loss = dense_reference(q, k, k, iq, ik, iw, torch.tensor([0, n]), 1.0, weight[at : at + n], None if dense else 6)
            sums[i] = sums[i] + loss
        at += n
    for i, loss in indexing.losses.items():
        assert float(loss.detach()) == pytest.approx(float(sums[i].detach()), rel=1e-4)
    got = torch.autograd.grad(indexing.mean(), [p for m in indexers(model) for p in m.parameters()])
    want = torch.autograd.grad(sum(sums.values()) / len(sums), [p for m in indexers(theirs) for p in m.parameters()])
    for a, b in zip(got, want):
        assert float(b.abs().max()) > 0 and (a - b).norm() <= 1e-4 * b.norm() + 1e-7


def gradients(recipe, warm=False):
    """Gradients of the first step by parameter name, through the recipe's objective."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    setup = prepare(recipe)
    objective = make_objective(setup)
    objective.before_step(0, 1)
    assert objective.warming is warm
    module = accelerator.prepare(objective)
    plan = plan_epoch(setup.samples.lengths, batch=recipe.optim.batch, micro_tokens=recipe.optim.micro_tokens, seed=1,
                      rank=accelerator.process_index, world=accelerator.num_processes, packing=recipe.data.packing)
    module.train()
    found = accumulate(accelerator, module, [collate([setup.samples[i] for i in micro]) for micro in plan[0]])
    objective.after_backward()
    return {n: p.grad for n, p in objective.named_parameters() if p.grad is not None}, found


def recipe_with(make_recipe, warm_up=0.0, objective=None, **sections):  # noqa: F811
    return make_recipe(prepare=STEPS, optim={**OPTIM, **sections.pop("optim", {})},
                       objective={"kind": "sft", "indexer": {"warm_up": warm_up, "lr_scale": 1.0}, **(objective or {})}, **sections)


@pytest.mark.parametrize("warm", [True, False])
def test_the_gradient_is_the_same_for_every_cut(warm, make_recipe):
    whole, found = gradients(recipe_with(make_recipe, float(warm), optim={"micro_tokens": 4096}), warm)
    assert {".indexer." in n for n in whole} == ({True} if warm else {True, False})
    for micro_tokens, packing in [(128, True), (64, True), (128, False)]:
        cut, also = gradients(recipe_with(make_recipe, float(warm), optim={"micro_tokens": micro_tokens}, data={"packing": packing}), warm)
        same(whole, cut, 2e-5)
        assert also.loss == pytest.approx(found.loss, rel=1e-5)


RANK = """
import sys, json
from safetensors.torch import save_file
from karui.configs.recipe import Recipe
from tests.trainers.test_sparse_attention import gradients
import torch.distributed as dist
recipe = Recipe.build(json.load(open(sys.argv[1])))
grads, found = gradients(recipe, recipe.objective.indexer.warm_up > 0)
if dist.get_rank() == 0:
    save_file({k: v.contiguous() for k, v in grads.items()}, sys.argv[2])
dist.destroy_process_group()
"""


@pytest.mark.parametrize("warm", [True, False])
def test_the_gradient_of_two_ranks_is_that_of_one(warm, make_recipe, tmp_path):
    recipe = recipe_with(make_recipe, float(warm), optim={"batch": 7})
    one, _ = gradients(recipe, warm)
    (tmp_path / "recipe.json").write_text(json.dumps(recipe.dump()))
    (tmp_path / "rank.py").write_text(RANK)
    done = ranks(tmp_path / "rank.py", tmp_path / "recipe.json", tmp_path / "two.safetensors")
    assert done.returncode == 0, done.stderr[-3500:]
    same(one, {k.removeprefix("module."): v for k, v in load_file(tmp_path / "two.safetensors").items()}, 2e-5)


def test_the_model_s_gradient_is_its_own_loss_s_and_the_indexers_that_of_theirs(make_recipe):
    both, _ = gradients(recipe_with(make_recipe))
    alone, _ = gradients_without(make_recipe)
    ours = {n: g for n, g in both.items() if ".indexer." not in n}
    same(ours, alone)


def gradients_without(make_recipe):
    recipe = make_recipe(prepare=STEPS, optim=OPTIM)
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    setup = prepare(recipe)
    objective = make_objective(setup)
    assert type(objective) is LossSum and not any(p.requires_grad for m in indexers(setup.model) for p in m.parameters())
    plan = plan_epoch(setup.samples.lengths, batch=8, micro_tokens=128, seed=1, rank=0, world=1, packing=True)
    found = accumulate(accelerator, accelerator.prepare(objective), [collate([setup.samples[i] for i in micro]) for micro in plan[0]])
    return {n: p.grad for n, p in objective.named_parameters() if p.grad is not None}, found


def test_layers_that_run_again_give_the_same_gradient():
    _, row = packed()
    found = []
    for again in (False, True):
        objective = IndexedSft(lean(tiny("deepseek_v32")), 16)
        objective.index_with(Recipe.build({"model": "m", "data": {"train": "x"}, "objective": {"indexer": {}}}).objective.indexer)
        objective.before_step(0, 10)
        objective.train()
        if again:
            enable_recompute(objective.model)
        objective(*row).backward()
        found.append({n: p.grad for n, p in objective.named_parameters() if p.grad is not None})
    same(*found)
    assert any(".indexer." in n for n in found[0])


def test_a_warm_up_moves_the_indexers_alone_then_all_move(make_recipe):
    recipe = recipe_with(make_recipe, 0.5, run={"checkpoint_every": 2, "eval_every": 2}, optim={"weight_decay": 0.1})
    done = run_recipe(recipe)
    start = {n: p.detach() for n, p in prepare(recipe).model.state_dict().items()}
    middle, end = (load_file(done.folder / at / "model.safetensors") for at in ("checkpoint-000002", "final"))
    for name, before in start.items():
        if name in middle:
            assert torch.equal(middle[name], before) != (".indexer." in name), name
    assert sum(not torch.equal(end[n], middle[n]) for n in end) == len(end)
    log = [r for r in read_log(done.folder) if "loss" in r]
    assert log[0]["loss"] == pytest.approx(log[0]["loss_indexer"], rel=1e-5) and log[2]["loss"] > log[2]["loss_indexer"] > 0
    losses = [r["eval_loss"] for r in read_log(done.folder) if "eval_loss" in r]
    assert len(losses) == 3 and losses[-1] < losses[1]


@pytest.mark.parametrize("at", [1, 3])
def test_a_resumed_run_ends_bit_identically(at, make_recipe):
    """Left in the warm-up, where the model has no optimizer state yet, and behind it."""
    recipe = recipe_with(make_recipe, 0.5, run={"checkpoint_every": 1, "keep": 4})
    whole = run_recipe(recipe)
    first = load_file(whole.final / "model.safetensors")
    again = run_recipe(recipe, resume=whole.folder / f"checkpoint-00000{at}")
    second = load_file(again.final / "model.safetensors")
    assert first.keys() == second.keys() and all(first[n].equal(second[n]) for n in first)


def test_a_second_run_goes_on_with_the_indexers_of_the_first(make_recipe, tmp_path):
    """Beside a teacher, and as an ordinary model of its type."""
    first = run_recipe(recipe_with(make_recipe, 1.0, run={"output": str(tmp_path / "warm")}, optim={"steps": 20}))
    means = [r["loss_indexer"] for r in read_log(first.folder) if "loss_indexer" in r]
    assert means[-1] < 0.9 * means[0]
    recipe = recipe_with(make_recipe, objective={"kind": "distil", "label": 0.5}, model={"name": str(first.final)}, optim={"steps": 2})
    second = run_recipe(Recipe.build({**recipe.dump(), "prepare": []}))
    assert [r["loss_indexer"] for r in read_log(second.folder) if "loss" in r][0] > 0


def test_the_indexers_learn_at_a_rate_of_their_own(make_recipe):
    setup = prepare(recipe_with(make_recipe, objective={"indexer": {"lr_scale": 3.0}}))
    objective = make_objective(setup)
    groups = make_optimizer(setup.recipe, objective).param_groups
    own = {id(p) for m in indexers(setup.model) for p in m.parameters()}
    assert {(g["lr_scale"], id(p) in own) for g in groups for p in g["params"]} == {(3.0, True), (1.0, False)}
    assert sum(len(g["params"]) for g in groups) == sum(1 for _ in objective.parameters())


def test_an_adapter_leaves_the_indexers_alone(make_recipe, tmp_path):
    first = run_recipe(recipe_with(make_recipe, run={"output": str(tmp_path / "first")}))
    kept = {"model": {"name": str(first.final)}, "optim": {"lr": 1e-2, "steps": 4}}
    done = run_recipe(make_recipe(**kept))
    assert done.metrics["eval_loss"] < done.metrics["eval_loss_before"]
    assert not [n for n in load_file(done.final / "adapter_model.safetensors") if "indexer" in n]
    with pytest.raises(KaruiError, match="adapter target 'model.layers.0.self_attn.indexer.wk' is of an indexer"):
        run_recipe(make_recipe(**kept, prepare=[{"method": "lora", "rank": 4, "targets": ["wk"]}]))
    with pytest.raises(KaruiError, match="which an adapter leaves as they are"):
        run_recipe(make_recipe(**kept, objective={"indexer": {}}))


def test_what_cannot_be_is_refused(make_recipe):
    for run in (dry_run, run_recipe):
        with pytest.raises(KaruiError, match="objective.indexer: a model of type 'llama' has no indexer; add"):
            run(make_recipe(prepare=[], objective={"indexer": {}}))
        with pytest.raises(KaruiError, match="top_k is 512; expected 1 to 511"):
            run(make_recipe(prepare=[STEPS[0], {**STEPS[1], "top_k": 512}]))
        with pytest.raises(UnsupportedError, match="Put {method: mla} before it"):
            run(make_recipe(prepare=STEPS[1:]))
    for objective in ({"indexer": {"warm_up": 1.5}}, {"indexer": {"lr_scale": 0}}, {"kind": "draft-medusa", "indexer": {}}):
        with pytest.raises(KaruiError):
            make_recipe(objective=objective)
    model = tiny("deepseek_v32")
    model.config.model_type = "another"
    with pytest.raises(UnsupportedError, match="another: its sparse attention is not supported in training; supported are deepseek_v32"):
        install_sparse_attention(model)
    with pytest.raises(UnsupportedError, match="one ragged row, got a batch of 2"):
        lean(tiny("deepseek_v32"))(torch.zeros(2, 5, dtype=torch.int64), use_cache=False)


def test_passes_of_a_step_are_kept_apart():
    """Two passes in one step keep apart what they say of the indexers."""
    _, row = packed()
    objective = IndexedSft(lean(tiny("deepseek_v32")), 16)
    objective.index_with(Recipe.build({"model": "m", "data": {"train": "x"}, "objective": {"indexer": {}}}).objective.indexer)
    objective.before_step(0, 10)
    objective.train()
    first = float(objective(*row).detach())
    assert first == pytest.approx(float(objective(*row).detach()), rel=1e-6)
    single = objective.metrics()["loss_indexer"]
    objective.before_step(1, 10)
    objective(*row)
    assert objective.metrics()["loss_indexer"] == pytest.approx(single, rel=1e-6) and objective.extra == {}
    objective.eval()
    assert float(objective(*row).detach()) == pytest.approx(float(LossSum(objective.model, 16)(*row).detach()), rel=1e-6)
