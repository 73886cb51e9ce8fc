"""Training runs of SmolLM2-135M that are set against one another: each kept under a hash of what defines it, differences with their error.

A run is `karui.trainers.run`'s own; only its held-out loss is taken answer by answer, in fp32. A difference of two kinds of run is
taken answer by answer and seed by seed (a seed is the order and choice of the samples and the random numbers of the start); its
error adds the standard error over the answers to that over the seeds, and it counts when it is larger than twice that.
"""

from __future__ import annotations

import hashlib
import json
import resource
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from figures import DATA, Figure

Answers = list[tuple[float, int]]  # of each held-out answer: sum of its tokens' losses, and their number
MODEL = "smollm2-135m"


def folder(given: Path | None) -> Path:
    """The folder for finished runs; a new one when none is given."""
    work = given or Path(tempfile.mkdtemp(prefix="karui-runs-"))
    work.mkdir(parents=True, exist_ok=True)
    return work


def gsm8k(work: Path, train: int, held_out: int, length: int = 256) -> dict[str, Any]:
    """A recipe's `data:` of so many rows; those longer than `length` tokens are dropped."""
    for name, source, rows in (("train", "gsm8k_train.jsonl", train), ("eval", "gsm8k_test.jsonl", held_out)):
        lines = (DATA / source).read_text(encoding="utf-8").splitlines()[:rows]
        _write(work / f"gsm8k-{name}-{rows}.jsonl", "\n".join(lines) + "\n")
    return {"train": str(work / f"gsm8k-train-{train}.jsonl"), "eval": str(work / f"gsm8k-eval-{held_out}.jsonl"), "prompt": "question",
            "completion": "answer", "max_length": length}


def trained(work: Path, name: str, seed: int, *, matmul: str = "bf16", threads: int = 1, more: Sequence[Any] = (),
            measure: Callable[[Any, Path], dict[str, Any]] | None = None, **sections: Any) -> dict[str, Any]:
    """One run, or what is known of it.

    Args:
        sections: of the recipe: prepare, data, optim, objective.
        measure: (the finished run's `Setup`, its `final` folder) -> what to keep; default: the loss of every held-out answer.
        more: what else defines the result.
    """
    from karui.configs.recipe import Recipe
    from karui.trainers.run import prepare, run_recipe

    recipe = Recipe.build({"name": "bench", "model": MODEL, **sections, "track": {"to": "none"},
                           "run": {"output": str(work / f"run-{name}-{seed}".replace(" ", "_")), "seed": seed, "threads": threads, "matmul": matmul}})
    identity = {k: v for k, v in recipe.dump().items() if k not in ("run", "track", "name")}
    key = json.dumps([identity, seed, matmul, list(more)], sort_keys=True, default=str)
    kept = work / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    if kept.is_file():
        return dict(json.loads(kept.read_text(encoding="utf-8")))
    before = resource.getrusage(resource.RUSAGE_SELF)
    setup = prepare(recipe)
    held_out, setup.held_out = setup.held_out, None
    done = run_recipe(recipe, setup=setup)
    setup.held_out = held_out
    assert done.final is not None, "an interrupted run is not measured"
    result = {"name": name, "seed": seed, "tokens": done.metrics["tokens"], "last": done.metrics["loss"],
              **(measure(setup, done.final) if measure else losses(setup))}
    after = resource.getrusage(resource.RUSAGE_SELF)
    result["cpu_s"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    for big in done.folder.rglob("*.safetensors"):
        big.unlink()
    _write(kept, json.dumps(result))
    print(f"{name}, seed {seed}: {mean(result['answers']):.4f} after {result['tokens']} tokens, {result['cpu_s']:.0f} s of processor time", flush=True)
    return result


def losses(setup: Any) -> dict[str, Any]:
    """{answers}: the loss of every held-out answer, in fp32."""
    import torch

    from karui.trainers.data import collate
    from karui.trainers.objectives import make_objective

    loss = setup.objective or make_objective(setup)
    loss.eval()
    found: Answers = []
    with torch.inference_mode():
        for i in range(len(setup.held_out)):
            batch = collate([setup.held_out[i]])
            found.append((float(loss.of(batch).double()), batch.num_supervised))
    return {"answers": found}


def start(work: Path, name: str, *, data: dict[str, Any], prepare: list[dict[str, Any]]) -> dict[str, Any]:
    """What `trained` gives, of the model before its first step."""
    from karui.configs.recipe import Recipe
    from karui.trainers.run import prepare as made

    recipe = Recipe.build({"model": MODEL, "data": data, "prepare": prepare, "track": {"to": "none"}})
    key = json.dumps([recipe.dump(), "start"], sort_keys=True, default=str)
    kept = work / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    if not kept.is_file():
        _write(kept, json.dumps({"name": name, "seed": 0, **losses(made(recipe))}))
    return dict(json.loads(kept.read_text(encoding="utf-8")))


def mean(answers: Answers) -> float:
    """Loss per token."""
    return sum(s for s, _ in answers) / sum(n for _, n in answers)


def level(name: str, runs: list[dict[str, Any]], note: str = "") -> Figure:
    """The held-out loss of a kind of run, over its seeds."""
    values = [mean(r["answers"]) for r in runs]
    seeds = f"seeds: {', '.join(f'{v:.4f}' for v in values)}" if len(values) > 1 else "one seed"
    return Figure(name=name, ours=statistics.fmean(values), unit="nats", better="lower", note="; ".join(filter(None, (seeds, note))))


def gap(name: str, these: list[dict[str, Any]], those: list[dict[str, Any]], goal: float | None = None) -> Figure:
    """The mean difference of two kinds of run with the same seeds, and whether it is beyond the noise of answers and seeds."""
    pairs = list(zip(these, those))
    assert all(x["seed"] == y["seed"] for x, y in pairs), "only runs of the same seed are compared"
    tokens = [n for _, n in these[0]["answers"]]
    total, count = sum(tokens), len(tokens)
    by_answer = [statistics.fmean(x["answers"][i][0] - y["answers"][i][0] for x, y in pairs) for i in range(count)]
    gaps = [mean(x["answers"]) - mean(y["answers"]) for x, y in pairs]
    value = statistics.fmean(gaps)
    # the ratio of two sums: their errors go together, so residuals about value * tokens
    rest = [d - value * n for d, n in zip(by_answer, tokens)]
    error = (count / (count - 1) * sum(r * r for r in rest)) ** 0.5 / total
    if len(gaps) > 1:
        error = (error**2 + statistics.variance(gaps) / len(gaps)) ** 0.5
    verdict = "separable" if abs(value) > 2 * error else "not separable"
    seeds = f"{len(gaps)} seeds ({', '.join(f'{g:+.4f}' for g in gaps)})" if len(gaps) > 1 else "one seed"
    return Figure(name=name, ours=value, unit="nats", better="lower", goal=goal, note=f"standard error {error:.4f} over {count} answers, {seeds}: {verdict}")


def _write(path: Path, text: str) -> None:
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
