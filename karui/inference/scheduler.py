"""Who runs next: continuous batching (Orca, Yu et al., OSDI 2022) with chunked prefill (Sarathi, arXiv 2308.16369). One token
budget per step for decodes and prompt chunks alike, preemption by recompute.

Each step the running sequences come first, decodes before prompt chunks, then waiting ones are admitted after a look into the
prefix cache. When a running sequence finds no free block, the last in order gives its blocks back and waits again; its computed
tokens are computed anew (mostly found in the prefix cache). The first in order is never preempted, so something always finishes.

Order is (priority, arrival, index): lower priority numbers first, then first come first served.

Hybrid models have a page of recurrent states beside the blocks (`cache/states.py`): each step of a sequence reads one and writes
another, or several where the prefix cache wants one in the middle of a chunk, and for each row of a draft.

Layers with a window give the blocks behind it back as soon as the tokens that saw them are computed (`cache/groups.py`).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from karui.inference.cache.groups import most_blocks, num_dead
from karui.inference.cache.pool import DEAD, BlockPool, group_name
from karui.inference.cache.states import ZERO, StatePool

SCORED_ROWS = 256


class EngineStuckError(RuntimeError):
    """Work is waiting and a step scheduled none of it: a bug, reported with the scheduler's state instead of a hang."""


class Sequence:
    """One token sequence and the blocks that hold its keys.

    Attributes:
        tokens: prompt and output. Rows of `tokens[num_computed:]` are still to be run.
        num_computed: tokens whose keys are in the cache and final.
        blocks: block ids, in order, of each group of layers, as many of each; the leading `dead[group]` of them are given back,
            `DEAD`. `names` are the prefix-cache names of the leading full ones.
        owner: whatever the engine hangs on it.
        held: not to be scheduled (a beam that waits for its siblings).
        recompute: no prefix-cache lookup, every row is wanted (scoring).
        state: page of the recurrent states behind the computed tokens; `writes` are the pages that the coming step fills, as
            (rows of the step, page) in order.
        branch: tokens of its prompt whose blocks, but no state, were found in the prefix cache; trail: name of the prefix behind
            which it last left a page while it generated.
    """

    __slots__ = ("order", "tokens", "num_prompt", "num_computed", "blocks", "names", "namespace", "owner", "held", "recompute",
                 "failures", "draft", "table_row", "running", "tables_filled", "state", "writes", "branch", "trail", "dead")

    def __init__(self, tokens: list[int], order: tuple[int, int, int], namespace: Any, owner: Any,
                 recompute: bool = False) -> None:
        self.tokens, self.order, self.namespace, self.owner, self.recompute = tokens, order, namespace, owner, recompute
        self.num_prompt = len(tokens)
        self.num_computed = self.failures = self.tables_filled = self.branch = 0
        self.state = ZERO
        self.writes: list[tuple[int, int]] = []
        self.trail: Any = None
        self.blocks: list[list[int]] = [[]]
        self.dead: list[int] = [0]
        self.names: list[Any] = []
        self.held = self.running = False
        self.draft: Any = None
        self.table_row = -1

    @property
    def num_pending(self) -> int:
        """Known tokens whose keys are not in the cache yet."""
        return len(self.tokens) - self.num_computed

    def __lt__(self, other: Sequence) -> bool:
        return self.order < other.order


@dataclass(slots=True)
class Work:
    """`count` pending tokens of `sequence` run in this step, and behind them the `num_drafted` nodes of its draft."""

    sequence: Sequence
    count: int
    num_drafted: int = 0

    @property
    def drafted(self) -> bool:
        return self.num_drafted > 0


@dataclass(slots=True)
class Plan:
    """One step: what runs, and the token slots to copy before it (source, target)."""

    works: list[Work] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)


class Scheduler:
    """Owns the block pool and the queues; the engine adds sequences, asks for a `Plan`, and reports what was computed.

    Args:
        pool: the block pool.
        max_tokens: rows per step, all sequences together.
        max_sequences: sequences running at once.
        max_context: tokens a sequence may have; fixes the width of the block tables.
        max_chunk: rows of one prompt per step; bounds how long decodes wait behind a long prompt.
        on_preempt: told of each preempted sequence.
        states: pages of recurrent states, at least two per running sequence; None for a model without.
        windows: of each group of layers, None: it keeps all keys.

    `tables` [groups, max_sequences, B] int32: the block tables.
    """

    def __init__(self, pool: BlockPool, max_tokens: int, max_sequences: int, max_context: int, max_chunk: int | None = None,
                 on_preempt: Callable[[Sequence], None] | None = None, states: StatePool | None = None,
                 windows: tuple[int | None, ...] = (None,)) -> None:
        self.pool, self.max_tokens, self.max_sequences = pool, max_tokens, max_sequences
        self.max_chunk = max_chunk or max_tokens
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.windows = windows
        self.tables = np.zeros((len(windows), max_sequences, -(-max_context // pool.block_size) + 1), dtype=np.int32)
        self._rows = list(range(max_sequences))[::-1]
        self._on_preempt = on_preempt
        self.states = states
        self._spare_pages = 0  # of this step: what is not kept for two pages per sequence
        if states is not None:
            assert states.num_pages >= 2 * max_sequences, "too few pages of states"
            assert len(windows) == 1, "a state lies behind the blocks of one group"
            pool.on_forget = states.forget
        self.num_preemptions = self.num_cached_tokens = self.num_looked_up_tokens = 0

    # -- the queues

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and give its blocks back."""
        self._release(sequence)
        if sequence.running:
            self._stop(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """`child` continues `parent`'s computed tokens: all blocks are shared, written ones are copied when it comes to that.

        Without a free place among the running the child waits and finds its prompt in the prefix cache.
        """
        if not parent.running or len(self.running) >= self.max_sequences:
            self.add(child)
            return
        self._share(parent.blocks)
        child.blocks, child.dead = [list(blocks) for blocks in parent.blocks], list(parent.dead)
        child.names, child.num_computed = list(parent.names), parent.num_computed
        if self.states is not None:
            child.state = self.states.share(parent.state)
        self._start(child)

    def preempt(self, sequence: Sequence) -> None:
        """Back to the waiting, everything to be computed anew."""
        self.num_preemptions += 1
        self._release(sequence)
        self._stop(sequence)
        self.add(sequence)
        if self._on_preempt:
            self._on_preempt(sequence)

    def preempt_all(self) -> None:
        for sequence in list(self.running):
            self.preempt(sequence)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    # -- planning

    def schedule(self) -> Plan:
        """The next step. Raises `EngineStuckError` when sequences wait and none can run."""
        plan = Plan()
        works: dict[Sequence, Work] = {}
        if self.states is not None:
            self._spare_pages = self.states.num_pages - 2 * self.max_sequences
            for s in self.running:
                self._drop_writes(s)  # of a step that failed
        suspect = next((s for s in self.running if s.failures), None)
        if suspect is not None:  # a step with it failed: alone it shows whether it was the cause
            suspect.draft = None
            self._run(suspect, self._chunk(suspect, self.max_tokens), works, plan)
        if not works:
            self._decodes(works, plan)
            self._chunks(works, plan)
            if self.waiting:
                self._admit(works, plan)
        plan.works = list(works.values())
        if not plan.works and self.has_work:
            raise EngineStuckError(f"work is waiting and the step is empty.\n{self.dump()}")
        return plan

    def _decodes(self, works: dict[Sequence, Work], plan: Plan) -> None:
        budget = self.max_tokens
        for s in tuple(self.running):
            if s.held or not s.running or len(s.tokens) - s.num_computed != 1:
                continue
            if budget <= 0:
                return
            extra = len(s.draft) if s.draft is not None else 0
            if extra and (extra >= budget or not self._pages_for(extra) or not self._reserve(s, 1 + extra, plan)):
                s.draft, extra = None, 0
            if extra:
                works[s] = Work(s, 1, extra)
                self._take_pages(s, range(1, 2 + extra))
            elif not self._run(s, 1, works, plan):
                continue
            budget -= 1 + extra

    def _chunks(self, works: dict[Sequence, Work], plan: Plan) -> None:
        for s in tuple(self.running):
            if s.held or not s.running or s in works or s.num_pending <= 1:
                continue
            budget = self.max_tokens - _rows(works)
            if budget <= 0:
                return
            self._run(s, self._chunk(s, budget), works, plan)

    def _admit(self, works: dict[Sequence, Work], plan: Plan) -> None:
        while self.waiting and (budget := self.max_tokens - _rows(works)) > 0:
            s = self.waiting[0]
            if s.held:
                # Its blocks were taken while it waited for its siblings; it needs none until it goes on.
                s = next((w for w in self.waiting if not w.held), s)
                if s.held:
                    return
            blocks: list[list[int]] = [[] for _ in self.windows]
            names: list[Any] = []
            if not s.recompute:
                blocks, names = self.pool.match_groups(s.tokens, s.namespace, self.windows)
            found, page = len(names), ZERO
            if self.states is not None:
                blocks[0], names, page = self._with_state(blocks[0], names)
            needed = sum(self._needed(s, window, own) for window, own in zip(self.windows, blocks))
            free = self.pool.num_free - sum(b != DEAD and self.pool.references[b] == 0 for own in blocks for b in own)
            # One block of slack per running sequence and group, else the newcomer would be the next one preempted.
            slack = len(self.windows) * sum(not r.held for r in self.running)
            if len(self.running) >= self.max_sequences or free < needed + slack:
                worst = self.running[-1] if self.running else None
                if worst is None or worst.order[0] <= s.order[0]:
                    if self.running and all(r.held for r in self.running):
                        self.preempt(self.running[-1])
                        continue
                    return
                works.pop(worst, None)
                self.preempt(worst)
                continue
            self.waiting.remove(s)
            self._share(blocks)
            if self.states is not None:
                s.state = self.states.share(page)
                s.branch = found * self.pool.block_size if found > len(names) else 0
            s.blocks, s.names, s.num_computed = blocks, names, len(names) * self.pool.block_size
            s.dead = [num_dead(window, s.num_computed, self.pool.block_size) for window in self.windows]
            self.num_cached_tokens += s.num_computed
            self.num_looked_up_tokens += len(s.tokens)
            self._start(s)
            if not self._run(s, self._chunk(s, budget), works, plan):
                return

    def _chunk(self, s: Sequence, budget: int) -> int:
        # Scoring wants the logits of every row, which are larger than all else a step holds.
        return min(s.num_pending, self.max_chunk, budget, SCORED_ROWS if s.recompute else budget)

    def _run(self, s: Sequence, count: int, works: dict[Sequence, Work], plan: Plan) -> bool:
        """Reserve blocks for `count` tokens, preempting from the back of the order; False when `s` itself had to go."""
        while not self._reserve(s, count, plan):
            victim = self.running[-1]
            works.pop(victim, None)
            # Its freshly copied block may go to somebody else in this very step.
            plan.copies = [c for c in plan.copies if all(c[1] // self.pool.block_size not in own for own in victim.blocks)]
            self.preempt(victim)
            if victim is s:
                return False
        works[s] = Work(s, count)
        if self.states is not None:
            self._take_pages(s, [*self._wanted_within(s, count), count])
        return True

    def reserve(self, plan: Plan, counts: Iterable[int]) -> bool:
        """Blocks for the next `counts` tokens of the plan's sequences; False, and none kept, when there are too few for all."""
        if all(self._reserve(work.sequence, count, plan) for work, count in zip(plan.works, counts, strict=True)):
            return True
        for work in plan.works:
            self.trim(work.sequence)
        return False

    def _reserve(self, s: Sequence, count: int, plan: Plan) -> bool:
        """Blocks of its own for the next `count` tokens of `s`; False, and nothing changed, when there are too few."""
        size, pool = self.pool.block_size, self.pool
        first, missing = s.num_computed // size, -(-(s.num_computed + count) // size) - len(s.blocks[0])
        shared = [group for group, own in enumerate(s.blocks) if first < len(own) and pool.references[own[first]] > 1]
        if missing <= 0 and not shared:
            return True
        if len(s.blocks) * max(missing, 0) + len(shared) > pool.num_free:
            return False
        for group in shared:  # copy on write: a fork's last block is filled differently by each of its holders
            old, new = s.blocks[group][first], pool.take()
            plan.copies += [(old * size + i, new * size + i) for i in range(s.num_computed % size)]
            pool.release([old])
            s.blocks[group][first] = new
            self.tables[group, s.table_row, first] = new
        for _ in range(missing):
            for own in s.blocks:
                own.append(pool.take())
        self._fill_tables(s)
        return True

    # -- after the step

    def computed(self, s: Sequence, count: int) -> None:
        """`count` more tokens of `s` have final keys; full blocks become findable, and those behind a window are given back."""
        s.num_computed += count
        s.failures = 0
        size = self.pool.block_size
        for i in range(len(s.names), s.num_computed // size):
            parent = s.names[-1] if s.names else self.pool.index.root(s.namespace)
            s.names.append(self.pool.index.name(parent, s.tokens[i * size:(i + 1) * size]))
            for group, own in enumerate(s.blocks):
                self.pool.enter(group_name(s.names[-1], group), own[i])
        for group, window in enumerate(self.windows):
            dead = num_dead(window, s.num_computed, size)
            if dead > s.dead[group]:
                own = s.blocks[group]
                self.pool.release(own[s.dead[group]:dead])
                own[s.dead[group]:dead] = [DEAD] * (dead - s.dead[group])
                s.dead[group] = dead
                self.tables[group, s.table_row, :dead] = own[dead]
        if self.states is not None:
            self._settle_pages(s, count)

    def trim(self, s: Sequence) -> None:
        """Give back blocks beyond the known tokens (rejected drafts)."""
        needed = -(-len(s.tokens) // self.pool.block_size)
        if len(s.blocks[0]) > needed:
            for own in s.blocks:
                self.pool.release(own[needed:])
                del own[needed:]
            s.tables_filled = min(s.tables_filled, needed)

    def check_integrity(self) -> None:
        """Assert that blocks, tables and queues agree; cheap enough for idle moments and every test step."""
        self.pool.check([own[dead:] for s in self.running for own, dead in zip(s.blocks, s.dead)])
        if self.states is not None:
            self.states.check([page for s in self.running for page in (s.state, *(p for _, p in s.writes))])
            assert all(s.state != ZERO for s in self.running if s.num_computed), "computed tokens without a state"
        assert all(s.state == ZERO and not s.writes for s in self.waiting), "a waiting sequence holds states"
        assert self.running == sorted(self.running) and self.waiting == sorted(self.waiting), "queues out of order"
        for s in self.running:
            assert {len(own) for own in s.blocks} == {len(s.blocks[0])}, "groups of layers have tables of different lengths"
            assert s.running and s.num_computed <= len(s.blocks[0]) * self.pool.block_size, "more computed than blocks hold"
            for table, own, dead, window in zip(self.tables[:, s.table_row], s.blocks, s.dead, self.windows):
                assert dead == num_dead(window, s.num_computed, self.pool.block_size), "blocks behind the window are held"
                assert own[:dead] == [DEAD] * dead and table[:len(own)].tolist() == own[dead:dead + 1] * dead + own[dead:], (
                    "block table differs from the sequence's blocks")
        assert all(not s.running and not any(s.blocks) for s in self.waiting), "a waiting sequence holds blocks"
        assert len(self._rows) + len(self.running) == self.max_sequences, "a block-table row was lost"

    def dump(self) -> str:
        """The state in words, for errors."""
        def line(s: Sequence) -> str:
            held = sum(map(len, s.blocks)) - sum(s.dead)
            return f"  {s.order}: {s.num_computed}/{len(s.tokens)} tokens, {held} blocks{', held' if s.held else ''}"

        return "\n".join([f"blocks: {self.pool.num_free} free of {self.pool.num_blocks}, {self.pool.num_cached} cached; "
                          f"{self.max_tokens} rows per step, {self.max_sequences} sequences at most",
                          f"running {len(self.running)}:", *map(line, self.running[:16]),
                          f"waiting {len(self.waiting)}:", *map(line, self.waiting[:16])])

    # -- states of recurrent layers

    def _with_state(self, blocks: list[int], names: list[Any]) -> tuple[list[int], list[Any], int]:
        """A prefix-cache hit, cut to where there is a state, and its page."""
        assert self.states is not None
        for count in range(len(blocks), 0, -1):
            page = self.states.find(names[count - 1])
            if page is not None:
                return blocks[:count], names[:count], page
        return [], [], ZERO

    def _wanted(self, s: Sequence, end: int) -> bool:
        """Whether the prefix cache wants the state behind the first `end` tokens."""
        if s.recompute or end % self.pool.block_size:
            return False
        return end > s.num_prompt or end in (s.branch, self._prompt_end(s))

    def _prompt_end(self, s: Sequence) -> int:
        """Where a prefix-cache hit of the same prompt would end."""
        return (s.num_prompt - 1) // self.pool.block_size * self.pool.block_size

    def _wanted_within(self, s: Sequence, count: int) -> list[int]:
        """After which of the next `count` rows, the last one aside, that is so: of what is generated the last block alone. The
        later ones where there are too few pages."""
        if count == 1 or self._spare_pages < 1:
            return []
        size, first, last = self.pool.block_size, s.num_computed, s.num_computed + count
        ends = {s.branch, self._prompt_end(s), (last - 1) // size * size}
        return [end - first for end in sorted(ends) if first < end < last and self._wanted(s, end)][-self._spare_pages:]

    def _pages_for(self, count: int) -> bool:
        """Whether so many pages can be had beside the two per sequence, or there are none to be had."""
        return self.states is None or count <= self._spare_pages

    def _take_pages(self, s: Sequence, ends: Iterable[int]) -> None:
        """Pages behind those rows of the coming step; each but one is a spare one."""
        if self.states is None:
            return
        s.writes = [(end, self.states.take()) for end in ends]
        self._spare_pages -= len(s.writes) - 1

    def _drop_writes(self, s: Sequence) -> None:
        assert self.states is not None
        for _, page in s.writes:
            self.states.release(page)
        s.writes = []

    def _settle_pages(self, s: Sequence, count: int) -> None:
        """The step has filled its pages and the first `count` of its rows stand: the page behind them is the sequence's now."""
        states, size = self.states, self.pool.block_size
        assert states is not None
        before, first = s.state, s.num_computed - count
        s.state = ZERO
        for rows, page in s.writes:
            if rows <= count and self._wanted(s, first + rows):
                name = s.names[(first + rows) // size - 1]
                if states.enter(name, page) and first + rows > s.num_prompt:
                    if s.trail is not None:
                        states.forget(s.trail)
                    s.trail = name
            if rows == count:
                s.state = page
            else:
                states.release(page)
        assert s.state != ZERO, f"no state behind {count} rows"
        states.release(before)
        s.writes = []

    # -- bookkeeping

    def _start(self, s: Sequence) -> None:
        s.running, s.table_row, s.tables_filled = True, self._rows.pop(), 0
        insort(self.running, s)
        self._fill_tables(s)

    def _stop(self, s: Sequence) -> None:
        self.running.remove(s)
        self._rows.append(s.table_row)
        s.running, s.table_row = False, -1

    def _fill_tables(self, s: Sequence) -> None:
        first, count = s.tables_filled, len(s.blocks[0])
        if first < count:
            for group, own in enumerate(s.blocks):
                table = self.tables[group, s.table_row]
                table[first:count] = own[first:]
                if first < s.dead[group]:
                    table[first:s.dead[group]] = own[s.dead[group]]
            s.tables_filled = count

    def _share(self, blocks: Iterable[list[int]]) -> None:
        for own in blocks:
            for block in own:
                if block != DEAD:
                    self.pool.share(block)

    def _needed(self, s: Sequence, window: int | None, found: list[int]) -> int:
        """Blocks that a group needs besides those found, at most, for the tokens known so far."""
        size, missing = self.pool.block_size, -(-len(s.tokens) // self.pool.block_size) - len(found)
        held = len(found) - num_dead(window, len(found) * size, size)
        return max(0, min(missing, most_blocks(window, len(s.tokens), self.max_tokens, size) - held))

    def _release(self, s: Sequence) -> None:
        if self.states is not None:
            self._drop_writes(s)
            self.states.release(s.state)
            s.state = ZERO
        for own, dead in zip(s.blocks, s.dead):
            self.pool.release(own[dead:])
        s.blocks, s.dead = [[] for _ in self.windows], [0] * len(self.windows)
        s.names, s.num_computed, s.draft = [], 0, None


def _rows(works: dict[Sequence, Work]) -> int:
    return sum(w.count + w.num_drafted for w in works.values())
