"""`karui demo`: the shipped demo recipe end to end, with what happened and what to try next."""

from __future__ import annotations

import time
from pathlib import Path

from karui.configs.errors import KaruiError
from karui.configs.recipe import Recipe


def run_demo(output: Path) -> None:
    """Fetch the model, fine-tune on a 4-bit base, export through the parity gate, compare, answer; an older demo makes way.

    Raises `KaruiError` when the held-out loss did not fall or the bundle is not light: then the demo shows nothing worth showing.
    """
    from rich.console import Console

    from karui.catalogue import resolve
    from karui.trainers.pipeline import run_pipeline

    console = Console(highlight=False)
    begin = time.perf_counter()
    recipe = Recipe.load("demo", [f"run.output={output}"])
    console.rule("1  the model", align="left")
    console.print(f"{recipe.model.name} -> {resolve(recipe.model.name)}")
    console.rule("2  fine-tune on a 4-bit base, export, compare, answer", align="left")
    result = run_pipeline(recipe)
    if result.run.interrupted:
        return
    base, light = result.reports
    assert base.held_out and light.held_out and base.disk_bytes and light.disk_bytes, "the demo recipe measures both"
    console.rule("3  what happened", align="left")
    console.print(f"held-out loss {base.held_out.loss:.3f} -> {light.held_out.loss:.3f}, trained on {recipe.data.limit} problems")
    console.print(f"size on disk {base.disk_bytes / 1e6:.0f} MB -> {light.disk_bytes / 1e6:.0f} MB")
    if base.speed and light.speed:
        context = min(base.speed.decode_per_s)
        console.print(f"decode {base.speed.decode_per_s[context]:.0f} -> {light.speed.decode_per_s[context]:.0f} tokens/s")
    console.print(f"{(time.perf_counter() - begin) / 60:.1f} minutes in all\n")
    bundle = result.bundles[0]
    console.print("what to try next")
    for command, why in (
        (f"karui chat {bundle}", "talk with it"),
        (f"karui bench {bundle}", "where its time goes, and which technique would move that"),
        ("karui train qlora --dry-run", "what a longer run would do, before it does it"),
        ("karui recipes qlora > mine.yaml", "a recipe of your own"),
    ):
        console.print(f"  {command:<48} {why}", soft_wrap=True)
    if light.held_out.loss >= base.held_out.loss:
        raise KaruiError("the held-out loss did not fall; please report this run's log.jsonl.")
