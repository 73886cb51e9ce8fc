"""The one shape of every benchmark: `python benchmarks/NAME.py [--quick] [--json OUT]`, a table, and the same as JSON.

A figure is met when its ratio (ours / peer), or without a peer its value, reaches the goal; computed here, never typed.
Peers live in virtual environments of their own, found through KARUI_PEERS (a folder of them); without one the row says so.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

DATA = Path(os.environ.get("KARUI_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measured figure. `better` says which way is good; `goal` is on the ratio when there is a peer, else on `ours`."""

    name: str
    ours: float | None
    unit: str
    peer: float | None = None
    peer_name: str = ""
    goal: float | None = None
    better: str = "higher"
    note: str = ""

    @property
    def ratio(self) -> float | None:
        return self.ours / self.peer if self.ours is not None and self.peer else None

    @property
    def met(self) -> bool | None:
        value = self.ratio if self.peer_name else self.ours
        if self.goal is None or value is None:
            return None
        return value >= self.goal if self.better == "higher" else value <= self.goal


def arguments(description: str) -> argparse.ArgumentParser:
    """The parser every benchmark starts from."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fits in 5 minutes on 2 cores")
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser


def peer_python(name: str) -> Path | None:
    """The interpreter of a peer's environment, or None when it is not installed."""
    folder = os.environ.get("KARUI_PEERS")
    python = Path(folder) / name / "bin" / "python" if folder else None
    return python if python is not None and python.exists() else None


def in_turn(steps: dict[str, Any], rounds: int, before: Callable[[Any], Any] = lambda step: None,
            clock: Callable[[], float] = time.perf_counter) -> dict[str, float]:  # fmt: skip
    """Median seconds of each, one after the other in every round; `before` a step's first call, which warms up, it is prepared."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 1):
        for name, step in steps.items():
            if not turn:
                before(step)
            begin = clock()
            step()
            if turn:
                found[name].append(clock() - begin)
    return {name: statistics.median(times) for name, times in found.items()}


def seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def best(rate: Callable[[], float], times: int) -> float:
    """The best of so many runs and one to warm up."""
    return max(rate() for _ in range(times + 1))


def transformers_decode(model: Any, new: int, threads: int = 2) -> float:
    """Tokens/s of transformers' own greedy `generate`, one stream behind a prompt of 8 tokens."""
    import torch

    torch.set_num_threads(threads)
    ids = torch.arange(5, 13)[None]
    with torch.inference_mode():
        model.generate(ids, max_new_tokens=2, min_new_tokens=2, do_sample=False)
        return new / seconds(lambda: model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False))


def report(figures: list[Figure], out: Path | None, **extra: Any) -> None:
    """Print the table and write the JSON."""
    rows = [asdict(f) | {"ratio": f.ratio, "met": f.met} for f in figures]
    header = f"{'figure':<44} {'ours':>10} {'peer':>10} {'ratio':>7} {'goal':>7}  met   unit"
    print(header, "-" * len(header), sep="\n")
    for figure, row in zip(figures, rows):
        peer = _number(figure.peer) if figure.peer is not None else "not inst." if figure.peer_name else ""
        met = {True: "yes", False: "NO", None: ""}[row["met"]]
        print(
            f"{figure.name:<44} {_number(figure.ours):>10} {peer:>10} {_number(row['ratio']):>7} {_number(figure.goal):>7}  {met:<5} {figure.unit}"
        )
        if figure.note:
            print(f"    {figure.note}")
    if out is not None:
        out.write_text(
            json.dumps({"device": device(), "versions": versions(), "figures": rows, **extra}, indent=2) + "\n", encoding="utf-8"
        )


def device() -> str:
    """Processor, cores and vector extensions, or the accelerator when there is one."""
    model, flags = platform.processor() or platform.machine(), ""
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                model = value.strip()
            elif key.strip() == "flags":
                flags = " ".join(f for f in ("avx2", "avx512f", "avx512_vnni") if f in value.split())
    return f"{model}, {os.cpu_count()} cores, {flags}"


def versions() -> dict[str, str]:
    from karui import __version__  # a checkout that is not installed has it too

    return {"karui": __version__} | {name: version(name) for name in ("torch", "transformers")} | {"python": platform.python_version()}


def _number(value: float | None) -> str:
    if value is None:
        return ""
    if 0.9 < value < 1.1:  # ratios and their goals may lie a thousandth apart
        return f"{value:.4g}"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 100 else f"{value:.3g}"
