"""Post-training quantization as the start of a run."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from karui.configs.errors import KaruiError
from karui.trainers.stages.base import Context, Stage

if TYPE_CHECKING:
    from karui.kernels.qtensor import QTensor
    from karui.qat.types import LayerReport

log = logging.getLogger(__name__)


class PostTrainingStage(Stage):
    """See `karui.qat`. The codes are found once, in `prepare`, and never move: what is exported is what the run trained with."""

    order = 20
    is_on_grid = True

    def __init__(self, step: Any, context: Context) -> None:
        from karui.qat.methods import method

        super().__init__(step, context)
        method(step.method).load().CONFIG.build(step.settings)  # a wrong setting should not cost loading a model
        self._codes: dict[str, QTensor] = {}
        self._report: list[LayerReport] = []
        self._hooks: list[Any] = []

    def prepare(self, model: Any) -> Any:
        from karui.catalogue.helpers import take_batches
        from karui.kernels.qtensor import QTensor
        from karui.qat.activations import attach
        from karui.qat.methods import method
        from karui.qat.run import quantize_loaded
        from karui.qat.types import Options
        from karui.trainers.calibrated import Calibration, rows_of

        step = self.step
        rows = None
        if method(step.method).calibrates:
            rows = rows_of(self.context.samples, Calibration(method=step.method, samples=step.samples, length=step.length))
        options = Options(settings=step.settings, skip=step.skip, seed=self.context.recipe.run.seed)
        ragged = model.config._attn_implementation
        take_batches(model)  # calibration rows come in batches
        try:
            found = quantize_loaded(model, model.config.to_dict(), step.method, step.spec, rows, options)
        finally:
            model.set_attn_implementation(ragged)
        self._codes = {n: v for n, v in found.changed.items() if isinstance(v, QTensor)}
        self._report = found.report
        self._hooks = attach(model, {n: None for n, q in self._codes.items() if q.spec.activation_bits == 8})
        kept = set(self._codes) | {r.name for r in found.report if step.train == "norms"}
        trained = 0
        for name, parameter in model.named_parameters():
            learns = name not in kept and (step.train == "rest" or parameter.ndim == 1)
            parameter.requires_grad_(learns)
            trained += learns
        if trained == 0:
            raise KaruiError(f"{step.method}: train: {step.train} leaves nothing of this model to train.")
        return model

    def lines(self) -> list[str]:
        done = [r for r in self._report if r.spec != "none"]
        errors = [r.error for r in done if r.error is not None]
        out = [f"{self.step.method}: {len(done)} linears on {self.step.spec}, mean relative squared error "
               f"{sum(errors) / max(1, len(errors)):.4f} ({done[0].error_of if done else 'weight'})"]  # fmt: skip
        return out + [f"{r.name}: {r.fallback}" for r in done if r.fallback]

    def finish(self, model: Any) -> None:
        for hook in self._hooks:
            hook.remove()

    def convert(self, model: Any) -> dict[str, QTensor]:
        import torch

        own = dict(model.named_parameters())
        for name, q in self._codes.items():
            assert torch.equal(own[name], q.dequantize(own[name].dtype)), f"{name} left its grid"
        return dict(self._codes)
