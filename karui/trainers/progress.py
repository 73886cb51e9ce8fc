"""What a person sees while a run goes on: a live line on a terminal, plain lines elsewhere; loss, speed, memory, time left."""

from __future__ import annotations

import sys
import time
from typing import Any, Protocol


class Progress(Protocol):
    """Receives one mapping per step, and notes in between."""

    def __enter__(self) -> Progress: ...
    def __exit__(self, *error: Any) -> None: ...
    def step(self, done: int, values: dict[str, Any]) -> None: ...
    def note(self, text: str) -> None: ...


def make_progress(total: int, *, done: int = 0, show: bool = True, log_every: int = 1) -> Progress:
    """A `rich` display on a terminal, plain lines (at most one in two seconds) elsewhere, silence on other ranks."""
    if not show:
        return Silent()
    return Live(total, done) if sys.stdout.isatty() else Plain(total, done, log_every)


class Silent:
    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *error: Any) -> None:
        return None

    def step(self, done: int, values: dict[str, Any]) -> None:
        return None

    def note(self, text: str) -> None:
        return None


class Plain(Silent):
    """One line per step, thinned out when steps are fast."""

    def __init__(self, total: int, done: int, log_every: int) -> None:
        self.total, self.first, self.log_every = total, done, log_every
        self.start = self.last = time.monotonic()

    def step(self, done: int, values: dict[str, Any]) -> None:
        now = time.monotonic()
        if done != self.total and (now - self.last < 2 or done % self.log_every):
            return
        self.last = now
        self.note(f"step {done}/{self.total}  {summary(values)}  left {left(self.start, now, self.first, done, self.total)}")

    def note(self, text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


class Live(Silent):
    """A bar with the newest figures, redrawn in place."""

    def __init__(self, total: int, done: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self.bar = Bar(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[figures]}"),
                       TextColumn("left"), TimeRemainingColumn(elapsed_when_finished=True))
        self.task = self.bar.add_task("training", total=total, completed=done, figures="")

    def __enter__(self) -> Live:
        self.bar.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.bar.stop()

    def step(self, done: int, values: dict[str, Any]) -> None:
        self.bar.update(self.task, completed=done, figures=summary(values))

    def note(self, text: str) -> None:
        self.bar.console.print(text, highlight=False, markup=False)


def summary(values: dict[str, Any]) -> str:
    """`loss 1.234  grad 0.56  lr 2.0e-04  412 tokens/s  1.4 GB`."""
    return (f"loss {values['loss']:.4f}  grad {values['grad_norm']:.3f}  lr {values['lr']:.2e}  "
            f"{values['tokens_per_s']:.0f} tokens/s  {values['memory_bytes'] / 1e9:.2f} GB")


def left(start: float, now: float, first: int, done: int, total: int) -> str:
    """Time to the end at the rate so far, as h:mm:ss."""
    seconds = int((now - start) / max(1, done - first) * (total - done))
    return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def memory_bytes() -> int:
    """Resident memory of this process, or allocated accelerator memory where there is one."""
    import torch

    if torch.cuda.is_available():
        return int(torch.cuda.memory_allocated())
    import psutil

    return int(psutil.Process().memory_info().rss)


def peak_memory_bytes() -> int:
    """The most memory this process has held since it began, or the accelerator's where there is one."""
    import torch

    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    from karui.inference.evaluate.memory import high_water

    return high_water()
