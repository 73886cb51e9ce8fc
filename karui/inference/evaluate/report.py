"""One table for several models: quality, size, speed and memory side by side, and the same as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from karui.inference.evaluate.scoring import HeldOutLoss, Perplexity
from karui.inference.evaluate.speed import Speed
from karui.inference.evaluate.tasks import ExactMatch


@dataclass(frozen=True, kw_only=True)
class Report:
    """One model's measurements; None where something was not measured."""

    name: str
    disk_bytes: int | None = None
    weight_bytes: int | None = None
    perplexity: Perplexity | None = None
    held_out: HeldOutLoss | None = None
    task: ExactMatch | None = None
    speed: Speed | None = None
    peak_bytes: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def table(reports: Sequence[Report]) -> Any:
    """A rich table; columns nobody measured are left out, ratios are against the first row."""
    from rich.table import Table

    columns: list[tuple[str, list[str]]] = [("model", [r.name for r in reports])]

    def column(title: str, cells: list[str | None]) -> None:
        if any(cell is not None for cell in cells):
            columns.append((title, [cell if cell is not None else "-" for cell in cells]))

    base = reports[0].disk_bytes if reports else None
    column("perplexity", [f"{r.perplexity.perplexity:.2f}" if r.perplexity else None for r in reports])
    column("held-out loss", [f"{r.held_out.loss:.4f}" if r.held_out else None for r in reports])
    column("exact match", [f"{r.task.accuracy:.1%}" if r.task else None for r in reports])
    column("disk MB", [f"{r.disk_bytes / 1e6:.1f}" if r.disk_bytes is not None else None for r in reports])
    if base and len(reports) > 1:
        column("of first", [f"{r.disk_bytes / base:.3f}" if r.disk_bytes is not None else None for r in reports])
    for length in dict.fromkeys(r.speed.prefill_tokens for r in reports if r.speed):
        column(f"prefill {length}", [f"{r.speed.prefill_per_s:.0f}/s" if r.speed and r.speed.prefill_tokens == length else None
                                     for r in reports])
    for context in dict.fromkeys(c for r in reports if r.speed for c in r.speed.decode_per_s):
        column(f"decode @{context}", [f"{r.speed.decode_per_s[context]:.1f}/s" if r.speed and context in r.speed.decode_per_s
                                      else None for r in reports])
    column("peak MB", [f"{r.peak_bytes / 1e6:.0f}" if r.peak_bytes is not None else None for r in reports])
    grid = Table(*(title for title, _ in columns), box=None, header_style="bold")
    for row in zip(*(cells for _, cells in columns), strict=True):
        grid.add_row(*row)
    return grid


def protocols(reports: Sequence[Report]) -> list[str]:
    """How the numbers were made, one line per distinct protocol, to be printed under the table."""
    lines = [f"perplexity: {r.perplexity.protocol}" for r in reports if r.perplexity]
    lines += [f"held-out loss: mean over {r.held_out.tokens} supervised tokens of {r.held_out.samples} samples"
              + (f", {r.held_out.left_out} left out" if r.held_out.left_out else "") for r in reports if r.held_out]
    lines += [f"exact match: {r.task.protocol}" for r in reports if r.task]
    lines += [f"speed: one stream, greedy, {r.speed.new_tokens} new tokens, best of the repeats" for r in reports if r.speed]
    return list(dict.fromkeys(lines))
