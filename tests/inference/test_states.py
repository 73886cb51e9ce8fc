"""Unit and property: the books of state pages, and the scheduler's use of them against a model that is nothing but a state."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from karui.inference.cache.pool import BlockPool
from karui.inference.cache.prefix import HashedIndex
from karui.inference.cache.states import ZERO, StatePool, StateStore, page_bytes
from karui.inference.models.recurrent.delta_net import DeltaNet
from karui.inference.scheduler import Scheduler, Sequence
from karui.inference.speculative.base import Draft

BLOCK = 4


def test_a_page_is_findable_until_it_is_needed() -> None:
    pool = StatePool(3)
    a, b = pool.take(), pool.take()
    assert pool.enter("a", a) and pool.enter("b", b) and not pool.enter("a", b) and not pool.enter("c", a)
    pool.release(a)
    pool.release(b)
    pool.check([])
    assert pool.num_free == 3 and pool.num_cached == 2
    held = pool.share(pool.find("a") or 0)  # used again: now the longest unused is b
    pool.release(held)
    assert {pool.take(), pool.take()} == {3, b} and pool.find("b") is None and pool.find("a") == a
    pool.forget("a")
    pool.forget("a")
    assert pool.num_cached == 0 and pool.take() == a
    assert pool.share(ZERO) == ZERO
    pool.release(ZERO)
    pool.check([a, b, 3, ZERO])
    with pytest.raises(AssertionError, match="reference counts differ"):
        pool.check([a, b])


def test_a_forgotten_page_is_the_next_to_be_used() -> None:
    pool = StatePool(3)
    pages = [pool.take() for _ in range(3)]
    for name, page in zip("abc", pages, strict=True):
        pool.enter(name, page)
        pool.release(page)
    pool.forget("c")
    assert pool.take() == pages[2]
    pool.release(pages[2])
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(pages[2])


def test_bytes_lie_where_they_were_written() -> None:
    kind = DeltaNet(layers=(True, False, True), key_heads=1, value_heads=2, key_dim=3, value_dim=4, taps=3, eps=1e-6)
    store = StateStore(kind, 5, torch.bfloat16, torch.float32, torch.device("cpu"))
    pages = torch.tensor([4, 2])
    state = (torch.randn(2, 2, 14).bfloat16(), torch.randn(2, 2, 3, 4))
    store.write(1, pages, state)
    assert all(torch.equal(a, b) for a, b in zip(store.read(1, pages), state, strict=True))
    assert all(not part.any() for layer in (0, 1) for part in store.read(layer, torch.tensor([0, 1, 3])))
    assert not store.read(0, pages)[1].any()
    assert page_bytes(kind, torch.bfloat16, torch.float32) == 2 * (2 * 14 * 2 + 2 * 3 * 4 * 4)


class Simulation:
    """Plays engine and runner: a page holds the text that it stands behind, so a sequence sees at once whether its page is right."""

    def __init__(self, num_blocks: int, num_pages: int, max_tokens: int, max_sequences: int) -> None:
        self.pool, self.states = BlockPool(num_blocks, BLOCK, HashedIndex()), StatePool(num_pages)
        self.scheduler = Scheduler(self.pool, max_tokens, max_sequences, num_blocks * BLOCK, states=self.states)
        self.pages: dict[int, list[int]] = {ZERO: []}
        self.goal: dict[Sequence, int] = {}
        self.count = 0
        self.cached: dict[Sequence, int] = {}

    def add(self, tokens: list[int], extra: int = 1, priority: int = 0, recompute: bool = False) -> Sequence:
        s = Sequence(tokens, (priority, self.count, 0), "space", None, recompute)
        self.count += 1
        self.goal[s] = len(tokens) + extra
        self.scheduler.add(s)
        return s

    def step(self, drafts: int = 0, right: int = 0, fork: bool = False, fails: bool = False) -> None:
        """drafts: tokens drafted for each that decodes, of which `right` are. fails: the runner raises when it has written."""
        scheduler = self.scheduler
        for s in scheduler.running:
            room = min(drafts, self.goal[s] - len(s.tokens) - 1)
            s.draft = Draft([next_of(len(s.tokens) + i) + (i >= right) for i in range(room)]) if s.num_pending == 1 and room > 0 \
                else None
        plan = scheduler.schedule()
        written: set[int] = set()
        for w in plan.works:
            s = w.sequence
            self.cached.setdefault(s, s.num_computed)
            assert self.pages[s.state] == s.tokens[:s.num_computed], "the page stands behind another text"
            known = s.tokens[s.num_computed:s.num_computed + w.count] + (s.draft.tokens if w.num_drafted else [])
            assert s.writes[-1][0] == len(known) and (not w.num_drafted or len(s.writes) == len(known))
            for rows, page in s.writes:
                assert self.states.references[page] == 1 and page not in written, "a page is written that somebody else holds"
                written.add(page)
                self.pages[page] = s.tokens[:s.num_computed] + known[:rows]
        assert not written & {w.sequence.state for w in plan.works}
        if fails:
            for w in plan.works:
                w.sequence.draft = None
            return
        for w in plan.works:
            s = w.sequence
            accepted = 0
            if w.num_drafted:
                accepted = min(right, w.num_drafted)
                s.tokens += s.draft.tokens[:accepted]
                s.draft = None
            scheduler.computed(s, w.count + accepted)
            scheduler.trim(s)
            if s.num_pending:
                continue
            if len(s.tokens) >= self.goal[s]:
                scheduler.remove(s)
                del self.goal[s]
                continue
            if fork and len(s.tokens) + 1 < self.goal[s]:
                child = Sequence(list(s.tokens), (s.order[0], s.order[1], self.count), "space", None)
                child.num_prompt = s.num_prompt
                self.count += 1
                self.goal[child] = self.goal[s]
                scheduler.fork(s, child)
                child.tokens.append(next_of(len(child.tokens)) + 1)
                fork = False
            s.tokens.append(next_of(len(s.tokens)))
        scheduler.check_integrity()
        for name, page in self.states._page_of.items():
            text = self.pages[page]
            assert len(text) % BLOCK == 0 and self.name_of(text) == name and self.pool.index.find(name) is not None

    def name_of(self, text: list[int]) -> bytes:
        name = self.pool.index.root("space")
        for i in range(0, len(text), BLOCK):
            name = self.pool.index.name(name, text[i:i + BLOCK])
        return name

    def finish(self) -> None:
        while self.scheduler.has_work:
            self.step()


def next_of(position: int) -> int:
    return position % 3


@pytest.mark.parametrize("spare", range(5))
def test_pages_in_the_middle_of_a_chunk_are_no_more_than_there_are(spare: int) -> None:
    sim = Simulation(40, 2 + spare, 64, 1)
    sim.add([1] * 12, recompute=True)  # leaves blocks and no page
    sim.finish()
    s = sim.add([1] * 12 + [2] * 9, 10)
    s.num_prompt = 17  # as after a preemption: wanted are a branch at 12, the prompt's end at 16, and 20
    sim.step()
    assert s.num_computed == 21 and sim.states.num_cached == min(spare, 3)
    sim.finish()


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_every_page_stands_behind_its_text(data: st.DataObject) -> None:
    blocks, sequences = data.draw(st.integers(6, 20)), data.draw(st.integers(1, 5))
    sim = Simulation(blocks, 2 * sequences + data.draw(st.integers(0, 8)), data.draw(st.integers(2, 24)), sequences)
    live: list[Sequence] = []
    for _ in range(data.draw(st.integers(1, 12))):
        length = data.draw(st.integers(1, blocks * BLOCK // 2))
        tokens = data.draw(st.lists(st.integers(0, 1), min_size=length, max_size=length))
        live.append(sim.add(tokens, data.draw(st.integers(1, blocks * BLOCK // 2)), data.draw(st.integers(0, 2)),
                            data.draw(st.booleans())))
        for _ in range(data.draw(st.integers(0, 6))):
            if sim.scheduler.has_work:
                sim.step(data.draw(st.integers(0, 4)), data.draw(st.integers(0, 4)), data.draw(st.booleans()),
                         data.draw(st.integers(0, 5)) == 0)
        if data.draw(st.integers(0, 3)) == 0:
            victim = data.draw(st.sampled_from(live))
            sim.scheduler.remove(victim)
            sim.goal.pop(victim, None)
    sim.finish()
    assert not sim.goal and sim.pool.num_free == blocks and sim.states.num_free == sim.states.num_pages
    sim.states.check([])


def test_a_preempted_sequence_goes_on_from_its_own_page() -> None:
    sim = Simulation(30, 8, 64, 2)
    s = sim.add([1] * 10, 20)
    for _ in range(8):
        sim.step()
    assert s.num_computed == 17 and s.trail is not None
    sim.scheduler.preempt(s)
    assert s.state == ZERO and sim.states.num_free == 8
    sim.step()
    assert s.num_computed == 18 and sim.scheduler.num_cached_tokens == 16  # two rows were run
    sim.finish()


def test_drafts_go_without_where_pages_are_few() -> None:
    sim = Simulation(30, 5, 64, 2)
    s = sim.add([1] * 4, 20)
    sim.step()
    sim.step(drafts=3, right=3)
    assert len(s.tokens) == 6  # five pages, of which four are kept for two sequences
    sim.step(drafts=1, right=1)
    assert len(s.tokens) == 8
    sim.finish()


def test_what_goes_along_with_a_text_leaves_one_page() -> None:
    sim = Simulation(40, 20, 64, 2)
    sim.add([1] * 5, 60)
    sim.finish()
    assert sim.states.num_cached == 2  # at the prompt's end, and behind the last full block
