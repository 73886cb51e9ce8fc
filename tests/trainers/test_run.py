"""End to end on a tiny model: a run's files, exact resume, interruption, bad checkpoints, skipped steps, tracking."""

import json
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from karui.configs.errors import CorruptError, KaruiError
from karui.configs.recipe import Recipe
from karui.kernels.native import available, train
from karui.trainers import checkpoint as ckpt
from karui.trainers.loop import read_log
from karui.trainers.run import alone, run_recipe
from tests.processes import Forked

ROOT = Path(__file__).resolve().parents[2]


def weights(folder):
    return (folder / "final" / "adapter_model.safetensors").read_bytes()


def steps_of(folder):
    return [(r["step"], r["loss"], r["grad_norm"], r["lr"]) for r in read_log(folder) if "loss" in r]


SCRIPT = """
import json, sys
from karui.configs.recipe import Recipe
from karui.trainers.run import run_recipe
sys.exit(130 if run_recipe(Recipe.build(json.load(open(sys.argv[1])))).interrupted else 0)
"""


def spawn(recipe):
    path, script = recipe.output.parent / "recipe.json", recipe.output.parent / "run.py"
    path.write_text(json.dumps(recipe.dump()))
    script.write_text(SCRIPT)
    return Forked(script, path)


def wait_for_step(folder, step, process):
    end = time.monotonic() + 300
    while time.monotonic() < end and process.poll() is None:
        try:
            if sum('"loss"' in line and line.endswith("\n") for line in (folder / "log.jsonl").open()) >= step:
                return
        except FileNotFoundError:
            pass
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached: {process.said()}")


@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
def test_a_run_learns_and_leaves_its_files(make_recipe, method):
    recipe = make_recipe(prepare=[] if method == "full" else [{"method": method, "rank": 4, "alpha": 8}],
                         optim={"lr": 5e-3, "batch": 4, "steps": 12, "micro_tokens": 128}, run={"checkpoint_every": 5, "keep": 2})
    result = run_recipe(recipe)
    assert result.metrics["eval_loss"] < result.metrics["eval_loss_before"] - 0.1
    assert [p.name for p in ckpt.list_checkpoints(result.folder)] == ["checkpoint-000010", "checkpoint-000012"]
    assert json.loads((result.folder / "recipe.json").read_text()) == json.loads(json.dumps(recipe.dump()))
    assert len(steps_of(result.folder)) == 12
    names = {p.name for p in result.final.iterdir()}
    expected = {"model.safetensors", "config.json", "tokenizer.json"} if method == "full" else {
        "adapter_model.safetensors", "adapter_config.json", "karui_adapter.json"}
    assert expected <= names
    assert not list(result.folder.glob(".*tmp*"))


def test_recompute_and_lean_operations_change_nothing(make_recipe, tmp_path):
    plain = run_recipe(make_recipe())
    again = run_recipe(make_recipe(run={"recompute": "full", "output": str(tmp_path / "again"), "seed": 3, "threads": 1}))
    for a, b in zip(steps_of(plain.folder), steps_of(again.folder)):
        assert a == pytest.approx(b, rel=1e-5)


@pytest.mark.skipif(not available(), reason="no C++ compiler here")
@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
def test_products_in_bf16_follow_fp32(make_recipe, tmp_path, monkeypatch, method):
    """The first loss of bf16-backward is that of fp32, and of bf16 is not; both learn the same."""
    monkeypatch.setattr(train, "SMALLEST", 0)

    def losses(matmul):
        made = make_recipe(prepare=[] if method == "full" else [{"method": method, "rank": 4, "alpha": 8}],
                           optim={"lr": 1e-3, "batch": 4, "steps": 4},
                           run={"matmul": matmul, "output": str(tmp_path / matmul)})
        return [loss for _, loss, *_ in steps_of(run_recipe(made).folder)]

    exact, split, backward, every = (losses(m) for m in ("fp32", "bf16x3", "bf16-backward", "bf16"))
    assert backward[0] == exact[0] and every[0] != exact[0]
    assert split[0] == pytest.approx(exact[0], rel=2e-5) and split == pytest.approx(exact, rel=2e-4)
    assert backward[1:] != exact[1:] and backward == pytest.approx(exact, rel=2e-4) and every == pytest.approx(exact, rel=5e-3)


@pytest.mark.parametrize("seed", [0, 1])
def test_killed_at_a_random_step_and_resumed_is_bit_identical(make_recipe, tmp_path, seed):
    """SIGKILL in the middle of training, with dropout and evaluation on; adapter bytes and every logged step must agree."""
    prepare = [{"method": "qlora" if seed else "lora", "rank": 4, "alpha": 8, "dropout": 0.1}]
    run = {"seed": seed, "threads": 1, "checkpoint_every": 2, "eval_every": 3}
    optim = {"lr": 3e-3, "batch": 4, "steps": 14, "micro_tokens": 128, "weight_decay": 0.1}
    straight = run_recipe(make_recipe(prepare=prepare, optim=optim, run={**run, "output": str(tmp_path / "straight")}))
    recipe = make_recipe(prepare=prepare, optim=optim, run={**run, "output": str(tmp_path / "killed")})
    process = spawn(recipe)
    wait_for_step(recipe.output, 3 + seed * 3, process)
    process.kill()
    assert not (recipe.output / "final").exists()
    resumed = run_recipe(recipe, resume=True)
    assert weights(straight.folder) == weights(resumed.folder)
    assert steps_of(straight.folder) == steps_of(resumed.folder)


def test_full_training_resumes_bit_identically(make_recipe, tmp_path):
    optim = {"lr": 3e-3, "batch": 4, "steps": 6, "micro_tokens": 128}
    run = {"seed": 1, "threads": 1, "checkpoint_every": 3, "keep": 9}
    straight = run_recipe(make_recipe(prepare=[], optim=optim, run={**run, "output": str(tmp_path / "a")}))
    recipe = make_recipe(prepare=[], optim=optim, run={**run, "output": str(tmp_path / "b")})
    resumed = run_recipe(recipe, resume=straight.folder / "checkpoint-000003")
    a, b = (load_file(r.final / "model.safetensors") for r in (straight, resumed))
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_a_checkpoint_and_says_how_to_go_on(make_recipe, number):
    recipe = make_recipe(optim={"lr": 1e-3, "batch": 4, "steps": 4000, "micro_tokens": 128, "schedule": "constant"})
    process = spawn(recipe)
    wait_for_step(recipe.output, 2, process)
    process.send_signal(number)
    process.wait(timeout=300)
    out = process.said()
    assert process.returncode == 130, out
    assert "--resume" in out and number.name in out
    (last,) = ckpt.list_checkpoints(recipe.output)
    assert json.loads((last / "state.json").read_text())["step"] == len(steps_of(recipe.output))


@pytest.fixture
def finished(make_recipe):
    recipe = make_recipe(run={"checkpoint_every": 2})
    return recipe, run_recipe(recipe).folder


def test_truncated_checkpoints_are_refused(finished):
    recipe, folder = finished
    last = ckpt.list_checkpoints(folder)[-1]
    for name in ("optimizer.safetensors", "adapter_model.safetensors", "state.json"):
        path = last / name
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(CorruptError, match=name.replace(".", r"\.")):
            run_recipe(recipe, resume=True)
        path.unlink()
        with pytest.raises(KaruiError, match="missing|not a checkpoint|incomplete|newest|holds no|is not"):
            run_recipe(recipe, resume=last)
        path.write_bytes(whole)


def test_a_newer_format_is_refused(finished):
    recipe, folder = finished
    path = ckpt.list_checkpoints(folder)[-1] / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    with pytest.raises(CorruptError, match="99"):
        run_recipe(recipe, resume=True)


def test_a_state_that_names_files_elsewhere_is_refused(finished):
    recipe, folder = finished
    path = ckpt.list_checkpoints(folder)[-1] / "state.json"
    state = json.loads(path.read_text())
    path.write_text(json.dumps({**state, "files": {**state["files"], "../../recipe.json": "0"}}))
    with pytest.raises(CorruptError, match="outside"):
        run_recipe(recipe, resume=True)


def test_a_foreign_checkpoint_is_refused_by_what_differs(finished, make_recipe, rows_file, tmp_path):
    _, folder = finished
    with pytest.raises(KaruiError, match=r"optim\.lr"):
        run_recipe(make_recipe(optim={"lr": 7e-3}), resume=folder)
    state = ckpt.list_checkpoints(folder)[0] / "state.json"
    whole = state.read_text()
    state.write_text(json.dumps({**json.loads(whole), "base": "0123456789abcdef"}))
    with pytest.raises(KaruiError, match="another base .fingerprint 0123456789abcdef"):
        run_recipe(finished[0], resume=state.parent)
    state.write_text(whole)
    text = rows_file.read_text()
    rows_file.write_text(text.replace("what is", "tell me"))
    try:
        with pytest.raises(KaruiError, match="other data"):
            run_recipe(finished[0], resume=folder)
    finally:
        rows_file.write_text(text)


def test_nothing_to_resume(make_recipe):
    with pytest.raises(KaruiError, match="holds no checkpoint"):
        run_recipe(make_recipe(), resume=True)


def test_an_earlier_run_is_moved_aside_not_overwritten(finished):
    recipe, folder = finished
    before = weights(folder)
    run_recipe(recipe)
    assert (folder.with_name("run.old1") / "final" / "adapter_model.safetensors").read_bytes() == before


def test_a_second_run_in_a_folder_at_work_is_refused(finished):
    recipe, folder = finished
    with alone(folder), pytest.raises(KaruiError, match="another run is at work in .*run.output of its own"):
        run_recipe(recipe)
    assert not folder.with_name("run.old1").exists()


def test_a_resume_names_the_key_of_a_step_that_changed(finished):
    recipe, folder = finished
    rank = recipe.prepare[0].rank
    other = Recipe.build(recipe.dump() | {"prepare": [recipe.dump()["prepare"][0] | {"rank": rank + 1}]})
    with pytest.raises(KaruiError, match=rf"another run .prepare.0.rank: {rank} there, {rank + 1} now"):
        run_recipe(other, resume=folder)


def test_a_full_disk_while_saving_keeps_the_old_checkpoint(tmp_path):
    def write(step, weights):
        return ckpt.write_checkpoint(tmp_path, step, {}, {"step/w": torch.tensor(1.0)}, weights, keep=2)

    write(1, lambda p: save_file({"w": torch.ones(3)}, str(p / "w.safetensors")))

    def full(folder):
        (folder / "half").write_bytes(b"x")
        raise OSError(28, "No space left on device")

    with pytest.raises(KaruiError, match="checkpoint-000001 is whole"):
        write(2, full)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-000001"]
    ckpt.read_checkpoint(tmp_path / "checkpoint-000001")


def test_a_full_disk_elsewhere_says_how_to_go_on_and_going_on_works(make_recipe, monkeypatch):
    from karui.trainers import converted

    def full(*given):
        raise OSError(28, "No space left on device")

    recipe = make_recipe(prepare=[], run={"checkpoint_every": 3})
    with monkeypatch.context() as patch:
        patch.setattr(converted, "save_converted", full)
        with pytest.raises(KaruiError, match="the trained weights could not be written.*checkpoint-000006 is whole; make room"):
            run_recipe(recipe)
    log = recipe.output / "log.jsonl"
    assert {p.name for p in recipe.output.iterdir()} == {"checkpoint-000003", "checkpoint-000006", "log.jsonl", "recipe.json"}
    kept = log.rename(log.with_suffix(".kept"))
    log.symlink_to("/dev/full")
    with pytest.raises(KaruiError, match="log.jsonl could not be written.*checkpoint-000006 is whole"):
        run_recipe(recipe, resume=recipe.output / "checkpoint-000003")
    log.unlink()
    kept.rename(log)
    assert run_recipe(recipe, resume=True).final.is_dir() and len(steps_of(recipe.output)) == 6


def test_a_step_that_is_not_finite_is_skipped_and_five_in_a_row_stop_the_run(make_recipe, monkeypatch):
    from karui.trainers import model

    original, calls = model.LossSum.forward, []

    def poisoned(bad):
        def forward(self, *args):
            out = original(self, *args)
            if self.training:
                calls.append(1)
                return out * float("nan") if len(calls) in bad else out
            return out
        return forward

    monkeypatch.setattr(model.LossSum, "forward", poisoned({2}))
    recipe = make_recipe(optim={"batch": 1, "steps": 4, "micro_tokens": 128})
    result = run_recipe(recipe)
    assert result.metrics["skipped_steps"] == 1
    log = [r for r in read_log(result.folder) if "grad_norm" in r]
    assert [r["skipped"] for r in log] == [False, True, False, False]
    adapter = load_file(result.final / "adapter_model.safetensors")
    assert all(torch.isfinite(v).all() for v in adapter.values())
    calls.clear()
    monkeypatch.setattr(model.LossSum, "forward", poisoned(set(range(2, 99))))
    with pytest.raises(KaruiError, match="5 steps in a row"):
        run_recipe(make_recipe(optim={"batch": 1, "steps": 20, "micro_tokens": 128}))
    calls.clear()
    with pytest.raises(KaruiError, match="none of the 2 steps had a loss and a gradient that are finite"):
        monkeypatch.setattr(model.LossSum, "forward", poisoned(set(range(1, 99))))
        run_recipe(make_recipe(optim={"batch": 1, "steps": 2, "micro_tokens": 128}))


@pytest.mark.parametrize("value, message", [
    (float("inf"), "step 1 left weights that are not finite: model.base_model"), (1e38, "held-out loss is nan after the last step")])
def test_what_the_last_step_ruined_is_told_and_not_kept(value, message, make_recipe, monkeypatch):
    from karui.trainers import loop

    original = loop.update

    def ruin(accelerator, optimizer, *args, **kwargs):
        norm = original(accelerator, optimizer, *args, **kwargs)
        with torch.no_grad():
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.fill_(value)
        return norm

    monkeypatch.setattr(loop, "update", ruin)
    recipe = make_recipe(optim={"steps": 1})
    with pytest.raises(KaruiError, match=message):
        run_recipe(recipe)
    assert not (recipe.output / "final").exists() and not (recipe.output / "checkpoint-000001").exists()


def test_a_rank_s_part_behind_a_placeholder_is_looked_at():
    """ZeRO 3 leaves an empty tensor where a parameter was."""
    from karui.trainers.loop import Loop, LoopState

    module = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.empty(0))})
    accelerator = SimpleNamespace(unwrap_model=lambda m: m, reduce=lambda t, how: t, device="cpu")
    loop = SimpleNamespace(accelerator=accelerator, module=module, state=LoopState(step=3), total=5)
    module.w.ds_tensor = torch.ones(2)
    Loop.check_weights(loop, False)
    module.w.ds_tensor = torch.tensor([1.0, float("nan")])
    with pytest.raises(KaruiError, match="step 3 left weights that are not finite: w"):
        Loop.check_weights(loop, False)


def test_wandb_offline_files_hold_config_and_every_step(make_recipe, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_DIR", raising=False)
    monkeypatch.setenv("NETRC", "/nonexistent")
    recipe = make_recipe(track={"to": "wandb", "name": "offline-test"})
    result = run_recipe(recipe)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    (path,) = result.folder.rglob("*.wandb")
    end = time.monotonic() + 30
    while not (found := read_wandb(path))[2] and time.monotonic() < end:  # W&B's own process writes it out after the run's end
        time.sleep(0.1)
    rows, config, complete = found
    assert complete
    train = [r for r in rows if "train/loss" in r]
    assert [r["train/loss"] for r in train] == pytest.approx([loss for _, loss, _, _ in steps_of(result.folder)])
    assert {"train/grad_norm", "train/lr", "train/tokens_per_s", "train/memory_bytes"} <= train[0].keys()
    assert sum("eval/loss" in r for r in rows) >= 1
    assert config["optim"]["lr"] == recipe.optim.lr


def leveldb_records(data):
    """Records of a LevelDB log: blocks of 32 KiB, each a run of (crc32, length, type) headers and payloads."""
    assert data[:4] == b":W&B"
    at, parts = 7, []
    while at + 7 <= len(data):
        if 2**15 - at % 2**15 < 7:  # no header fits: the block's rest is padding
            at += 2**15 - at % 2**15
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if kind == 0 or at + 7 + length > len(data):
            return
        parts.append(data[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []


def wandb_records(path):
    from wandb.proto import wandb_internal_pb2

    for data in leveldb_records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        yield record


def read_wandb(path):
    """History rows, config, and whether the run's end is there, out of wandb's own offline format."""
    rows, config, complete = [], {}, False
    for record in wandb_records(path):
        kind = record.WhichOneof("record_type")
        complete |= kind == "exit"
        if kind == "history":
            rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item})
        for item in {"run": record.run.config.update, "config": record.config.update}.get(kind, []):
            config[item.key or item.nested_key[0]] = json.loads(item.value_json)
    return rows, config, complete


def test_wandb_offline_files_hold_preflight_answers_and_the_bundle(make_recipe, monkeypatch):
    from karui.trainers.pipeline import run_pipeline

    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", "/nonexistent")
    recipe = make_recipe(track={"to": "wandb"}, export=[{"spec": "w4g32"}],
                         eval={"questions": ["what is 2 plus 2"], "speed": False, "held_out": False})
    result = run_pipeline(recipe)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    (path,) = result.run.folder.rglob("*.wandb")
    end = time.monotonic() + 30
    while not (found := read_wandb(path))[2] and time.monotonic() < end:
        time.sleep(0.1)
    rows, config, complete = found
    assert complete
    assert config["preflight"]["steps"] == 6 and config["preflight"]["memory"]
    assert any("bundle" in key for key in config)
    assert any("answers" in key for row in rows for key in row)
    artifacts = [record.artifact for record in wandb_records(path) if record.WhichOneof("record_type") == "artifact"]
    artifacts += [r.request.log_artifact.artifact for r in wandb_records(path) if r.request.HasField("log_artifact")]
    (bundle,) = [a for a in artifacts if a.type == "bundle"]
    names = {entry.path for entry in bundle.manifest.contents}
    assert {"manifest.json", "tokenizer.json"} <= names and any(n.endswith(".safetensors") for n in names)


@pytest.mark.parametrize("reachable", ["never", "offline"])
def test_wandb_failing_does_not_stop_training(make_recipe, monkeypatch, reachable):
    import wandb

    init = wandb.init

    def broken(*args, mode, **kwargs):
        if mode == reachable:
            return init(*args, mode=mode, **kwargs)
        raise wandb.errors.CommError("no route")

    monkeypatch.setattr(wandb, "init", broken)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_MODE", "online")
    result = run_recipe(make_recipe(track={"to": "wandb"}))
    assert result.metrics["steps"] == 6 and result.final.is_dir()
    assert len(list(result.folder.rglob("*.wandb"))) == (reachable == "offline")


def test_tensorboard_files_hold_every_step_and_answers(make_recipe):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from karui.trainers.pipeline import run_pipeline

    recipe = make_recipe(track={"to": "tensorboard"}, export=[{"spec": "w8"}],
                         eval={"questions": ["what is 2 plus 2"], "speed": False, "held_out": False})  # fmt: skip
    result = run_pipeline(recipe).run
    found = [EventAccumulator(str(folder)).Reload() for folder in {p.parent for p in result.folder.rglob("events.out*")}]
    events = next(e for e in found if "train/loss" in e.Tags()["scalars"])  # another holds hyperparameters
    assert [s.value for s in events.Scalars("train/loss")] == pytest.approx([x[1] for x in steps_of(result.folder)], rel=1e-6)
    assert {"train/grad_norm", "train/tokens_per_s", "train/memory_bytes", "eval/loss"} <= set(events.Tags()["scalars"])
    (said,) = events.Tensors("answers/text_summary")
    assert b"what is 2 plus 2" in said.tensor_proto.string_val[0]
    stored = "".join(p.read_text() for p in result.folder.rglob("hparams.yml"))
    assert "optim.lr" in stored and "preflight.steps: 6" in stored


def test_resume_auto_starts_where_there_is_nothing_and_goes_on_where_there_is(make_recipe):
    recipe = make_recipe(run={"checkpoint_every": 2, "keep": 3})
    first = run_recipe(recipe, resume="auto")
    assert first.metrics["steps"] == 6
    again = run_recipe(recipe, resume="auto")  # from the checkpoint of the last step: nothing is left to do
    assert again.metrics["steps"] == 6 and again.metrics["tokens_per_s"] is None
    assert not list(recipe.output.parent.glob("run.old*"))


def test_a_checkpoint_from_before_a_recipe_key_existed_goes_on(make_recipe):
    recipe = make_recipe(run={"checkpoint_every": 3, "keep": 3})
    folder = run_recipe(recipe).folder
    path = folder / "checkpoint-000003" / "state.json"
    state = json.loads(path.read_text())
    del state["recipe"]["run"]["sharding"], state["recipe"]["optim"]["clip"]  # both at their defaults
    path.write_text(json.dumps(state))
    assert run_recipe(recipe, resume=path.parent).metrics["steps"] == 6
    state["recipe"]["optim"]["lr"] = 5e-5
    path.write_text(json.dumps(state))
    with pytest.raises(KaruiError, match="belongs to another run .optim.lr"):
        run_recipe(recipe, resume=path.parent)


def test_dry_run_trains_nothing(make_recipe, capsys):
    recipe = make_recipe()
    assert run_recipe(recipe, dry_run=True).final is None
    assert not recipe.output.exists()
    assert "tokens" in capsys.readouterr().out


def test_two_adapter_steps_are_refused(make_recipe):
    step = {"method": "lora", "rank": 4}
    with pytest.raises(KaruiError, match="each own the result of the run"):
        run_recipe(make_recipe(prepare=[step, step]))


@pytest.mark.slow
def test_the_real_model_learns(tmp_path, monkeypatch):
    from karui.configs.recipe import Recipe

    recipe = Recipe.load("qlora", [f"run.output={tmp_path / 'run'}", "optim.steps=4", "optim.batch=4", "data.eval=null",
                                   "data.holdout=8", "optim.micro_tokens=1024", "track.to=none", "export=[]"])
    metrics = run_recipe(recipe).metrics
    assert metrics["eval_loss"] < metrics["eval_loss_before"] - 0.05
