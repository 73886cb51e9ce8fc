"""Unit tests: turns and their masks, seeds, the schedule, the buffer's round trip and its bound, drift."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from karui.configs.errors import CorruptError, KaruiError
from karui.distill.on_policy.buffer import RolloutBuffer
from karui.distill.on_policy.drift import Drift
from karui.distill.on_policy.rollout import Drawn, turns, write
from karui.distill.on_policy.schedule import is_on_policy

END = 9


class Echo:
    """Writes the prompt's length, its seed modulo 5, and an end token; never ends after a prompt that ends in 7."""

    version = 4

    def __init__(self):
        self.calls = []

    def generate(self, prompts, seeds, max_tokens):
        self.calls.append([p.tolist() for p in prompts])
        out = []
        for p, s, n in zip(prompts, seeds, max_tokens):
            tokens = [8] * n if p[-1] == 7 else [len(p), s % 5, END][:n]
            out.append(Drawn(np.array(tokens), -np.arange(1.0, len(tokens) + 1), -np.arange(2.0, len(tokens) + 2), tokens[-1] == END))
        return out


def document(index, *parts):
    ids = np.array([t for part, _ in parts for t in part])
    mask = np.array([loss for part, loss in parts for _ in part])
    return index, ids, mask


@given(st.lists(st.booleans(), min_size=1))
def test_turns_rebuild_the_mask(mask):
    assert [loss for a, b, loss in turns(np.array(mask)) for _ in range(b - a)] == mask


def test_each_supervised_turn_is_written_anew_and_given_ones_stay():
    sampler = Echo()
    docs = [document(0, ([1, 2], False), ([5, END], True), ([3], False), ([6, 6, END], True), ([4, 4], False)),
            document(1, ([1], False), ([5, END], True))]
    a, b = write(sampler, docs, seed=0, steps=[0] * 2, max_tokens=8, max_length=100)
    assert [len(c) for c in sampler.calls] == [2, 1]
    assert sampler.calls[1][0] == [*a.ids[:5].tolist(), 3]
    assert a.loss_mask.tolist() == [False, False, True, True, True, False, True, True, True] and a.ids[4] == END
    assert a.processed.tolist() == [0, 0, -1, -2, -3, 0, -1, -2, -3] and a.raw[2] == -2
    assert b.ids[0] == 1 and b.loss_mask.tolist() == [False, True, True, True] and a.finished and b.finished and a.version == 4


def test_a_turn_without_an_end_closes_its_document():
    rollout, = write(Echo(), [document(0, ([7], False), ([5], True), ([3], False), ([6], True))], seed=0, steps=[0], max_tokens=4, max_length=100)
    assert rollout.ids.tolist() == [7, 8, 8, 8, 8] and not rollout.finished
    rollout, = write(Echo(), [document(0, ([1, 1], False), ([5], True))], seed=0, steps=[0], max_tokens=4, max_length=3)
    assert len(rollout.ids) == 3 and not rollout.finished


def test_seeds_depend_on_step_sample_and_turn_only():
    doc = [document(3, ([1], False), ([5], True))]
    one = write(Echo(), doc, seed=1, steps=[2], max_tokens=4, max_length=50)[0]
    among = write(Echo(), [document(8, ([1], False), ([5], True)), *doc], seed=1, steps=[2, 2], max_tokens=4, max_length=50)[1]
    assert one.ids.tolist() == among.ids.tolist()
    assert len({tuple(write(Echo(), doc, seed=1, steps=[s], max_tokens=4, max_length=50)[0].ids.tolist()) for s in range(20)}) > 1
    with pytest.raises(KaruiError, match="nothing for the student to write"):
        write(Echo(), [document(3, ([1], False))], seed=1, steps=[2], max_tokens=4, max_length=50)


def test_the_schedule_holds_its_share_and_its_first_stage():
    def picked(**options):
        return [is_on_policy(seed=5, step=s, total=100, index=i, **options) for s in range(100) for i in range(50)]

    assert all(picked(share=1.0)) and not any(picked(share=0.0))
    assert np.mean(picked(share=0.3)) == pytest.approx(0.3, abs=0.03)
    staged = picked(share=1.0, off_policy_first=0.25)
    assert not any(staged[: 25 * 50]) and all(staged[25 * 50 :])


def test_the_buffer_comes_back_from_its_tensors_and_keeps_its_bound():
    buffer = RolloutBuffer(1)
    sampler = Echo()
    for step in (4, 5):
        buffer.put(step, write(sampler, [document(i, ([1, i], False), ([5], True)) for i in range(3)], seed=0, steps=[step] * 3, max_tokens=4, max_length=50))
    again = RolloutBuffer(1)
    again.load({k: v.clone() for k, v in buffer.state().items()})
    for step in (4, 5):
        for a, b in zip(buffer.take(step), again.take(step), strict=True):
            assert all(np.array_equal(getattr(a, n), getattr(b, n)) for n in ("ids", "loss_mask", "processed", "raw"))
            assert (a.version, a.finished, a.index) == (b.version, b.finished, b.index)
    assert 5 not in again and again.state() == {}
    again.load({})
    again.put(7, write(sampler, [document(0, ([1], False), ([5], True))], seed=0, steps=[7], max_tokens=4, max_length=50))
    broken = {**again.state(), "rollouts.raw": torch.zeros(1)}
    with pytest.raises(AssertionError):
        again.take(7)
    with pytest.raises(CorruptError, match="cut short"):
        again.load(broken)


def test_drift():
    logp = torch.tensor([-1.0, -2.0, -3.0])
    assert Drift.of(logp, logp).kl == 0 and Drift.of(logp[:0], logp[:0]).tokens == 0
    d = Drift.of(logp + torch.tensor([0.1, -0.2, 0.3]), logp)
    assert d.mean == pytest.approx(0.2) and d.largest == pytest.approx(0.3) and d.kl == pytest.approx(np.mean([np.exp(x) - 1 - x for x in (0.1, -0.2, 0.3)]), rel=1e-5)
    d.check(0.25)
    with pytest.raises(KaruiError, match="its text is not the student's"):
        d.check(0.1)
    with pytest.raises(KaruiError):
        Drift.of(logp * float("nan"), logp).check(0.1)
