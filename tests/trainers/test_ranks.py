"""End to end with two processes: a rank that fails, is killed or hangs ends the run of the other soon, with a reason."""

import pytest

from karui.trainers.ranks import together
from tests.trainers.launching import OPTIM, job, launch

AT_STEP = """
import os, time
from karui.trainers import loop
step = loop.Loop.train_step
def train_step(self):
    step(self)
    if os.environ["RANK"] == "1" and self.state.step == 2:
        {deed}
loop.Loop.train_step = train_step
"""


def fail(make_recipe, tmp_path, deed, *, run=None, **launched):
    """What the launch printed when it ended; its 500 steps would take minutes."""
    recipe = make_recipe(optim={**OPTIM, "steps": 500}, run={"output": str(tmp_path / "run"), **(run or {})})
    done = launch(tmp_path, [job(recipe)], before=AT_STEP.format(deed=deed), **launched)
    assert done.returncode != 0
    return done.stderr


def test_a_rank_that_fails_gives_its_error_to_the_others(make_recipe, tmp_path):
    said = fail(make_recipe, tmp_path, "raise ValueError('the disk is on fire')")
    assert "rank 0 ends because another rank failed, rank 1: ValueError: the disk is on fire" in said


def test_a_rank_that_is_killed_is_told(make_recipe, tmp_path):
    said = fail(make_recipe, tmp_path, "os.kill(os.getpid(), 9)", torchrun=True)
    assert "rank 0 ends because another rank ended without a word" in said or "SIGKILL" in said


def test_a_rank_that_hangs_is_waited_for_no_longer_than_the_recipe_says(make_recipe, tmp_path):
    said = fail(make_recipe, tmp_path, "time.sleep(1000)", run={"timeout": 8}, patience=1)
    assert "did not answer within run.timeout=8 seconds" in said


def test_alone_an_error_stays_what_it_is(make_recipe):
    from accelerate import Accelerator

    with pytest.raises(ZeroDivisionError), together(make_recipe(), Accelerator(cpu=True)):
        raise ZeroDivisionError
