"""Behavioural: the step's gradient does not depend on how its samples are cut, packed, chunked or spread over ranks."""

import json

import pytest
import torch
from safetensors.torch import load_file

from karui.trainers.data import collate, plan_epoch
from karui.trainers.model import LossSum
from karui.trainers.run import prepare
from karui.trainers.step import accumulate
from tests.processes import ranks


def gradients(recipe, *, method_b=0.05):
    """Gradients of the first step by parameter name; B is made non-zero so that A has a gradient too."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    setup = prepare(recipe)
    with torch.no_grad():
        for name, parameter in setup.model.named_parameters():
            if "lora_B" in name or "vera_lambda_b" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) * method_b)
    loss = LossSum(setup.model, recipe.objective.chunk_tokens)
    module = accelerator.prepare(loss)
    plan = plan_epoch(setup.samples.lengths, batch=recipe.optim.batch, micro_tokens=recipe.optim.micro_tokens,
                      rank=accelerator.process_index, world=accelerator.num_processes, seed=1, packing=recipe.data.packing)
    found = accumulate(accelerator, module, [collate([setup.samples[i] for i in micro]) for micro in plan[0]])
    return {n: p.grad for n, p in loss.named_parameters() if p.grad is not None}, found


def same(a, b, tolerance=1e-6):
    assert a.keys() == b.keys() and a
    for name in a:
        scale = float(a[name].abs().max())
        assert scale > 0, name
        assert float((a[name] - b[name]).abs().max()) <= tolerance * max(scale, 1e-2), name


@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
def test_gradient_is_the_same_for_every_cut(make_recipe, method):
    steps = [] if method == "full" else [{"method": method, "rank": 4, "alpha": 8}]
    optim = {"lr": 1e-3, "batch": 8, "steps": 1}
    whole, found = gradients(make_recipe(prepare=steps, optim={**optim, "micro_tokens": 4096}))
    for micro_tokens, packing, chunk in [(4096, True, 3), (128, True, 1024), (64, True, 7), (128, False, 5)]:
        recipe = make_recipe(prepare=steps, optim={**optim, "micro_tokens": micro_tokens}, data={"packing": packing},
                             objective={"chunk_tokens": chunk})
        cut, also = gradients(recipe)
        same(whole, cut)
        assert also.num_supervised == found.num_supervised and also.loss == pytest.approx(found.loss, rel=1e-6)


def test_gradient_equals_transformers_loss_on_padded_samples(make_recipe, tiny_folder):
    """An independent route: each sample alone through the stock model, one mean over all supervised tokens."""
    from transformers import AutoModelForCausalLM

    recipe = make_recipe(prepare=[], optim={"batch": 8, "steps": 1, "micro_tokens": 4096})
    ours, found = gradients(recipe)
    setup = prepare(recipe)
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32, attn_implementation="eager")
    total, count = 0.0, 0
    for i in plan_epoch(setup.samples.lengths, batch=8, micro_tokens=4096, seed=1)[0][0]:
        sample = setup.samples[i]
        ids, mask = torch.tensor(sample.ids).long(), torch.tensor(sample.loss_mask)
        logits = model(input_ids=ids[None]).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")
        total, count = total + losses[mask[1:]].sum(), count + int(mask[1:].sum())
    (total / count).backward()
    assert found.num_supervised == count and found.loss == pytest.approx(float(total.detach()) / count, rel=1e-5)
    theirs = {f"model.{n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    same(theirs, ours, 2e-5)


RANK = """
import sys, json
from safetensors.torch import save_file
from karui.configs.recipe import Recipe
from tests.trainers.test_invariance import gradients
import torch.distributed as dist
grads, found = gradients(Recipe.build(json.load(open(sys.argv[1]))))
assert dist.get_world_size() == 2
if dist.get_rank() == 0:
    save_file({k: v.contiguous() for k, v in grads.items()}, sys.argv[2])
dist.destroy_process_group()
"""


def test_gradient_of_two_ranks_is_that_of_one(make_recipe, tmp_path):
    recipe = make_recipe(optim={"batch": 7, "steps": 1, "micro_tokens": 128})  # odd: one rank has less to do
    one, _ = gradients(recipe)
    (tmp_path / "recipe.json").write_text(json.dumps(recipe.dump()))
    (tmp_path / "rank.py").write_text(RANK)
    done = ranks(tmp_path / "rank.py", tmp_path / "recipe.json", tmp_path / "two.safetensors")
    assert done.returncode == 0, done.stderr[:3500]
    two = {k.removeprefix("module."): v for k, v in load_file(tmp_path / "two.safetensors").items()}
    same(one, two)
