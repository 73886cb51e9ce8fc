"""Behavioural: the trainer's contracts for every kind of adapter: the same gradient for every cut, isolation, exact resume."""

import json

import pytest
import torch
from safetensors.torch import load_file

from karui.configs.errors import UnsupportedError
from karui.trainers.data import collate, isolation_probe, prove_isolation
from karui.trainers.model import LossSum
from karui.trainers.run import prepare, run_recipe
from tests.processes import ranks
from tests.trainers.test_invariance import RANK, gradients, same
from tests.trainers.test_run import spawn, steps_of, wait_for_step, weights

KINDS = {
    "dora": {"method": "lora", "rank": 4, "dora": True},
    "qdora rslora": {"method": "qlora", "rank": 4, "dora": True, "rslora": True},
    "pissa": {"method": "lora", "rank": 4, "init": "pissa"},
    "loftq": {"method": "qlora", "rank": 4, "init": "loftq", "base": "w4g32"},
    "olora": {"method": "lora", "rank": 4, "init": "olora"},
    "whole": {"method": "lora", "rank": 4, "train_also": ["embed_tokens", "norm"], "lr_ratio": 8},
    "vera": {"method": "vera", "rank": 8},
    "ia3": {"method": "ia3"},
    "prompt": {"method": "prompt", "tokens": 4},
    "prefix": {"method": "prefix", "tokens": 4},
}
OPTIM = {"lr": 3e-3, "batch": 8, "steps": 1}


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_the_same_for_every_cut(kind, make_recipe):
    whole, found = gradients(make_recipe(prepare=[KINDS[kind]], optim={**OPTIM, "micro_tokens": 4096}))
    for micro_tokens, packing, chunk in [(4096, True, 3), (128, True, 7), (64, False, 1024)]:
        cut, also = gradients(make_recipe(prepare=[KINDS[kind]], optim={**OPTIM, "micro_tokens": micro_tokens},
                                          data={"packing": packing}, objective={"chunk_tokens": chunk}))
        same(whole, cut, 4e-6 if kind in ("olora", "pissa") else 1e-6)  # their A holds W's own large entries
        assert also.num_supervised == found.num_supervised and also.loss == pytest.approx(found.loss, rel=1e-6)


@pytest.mark.parametrize("kind", ["qdora rslora"])
def test_the_gradient_of_two_ranks_is_that_of_one(kind, make_recipe, tmp_path):
    recipe = make_recipe(prepare=[KINDS[kind]], optim={"batch": 7, "steps": 1, "micro_tokens": 128})
    one, _ = gradients(recipe)
    (tmp_path / "recipe.json").write_text(json.dumps(recipe.dump()))
    (tmp_path / "rank.py").write_text(RANK)
    done = ranks(tmp_path / "rank.py", tmp_path / "recipe.json", tmp_path / "two.safetensors")
    assert done.returncode == 0, done.stderr[:3500]
    same(one, {k.removeprefix("module."): v for k, v in load_file(tmp_path / "two.safetensors").items()})


@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_do_not_see_one_another(kind, make_recipe):
    setup = prepare(make_recipe(prepare=[KINDS[kind]]))
    loss = LossSum(setup.model, 64).eval()
    assert prove_isolation(lambda b: loss.hidden(b.tokens, b.positions, b.cu_seqlens), isolation_probe(setup.samples)) <= 1e-6
    alone = [loss.of(collate([setup.samples[i]])) for i in range(5)]
    together = loss.of(collate([setup.samples[i] for i in range(5)]))
    assert float(together) == pytest.approx(float(sum(alone)), rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_going_on_from_a_checkpoint_is_bit_identical(kind, make_recipe, tmp_path):
    optim = {"lr": 3e-3, "batch": 4, "steps": 5, "micro_tokens": 128, "weight_decay": 0.1}
    run = {"seed": 1, "threads": 1, "checkpoint_every": 2, "keep": 9, "eval_every": 2}
    straight = run_recipe(make_recipe(prepare=[KINDS[kind]], optim=optim, run={**run, "output": str(tmp_path / "a")}))
    recipe = make_recipe(prepare=[KINDS[kind]], optim=optim, run={**run, "output": str(tmp_path / "b")})
    resumed = run_recipe(recipe, resume=straight.folder / "checkpoint-000002")
    assert weights(straight.folder) == weights(resumed.folder)
    assert steps_of(straight.folder)[2:] == steps_of(resumed.folder)


@pytest.mark.parametrize("seed,kind", [(0, "qdora rslora"), (1, "loftq"), (2, "pissa")])
def test_killed_at_a_random_step_with_data_workers_and_resumed_is_bit_identical(seed, kind, make_recipe, tmp_path):
    """SIGKILL with dropout and evaluation on; once the samples of the second half are made by worker processes."""
    step = [{**KINDS[kind], "dropout": 0.1}]
    optim = {"lr": 3e-3, "batch": 4, "steps": 12, "micro_tokens": 128}
    data = {"shuffle_window": 5}
    run = {"seed": seed, "threads": 1, "checkpoint_every": 2, "eval_every": 3}
    straight = run_recipe(make_recipe(prepare=step, optim=optim, data=data, run={**run, "output": str(tmp_path / "straight")}))
    recipe = make_recipe(prepare=step, optim=optim, data=data, run={**run, "output": str(tmp_path / "killed")})
    process = spawn(recipe)
    wait_for_step(recipe.output, 3 + torch.randint(0, 6, (1,), generator=torch.Generator().manual_seed(seed)).item(), process)
    process.kill()
    for file in (tmp_path / "cache").rglob("*.safetensors"):
        file.unlink()  # the samples are made anew
    resumed = run_recipe(make_recipe(prepare=step, optim=optim, data={**data, "workers": 0 if seed else 2},
                                     run={**run, "output": str(tmp_path / "killed")}), resume=True)
    assert weights(straight.folder) == weights(resumed.folder)
    assert steps_of(straight.folder) == steps_of(resumed.folder)


@pytest.mark.parametrize("kind", ["vera", "ia3", "prompt", "prefix"])
def test_a_kind_that_no_bundle_holds_is_refused_before_it_trains(kind, make_recipe):
    with pytest.raises(UnsupportedError, match="cannot be merged"):
        prepare(make_recipe(prepare=[KINDS[kind]], export=[{"spec": "w4g32"}]))
