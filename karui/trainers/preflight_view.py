"""The preflight in a terminal: data, one sample with its mask in colour, parameters, memory by part, time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from karui.trainers.preflight import Preflight

_BAR = 30


def view(found: Preflight) -> RenderableType:
    """All sections, in the order a person asks for them."""
    sections: list[RenderableType] = [_data(found), _lengths(found), _sample(found), _training(found), _memory(found)]
    if found.exports:
        sections.append(_exports(found))
    sections += [Text(f"note  {n}", style="dim") for n in found.notes]
    sections += [Text(f"look  {w}", style="bold yellow") for w in found.warnings]
    return Group(*sections)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2), show_header=bool(columns))
    for at, name in enumerate(columns or ("", "")):
        table.add_column(name, justify="left" if at == 0 else "right")
    return table


def _data(found: Preflight) -> Table:
    sets = [("train", found.train)] + ([("held out", found.evaluation)] if found.evaluation else [])
    table = _table(f"{found.name}: {found.model}", "data", *(name for name, _ in sets))

    def row(label: str, of: Any) -> None:
        table.add_row(label, *(of(values) for _, values in sets))

    row("source", lambda v: v["source"])
    row("format", lambda v: v["format"])
    row("rows", lambda v: f"{v['rows']:,}")
    row("samples used", lambda v: f"{v['used']:,}")
    row("tokens", lambda v: f"{v['tokens']:,}")
    row("supervised", lambda v: f"{v['supervised_tokens']:,} ({100 * v['supervised_tokens'] / max(1, v['tokens']):.1f} %)")
    for label, key in (("left out: too long", "dropped_overlong"), ("left out: nothing supervised", "unsupervised"),
                       ("left out: empty", "empty"), ("truncated", "truncated"), ("repeated", "duplicates")):
        row(label, lambda v, key=key: f"{v[key]:,} ({100 * v[key] / max(1, v['rows']):.1f} %)")
    return table


def _lengths(found: Preflight) -> Table:
    table = _table("tokens per sample", "tokens", "samples", "")
    table.columns[2].justify = "left"
    most = max((n for _, _, n in found.lengths), default=1)
    for low, high, count in found.lengths:
        table.add_row(f"{low:,} to {high - 1:,}", f"{count:,}", "█" * round(_BAR * count / most) or ("▏" if count else ""))
    return table


def _sample(found: Preflight) -> Panel:
    text = Text()
    for piece, supervised in found.sample:
        text.append(piece, style="bold green" if supervised else "dim")
    return Panel(text, title="first sample: green carries loss, grey does not", title_align="left", border_style="dim")


def _training(found: Preflight) -> Table:
    p, table = found.parameters, _table("training")
    share = 100 * p.trained / max(1, p.total)
    table.add_row("parameters trained", f"{p.trained:,} ({share:.2f} %)")
    table.add_row("parameters frozen", f"{p.frozen:,}")
    for step in found.prepare:
        table.add_row("prepare", step)
    rest = "" if found.last_step_samples == found.batch else f", the last of an epoch {found.last_step_samples}"
    table.add_row("steps", f"{found.steps:,} ({found.warmup_steps:,} of warm-up), {found.steps_per_epoch:,} per epoch")
    table.add_row("samples per step", f"{found.batch}{rest}")
    table.add_row("micro-batches per step", f"{found.micro_batches:.1f} over {found.world} rank{'s' if found.world > 1 else ''}, "
                                           f"largest {found.largest_micro_tokens:,} tokens")
    table.add_row("operations per step", f"{found.step_flops / 1e12:.2f} TFLOP for {found.step_tokens:,.0f} tokens")
    table.add_row("this machine", f"{found.rate.flops_per_s / 1e9:,.0f} GFLOP/s, {found.rate.bytes_per_s / 1e9:.1f} GB/s "
                                  f"({found.rate.device}, measured)")
    table.add_row("predicted", f"{found.step_seconds:.2f} s per step, {found.step_tokens / found.step_seconds:,.0f} tokens/s, "
                               f"{duration(found.total_seconds)} in all")
    return table


def _memory(found: Preflight) -> Table:
    m, table = found.memory, _table("memory per rank, predicted", "part", "MB")
    rows = [("weights", m.weights), ("adapter", m.adapter), ("gradients", m.gradients), ("optimizer state", m.optimizer),
            (f"activations ({found.largest_micro_tokens:,} tokens)", m.activations),
            ("logits of one chunk, and the head" if m.head else "logits of one chunk", m.logits + m.head),
            ("backward pass at work (not at once with the logits)", m.working), ("while loading (before training)", m.loading),
            ("kept by the allocator", found.slack_bytes), ("libraries (held now)", found.baseline_bytes)]
    for label, size in rows:
        table.add_row(label, f"{size / 1e6:,.0f}")
    fits = found.peak_bytes <= found.available_bytes
    table.add_row(Text("peak", style="bold"), Text(f"{found.peak_bytes / 1e6:,.0f}", style="bold green" if fits else "bold red"))
    table.add_row("there is", f"{found.available_bytes / 1e6:,.0f}")
    return table


def _exports(found: Preflight) -> Table:
    table = _table("export", "grid", "weights MB", "folder")
    for export in found.exports:
        table.add_row(export.spec, f"{export.weight_bytes / 1e6:,.0f}", export.output)
    return table


def duration(seconds: float) -> str:
    """45 s, 12 min, 3 h 20 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
