"""Behavioural: benchmarks/speculation.py counts what the engines did, and notices a text that differs."""

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from karui.inference.speculative.config import SpeculationConfig
from tests.speculative.conftest import tiny_engine, tiny_weights

SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks"
PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [9, 4]]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("speculation")


def test_every_token_is_of_a_verification_or_a_plain_step(script):
    a = SimpleNamespace(rounds=2, clock="wall")
    engines = {"plain": tiny_engine(native=True, vocab=13)}
    engines |= {s: tiny_engine(SpeculationConfig(**{**vars(SpeculationConfig.parse(s)), "adaptive": False, "n_min": 1}), native=True, vocab=13)
                for s in ("ngram:4", "lookahead:3,2,2", "draft:x:3")}
    runs = script.measure(a, engines, PROMPTS, 40)
    for name, run in runs.items():
        assert run.same and run.tokens == 2 * 39 and [len(s) for s in run.seconds] == [2, 2] and run.rate > 0
        assert run.emitted + run.steps - run.drafts == run.tokens * a.rounds
        assert sum(run.by_depth) == run.emitted - run.drafts and (run.drafts > 0) == (name != "plain")
    other = tiny_engine(native=True, vocab=13)
    other.runner.load_weights({n: w.flip(0) for n, w in tiny_weights(other.config).items()})
    assert not script.measure(a, {"plain": engines["plain"], "other": other}, PROMPTS, 40)["other"].same


def test_a_method_takes_the_first_bundle_that_has_its_file(script, tmp_path):
    folders = [tmp_path / name for name in ("model", "heads")]
    for folder in folders:
        folder.mkdir()
    (folders[1] / "medusa.safetensors").write_bytes(b"")
    a = SimpleNamespace(bundle=folders, draft_model=None, only=None, shapes=True, medusa_nodes=5, draft_tokens=3)
    found = script.spellings(a)
    assert found["medusa"][0] == folders[1] and found["ngram"][0] == folders[0] and "eagle3" not in found and "draft" not in found
    assert found["medusa"][1].k == 5 and not found["lookahead:3,2,2, always"][1].adaptive
    a.only, a.draft_model = "draft,medusa", tmp_path
    assert set(script.spellings(a)) == {"plain", "draft", "medusa"}
