"""From a recipe to a trained adapter or model. The same under `accelerate launch`, `torchrun` and alone.

    python -m karui.trainers.run RECIPE [--set key=value] [--resume] [--dry-run]
    accelerate launch --multi_gpu --num_processes 8 -m karui.trainers.run RECIPE
    torchrun --nproc_per_node 2 -m karui.trainers.run RECIPE       several processes on a CPU (accelerate launch --cpu starts one)

The run folder:
    recipe.json     the recipe as it was run
    log.jsonl       a line per step, and per evaluation
    checkpoint-N/   see `karui.trainers.checkpoint`
    final/          the adapter (peft's files), or the whole model; weights trained on a grid also as `quantized.safetensors`
    metrics.json    closing figures
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from karui.configs.errors import KaruiError, UnsupportedError
from karui.configs.recipe import Recipe
from karui.kernels.cores import usable_cores

if TYPE_CHECKING:
    from accelerate import Accelerator

    from karui.trainers.data import SampleSet
    from karui.trainers.stages import Stage
    from karui.trainers.tracking import Tracker

logger = logging.getLogger(__name__)
STAGES, OBJECTIVE, ROUTERS = "stages.safetensors", "objective.safetensors", "routers.safetensors"


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a run left behind.

    Attributes:
        folder: the run folder.
        final: folder of the adapter or the model; None when the run was interrupted or dry.
        is_adapter: whether `final` is an adapter.
        metrics: closing figures: loss, eval_loss_before, eval_loss, tokens_per_s, peak_memory_bytes, ...
        interrupted: the signal that stopped the run, or None.
        tracker: still open, when it was asked for.
    """

    folder: Path
    final: Path | None
    is_adapter: bool
    metrics: dict[str, Any] = field(default_factory=dict)
    interrupted: str | None = None
    tracker: Tracker | None = None


def run_recipe(
    recipe: Recipe, *, resume: bool | str | Path | None = None, dry_run: bool = False, setup: Setup | None = None,
    hold_tracker: bool = False,
) -> RunResult:  # fmt: skip
    """Train as the recipe says.

    Args:
        resume: True: from the newest checkpoint in the recipe's run folder; "auto": likewise, or from the start when there is
            none; a path: from that checkpoint or run folder.
        dry_run: print the preflight and train nothing.
        setup: model and samples made before, for callers that bring their own; default: `prepare(recipe)`.
        hold_tracker: leave the trackers open in the result, for what is still to be logged; the caller closes them.

    Raises:
        KaruiError: anything the recipe, the data, the model or a checkpoint makes impossible; says what to do.
    """
    import torch

    from karui.kernels.matmul import matmul_precision
    from karui.kernels.native import heap
    from karui.trainers.launched import FP8_BACKEND, resolve_precision, without
    from karui.trainers.ranks import together

    recipe = resolve_precision(recipe, os.environ, cuda=torch.cuda.is_available())
    accelerator = _make_accelerator(recipe)
    _set_threads(recipe, accelerator)
    on_cpu = accelerator.device.type == "cpu"
    if on_cpu:
        heap.keep_freed()
    matmul = recipe.run.matmul if on_cpu else "fp32"
    # the recipe has the FP8 step now: accelerate must not wrap the model in modules of its own
    with (without(os.environ, FP8_BACKEND), together(recipe, accelerator), matmul_precision(matmul),
          contextlib.ExitStack() as held):
        try:
            return _run(recipe, accelerator, resume=resume, dry_run=dry_run, setup=setup, hold_tracker=hold_tracker, held=held)
        except torch.OutOfMemoryError as error:
            raise KaruiError(
                f"the GPU's memory is full ({error}); lower optim.micro_tokens (now {recipe.optim.micro_tokens}) or "
                "data.max_length, or set run.recompute: full. A run that has a checkpoint goes on with --resume."
            ) from error


def _run(
    recipe: Recipe, accelerator: Accelerator, *, resume: bool | str | Path | None, dry_run: bool, setup: Setup | None,
    hold_tracker: bool, held: contextlib.ExitStack,
) -> RunResult:  # fmt: skip
    import torch

    from karui.trainers import checkpoint as ckpt
    from karui.trainers import shards, tracking
    from karui.trainers.context import make_group
    from karui.trainers.data import total_steps
    from karui.trainers.loop import Loop, LoopState
    from karui.trainers.model import enable_recompute
    from karui.trainers.objectives import make_objective
    from karui.trainers.progress import make_progress, peak_memory_bytes
    from karui.trainers.spread import spread

    folder = recipe.output
    main = accelerator.is_main_process
    if resume == "auto":
        resume = bool(ckpt.list_checkpoints(folder))
    start = ckpt.find_checkpoint(folder if resume is True else resume) if resume else None
    if dry_run:
        if main:
            _preflight(recipe, accelerator.num_processes)
        return RunResult(folder=folder, final=None, is_adapter=False)
    setup = setup or prepare(recipe)
    loss = setup.objective = make_objective(setup)
    _check_isolation(recipe, loss, setup)
    loss.context = make_group(recipe, accelerator)
    if recipe.run.recompute == "full":
        enable_recompute(setup.model)
    state = LoopState()
    if start is not None:
        stored, tensors = ckpt.read_checkpoint(start)
        ckpt.check_belongs(stored, recipe, base=setup.base, data=setup.data, source=str(start))
        load_weights(setup, start, sharded=(start / shards.FOLDER).is_dir())
        state = LoopState(**stored["loop"])
        if accelerator.scaler is not None and stored.get("scaler"):
            accelerator.scaler.load_state_dict(stored["scaler"])
    loss.to(accelerator.device)
    laid = spread(recipe, accelerator, loss, lambda: make_optimizer(recipe, loss, setup.stages), setup.stages)
    for stage in setup.stages:
        stage.attach(laid.inner)
    if start is not None and (start / shards.FOLDER).is_dir():
        shards.read(start, loss, laid.inner, adapter=setup.is_adapter)
    elif start is not None:
        laid.restore(tensors, str(start))
    if main:
        with ckpt.writing(folder, "the run's files"):
            with alone(folder) if folder.is_dir() else contextlib.nullcontext():
                _open_folder(folder, recipe, keep_steps=state.step if start is not None else None)
            held.enter_context(alone(folder))
    accelerator.wait_for_everyone()

    def save(now: LoopState) -> None:
        from accelerate.utils import gather_object

        facts = {"loop": vars(now), "recipe": recipe.dump(), "base": setup.base, "data": setup.data,
                 "rng": gather_object([ckpt.rng_state()]), "world": accelerator.num_processes, "total": total,
                 "scaler": None if accelerator.scaler is None else accelerator.scaler.state_dict(),
                 "torch": torch.__version__}  # fmt: skip
        if recipe.run.checkpoint == "sharded":
            held = shards.tensors(loss, laid.inner, adapter=setup.is_adapter)
            ckpt.write_sharded(folder, now.step, facts, held, lambda scratch: save_extras(setup, scratch), recipe.run.keep,
                               accelerator)  # fmt: skip
            return
        moments = laid.moments()
        with laid.gathered(frozen=not setup.is_adapter):
            if main:
                ckpt.write_checkpoint(folder, now.step, facts, moments, lambda scratch: save_weights(setup, scratch),
                                      recipe.run.keep)  # fmt: skip
        accelerator.wait_for_everyone()

    total = total_steps(len(setup.samples), batch=recipe.optim.batch, epochs=recipe.optim.epochs, steps=recipe.optim.steps)
    # dropout differs between ranks; a resumed run goes on with the stored streams
    torch.manual_seed(recipe.run.seed + accelerator.process_index)
    if start is not None and len(stored["rng"]) == accelerator.num_processes:
        ckpt.set_rng_state(stored["rng"][accelerator.process_index])
    where = tracking.start(accelerator, recipe, folder)
    tracker = tracking.Tracker(accelerator)
    if main and accelerator.trackers:
        tracker.config({"preflight": _preflight_facts(recipe, setup, accelerator.num_processes)})
    progress = make_progress(total, done=state.step, show=main, log_every=recipe.run.log_every)
    loop = Loop(recipe=recipe, accelerator=accelerator, module=laid.module, optimizer=laid.optimizer, samples=setup.samples,
                held_out=setup.held_out, total=total, folder=folder, progress=progress, tracker=tracker, save=save,
                stages=setup.stages, state=state)
    try:
        with progress:
            progress.note(f"run {folder}  {setup.describe()}  {where}")
            if recipe.run.matmul != "fp32" and (note := _matmul_note(accelerator.device.type)):
                progress.note(f"run.matmul {recipe.run.matmul}: {note}")
            for line in (line for stage in setup.stages for line in stage.lines()):
                progress.note(line)
            if loss.routers is not None:
                progress.note(loss.routers.line())
            if start is not None:
                progress.note(f"resumed from {start} at step {state.step} of {total}")
            metrics = loop.run()
        metrics["peak_memory_bytes"] = peak_memory_bytes()
        if loop.interrupted:
            progress.note(f"stopped by {loop.interrupted} after step {state.step} of {total}, checkpoint written; "
                          f"to go on: the same command with --resume")
        else:
            with laid.gathered(frozen=not setup.is_adapter):
                if main:
                    _finish(setup, folder, metrics)
        accelerator.wait_for_everyone()
    except BaseException:
        tracker.finish()
        raise
    tracker.leave()  # after the last barrier: what follows is the first rank's alone
    if not hold_tracker:
        tracker.finish()
    final = None if loop.interrupted else folder / "final"
    return RunResult(folder=folder, final=final, is_adapter=setup.is_adapter, metrics=metrics, interrupted=loop.interrupted,
                     tracker=tracker if hold_tracker else None)


def _matmul_note(device: str) -> str:
    """Why `run.matmul` will not be as fast as one may think, or an empty text."""
    from karui.kernels.native.train import has_bf16

    if device != "cpu":
        return f"without effect on {device}, where run.precision says what products are computed in"
    return "" if has_bf16() else "rounds, but is no faster, as this CPU has neither AVX512-BF16 nor AMX"


def _make_accelerator(recipe: Recipe) -> Accelerator:
    """The accelerator of this process, as the recipe and the launch say; refuses a way of launching that is not supported."""
    from datetime import timedelta

    import torch
    from accelerate import Accelerator
    from accelerate.utils import DistributedType, InitProcessGroupKwargs

    from karui.trainers import tracking, zero
    from karui.trainers.launched import without

    with without(os.environ, zero.USE):
        accelerator = Accelerator(
            cpu=not torch.cuda.is_available(),
            mixed_precision=recipe.run.precision,
            log_with=tracking.tracker_names(recipe) or None,
            project_dir=str(recipe.output),
            kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=recipe.run.timeout))],
        )
    if accelerator.distributed_type not in (
        DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.FSDP
    ):
        raise UnsupportedError(
            f"distributed mode {accelerator.distributed_type.value} is not supported; launch with DDP or FSDP2: "
            f"accelerate launch --multi_gpu --num_processes N, or torchrun --nproc_per_node N, -m karui.trainers.run RECIPE "
            f"[--set run.sharding=fsdp2]."
        )
    return accelerator


@dataclass(kw_only=True)
class Setup:
    """Model, data and tokenizer of a run, before any device or rank enters.

    Attributes:
        model: the model to train; a peft model when the recipe has an adapter step.
        base: fingerprint of the model as it was loaded.
        data: hash of the training samples.
        stages: the recipe's prepare steps at work, in their order.
        objective: the recipe's objective around the model, once the run has made it.
        held_out: evaluation samples, None when the recipe names none.
    """

    recipe: Recipe
    model: Any
    tokenizer: Any
    samples: SampleSet
    held_out: SampleSet | None
    base: str
    data: str
    stages: list[Stage] = field(default_factory=list)
    objective: Any = None

    @property
    def is_adapter(self) -> bool:
        return any(stage.is_adapter for stage in self.stages)

    def describe(self) -> str:
        whole = self.model if self.objective is None else self.objective  # a draft or a projection is the objective's own
        trained = sum(p.numel() for p in whole.parameters() if p.requires_grad)
        frozen = sum(p.numel() for p in self.model.parameters() if not p.requires_grad)
        frozen += sum(m.in_features * m.out_features for m in self.model.modules() if type(m).__name__ == "QuantizedLinear")
        return f"{trained:,} parameters trained, {frozen:,} frozen, {len(self.samples):,} samples"


def prepare(recipe: Recipe) -> Setup:
    """Load tokenizer, samples and model, and do the recipe's prepare steps; the same on every rank (seeded)."""
    import torch

    from karui.adapters.files import fingerprint
    from karui.catalogue import load_model_config
    from karui.trainers.data import read_data
    from karui.trainers.model import install_lean_ops, load_model, weights_folder
    from karui.trainers.stages import Context, check_order, make_stages, planned

    check_order(recipe)
    folder = weights_folder(recipe.model.name)
    planned(recipe, load_model_config(folder))  # what it refuses should not cost reading data and weights
    tokenizer, samples, held_out = read_data(recipe.data, folder)
    model: Any = load_model(recipe.model)
    _check_vocabulary(model, samples)
    torch.manual_seed(recipe.run.seed)
    base = fingerprint(model)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    stages = make_stages(recipe, Context(recipe=recipe, model_folder=folder, tokenizer=tokenizer, samples=samples, base=base,
                                         device=device))
    for stage in stages:
        model = stage.prepare(model)
    for stage in stages:
        samples = stage.training_samples(samples)
    install_lean_ops(model)
    return Setup(recipe=recipe, model=model, tokenizer=tokenizer, samples=samples, held_out=held_out if len(held_out) else None,
                 base=base, data=_data_hash(samples), stages=stages)


def make_optimizer(recipe: Recipe, module: Any, stages: Sequence[Stage] = ()) -> Any:
    """The recipe's optimizer; weight decay on matrices only (not on norms and biases); stages may regroup."""
    from karui.lowprec.optim import build_optimizer

    trained = [p for p in module.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": recipe.optim.weight_decay, "lr_scale": 1.0},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0, "lr_scale": 1.0},
    ]
    if hasattr(module, "param_groups"):
        groups = module.param_groups(groups)
    for stage in stages:
        groups = stage.param_groups(module, groups)
    optim = recipe.optim
    return build_optimizer(optim.name, module, lr=optim.lr, betas=optim.betas, eps=optim.eps, seed=recipe.run.seed, groups=groups)


def _adapter_stage(setup: Setup) -> Stage | None:
    return next((stage for stage in setup.stages if stage.is_adapter), None)


def save_weights(setup: Setup, folder: Path) -> None:
    """The adapter or the whole model, and what the stages keep beside it, into an existing folder."""
    if stage := _adapter_stage(setup):
        stage.save(setup.model, folder)
    else:
        # under the names of the model in memory: some types' files have others, and hold experts one by one
        setup.model.save_pretrained(str(folder), safe_serialization=True, save_original_format=False)
    save_extras(setup, folder)


def save_extras(setup: Setup, folder: Path) -> None:
    """What stages and objective keep beside the weights, into an existing folder."""
    from safetensors.torch import save_file

    tensors = {f"{i}/{k}": v.detach().cpu().clone() for i, s in enumerate(setup.stages) for k, v in s.state().items()}
    if tensors:
        save_file(tensors, str(folder / STAGES))
    if setup.objective is not None and (own := setup.objective.state()):
        save_file({k: v.detach().cpu().contiguous() for k, v in own.items()}, str(folder / OBJECTIVE))
    if setup.objective is not None and setup.objective.routers is not None and (loads := setup.objective.routers.state()):
        save_file({k: v.cpu() for k, v in loads.items()}, str(folder / ROUTERS))


def load_weights(setup: Setup, folder: Path, *, sharded: bool = False) -> None:
    """Put a checkpoint's weights (unless they are `sharded`, which are read later), and what the stages kept, into the run."""
    from safetensors.torch import load_file

    if sharded:
        pass
    elif stage := _adapter_stage(setup):
        stage.restore(setup.model, folder)
    else:
        from karui.trainers.checkpoint import load_full

        load_full(setup.model, folder)
    tensors = load_file(str(folder / STAGES)) if (folder / STAGES).is_file() else {}
    for i, stage in enumerate(setup.stages):
        stage.load({k.partition("/")[2]: v for k, v in tensors.items() if k.partition("/")[0] == str(i)})
    if setup.objective is not None:
        setup.objective.load(load_file(str(folder / OBJECTIVE)) if (folder / OBJECTIVE).is_file() else {})
        if setup.objective.routers is not None:
            setup.objective.routers.load(load_file(str(folder / ROUTERS)) if (folder / ROUTERS).is_file() else {})


def _finish(setup: Setup, folder: Path, metrics: dict[str, Any]) -> None:
    from karui.adapters.files import replace_folder
    from karui.trainers.checkpoint import writing
    from karui.trainers.converted import save_converted

    scratch = folder / f".final.tmp{os.getpid()}"
    on_grid = next((stage for stage in setup.stages if stage.is_on_grid), None)
    with writing(folder, "the trained weights", scratch):
        scratch.mkdir(parents=True, exist_ok=True)
        if stage := _adapter_stage(setup):
            stage.save(setup.model, scratch)
        else:
            quantized = on_grid.convert(setup.model) if on_grid is not None else {}
            for stage in reversed(setup.stages):
                stage.finish(setup.model)
            save_converted(setup.model, quantized, scratch)
            setup.objective.save(scratch)
            setup.tokenizer.save_pretrained(str(scratch))
        replace_folder(scratch, folder / "final")
        write_json(folder / "metrics.json", metrics)


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Within, no other run starts in this folder; the lock is the process's and ends with it, however it ends.

    Raises:
        KaruiError: another run is at work there.
    """
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise KaruiError(f"another run is at work in {folder}; wait for its end, or give this one a run.output of its "
                             "own.") from error
        except OSError as error:  # a file system without locks
            logger.info("%s: no lock against a second run (%s)", folder, error)
        yield
    finally:
        os.close(handle)


def _open_folder(folder: Path, recipe: Recipe, keep_steps: int | None) -> None:
    """Make the run folder; a resumed run's log is cut back to the checkpoint, an earlier run is moved aside, never deleted."""
    log = folder / "log.jsonl"
    if keep_steps is not None:
        if log.is_file():
            rows = [line for line in log.read_text(encoding="utf-8").splitlines() if _step_of(line) <= keep_steps]
            scratch = log.with_name(".log.tmp")
            scratch.write_text("".join(r + "\n" for r in rows), encoding="utf-8")
            os.replace(scratch, log)
    elif log.exists():
        n = 1
        while (aside := folder.with_name(f"{folder.name}.old{n}")).exists():
            n += 1
        os.replace(folder, aside)
        logger.warning("%s held an earlier run; it was moved to %s", folder, aside)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "recipe.json", recipe.dump())


def _step_of(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return sys.maxsize  # a line cut short by the kill


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file, which appears whole or not at all."""
    scratch = path.with_name(f".{path.name}.tmp{os.getpid()}")
    scratch.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(scratch, path)


def _set_threads(recipe: Recipe, accelerator: Accelerator) -> None:
    """The recipe's threads; else the cores shared out among the ranks of this machine, unless OMP_NUM_THREADS was set alone."""
    import torch

    if recipe.run.threads:
        torch.set_num_threads(recipe.run.threads)
    elif accelerator.num_processes > 1 and accelerator.device.type == "cpu":
        local = int(os.environ.get("LOCAL_WORLD_SIZE", accelerator.num_processes))
        torch.set_num_threads(max(1, usable_cores() // local))


def _check_vocabulary(model: Any, samples: SampleSet) -> None:
    rows = model.get_input_embeddings().weight.shape[0]
    if len(samples.ids) and int(samples.ids.max()) >= rows:
        raise KaruiError(f"a sample holds token {int(samples.ids.max())}, the model's embedding has {rows} rows; "
                         f"tokenizer and model do not belong together.")


def _check_isolation(recipe: Recipe, loss: Any, setup: Setup) -> None:
    """With packing on, prove on the first samples that documents of a row do not see one another.

    An expert of a mixture has rows of all documents, how many decides in which order its products are summed, and what that
    rounds to may send a token elsewhere: the proof is in fp32 products, and allows it the last bits.
    """
    if not recipe.data.packing:
        return
    from karui.kernels.matmul import current_precision, matmul_precision
    from karui.trainers.data import isolation_probe, prove_isolation

    loss.eval()
    mixture = loss.routers is not None
    with contextlib.ExitStack() as stack:
        for stage in setup.stages:
            stack.enter_context(stage.exact())
        stack.enter_context(matmul_precision("fp32" if mixture else current_precision()))
        change = prove_isolation(lambda b: loss.hidden(b.tokens, b.positions, b.cu_seqlens), isolation_probe(setup.samples),
                                 1e-5 if mixture else 1e-6)
    logger.info("packing isolates documents: largest change %.1e", change)


def _data_hash(samples: SampleSet) -> str:
    digest = hashlib.sha256()
    for part in (samples.ids, samples.loss_mask, samples.offsets):
        for at in range(0, len(part), 1 << 20):  # a large set is mapped from disk, never in memory as a whole
            digest.update(part[at : at + (1 << 20)].tobytes())
    return digest.hexdigest()[:16]


def _preflight_facts(recipe: Recipe, setup: Setup, world: int) -> dict[str, Any]:
    """The preflight's figures, without its sample and histogram."""
    from karui.trainers.model import base_model
    from karui.trainers.preflight import preflight

    found = preflight(recipe, base_model(setup.model).config, setup.tokenizer, setup.samples, setup.held_out, world=world)
    return {k: v for k, v in found.to_json().items() if k not in ("sample", "lengths")}


def _preflight(recipe: Recipe, world: int) -> None:
    from rich.console import Console

    from karui.trainers.preflight import dry_run, render

    Console().print(render(dry_run(recipe, world=world)))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line: recipe, overrides, resume, dry_run."""
    parser = argparse.ArgumentParser(prog="karui.trainers.run", description="Train as a recipe says.")
    parser.add_argument("recipe", help="a YAML file or the name of a shipped recipe")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="override a key")
    parser.add_argument("--resume", nargs="?", const=True, default=None, metavar="PATH",
                        help="go on from the newest checkpoint of the run folder, or from PATH; auto: start when there is none")
    parser.add_argument("--dry-run", action="store_true", help="print what would happen; train nothing")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """The whole path, what `karui train` runs too; a user's mistake prints its message and gives 2, a stopped run 130."""
    given = parse(argv)
    from karui.trainers.pipeline import run_pipeline

    try:
        result = run_pipeline(given.recipe, given.overrides, resume=given.resume, dry_run=given.dry_run).run
    except KaruiError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 130 if result.interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
