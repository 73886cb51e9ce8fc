"""Low-precision linears as a step of a run."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from karui.trainers.stages.base import Context, Stage


class LowPrecisionStage(Stage):
    """See `karui.lowprec`; with `backend: te`, see `karui.lowprec.transformer_engine`."""

    order = 40

    def __init__(self, step: Any, context: Context) -> None:
        from karui.lowprec.converter import LowPrecision
        from karui.lowprec.precision import Precision

        super().__init__(step, context)
        self.precision = Precision.of(step)
        self.low = LowPrecision(self.precision) if step.backend != "te" else None
        self._te: Any = None

    def prepare(self, model: Any) -> Any:
        if self.low is not None:
            return self.low.prepare(model, device=self.context.device)
        from karui.lowprec.transformer_engine import TransformerEngineModel

        self._te = TransformerEngineModel(model, self.precision)
        return model

    def lines(self) -> list[str]:
        return self.low.table().splitlines() if self.low is not None else self._te.lines()

    def exact(self) -> AbstractContextManager[None]:
        return self.low.high_precision() if self.low is not None else self._te.high_precision()

    def faults(self) -> list[str]:
        return self.low.nonfinite() if self.low is not None else []

    def after_step(self, *, skipped: bool) -> None:
        if self.low is None:
            return
        if not skipped:
            self.low.check_ran()
        self.low.finish_step(skipped=skipped)

    def state(self) -> dict[str, torch.Tensor]:
        return dict(self.low.state.state_dict()) if self.low is not None else {}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        if self.low is not None:
            self.low.state.load_state_dict(dict(state))

    def finish(self, model: Any) -> None:
        if self.low is not None:
            self.low.convert(model)
        else:
            self._te.undo()
