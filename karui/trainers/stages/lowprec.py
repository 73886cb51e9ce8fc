"""Low-precision linears as a step of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from karui.trainers.stages.base import Context, Stage


class LowPrecisionStage(Stage):
    """See `karui.lowprec`."""

    order = 40

    def __init__(self, step: Any, context: Context) -> None:
        from karui.lowprec.converter import LowPrecision
        from karui.lowprec.precision import Precision

        super().__init__(step, context)
        self.low = LowPrecision(Precision.of(step))

    def prepare(self, model: Any) -> Any:
        return self.low.prepare(model)

    def lines(self) -> list[str]:
        return self.low.table().splitlines()

    def faults(self) -> list[str]:
        return self.low.nonfinite()

    def after_step(self, *, skipped: bool) -> None:
        if not skipped:
            self.low.check_ran()
        self.low.finish_step(skipped=skipped)

    def state(self) -> dict[str, torch.Tensor]:
        return dict(self.low.state.state_dict())

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        self.low.state.load_state_dict(dict(state))

    def finish(self, model: Any) -> None:
        self.low.convert(model)
