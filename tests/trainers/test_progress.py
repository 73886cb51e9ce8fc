"""Unit: what a person sees while a run goes on, on a terminal and in a log."""

import io

import pytest
from rich.console import Console

from karui.trainers import progress

VALUES = {"loss": 1.23456, "grad_norm": 0.5, "lr": 2e-4, "tokens_per_s": 412.3, "memory_bytes": 1.4e9}
FIGURES = "loss 1.2346  grad 0.500  lr 2.00e-04  412 tokens/s  1.40 GB"


def test_the_live_view_shows_a_bar_with_the_newest_figures_and_notes_above_it(monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    view = progress.make_progress(40, done=10)
    assert isinstance(view, progress.Live)
    screen = io.StringIO()
    view.bar.live.console = Console(file=screen, force_terminal=True, width=140, color_system=None)
    with view:
        view.note("held-out loss 1.5 after 10 steps")
        view.step(11, VALUES)
        view.step(12, {**VALUES, "loss": 1.1})
    text = screen.getvalue()
    assert "held-out loss 1.5" in text and FIGURES.replace("1.2346", "1.1000") in text and "12/40" in text


def test_a_log_gets_a_line_at_most_every_two_seconds_and_the_last_one(monkeypatch, capsys):
    clock = iter([0.0, *(0.5 * n for n in range(1, 13))])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    view = progress.make_progress(12)
    assert isinstance(view, progress.Plain)
    for n in range(1, 13):
        view.step(n, VALUES)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["4/12", "8/12", "12/12"]
    assert FIGURES in lines[0] and lines[0].endswith("left 0:00:04") and lines[-1].endswith("left 0:00:00")


def test_other_ranks_say_nothing(capsys):
    with progress.make_progress(3, show=False) as view:
        view.step(1, VALUES)
        view.note("hello")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("first,done,expected", [(0, 1, "0:59:00"), (0, 30, "0:01:00"), (20, 30, "0:03:00")])
def test_time_left_counts_only_the_steps_of_this_process(first, done, expected):
    assert progress.left(0.0, 60.0, first, done, 60) == expected
