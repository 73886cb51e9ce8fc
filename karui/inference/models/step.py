"""`Step`: a `StepBatch` as the torch runners read it, on their device, with the keys that each sequence sees.

Legend for shapes: T tokens in the step, S sequences, C keys seen, q rows of one sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from karui.inference.batch import StepBatch


@dataclass
class Span:
    """Rows start..stop of the step are one sequence's and see the keys at `slots` [C]; `visible` [q, C] bool or None = all."""

    start: int
    stop: int
    slots: torch.Tensor
    key_positions: torch.Tensor
    visible: torch.Tensor | None

    def row(self, row: int) -> Span:
        """The same sequence as seen by one of its rows: only the keys that row may see, in order."""
        if self.visible is None:
            return replace(self, start=0, stop=1)
        seen = self.visible[row - self.start]
        return Span(0, 1, self.slots[seen], self.key_positions[seen], None)

    def within(self, window: int, unit: int = 1) -> Span:
        """The same without the keys that lie before the window of every row, as far as they are whole units of so many."""
        first = max(0, len(self.slots) - (self.stop - self.start) - window + 1) // unit * unit
        visible = None if self.visible is None else self.visible[:, first:]
        return replace(self, slots=self.slots[first:], key_positions=self.key_positions[first:], visible=visible)


@dataclass
class StateRows:
    """Rows [S, q] of the step that recurrent layers run together: each q of a sequence, from the states in pages `before` [S] to
    those in `after` [S]."""

    rows: torch.Tensor
    before: torch.Tensor
    after: torch.Tensor

    def alone(self, first: torch.Tensor) -> Iterator[tuple[int, StateRows]]:
        """Each row with what it is in a step of its own: those behind a first one go on from the page that it has written."""
        for s, rows in enumerate(self.rows.tolist()):
            before, after = self.before[s:s + 1], self.after[s:s + 1]
            for i, row in enumerate(rows):
                yield row, StateRows(first[None], after if i else before, after)


def _state_rows(runs: list[list[int]], device: torch.device) -> list[StateRows]:
    """`StepBatch.states` as `StateRows`: runs of one row together, as far as none reads what another writes, others alone."""
    Run = tuple[int, int, int, int]
    waves: list[list[Run]] = []
    found: list[tuple[int, list[Run]]] = []
    wave, written = 0, -1
    for start, stop, before, after in runs:
        wave, written = wave + 1 if before == written else 0, after
        if stop - start > 1:
            found.append((wave, [(start, stop, before, after)]))
            continue
        while len(waves) <= wave:
            waves.append([])
            found.append((len(waves) - 1, waves[-1]))
        waves[wave].append((start, stop, before, after))

    def ints(values: list[Any]) -> torch.Tensor:
        return torch.tensor(values, device=device)

    return [StateRows(ints([list(range(r[0], r[1])) for r in group]), ints([r[2] for r in group]), ints([r[3] for r in group]))
            for _, group in sorted(found, key=lambda pair: pair[0]) if group]


class PaddedDecodes:
    """The one-row sequences of a step, their keys padded to the longest: slots [S, C], and a mask [S, 1, 1, C] of those that are
    real; of a window's keys the same. `others` are the sequences with more rows."""

    def __init__(self, spans: list[Span], others: list[Span], positions: torch.Tensor) -> None:
        self.others = others
        self.rows = torch.tensor([span.start for span in spans], device=positions.device)
        lengths = torch.tensor([len(span.slots) for span in spans], device=positions.device)
        self.slots = torch.nn.utils.rnn.pad_sequence([span.slots for span in spans], batch_first=True)
        index = torch.arange(self.slots.shape[1], device=positions.device)
        self._last = positions[self.rows][:, None]
        self._near: dict[int | None, tuple[torch.Tensor, torch.Tensor]] = {
            None: (self.slots, (index < lengths[:, None])[:, None, None])}

    def near(self, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots and mask of the keys in the window, None: of all."""
        if window is not None and window >= self.slots.shape[1]:
            window = None
        if window is not None and window not in self._near:
            index = self._last - torch.arange(window, device=self._last.device).flip(0)
            self._near[window] = self.slots.gather(1, index.clamp_min(0)), (index >= 0)[:, None, None]
        return self._near[window]


@dataclass
class Step:
    """tokens, positions, slots: [T] int64. adapters: rows of each adapter slot in use. padded: the one-row sequences together, if
    there are several. cos, sin: [T, 1, D/2] of the rotation, set by the runner. shared: what a layer leaves for those behind it.
    states: what recurrent layers run, in this order. others: slots, spans and padded of the groups of layers behind the first."""

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    spans: list[Span]
    adapters: dict[int, torch.Tensor]
    padded: PaddedDecodes | None = None
    cos: torch.Tensor = field(default_factory=torch.Tensor)
    sin: torch.Tensor = field(default_factory=torch.Tensor)
    shared: Any = None
    states: list[StateRows] = field(default_factory=list)
    others: list[Step] = field(default_factory=list)

    @staticmethod
    def of(batch: StepBatch, block_size: int, adapters: dict[int, torch.Tensor], device: torch.device) -> Step:
        tokens, positions, slots = (x.long().to(device) for x in (batch.tokens, batch.positions, batch.slots))
        spans = _spans(batch, batch.block_tables, block_size, device)
        states = [] if batch.states is None else _state_rows(batch.states.tolist(), device)
        step = Step(tokens, positions, slots, spans, adapters, _pad_decodes(spans, positions), states=states)
        for own, table in batch.others:
            spans = _spans(batch, table, block_size, device)
            step.others.append(replace(step, slots=own.long().to(device), spans=spans, padded=_pad_decodes(spans, positions)))
        return step

    def of_group(self, group: int) -> Step:
        """The step as a group of layers sees it: `slots`, `spans` and `padded` are its."""
        return self.others[group - 1] if group else self

    def rows(self) -> Iterator[Step]:
        """Each token as a step of its own, in order."""
        first = torch.zeros(1, dtype=torch.long, device=self.positions.device)
        states = {} if not self.states else {row: one for many in self.states for row, one in many.alone(first)}
        for number, span in enumerate(self.spans):
            for r in range(span.start, span.stop):
                others = [replace(other, positions=self.positions[r:r + 1], slots=other.slots[r:r + 1],
                                  spans=[other.spans[number].row(r)], padded=None) for other in self.others]
                yield Step(self.tokens[r:r + 1], self.positions[r:r + 1], self.slots[r:r + 1], [span.row(r)],
                           {a: first for a, at in self.adapters.items() if r in at}, states=[states[r]] if states else [],
                           others=others)


def _spans(batch: StepBatch, tables: torch.Tensor, block_size: int, device: torch.device) -> list[Span]:
    starts, contexts = batch.query_starts.tolist(), batch.context_lens.tolist()
    tables = tables.long()
    spans = []
    for s, context in enumerate(contexts):
        start, stop = starts[s], starts[s + 1]
        q, index = stop - start, torch.arange(context)
        slots = tables[s, index // block_size] * block_size + index % block_size
        own = batch.tree_masks[s] if batch.tree_masks else None
        key_positions, visible = index, None
        if own is not None or q > 1:
            if own is None:
                own = torch.ones(q, q, dtype=torch.bool).tril()
            visible = torch.cat([torch.ones(q, context - q, dtype=torch.bool), own.to(torch.bool)], 1).to(device)
            key_positions = torch.cat([index[:context - q], batch.positions[start:stop].long()])
        spans.append(Span(start, stop, slots.to(device), key_positions.to(device), visible))
    return spans


def _pad_decodes(spans: list[Span], positions: torch.Tensor) -> PaddedDecodes | None:
    single = [span for span in spans if span.stop - span.start == 1 and span.visible is None]
    if len(single) < 2:
        return None
    return PaddedDecodes(single, [span for span in spans if span not in single], positions)
