"""From the scheduler's plan to the ragged batch that a runner takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from karui.inference.batch import StepBatch
from karui.inference.scheduler import Plan, Scheduler, Sequence
from karui.inference.speculate import Speculation


class Assembler:
    """Lays sequences, chunks of prompts and drafts one after the other.

    Args:
        scheduler: whose plans come, with its tables of blocks.
        num_groups: groups of layers with tables of their own, see `cache/groups.py`.
        adapter_of: the slot of a sequence's adapter, -1 for the base.
    """

    def __init__(self, scheduler: Scheduler, num_groups: int, adapter_of: Callable[[Sequence], int]) -> None:
        self.scheduler, self.adapter_of = scheduler, adapter_of
        self._rows = np.zeros((2 + num_groups, scheduler.max_tokens), dtype=np.int32)  # tokens, positions, slots of the step

    def batch(self, plan: Plan, speculation: Speculation | None = None) -> StepBatch:
        """The plan's step, with what `speculation` must see of the model. Tokens, positions and slots are views that the next
        call fills anew."""
        size, tables = self.scheduler.pool.block_size, self.scheduler.tables
        tokens, positions, slots = self._rows[0], self._rows[1], self._rows[2:]
        starts, contexts, rows, adapters, masks = [0], [], [], [], []
        states: list[tuple[int, int, int, int]] = []
        wanted: list[int] = []
        at = 0
        for work in plan.works:
            s, count, first = work.sequence, work.count, work.sequence.num_computed
            mask = None
            if count == 1:
                tokens[at], positions[at] = s.tokens[first], first
                for group, own in enumerate(s.blocks):
                    slots[group, at] = own[first // size] * size + first % size
                at += 1
                if work.drafted:
                    n, tree = len(s.draft), s.draft.tree()
                    index = np.arange(first + 1, first + 1 + n, dtype=np.int32)
                    tokens[at:at + n] = s.draft.tokens
                    slots[:, at:at + n] = tables[:, s.table_row, index // size] * size + index % size
                    positions[at:at + n] = np.asarray(tree.depths[1:], dtype=np.int32) + first
                    mask = None if s.draft.parents is None else tree.mask
                    at, count = at + n, 1 + n
            else:
                index = np.arange(first, first + count, dtype=np.int32)
                tokens[at:at + count], positions[at:at + count] = s.tokens[first:first + count], index
                slots[:, at:at + count] = tables[:, s.table_row, index // size] * size + index % size
                at += count
            if s.writes:
                states += _state_runs(s, at - count)
            if s.recompute or work.drafted:
                wanted += range(at - count, at)
            elif first + count == len(s.tokens):
                wanted.append(at - 1)
            starts.append(at)
            contexts.append(first + count)
            rows.append(s.table_row)
            masks.append(mask)
            adapters.append(self.adapter_of(s))
        seen = [torch.from_numpy(table[rows, :-(-max(contexts) // size)]) for table in tables]
        return StepBatch(
            torch.from_numpy(tokens[:at]), torch.from_numpy(positions[:at]), torch.from_numpy(slots[0, :at]), ints(starts),
            ints(contexts), seen[0], ints(wanted),
            others=[(torch.from_numpy(to[:at]), table) for to, table in zip(slots[1:], seen[1:])],
            tree_masks=masks if any(m is not None for m in masks) else None,
            adapters=ints(adapters) if max(adapters) >= 0 else None,
            states=ints(states) if states else None,
            want_hidden=speculation is not None and speculation.needs_hidden,
            aux_layers=() if speculation is None else speculation.aux_layers)


def _state_runs(s: Sequence, row: int) -> list[tuple[int, int, int, int]]:
    """(first row, row after the last, page read, page written) of a sequence's runs in the step; its rows begin at `row`."""
    runs, done, page = [], 0, s.state
    for end, target in s.writes:
        runs.append((row + done, row + end, page, target))
        done, page = end, target
    return runs


def ints(values: Any) -> torch.Tensor:
    """int32, on the CPU."""
    return torch.from_numpy(np.array(values, dtype=np.int32))
