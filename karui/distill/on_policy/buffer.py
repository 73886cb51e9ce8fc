"""Rollouts that wait for their step. What a checkpoint holds of it makes a resumed run go on with the very same text.

With a staleness of s the sampler gets new weights every s + 1 steps and then writes for all of them at once, which makes its
batches larger; the text used at a step is then at most s updates old. The buffer hands out nothing older.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from karui.configs.errors import CorruptError
from karui.distill.on_policy.rollout import Rollout


class RolloutBuffer:
    """Rollouts by the step they were written for.

    Args:
        staleness: most updates between the weights that wrote a rollout and those it trains.
    """

    def __init__(self, staleness: int) -> None:
        self.staleness = staleness
        self._by_step: dict[int, list[Rollout]] = {}

    def __contains__(self, step: int) -> bool:
        return step in self._by_step

    def put(self, step: int, rollouts: Sequence[Rollout]) -> None:
        self._by_step[step] = list(rollouts)

    def take(self, step: int) -> list[Rollout]:
        """The rollouts of a step; they and older ones are let go."""
        found = self._by_step.pop(step)
        self._by_step = {s: r for s, r in self._by_step.items() if s > step}
        for rollout in found:
            assert 0 <= step - rollout.version <= self.staleness, (step, rollout.version, self.staleness)
        return found

    def state(self) -> dict[str, torch.Tensor]:
        """As tensors: one flat array per field and a table of (step, length, version, finished, index, own)."""
        flat = [(step, r) for step, rollouts in sorted(self._by_step.items()) for r in rollouts]
        if not flat:
            return {}
        table = [[step, len(r.ids), r.version, int(r.finished), r.index, int(r.own)] for step, r in flat]
        return {
            "rollouts.table": torch.tensor(table, dtype=torch.int64),
            "rollouts.ids": torch.from_numpy(np.concatenate([r.ids for _, r in flat])),
            "rollouts.loss_mask": torch.from_numpy(np.concatenate([r.loss_mask for _, r in flat])),
            "rollouts.processed": torch.from_numpy(np.concatenate([r.processed for _, r in flat])),
            "rollouts.raw": torch.from_numpy(np.concatenate([r.raw for _, r in flat])),
        }

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """The inverse of `state`. Raises `CorruptError` when lengths do not add up."""
        self._by_step = {}
        if "rollouts.table" not in state:
            return
        arrays = [state[f"rollouts.{name}"].numpy() for name in ("ids", "loss_mask", "processed", "raw")]
        at = 0
        for step, length, version, finished, index, own in state["rollouts.table"].tolist():
            ids, mask, processed, raw = (a[at : at + length] for a in arrays)
            if len(raw) != length:
                raise CorruptError("the checkpoint's rollouts are cut short; resume from an earlier checkpoint.")
            rollout = Rollout(ids, mask, processed, raw, version, bool(finished), index, bool(own))
            self._by_step.setdefault(step, []).append(rollout)
            at += length
