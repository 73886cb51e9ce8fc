"""`karui sweep RECIPE --over optim.lr=1e-4,3e-4`: every combination as a run of its own, ranked by held-out loss.

    runs/NAME-sweep/optim.lr=0.0001/     one run folder per combination
    runs/NAME-sweep/sweep.json           the ranking, written after every run
    runs/NAME-sweep/sweep.png            loss over each key, when matplotlib is there

A combination that is done is not run again; one that was interrupted goes on from its checkpoint. Each run is a process, so that
its memory is given back and its failure does not end the others.
"""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from karui.configs.errors import KaruiError
from karui.configs.recipe import Recipe
from karui.trainers.run import write_json


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One combination.

    Attributes:
        values: recipe key -> value.
        folder: its run folder.
        loss: held-out loss after training, else the last training loss; None when the run failed.
        metrics: the run's metrics.json.
        error: last words of a run that failed.
    """

    values: dict[str, Any]
    folder: str
    loss: float | None
    metrics: dict[str, Any]
    error: str = ""


def parse_over(items: Sequence[str]) -> dict[str, list[Any]]:
    """`["optim.lr=1e-4,3e-4", "prepare.0.rank=8,16"]` -> values by key; commas within brackets and quotes do not split.

    Raises:
        KaruiError: no `=`, no value, a key given twice.
    """
    found: dict[str, list[Any]] = {}
    for item in items:
        key, equals, text = item.partition("=")
        key = key.strip()
        if not equals or not key or not text.strip():
            raise KaruiError(f"--over {item!r}: expected key=value,value, e.g. --over optim.lr=1e-4,3e-4.")
        if key in found:
            raise KaruiError(f"--over names {key} twice; put its values into one list.")
        try:
            values = yaml.safe_load(f"[{text}]")
        except yaml.YAMLError as error:
            raise KaruiError(f"--over {item!r}: the values are malformed: {error}") from error
        found[key] = [_number(v) for v in values]
    if not found:
        raise KaruiError("a sweep needs at least one --over key=value,value.")
    return found


def plan(
    recipe: str | Path, over: Mapping[str, Sequence[Any]], overrides: Sequence[str] = ()
) -> list[tuple[dict[str, Any], Recipe]]:
    """The combinations and their recipes, checked before the first is run; exports are left out, tracking as the recipe says."""
    root = Recipe.load(recipe, overrides)
    folder = root.output.with_name(f"{root.output.name}-sweep")
    out = []
    for combination in itertools.product(*over.values()):
        values = dict(zip(over, combination))
        name = ",".join(f"{k}={_spell(v)}" for k, v in values.items()).replace("/", "_")
        settings = [f"{k}={_yaml(v)}" for k, v in values.items()]
        own = [f"name={_yaml(f'{root.name}-{name}')}", f"run.output={_yaml(str(folder / name))}", "export=[]"]
        out.append((values, Recipe.load(recipe, [*overrides, *settings, *own])))
    return out


def sweep(
    recipe: str | Path,
    over: Mapping[str, Sequence[Any]],
    overrides: Sequence[str] = (),
    *,
    notify: Callable[[str], None] = print,
) -> list[Trial]:
    """Run every combination and rank them, best first.

    Raises:
        KaruiError: a combination that is no valid recipe (before anything runs), or all of them failed.
    """
    trials: list[Trial] = []
    combinations = plan(recipe, over, overrides)
    root = combinations[0][1].output.parent
    for number, (values, own) in enumerate(combinations, 1):
        shown = ", ".join(f"{k} = {_spell(v)}" for k, v in values.items())
        notify(f"[{number}/{len(combinations)}] {shown}")
        trial = _run(values, own)
        notify(f"  loss {trial.loss:.4f}" if trial.loss is not None else f"  failed: {trial.error}")
        trials.append(trial)
        write_json(root / "sweep.json", [asdict(t) for t in rank(trials)])
    if all(t.loss is None for t in trials):
        raise KaruiError(f"all {len(trials)} runs of the sweep failed, the last with: {trials[-1].error}")
    ranked = rank(trials)
    _plot(root, ranked)
    return ranked


def rank(trials: Sequence[Trial]) -> list[Trial]:
    """Best loss first, failed ones last."""
    return sorted(trials, key=lambda t: math.inf if t.loss is None or not math.isfinite(t.loss) else t.loss)


def _run(values: dict[str, Any], recipe: Recipe) -> Trial:
    done = _finished(recipe)
    if done is None:
        root = recipe.output.parent
        root.mkdir(parents=True, exist_ok=True)
        path = root / f"{recipe.output.name}.json"
        write_json(path, recipe.dump())
        command = [sys.executable, "-m", "karui.trainers.run", str(path)]
        if any(recipe.output.glob("checkpoint-*")) and _same_run(recipe):
            command.append("--resume")
        process = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        if process.returncode in (130, -2):
            raise KeyboardInterrupt
        done = _finished(recipe)
        if done is None:
            words = [line for line in process.stderr.splitlines() if line.strip()]
            return Trial(values=values, folder=str(recipe.output), loss=None, metrics={},
                         error=words[-1].removeprefix("error: ") if words else f"exit code {process.returncode}")
    loss = done.get("eval_loss", done.get("loss"))
    return Trial(values=values, folder=str(recipe.output), loss=loss, metrics=done)


def _same_run(recipe: Recipe) -> bool:
    """Whether the folder holds a run of this recipe; one from before a key existed had that key's default."""
    from karui.trainers.checkpoint import as_of_now, as_written

    try:
        stored = json.loads((recipe.output / "recipe.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return False
    return bool(as_of_now(stored) == as_written(recipe))


def _finished(recipe: Recipe) -> dict[str, Any] | None:
    """The figures of a run of exactly this recipe that came to its end."""
    path = recipe.output / "metrics.json"
    if not path.is_file() or not _same_run(recipe):
        return None
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _plot(root: Path, trials: Sequence[Trial]) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return
    keys = list(trials[0].values)
    shown = [(t.values, t.loss) for t in trials if t.loss is not None]
    figure = Figure(figsize=(4.5 * len(keys), 3.5), layout="constrained")
    for at, key in enumerate(keys, 1):
        axes = figure.add_subplot(1, len(keys), at)
        numbers = all(isinstance(values[key], (int, float)) for values, _ in shown)
        axes.scatter([v[key] if numbers else _spell(v[key]) for v, _ in shown], [loss for _, loss in shown])
        if numbers and all(values[key] > 0 for values, _ in shown):
            axes.set_xscale("log")
        axes.set_xlabel(key)
        axes.set_ylabel("held-out loss" if "eval_loss" in trials[0].metrics else "training loss")
    FigureCanvasAgg(figure).print_png(str(root / "sweep.png"))


def _number(value: Any) -> Any:
    """YAML 1.1 reads 1e-4 as text."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _spell(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("\n").removesuffix("\n...")
