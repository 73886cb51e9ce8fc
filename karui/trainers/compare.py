"""Several models side by side: perplexity, held-out loss, size, speed and memory, in one table.

Quality is measured with the reference runner in fp32, speed with the runner a user gets; both are said under the table.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from karui.configs.errors import KaruiError
from karui.configs.recipe import DataSection

if TYPE_CHECKING:
    from karui.inference.evaluate.report import Report

log = logging.getLogger(__name__)
WINDOW = 1024
"""Tokens of a perplexity window, where every compared model's context holds so many."""


def compare(
    models: Sequence[str],
    *,
    text: Path | None = None,
    windows: int | None = None,
    data: str | DataSection | None = None,
    speed: bool = True,
    runner: str = "auto",
    engine: Mapping[str, Any] | None = None,
) -> list[Report]:
    """Measure each model, print the table and its protocols, return the reports.

    Args:
        models: bundles, model folders or catalogue names; sizes are compared with the first.
        text, windows: perplexity over the first windows of a text file; windows hold `WINDOW` tokens, or as many as the shortest
            of the contexts, the same for all.
        data: held-out samples: a file or shipped sample, or a recipe's data section (its eval split).
        runner: "auto" measures quality with torch in fp32 and speed with what the engine chooses; a name forces one for both.
        engine: further options of `Engine.load` for both, such as device or kv_dtype. Quality is measured with an fp32 cache when
            no other is named.
    """
    from rich.console import Console

    from karui.inference.bundle import open_model
    from karui.inference.evaluate.report import protocols, table
    from karui.inference.loading import find
    from karui.inference.models.config import from_hf
    from karui.inference.models.rope import context_limit

    if text is not None and not text.is_file():
        raise KaruiError(f"--text {text}: no such file.")
    console = Console(highlight=False)
    reports = []
    limits = {name: context_limit(from_hf(open_model(find(name)).config)) for name in models}
    shortest = min(limits, key=lambda name: limits[name])
    window = min(WINDOW, limits[shortest])
    for name in models:
        with console.status(f"measuring {name}"):
            reports.append(_measure(name, limits[name], text, windows, window, data, speed, runner, dict(engine or {})))
        gc.collect()
    console.print(table(reports))
    lines = protocols(reports)
    if text is not None and window < WINDOW:
        lines.append(f"windows of {window} tokens instead of {WINDOW}: the context of {shortest} holds no more")
    cache = f", keys in {engine['kv_dtype']}" if engine and "kv_dtype" in engine else ""
    lines.append(f"quality with the {'reference runner (torch, fp32)' if runner == 'auto' else runner + ' runner'}{cache}")
    for line in lines:
        console.print(f"  {line}", style="dim")
    return reports


def _measure(
    name: str, limit: int, text: Path | None, windows: int | None, window: int, data: str | DataSection | None, speed: bool,
    runner: str, options: dict[str, Any],
) -> Report:  # fmt: skip
    from karui.inference.engine import Engine
    from karui.inference.evaluate.memory import disk_bytes, peak_memory
    from karui.inference.evaluate.report import Report
    from karui.inference.evaluate.scoring import held_out_loss, perplexity
    from karui.inference.evaluate.speed import speed as measure_speed
    from karui.inference.loading import find

    folder = find(name)
    found: dict[str, Any] = {}
    if text is not None or data is not None:
        how = {"kv_dtype": "float32", "max_context": min(2048, limit), "max_sequences": 1, **options}
        how |= {"runner": "torch", "dtype": "float32"} if runner == "auto" else {"runner": runner}
        judge = Engine.load(folder, **how)

        def scorer(ids: Sequence[int]) -> list[float]:
            return judge.score([ids])[0].tolist()

        if text is not None:
            found["perplexity"] = perplexity(scorer, text, judge.tokenizer, window=window, windows=windows)
        if data is not None:
            found["held_out"] = held_out_loss(scorer, _samples(data, judge.tokenizer), max_tokens=min(2048, limit))
        judge.runner.allocate(1, judge.pool.block_size, judge.kv_dtype)
    with peak_memory() as peak:
        engine = Engine.load(folder, **{"runner": runner, "max_context": min(1024, limit), "max_sequences": 8, **options})
        weight_bytes = engine.runner.weight_bytes()
        if speed:
            tokens, new = _speed_text(engine.tokenizer), min(64, limit // 4)
            longest = min(len(tokens), limit - new)
            found["speed"] = measure_speed(engine, tokens, contexts=(min(8, longest // 2), longest), new_tokens=new)
    return Report(name=name, disk_bytes=disk_bytes(folder), weight_bytes=weight_bytes, peak_bytes=peak.host_bytes, **found)


def _samples(data: str | DataSection, tokenizer: Any) -> list[tuple[list[int], list[int]]]:
    from karui.trainers.data import load_samples, shipped_samples

    if isinstance(data, DataSection):
        section = data
    elif data in shipped_samples():
        section = DataSection(train=data, prompt="question", completion="answer", shuffle=False)
    else:
        section = DataSection(train=data, shuffle=False)
    found = load_samples(section, tokenizer, "eval" if isinstance(data, DataSection) else "train")
    return [(s.ids.tolist(), s.loss_mask.astype(int).tolist()) for s in found]


def _speed_text(tokenizer: Any) -> list[int]:
    """512 tokens of ordinary prose to measure speed with."""
    from karui.trainers.parity import PROBE

    ids = list(tokenizer(PROBE, add_special_tokens=False)["input_ids"])
    return (ids * (512 // len(ids) + 1))[:512]
