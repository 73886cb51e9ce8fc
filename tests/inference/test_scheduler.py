"""Property: random arrivals, cancellations, forks and drafts through the scheduler; nothing starves, leaks or exceeds the budget."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from karui.inference.cache.naive import NaiveIndex
from karui.inference.cache.pool import BlockPool
from karui.inference.cache.prefix import HashedIndex
from karui.inference.scheduler import EngineStuckError, Scheduler, Sequence
from karui.inference.speculative.base import Draft

BLOCK = 4


class Simulation:
    """Plays engine and runner: remembers which token each slot holds and checks that a sequence reads back its own text."""

    def __init__(self, num_blocks: int, max_tokens: int, max_sequences: int, max_chunk: int, index, windows=(None,)) -> None:
        self.pool = BlockPool(num_blocks, BLOCK, index)
        self.scheduler = Scheduler(self.pool, max_tokens, max_sequences, num_blocks * BLOCK, max_chunk, windows=windows)
        self.slots: dict[int, int] = {}
        self.goal: dict[Sequence, int] = {}
        self.count = self.steps = 0

    def add(self, tokens: list[int], extra: int, priority: int, recompute: bool = False) -> Sequence:
        s = Sequence(tokens, (priority, self.count, 0), "space", None, recompute)
        self.count += 1
        self.goal[s] = len(tokens) + extra
        self.scheduler.add(s)
        return s

    def step(self, drafts: int = 0, fork: bool = False) -> None:
        scheduler = self.scheduler
        for s in scheduler.running:
            room = self.goal[s] - len(s.tokens) - 1
            s.draft = Draft([7] * min(drafts, room)) if s.num_pending == 1 and min(drafts, room) > 0 else None
        plan = scheduler.schedule()
        self.steps += 1
        rows = sum(w.count + w.num_drafted for w in plan.works)
        assert 0 < rows <= scheduler.max_tokens and len(plan.works) <= scheduler.max_sequences
        copied = {target: self.slots[source] for source, target in plan.copies}
        self.slots |= copied
        for w in plan.works:
            s = w.sequence
            known = s.tokens[s.num_computed:s.num_computed + w.count] + (s.draft.tokens if w.num_drafted else [])
            for row in scheduler.tables[:, s.table_row]:
                for i, token in enumerate(known):
                    p = s.num_computed + i
                    block = int(row[p // BLOCK])
                    assert self.pool.references[block] == 1, "a shared block is written to"
                    self.slots[block * BLOCK + p % BLOCK] = token
        for w in plan.works:
            s = w.sequence
            for own, window in zip(s.blocks, scheduler.windows):
                first = 0 if window is None else max(0, s.num_computed - window + 1)
                held = [self.slots[own[p // BLOCK] * BLOCK + p % BLOCK] for p in range(first, s.num_computed + w.count)]
                assert held == s.tokens[first:s.num_computed + w.count], "the cache holds another text"
            scheduler.computed(s, w.count)
            scheduler.trim(s)
            if s.num_pending:
                continue
            if len(s.tokens) < self.goal[s]:
                if fork and len(s.tokens) + 1 < self.goal[s]:
                    child = Sequence(list(s.tokens), (s.order[0], s.order[1], self.count), "space", None)
                    self.count += 1
                    self.goal[child] = self.goal[s]
                    scheduler.fork(s, child)
                    child.tokens.append(len(child.tokens) % 3 + 3)
                    fork = False
                s.tokens.append(len(s.tokens) % 3)
            else:
                scheduler.remove(s)
                del self.goal[s]
        scheduler.check_integrity()


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_everything_finishes_and_nothing_leaks(data):
    blocks = data.draw(st.integers(6, 20))
    index = data.draw(st.sampled_from([NaiveIndex, HashedIndex]))()
    windows = data.draw(st.sampled_from([(None,), (6,), (1,), (None, 9), (None, 3, 3)]))
    blocks *= len(windows)
    sim = Simulation(blocks, data.draw(st.integers(2, 24)), data.draw(st.integers(1, 5)), data.draw(st.integers(1, 16)), index, windows)
    blocks //= len(windows)
    live: list[Sequence] = []
    for _ in range(data.draw(st.integers(1, 12))):
        length = data.draw(st.integers(1, blocks * BLOCK // 2))
        tokens = data.draw(st.lists(st.integers(0, 1), min_size=length, max_size=length))
        live.append(sim.add(tokens, data.draw(st.integers(1, blocks * BLOCK // 2)), data.draw(st.integers(0, 2)),
                            data.draw(st.booleans())))
        for _ in range(data.draw(st.integers(0, 6))):
            if sim.scheduler.has_work:
                sim.step(data.draw(st.integers(0, 3)), data.draw(st.booleans()))
        if data.draw(st.integers(0, 3)) == 0:
            victim = data.draw(st.sampled_from(live))
            sim.scheduler.remove(victim)
            sim.goal.pop(victim, None)
    while sim.scheduler.has_work:
        sim.step()
        assert sim.steps < 20_000, sim.scheduler.dump()
    assert not sim.goal and sim.pool.num_free == sim.pool.num_blocks
    sim.pool.check([])


def test_decodes_are_not_starved_by_a_long_prompt():
    sim = Simulation(100, 8, 4, 8, HashedIndex())
    short = sim.add([2, 3], 6, 1)
    sim.step()
    long = sim.add([1] * 200, 1, 0)  # comes first in order and would fill many steps
    for grown in range(4, 9):
        sim.step()
        assert len(short.tokens) == grown
    assert 0 < long.num_computed < 200


def test_the_first_in_order_is_never_preempted():
    sim = Simulation(8, 16, 4, 16, HashedIndex())
    first = sim.add([1] * 8, 20, 0)
    for _ in range(3):
        sim.add([2] * 6, 20, 0)
    progress = 0
    while first in sim.goal:
        sim.step()
        assert first.num_computed >= progress or first not in sim.goal
        progress = first.num_computed
    assert sim.scheduler.num_preemptions > 0


def test_an_empty_step_with_work_raises_with_the_state():
    sim = Simulation(8, 16, 4, 16, HashedIndex())
    sim.add([1] * 8, 20, 0)
    sim.step()
    for s in sim.scheduler.running:
        s.held = True
    with pytest.raises(EngineStuckError, match=r"7 free of 8|6 free of 8(.|\n)*running 1:(.|\n)*held"):
        sim.scheduler.schedule()


def test_a_suspect_runs_alone():
    sim = Simulation(20, 16, 4, 16, HashedIndex())
    a, b = sim.add([1] * 4, 5, 0), sim.add([2] * 4, 5, 0)
    sim.step()
    b.failures = 1
    assert [w.sequence for w in sim.scheduler.schedule().works] == [b]
    sim.scheduler.computed(b, 1)
    b.tokens.append(3)
    assert [w.sequence for w in sim.scheduler.schedule().works] == [a, b]
