"""Unit: a step's micro-batches are made ahead in a thread, and are those of the plan whatever was asked for before."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from karui.configs.recipe import Recipe
from karui.trainers.data import Sample, SampleSet, StepLoader, collate, loader, plan_epoch

RECIPE = Recipe.build({"model": "m", "data": {"train": "x"}, "optim": {"batch": 3, "micro_tokens": 16}, "run": {"seed": 5}})
SAMPLES = SampleSet.of(
    [Sample(ids=np.arange(1, n, dtype=np.int32), loss_mask=np.arange(1, n) > 2, source_row=n) for n in range(4, 14)]
)


def plain(step, rank, world):
    epoch, at = divmod(step, 4)  # 10 samples in steps of 3
    plan = plan_epoch(SAMPLES.lengths, batch=3, micro_tokens=16, rank=rank, world=world, seed=5, epoch=epoch)
    return step / 4, [collate([SAMPLES[i] for i in micro]) for micro in plan[at]]


@given(st.lists(st.integers(0, 11), min_size=1, max_size=8), st.integers(0, 1))
def test_any_order_of_steps_gives_the_batches_of_the_plan(steps, rank):
    load = StepLoader(RECIPE, SAMPLES, rank=rank, world=2)
    for step in steps:
        (epoch, found), (wanted_epoch, wanted) = load(step), plain(step, rank, 2)
        assert epoch == wanted_epoch and len(found) == len(wanted)
        assert all(torch.equal(a.tokens, b.tokens) and torch.equal(a.targets, b.targets) for a, b in zip(found, wanted))


def test_the_next_step_is_made_in_a_thread_without_being_asked_for(monkeypatch):
    made, enough = [], threading.Event()

    def watched(samples):
        made.append(threading.current_thread() is threading.main_thread())
        if len(made) >= 2 * len(plain(0, 0, 1)[1]):
            enough.set()
        return collate(samples)

    monkeypatch.setattr(loader, "collate", watched)
    load = StepLoader(RECIPE, SAMPLES, rank=0, world=1)
    load(0)
    assert enough.wait(30) and not any(made)
    assert load(1) is load(1)


def test_a_sample_that_cannot_be_read_fails_the_step_it_belongs_to(monkeypatch):
    load = StepLoader(RECIPE, SAMPLES, rank=0, world=1)
    load(0)
    monkeypatch.setattr(loader, "collate", lambda samples: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        load(5)
