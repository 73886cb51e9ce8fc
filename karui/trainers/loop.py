"""The training loop: plan -> accumulate -> clip -> update -> log, evaluate, checkpoint; from any step it was left at.

Everything a step does is a function of the recipe, the samples, the step's number and the restored state, which is why a run
that was killed and resumed ends with the same bytes as one that was not.
"""

from __future__ import annotations

import json
import logging
import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from karui.configs.errors import KaruiError
from karui.configs.recipe import Recipe
from karui.trainers.checkpoint import writing
from karui.trainers.context import data_ranks
from karui.trainers.data import SampleSet, StepLoader, collate, plan_epoch
from karui.trainers.progress import Progress, memory_bytes
from karui.trainers.schedule import learning_rate
from karui.trainers.sharding import is_sharded, reshard
from karui.trainers.step import accumulate, update
from karui.trainers.tracking import Tracker

if TYPE_CHECKING:
    from accelerate import Accelerator

    from karui.trainers.stages import Stage

logger = logging.getLogger(__name__)
MAX_SKIPPED_IN_A_ROW = 5
MAX_SCALED_IN_A_ROW = 20  # fp16: each halves the loss scale, which begins at 2^16


@dataclass(kw_only=True)
class LoopState:
    """What changes from step to step and is stored in checkpoints.

    Attributes:
        step: optimizer steps done.
        skipped: steps left out because of a non-finite loss or gradient, of all and in a row up to now.
        tokens: tokens trained on.
        best_eval: smallest held-out loss so far.
    """

    step: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    tokens: int = 0
    best_eval: float | None = None


def _own(parameter: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a parameter: all of it, its shard (FSDP2), or its part behind an empty placeholder (ZeRO 3)."""
    held: torch.Tensor = parameter.to_local() if hasattr(parameter, "to_local") else getattr(parameter, "ds_tensor", parameter)
    return held


@dataclass(kw_only=True)
class Loop:
    """One run's loop.

    Attributes:
        module: `LossSum` as the accelerator prepared it.
        optimizer: prepared, over the trained parameters; or a `ZeroOptimizer`.
        samples, held_out: training and evaluation samples; no evaluation without held_out.
        total: optimizer steps of the whole run.
        save: called with the state when a checkpoint is due; on every rank.
        stages: the recipe's prepare steps at work.
    """

    recipe: Recipe
    accelerator: Accelerator
    module: nn.Module
    optimizer: Any
    samples: SampleSet
    held_out: SampleSet | None
    total: int
    folder: Path
    progress: Progress
    tracker: Tracker
    save: Callable[[LoopState], None]
    stages: Sequence[Stage] = ()
    state: LoopState = field(default_factory=LoopState)
    last: dict[str, Any] = field(default_factory=dict)
    interrupted: str | None = None
    loader: StepLoader = field(init=False)

    def __post_init__(self) -> None:
        rank, world = data_ranks(self.recipe, self.accelerator)
        self.loader = StepLoader(self.recipe, self.samples, rank=rank, world=world)

    def run(self) -> dict[str, Any]:
        """Train to `total` steps or until a signal; returns the run's closing figures."""
        recipe, state = self.recipe, self.state
        losses: dict[str, float] = {}
        begin, tokens_before = time.perf_counter(), state.tokens
        seconds_training = 0.0
        if state.step == 0 and self.held_out is not None:
            losses["eval_loss_before"] = self.evaluate()
        with _Signals(self._on_signal):
            while state.step < self.total and self.interrupted is None:
                step_begin = time.perf_counter()
                self.train_step()
                seconds_training += time.perf_counter() - step_begin
                self.interrupted = self._agree_on_interrupt()
                done = state.step == self.total
                if self.held_out is not None and not done and recipe.run.eval_every and state.step % recipe.run.eval_every == 0:
                    self.evaluate()
                due = recipe.run.checkpoint_every and state.step % recipe.run.checkpoint_every == 0
                if due or done or self.interrupted:
                    self.check_weights(done)
                    if done and self.interrupted is None:
                        self._outcome(losses)  # before the last checkpoint, which a resume would only fail with again
                    self.save(state)
        if "eval_loss" not in losses and self.interrupted is None:
            self._outcome(losses)
        tokens = state.tokens - tokens_before
        return {
            **losses,
            "loss": self.last.get("loss"),
            "steps": state.step,
            "tokens": state.tokens,
            "tokens_per_s": tokens / seconds_training if seconds_training else None,
            "seconds": time.perf_counter() - begin,
            "skipped_steps": state.skipped,
            **{k: v for k, v in self.last.items() if k.startswith("moe_")},
        }

    def train_step(self) -> None:
        """One optimizer step, logged."""
        begin = time.perf_counter()
        recipe, state = self.recipe, self.state
        self.module.train()
        rate = learning_rate(recipe.optim, state.step, self.total)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_scale", 1.0)
        for stage in self.stages:
            stage.before_step(state.step, self.total)
        objective: Any = self.accelerator.unwrap_model(self.module)
        objective.before_step(state.step, self.total)
        epoch = self.loader(state.step)[0]
        micros = objective.batches(state.step, lambda at: self.loader(at)[1])
        gradient = accumulate(self.accelerator, self.module, micros, self.optimizer, sharing=recipe.run.context_parallel)
        objective.after_backward()
        faults = [fault for stage in self.stages for fault in stage.faults()]
        usable = math.isfinite(gradient.loss) and not faults
        norm = update(self.accelerator, self.optimizer, recipe.optim.clip, usable=usable)
        finite = usable and math.isfinite(norm)
        for stage in self.stages:
            stage.after_step(skipped=not finite)
        loads = objective.routers.finish(self.accelerator, skipped=not finite) if objective.routers is not None else {}
        state.step += 1
        state.tokens += gradient.num_tokens
        state.skipped_in_a_row = 0 if finite else state.skipped_in_a_row + 1
        state.skipped += not finite
        seconds = time.perf_counter() - begin
        values = {
            "step": state.step,
            "epoch": epoch,
            "loss": gradient.loss,
            "grad_norm": norm,
            "lr": rate,
            "tokens": gradient.num_tokens,
            "supervised_tokens": gradient.num_supervised,
            "tokens_per_s": gradient.num_tokens / seconds,
            "seconds": seconds,
            "memory_bytes": memory_bytes(),
            "skipped": not finite,
            **objective.metrics(),
            **loads,
        }
        self.last = values
        self._write(values)
        if not finite:
            what = "loss" if not math.isfinite(gradient.loss) else "gradient" if not math.isfinite(norm) else "layer below"
            where = f"; NaN or Inf in {', '.join(faults[:4])}{f' and {len(faults) - 4} more' if len(faults) > 4 else ''}"
            self.progress.note(f"step {state.step}: the {what} is not finite ({gradient.loss}, norm {norm}); no update was made"
                               f"{where if faults else ''}")
            limit = MAX_SKIPPED_IN_A_ROW if self.accelerator.scaler is None else MAX_SCALED_IN_A_ROW
            if state.skipped_in_a_row >= limit:
                raise KaruiError(
                    f"{state.skipped_in_a_row} steps in a row had a loss or gradient that is not finite, last at step "
                    f"{state.step}; the weights are as they were before. Lower optim.lr, set optim.clip, or check the data "
                    f"and the model."
                )
        if state.step % recipe.run.log_every == 0 or state.step == self.total:
            self.tracker.log({f"train/{k}": v for k, v in values.items() if k not in ("step", "skipped")}, state.step)
        self.progress.step(state.step, values)

    @torch.no_grad()
    def check_weights(self, done: bool) -> None:
        """Raise `KaruiError` where a trained weight is not finite, or where a run that is `done` made no update at all: no
        checkpoint and no result is made of it."""
        named = ((n, p) for n, p in self.accelerator.unwrap_model(self.module).named_parameters() if p.requires_grad)
        odd = [n for n, p in named if not bool(torch.isfinite(_own(p)).all())]
        if int(self.accelerator.reduce(torch.tensor(len(odd), device=self.accelerator.device), "sum")):
            where = f": {', '.join(odd[:3])}" if odd else ""
            raise KaruiError(f"step {self.state.step} left weights that are not finite{where}. They were not "
                             "written; lower optim.lr, or set optim.clip, and begin anew.")
        if done and self.state.skipped == self.total:
            raise KaruiError(f"none of the {self.total} steps had a loss and a gradient that are finite, so nothing was trained. "
                             "Lower optim.lr, or check the data and the model.")

    def _outcome(self, losses: dict[str, float]) -> None:
        """Add the held-out loss after the last step, where there are held-out samples; `KaruiError` where it is not finite."""
        if self.held_out is None:
            return
        before, after = losses.get("eval_loss_before"), self.evaluate()
        losses["eval_loss"] = after
        if not math.isfinite(after):
            raise KaruiError(f"the held-out loss is {after} after the last step: the run diverged, and final/ was not written. "
                             "Lower optim.lr, set optim.clip, or check the held-out samples.")
        if before is not None and after > before:
            self.progress.note(f"the held-out loss rose from {before:.4f} to {after:.4f}: a lower optim.lr, or fewer steps?")

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean held-out loss per supervised token, over all ranks; samples are sorted by length and packed."""
        assert self.held_out is not None
        recipe, accelerator = self.recipe, self.accelerator
        rank, world = data_ranks(recipe, accelerator)
        loss = accelerator.unwrap_model(self.module)
        was_training = loss.training
        loss.eval()
        plan = plan_epoch(self.held_out.lengths, batch=len(self.held_out), micro_tokens=recipe.optim.micro_tokens,
                          rank=rank, world=world, shuffle=False, packing=recipe.data.packing)
        total = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
        # ranks that hold parts of the model, or of the batch, go through it together
        together = is_sharded(loss) or recipe.run.context_parallel > 1
        for micro in plan[0]:
            batch = collate([self.held_out[i] for i in micro]).to(accelerator.device)
            if batch.num_supervised or together:
                with accelerator.autocast():
                    total[0] += loss.of(batch).double()
                total[1] += batch.num_supervised / recipe.run.context_parallel
        total = accelerator.reduce(total, "sum")
        reshard(loss)
        loss.train(was_training)
        mean = float(total[0] / total[1])
        self.state.best_eval = min(mean, self.state.best_eval if self.state.best_eval is not None else math.inf)
        self._write({"step": self.state.step, "eval_loss": mean})
        self.tracker.log({"eval/loss": mean}, self.state.step)
        self.progress.note(f"held-out loss {mean:.4f} after {self.state.step} steps ({len(self.held_out)} samples)")
        return mean

    def _write(self, values: dict[str, Any]) -> None:
        if not self.accelerator.is_main_process:
            return
        with writing(self.folder, "log.jsonl"), (self.folder / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")

    def _on_signal(self, name: str) -> None:
        self.interrupted = name
        self.progress.note(f"{name}: finishing this step and writing a checkpoint; once more to stop at once")

    def _agree_on_interrupt(self) -> str | None:
        """A signal to one rank stops all after the same step."""
        if self.accelerator.num_processes == 1:
            return self.interrupted
        flag = torch.tensor(int(self.interrupted is not None), device=self.accelerator.device)
        return (self.interrupted or "signal to another rank") if int(self.accelerator.reduce(flag, "sum")) else None


class _Signals:
    """The first SIGINT or SIGTERM is noted, a second has its usual effect; outside the main thread nothing is changed."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self.notify = notify
        self.before: dict[int, Any] = {}

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self.before[number] = signal.signal(number, self._handle)
            except ValueError:  # not the main thread
                return

    def __exit__(self, *error: Any) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        signal.signal(number, self.before[number])
        self.notify(signal.Signals(number).name)


def read_log(folder: Path) -> Iterator[dict[str, Any]]:
    """The rows of a run's log.jsonl."""
    with (folder / "log.jsonl").open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)
