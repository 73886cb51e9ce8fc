"""End to end: the plan's weights, gradients and optimizer states against what each of two ranks held; and the verb's output."""

import json
import shutil

import pytest
import yaml
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from karui.cli import app
from karui.configs.errors import KaruiError
from karui.trainers.estimate import shape_of, skeleton, trained_by
from karui.trainers.rank_plan import WAYS, plan_ranks, rank_memory
from tests.trainers.launching import OPTIM, PREPARE, job, launch
from tests.trainers.test_zero import needs_deepspeed

MEASURE = """
import os
from karui.trainers import loop, spread as spreading
from karui.trainers.zero import ZeroOptimizer
laid = []
def remember(*given, spread=spreading.spread):
    laid.append(spread(*given))
    return laid[-1]
spreading.spread = remember
def held(tensors):
    # bytes of the storages that these tensors of this rank lie in
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors if t is not None]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}.values())
def gradients(one):
    found = [p.grad for p in one.loss.parameters()]
    if engine := getattr(one.optimizer, "engine", None):
        found += [g for part in engine.optimizer.averaged_gradients.values() for g in part or ()]
    return found
whole = []
def backward(self, loss_sum, *, last, backward=ZeroOptimizer.backward):
    backward(self, loss_sum, last=last)
    whole.append(held(gradients(laid[-1])))  # while micro-batches add up
ZeroOptimizer.backward = backward
def measure(accelerator, optimizer, *given, update=loop.update, **more):
    one, engine = laid[-1], getattr(optimizer, "engine", None)
    parameters, module = list(one.loss.parameters()), one.loss
    whole.append(held(gradients(one)))
    if engine is not None:
        parameters = [getattr(p, "ds_tensor", p) for p in parameters]
    result = update(accelerator, optimizer, *given, **more)
    states = [v for s in one.inner.state.values() for v in s.values() if v.numel() > 1]
    if engine is not None:
        states += optimizer._flat()
    codes = [b for n, b in module.named_buffers() if b.numel() > 64]
    found = {"weights": held(parameters) + held(codes), "gradients": max(whole), "optimizer": held(states)}
    if accelerator.is_main_process:
        whole.clear()
        print("MEASURED " + json.dumps(found), flush=True)
    return result
loop.update = measure
"""


@needs_deepspeed
def test_what_a_rank_holds_is_within_ten_percent_of_the_plan(make_recipe, tmp_path, tiny_folder):
    folder = tmp_path / "wider"  # so that what does not grow with the matrices does not count
    shutil.copytree(tiny_folder, folder, ignore=shutil.ignore_patterns("model.safetensors"))
    config = AutoConfig.from_pretrained(tiny_folder, hidden_size=256, intermediate_size=512, head_dim=64)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    ways = [(kind, way) for kind in ("full", "lora", "qlora") for way in WAYS]
    recipes = [make_recipe(model={"name": str(folder)}, prepare=PREPARE[kind], optim={**OPTIM, "steps": 1},
                           run={"output": str(tmp_path / f"{kind}-{way}"), "sharding": "none" if way == "ddp" else way})
               for kind, way in ways]  # fmt: skip
    done = launch(tmp_path, [job(r) for r in recipes], before=MEASURE)
    assert done.returncode == 0, done.stderr[-3000:]
    measured = [json.loads(line.removeprefix("MEASURED ")) for line in done.stdout.splitlines() if line.startswith("MEASURED")]
    assert len(measured) == len(ways)
    for (kind, way), recipe, found in zip(ways, recipes, measured):
        model = skeleton(AutoConfig.from_pretrained(recipe.model.name))
        shape = shape_of(model)
        plan = rank_memory(recipe, shape, trained_by(recipe, model, shape), way=way, ranks=2, tokens=64)
        wanted = {part: getattr(plan, part) for part in found}
        assert wanted == pytest.approx(found, rel=0.1), (kind, way)


def test_what_is_split_shrinks_with_the_ranks_and_the_room_is_used(make_recipe):
    recipe = make_recipe(prepare=[])
    small, large = (plan_ranks(recipe, "H100", nodes=n) for n in (1, 4))
    assert (small.ranks, large.ranks) == (8, 32)
    for a, b in zip(small.ways, large.ways):
        assert (a.optimizer == b.optimizer) == (a.way == "ddp") and (a.weights == b.weights) == (a.way in ("ddp", "zero1", "zero2"))
    room = small.gpu.memory_gb * 1e9
    for way in small.ways:
        fits, too_much = (plan_ranks(recipe, "H100", tokens=way.most_tokens + more) for more in (0, 1))
        found, over = (next(w for w in p.ways if w.way == way.way) for p in (fits, too_much))
        assert found.peak <= room < over.peak and fits.fits(found) and not too_much.fits(over)


def test_ranks_that_share_a_batch_hold_a_part_of_its_activations(make_recipe):
    alone, shared = (plan_ranks(make_recipe(run={"context_parallel": n}), "H100", tokens=4096).ways[0] for n in (1, 4))
    assert shared.activations == pytest.approx(alone.activations / 4, rel=0.05) and shared.weights == alone.weights
    with pytest.raises(KaruiError, match="multiple of run.context_parallel=3"):
        plan_ranks(make_recipe(run={"context_parallel": 3}), "H100")


def test_the_verb_without_low_precision(make_recipe, tmp_path):
    path, out = tmp_path / "r.yaml", tmp_path / "plan.json"
    path.write_text(yaml.safe_dump(json.loads(json.dumps(make_recipe().dump()))))
    done = CliRunner().invoke(app, ["plan", str(path), "--gpu", "H100", "--nodes", "2", "--json", str(out)])
    assert done.exit_code == 0 and "16 ranks of H100" in done.output and "zero3" in done.output
    assert [w["way"] for w in json.loads(out.read_text())["ranks"]["ways"]] == list(WAYS)
