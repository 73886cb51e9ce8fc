"""End to end with two CPU processes (gloo): DDP, FSDP2 and context parallelism train as one process does, and any number of ranks goes on."""

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from karui.configs.errors import CorruptError, KaruiError, UnsupportedError
from karui.trainers.run import run_recipe
from tests.trainers.launching import OPTIM, PREPARE, forget_after, job, launch, losses, weights

KINDS = ("full", "lora", "qlora", "qat")


@pytest.fixture
def recipe_at(make_recipe, tmp_path):
    def make(kind, where, **run):
        return make_recipe(prepare=PREPARE[kind], optim=OPTIM,
                           run={"output": str(tmp_path / where), "checkpoint_every": 2, "keep": 4, **run})

    return make


def agree(one, other, where):
    assert losses(one) == pytest.approx(losses(other), abs=2e-6), where
    torch.testing.assert_close(weights(one), weights(other), rtol=0, atol=2e-5, msg=lambda m: f"{where}: {m}")


def in_two_ranks(recipe_at, tmp_path, kinds, sharding, **run):
    """By kind: folders of one process's runs, and recipes that two ranks ran, from the start and from one process's second step."""
    alone = {kind: run_recipe(recipe_at(kind, f"{kind}-alone", **run)).folder for kind in kinds}
    split = {kind: recipe_at(kind, kind, sharding=sharding, **run) for kind in kinds}
    resumed = {kind: recipe_at(kind, f"{kind}-resumed", sharding=sharding, **run) for kind in kinds}
    for kind, there in resumed.items():
        shutil.copytree(alone[kind], there.output)
        forget_after(there.output, 2)
    done = launch(tmp_path, [*map(job, split.values()), *(job(r, resume=True) for r in resumed.values())])
    assert done.returncode == 0, done.stderr[-3000:]
    for kind, there in split.items():
        agree(there.output, alone[kind], kind)
        agree(resumed[kind].output, alone[kind], f"{kind}, from one rank to two")
    return alone, split


def go_on_alone(recipe_at, alone, kind, **run):
    """What two ranks began, one process ends as if it had done all of it."""
    there = recipe_at(kind, kind, **run)
    forget_after(there.output, 2)
    run_recipe(there, resume=True)
    agree(there.output, alone[kind], f"{kind}, from two ranks to one")


@pytest.mark.parametrize("sharding", ["none", "fsdp2"])
def test_two_ranks_train_as_one_process_does_and_go_on_from_one_rank_to_two_and_back(sharding, recipe_at, tmp_path):
    kinds = KINDS if sharding == "fsdp2" else ("full", "qlora", "qat")
    alone, split = in_two_ranks(recipe_at, tmp_path, kinds, sharding)
    for kind, there in split.items():
        for name in ("checkpoint-000002", "checkpoint-000004"):
            found, wanted = (load_file(str(f / name / "optimizer.safetensors")) for f in (there.output, alone[kind]))
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
        state = json.loads((there.output / "checkpoint-000004" / "state.json").read_text())
        assert state["world"] == 2 and len(state["rng"]) == 2
        go_on_alone(recipe_at, alone, kind)


def test_every_rank_writes_its_part_of_a_sharded_checkpoint_and_any_number_goes_on_from_it(recipe_at, tmp_path):
    alone, split = in_two_ranks(recipe_at, tmp_path, ("full", "lora"), "fsdp2", checkpoint="sharded")
    for kind, there in split.items():
        parts = sorted((there.output / "checkpoint-000004" / "sharded").iterdir())
        assert [p.suffix for p in parts] == [".safetensors"] * 2, parts
        assert abs(parts[0].stat().st_size - parts[1].stat().st_size) < 0.2 * parts[0].stat().st_size
        go_on_alone(recipe_at, alone, kind, checkpoint="sharded")


def test_a_sharded_checkpoint_that_is_not_this_models_is_refused(recipe_at, tmp_path):
    recipe = recipe_at("lora", "run", checkpoint="sharded")
    folder = run_recipe(recipe).folder / "checkpoint-000002"
    (part,) = (folder / "sharded").iterdir()
    with safe_open(str(part), "pt") as file:
        names = list(file.keys())
    assert any(n.startswith("optimizer/exp_avg_sq/") for n in names) and any(n.startswith("model/") for n in names)
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(CorruptError, match="cut short or changed"):
        run_recipe(recipe, resume=folder)
    state = json.loads((folder / "state.json").read_text())
    other = run_recipe(recipe_at("full", "other", checkpoint="sharded")).folder / "checkpoint-000002"
    (foreign,) = (other / "sharded").iterdir()
    part.write_bytes(foreign.read_bytes())
    state["files"][f"sharded/{part.name}"] = json.loads((other / "state.json").read_text())["files"][f"sharded/{foreign.name}"]
    (folder / "state.json").write_text(json.dumps(state))
    with pytest.raises(CorruptError, match="missing or do not fit this model"):
        run_recipe(recipe, resume=folder)


def test_ranks_that_share_the_tokens_of_a_batch_train_as_one_process_does(recipe_at, tmp_path):
    """Keys and values gathered over the ranks, in both passes; losses, held-out losses and weights are those of one process."""
    alone = {kind: run_recipe(recipe_at(kind, f"{kind}-alone")).folder for kind in ("full", "qlora")}
    split = {
        ("full", "ddp"): recipe_at("full", "a", context_parallel=2),
        ("full", "fsdp2"): recipe_at("full", "b", context_parallel=2, sharding="fsdp2"),
        ("full", "recompute"): recipe_at("full", "c", context_parallel=2, recompute="full"),
        ("qlora", "ddp"): recipe_at("qlora", "d", context_parallel=2),
    }
    done = launch(tmp_path, [job(r) for r in split.values()])
    assert done.returncode == 0, done.stderr[-3000:]
    for (kind, how), there in split.items():
        agree(there.output, alone[kind], f"{kind} {how}")
        found, wanted = (json.loads((f / "metrics.json").read_text()) for f in (there.output, alone[kind]))
        assert found["eval_loss"] == pytest.approx(wanted["eval_loss"], abs=2e-6) and found["tokens"] == wanted["tokens"]


def test_what_context_parallelism_does_not_serve(recipe_at):
    with pytest.raises(KaruiError, match="context_parallel is 2, which does not divide this run's 1 ranks"):
        run_recipe(recipe_at("lora", "run", context_parallel=2))


def test_an_accelerate_configuration_with_fsdp_is_taken_up(recipe_at, tmp_path):
    recipe = recipe_at("lora", "run")
    done = launch(tmp_path, [job(recipe)], env={"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"},
                  before="from karui.trainers import sharding\nshard = sharding.shard\n"
                         "sharding.shard = lambda *given: (print('split over ranks'), shard(*given))")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("split over ranks") == 2 and len(losses(recipe.output)) == 4


@pytest.mark.parametrize("device, kind", [("cuda", "CPUOffloadPolicy"), ("cpu", "OffloadPolicy")])
def test_offload_of_the_accelerate_configuration_reaches_every_part_of_the_model(device, kind, monkeypatch, tiny_folder):
    """On CPUs there is nothing to offload to; the GPU's calls are recorded, not made."""
    from types import SimpleNamespace

    import torch.distributed.device_mesh
    import torch.distributed.fsdp

    from karui.configs.recipe import ModelSection
    from karui.trainers.model import LossSum, load_model
    from karui.trainers.sharding import shard

    calls = []
    monkeypatch.setattr(torch.distributed.device_mesh, "init_device_mesh", lambda *given: given)
    monkeypatch.setattr(torch.distributed.fsdp, "fully_shard", lambda module, **options: calls.append((module, options)))
    loss = LossSum(load_model(ModelSection(name=str(tiny_folder))), 64)
    plugin = SimpleNamespace(cpu_offload=True, reshard_after_forward=True)
    shard(loss, SimpleNamespace(device=torch.device(device), num_processes=2, state=SimpleNamespace(fsdp_plugin=plugin)))
    assert [type(options["offload_policy"]).__name__ for _, options in calls] == [kind] * 3
    assert calls[-1][0] is loss and calls[0][1]["mesh"] == (device, (2,))


def test_fsdp_in_version_1_is_refused(make_recipe, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "1")
    with pytest.raises(UnsupportedError, match="fsdp_version: 2"):
        run_recipe(make_recipe())
