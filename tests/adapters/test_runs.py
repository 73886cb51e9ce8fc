"""Reference: how benchmarks/runs.py compares runs, against a bootstrap over the answers; its finished runs are not repeated."""

import importlib
import random
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "runs.py"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module(SCRIPT.stem)


def pair(shift, seed=0, count=60):
    """Two runs over the same answers; the second's losses are lower by `shift` a token, give or take."""
    rng = random.Random(seed)
    tokens = [rng.randint(20, 200) for _ in range(count)]
    hard = [rng.uniform(0.5, 2.0) for _ in tokens]
    one = [(n * (h + rng.gauss(0, 0.02)), n) for n, h in zip(tokens, hard)]
    other = [(n * (h - shift + rng.gauss(0, 0.02)), n) for n, h in zip(tokens, hard)]
    return {"seed": seed, "answers": one}, {"seed": seed, "answers": other}


def test_a_gap_and_its_error_are_those_of_a_bootstrap(script):
    one, other = pair(0.05)
    figure = script.gap("x", [one], [other], goal=0.0)
    assert figure.ours == pytest.approx(script.mean(one["answers"]) - script.mean(other["answers"]))
    rng, drawn = random.Random(1), []
    for _ in range(2000):
        at = [rng.randrange(60) for _ in range(60)]
        drawn.append(script.mean([one["answers"][i] for i in at]) - script.mean([other["answers"][i] for i in at]))
    middle = sum(drawn) / len(drawn)
    spread = (sum((d - middle) ** 2 for d in drawn) / len(drawn)) ** 0.5
    assert float(figure.note.split()[2]) == pytest.approx(spread, rel=0.15)
    assert figure.note.endswith("one seed: separable") and figure.met is False
    assert script.gap("x", *([r] for r in pair(0.001))).note.endswith("not separable")


def test_seeds_that_disagree_make_a_difference_inseparable(script):
    up, down = pair(0.05), pair(-0.04, seed=1)
    assert "2 seeds" in script.gap("x", [up[0], down[0]], [up[1], down[1]]).note
    # the answers of both seeds are the same ones in a benchmark; here only the seeds' disagreement matters
    down = tuple({**r, "answers": [(s, n) for (s, _), (_, n) in zip(r["answers"], up[0]["answers"])]} for r in down)
    assert script.gap("x", [up[0], down[0]], [up[1], down[1]]).note.endswith("not separable")
    with pytest.raises(AssertionError, match="same seed"):
        script.gap("x", [up[0]], [down[1]])
    assert script.level("x", [up[0], down[0]]).note.startswith("seeds: ") and script.level("x", [up[0]]).note == "one seed"
