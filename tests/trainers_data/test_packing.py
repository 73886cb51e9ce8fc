"""Property and unit tests of planning and collating, against their definitions."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from karui.configs.errors import KaruiError
from karui.trainers.data import IGNORE, Sample, SampleSet, collate, epoch_order, plan_epoch, total_steps
from karui.trainers.data.packing import first_fit

plans = st.fixed_dictionaries({
    "lengths": st.lists(st.integers(1, 60), min_size=1, max_size=60),
    "batch": st.integers(1, 17),
    "micro_tokens": st.integers(1, 130),
    "world": st.integers(1, 5),
    "seed": st.integers(0, 2**40),
    "epoch": st.integers(0, 50),
    "shuffle": st.booleans(),
    "packing": st.booleans(),
})


def ranks(p, **change):
    p = {**p, **change}
    return [plan_epoch(rank=r, **p) for r in range(p["world"])]


@given(plans)
@settings(max_examples=200, deadline=None)
def test_every_sample_once_in_steps_that_only_seed_epoch_and_batch_decide(p):
    per_rank = ranks(p)
    steps = [sorted(i for plan in per_rank for micro in plan[k] for i in micro) for k in range(len(per_rank[0]))]
    assert sorted(i for step in steps for i in step) == list(range(len(p["lengths"])))
    assert [len(s) for s in steps[:-1]] == [p["batch"]] * (len(steps) - 1)
    alone = plan_epoch(**{**p, "world": 1, "micro_tokens": 10**6, "packing": True})
    assert [sorted(i for micro in step for i in micro) for step in alone] == steps


@given(plans)
@settings(max_examples=200, deadline=None)
def test_micro_batches_fit_and_ranks_run_in_lock_step(p):
    for steps in zip(*ranks(p)):
        assert len({len(step) for step in steps}) == 1, "ranks run different numbers of micro-batches"
        micros = [m for step in steps for m in step]
        for micro in micros:
            assert len(micro) <= 1 or sum(p["lengths"][i] for i in micro) <= p["micro_tokens"]
            assert p["packing"] or len(micro) <= 1
        if any(not m for m in micros):  # fillers only when there was nothing left to split
            assert max(len(m) for m in micros) == 1


@given(plans)
@settings(max_examples=100, deadline=None)
def test_resume_is_recomputing_the_plan_and_skipping(p):
    whole = list(plan_epoch(**p))
    k = len(whole) // 2
    again = plan_epoch(**p)
    assert [again[i] for i in range(k, len(again))] == whole[k:] and again[k:] == whole[k:] and again[-1] == whole[-1]


@given(st.integers(2, 300), st.integers(0, 2**63 - 1), st.integers(0, 100))
@settings(deadline=None)
def test_order_is_a_permutation_that_changes_with_seed_and_epoch(n, seed, epoch):
    order = epoch_order(n, seed, epoch)
    assert sorted(order) == list(range(n))
    if n > 20:
        assert list(order) != list(epoch_order(n, seed, epoch + 1)) and list(order) != list(epoch_order(n, seed ^ 1, epoch))
    assert list(epoch_order(n, seed, epoch, shuffle=False)) == list(range(n))


def test_order_is_pinned():
    """The order is part of what resume rests on: a change of the algorithm must be seen."""
    assert epoch_order(10, 0, 0).tolist() == [4, 8, 0, 1, 7, 6, 2, 5, 3, 9]
    assert epoch_order(10, 1234, 3).tolist() == [9, 3, 8, 4, 6, 0, 1, 2, 7, 5]


def mix(value):
    """splitmix64 in Python's integers, from the paper."""
    z = (value + 0x9E3779B97F4A7C15) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


def test_order_against_integer_arithmetic():
    assert mix(0) == 0xE220A8397B1DCDAF  # the first output of the published generator seeded with 0
    for seed, epoch in [(0, 0), (1234, 3), (2**62 + 5, 77)]:
        key = mix((mix(seed) + epoch) % 2**64)
        assert epoch_order(40, seed, epoch).tolist() == sorted(range(40), key=lambda i: mix((key + i) % 2**64))


def test_order_has_no_bias_in_position():
    """Over many epochs every sample's mean position is the middle: 5 standard errors of a uniform position."""
    positions = np.array([np.argsort(epoch_order(50, 7, e)) for e in range(400)])
    error = np.sqrt((50**2 - 1) / 12 / 400)
    assert np.abs(positions.mean(0) - 24.5).max() < 5 * error


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(9, 20))
@settings(max_examples=60, deadline=None)
def test_first_fit_decreasing_stays_within_its_bound_of_the_optimum(sizes, capacity):
    lengths = np.array(sizes)
    bins = first_fit(np.argsort(-lengths, kind="stable"), lengths, capacity)
    assert len(bins) <= 11 / 9 * optimum(sizes, capacity) + 6 / 9


def optimum(sizes, capacity):
    """Fewest bins, by trying all assignments up to symmetry."""
    best = len(sizes)

    def place(at, room):
        nonlocal best
        if len(room) >= best:
            return
        if at == len(sizes):
            best = len(room)
            return
        for b in range(len(room)):
            if room[b] >= sizes[at]:
                place(at + 1, [*room[:b], room[b] - sizes[at], *room[b + 1 :]])
        place(at + 1, [*room, capacity - sizes[at]])

    place(0, [])
    return best


def sample(ids, mask, row=0):
    return Sample(ids=np.array(ids, np.int32), loss_mask=np.array(mask, bool), source_row=row)


documents = st.lists(st.lists(st.tuples(st.integers(0, 99), st.booleans()), min_size=1, max_size=12), min_size=1, max_size=8)


@given(documents)
@settings(max_examples=200, deadline=None)
def test_collate_against_the_definition_position_by_position(docs):
    samples = [sample([t for t, _ in d], [m for _, m in d]) for d in docs]
    batch = collate(samples)
    tokens, positions, targets = [], [], []
    for d in docs:
        for t, (token, _) in enumerate(d):
            tokens.append(token)
            positions.append(t)
            targets.append(d[t + 1][0] if t + 1 < len(d) and d[t + 1][1] else IGNORE)
    assert batch.tokens.tolist() == tokens and batch.positions.tolist() == positions and batch.targets.tolist() == targets
    assert batch.cu_seqlens.tolist() == [0, *np.cumsum([len(d) for d in docs])]
    assert (batch.num_supervised, batch.num_samples) == (sum(t != IGNORE for t in targets), len(docs))
    assert batch.max_length == max(len(d) for d in docs) and batch.num_tokens == len(tokens)
    assert (batch.tokens.dtype, batch.positions.dtype, batch.targets.dtype) == (torch.int64,) * 3
    assert batch.cu_seqlens.dtype == torch.int32


@given(documents, st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_supervised_count_does_not_depend_on_the_split(docs, parts):
    samples = [sample([t for t, _ in d], [m for _, m in d]) for d in docs]
    whole = collate(samples).num_supervised
    assert sum(collate(samples[i::parts]).num_supervised for i in range(parts)) == whole


def test_collate_does_not_touch_its_samples():
    one = sample([1, 2, 3], [True, True, True])
    collate([one])
    assert one.loss_mask.all()


def test_filler_keeps_collectives_going_without_loss():
    filler = collate([])
    assert (filler.num_tokens, filler.num_supervised, filler.num_samples) == (1, 0, 0) and filler.targets.tolist() == [IGNORE]


def test_last_step_holds_the_rest_and_long_samples_stand_alone():
    plan = plan_epoch([5, 50, 5, 5, 5], batch=4, micro_tokens=12, shuffle=False)
    assert list(plan) == [[[1], [0, 2], [3]], [[4]]]
    unpacked = plan_epoch([5, 50, 6, 7], batch=4, micro_tokens=100, shuffle=False, packing=False)
    assert list(unpacked) == [[[1], [3], [2], [0]]]


def test_total_steps():
    assert total_steps(100, batch=16, epochs=1.0, steps=None) == 7
    assert total_steps(100, batch=16, epochs=0.5, steps=None) == 4
    assert total_steps(100, batch=16, epochs=3.0, steps=11) == 11
    assert total_steps(96, batch=16, epochs=1 / 3, steps=None) == 2
    assert total_steps(3, batch=16, epochs=0.01, steps=None) == 1


@pytest.mark.parametrize("change", [{"lengths": []}, {"batch": 0}, {"micro_tokens": 0}, {"rank": 2, "world": 2}])
def test_bad_plans_are_refused(change):
    with pytest.raises(KaruiError):
        plan_epoch(**{"lengths": [3], "batch": 1, "micro_tokens": 8, **change})


def test_sample_set_is_its_samples():
    samples = [sample([1, 2], [False, True], 4), sample([3], [False], 5), sample([4, 5, 6], [False, False, True], 9)]
    kept = SampleSet.of(samples)
    assert len(kept) == 3 and kept.lengths.tolist() == [2, 1, 3] and kept[-1].source_row == 9
    assert [s.ids.tolist() for s in kept] == [[1, 2], [3], [4, 5, 6]] and kept[1:][0].source_row == 5
    assert (kept.counts.tokens, kept.counts.supervised_tokens, kept.counts.used) == (6, 2, 3)
    with pytest.raises(IndexError):
        kept[3]
