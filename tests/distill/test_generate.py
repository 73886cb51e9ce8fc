"""Unit tests: rejection sampling keeps what the checker accepts, counts what it does not, and says when nothing is left."""

import pytest

from karui.configs.errors import KaruiError
from karui.distill.generate import checker, last_number, rejection_sample

ROWS = [{"q": "1 + 1", "answer": "so\n#### 2"}, {"q": "2 + 2", "answer": "#### 4"}]


def writer(prompts, seeds):
    """Right from the second turn on; an odd seed never ends."""
    return [(f"{p} = {eval(p) if s >= 2 else 9}", s % 2 == 0 or s > 2) for p, s in zip(prompts, seeds)]


def test_only_accepted_texts_come_back_and_open_prompts_are_drawn_again():
    found = list(rejection_sample(writer, ROWS, [r["q"] for r in ROWS], checker=checker("answer"), draws=3))
    assert [(f["row"], f["completion"]) for f in found] == [(0, "1 + 1 = 2"), (1, "2 + 2 = 4")]
    both = list(rejection_sample(writer, ROWS, [r["q"] for r in ROWS], draws=3, keep=2))
    assert [f["row"] for f in both] == [0, 0, 1, 1]


def test_a_checker_that_rejects_everything_is_an_error():
    with pytest.raises(KaruiError, match="none of 4 continuations was kept .3 rejected by the checker, 1 without an end"):
        list(rejection_sample(writer, ROWS, [r["q"] for r in ROWS], checker=lambda text, row: False, draws=2))


def test_checkers():
    assert checker("answer")("the total is 1,234.", {"answer": "#### 1234"})
    assert not checker("answer")("no number", {"answer": "#### 1"}) and not checker("answer")("1", {"answer": "none"})
    assert checker("contains:yes")("oh yes", {}) and not checker("contains:yes")("no", {})
    assert checker(r"regex:^\d+$")("12", {}) and not checker(r"regex:^\d+$")("12a", {})
    assert last_number("from 3 to -4.5") == -4.5 and last_number("") is None
    for bad in ("anser", "contains:", "regex:("):
        with pytest.raises(KaruiError):
            checker(bad)
