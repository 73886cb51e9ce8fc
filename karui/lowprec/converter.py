"""`LowPrecision`: puts low-precision linears into a model, closes its optimizer steps, and takes them out again.

low = LowPrecision(Precision.parse("fp8-current"))
low.prepare(model)            # in place; low.report says what became of every linear
low.attach(optimizer)         # or call low.finish_step() once per optimizer step
... train ...
tensors = low.convert(model)  # ordinary linears again
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from karui.configs.errors import KaruiError
from karui.lowprec.backends import choose
from karui.lowprec.linear import LowPrecisionLinear
from karui.lowprec.policy import decide, padding
from karui.lowprec.precision import GEMMS, Precision
from karui.lowprec.sharing import readers
from karui.lowprec.state import LowPrecisionState

logger = logging.getLogger(__name__)
STATE_NAME = "lowprec_state"


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """What became of one linear.

    Attributes:
        formats: "fprop/dgrad/wgrad" at step 0, or "high".
        backend, reason: who multiplies and why, or why the layer stays high.
        padding: dimensions padded, "" for none.
        frozen: the weight was quantized once.
        input: "own", or the layers (last parts of their names) that read one input: it is quantized and kept once for them all.
    """

    name: str
    formats: str
    backend: str
    reason: str
    padding: str = ""
    frozen: bool = False
    input: str = "own"


class LowPrecision:
    """The converter of `karui.lowprec`, for one model."""

    stage = "lowprec"

    def __init__(self, precision: Precision | str) -> None:
        self.precision = Precision.parse(precision)
        self.report: tuple[LayerReport, ...] = ()
        self._model: nn.Module | None = None

    def prepare(self, model: nn.Module, *, device: torch.device | None = None) -> nn.Module:
        """Replace linears of `model` in place as the policy says; parameters stay the same objects. Returns `model`.

        Args:
            device: where it will be trained, which says who multiplies; None: where it lies.

        Raises:
            KaruiError: prepared already, nothing to replace, a layer that is no plain linear or whose weight is not finite
                (nothing is replaced then). UnsupportedError: a backend that cannot serve.
        """
        if hasattr(model, STATE_NAME):
            raise KaruiError("the model is in low precision already; call convert() before preparing it again.")
        reasons = decide(model, self.precision)
        names = [n for n, reason in reasons.items() if not reason]
        for name in names:
            linear = model.get_submodule(name)
            if type(linear) is not nn.Linear:
                raise KaruiError(f"{name} is a {type(linear).__name__}, not a plain linear layer; name it in policy.skip.")
            if not torch.isfinite(linear.weight).all():  # codes saturate, so that nothing would show it later
                raise KaruiError(f"{name}.weight holds NaN or infinite values; mend it before training in low precision.")
        held = next(iter(model.parameters())).device
        state, target = LowPrecisionState(self.precision, names, held), device or held
        formats = self.precision.at(0)
        kinds = formats["fprop"] if len(set(formats.values())) == 1 else "/".join(formats[g] for g in GEMMS)
        choice = choose(self.precision, target)
        rows = []
        for name, reason in reasons.items():
            if reason:
                rows.append(LayerReport(name=name, formats="high", backend="torch", reason=reason))
                continue
            linear = model.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            frozen = not linear.weight.requires_grad
            padded = padding(linear, self.precision)
            family = readers(name, set(names))
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, LowPrecisionLinear.wrap(linear, state, names.index(name), choice.backend))
            rows.append(
                LayerReport(
                    name=name,
                    formats=kinds,
                    backend=choice.backend,
                    reason=choice.reason,
                    padding=padded,
                    frozen=frozen,
                    input=", ".join(n.rpartition(".")[2] for n in family) if len(family) > 1 else "own",
                )  # fmt: skip
            )
        model.add_module(STATE_NAME, state)
        self.report, self._model = tuple(rows), model
        logger.info("%s: %d of %d linears, backend %s (%s)", kinds, len(names), len(rows), choice.backend, choice.reason)
        return model

    def convert(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Put ordinary linears back and drop the state; returns the weight of every converted layer by parameter name.

        A weight kept as codes comes back as the values they stand for, frozen.
        """
        out: dict[str, torch.Tensor] = {}
        for name, module in [(n, m) for n, m in model.named_modules() if isinstance(m, LowPrecisionLinear)]:
            plain = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
            plain.weight = module.weight
            if module.weight is None:
                plain.weight = nn.Parameter(module.dequantized_weight(), requires_grad=False)
            plain.bias, plain.training = module.bias, module.training
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, plain)
            out[f"{name}.weight"] = plain.weight.detach()
        if not out:
            raise KaruiError("the model has no low-precision layer to convert.")
        delattr(model, STATE_NAME)
        self._model = None
        return out

    @property
    def state(self) -> LowPrecisionState:
        """The prepared model's state."""
        state = getattr(self._model, STATE_NAME, None)
        if not isinstance(state, LowPrecisionState):
            raise KaruiError("no model is prepared; call prepare(model) first.")
        return state

    @contextmanager
    def high_precision(self) -> Iterator[None]:
        """While it lasts, every GEMM runs in high precision and nothing is recorded (with frozen weights as they are kept)."""
        state = self.state
        before, staged = state.formats, state.staged.clone()
        state.formats = dict.fromkeys(GEMMS, "high")
        try:
            yield
        finally:
            state.formats = before
            state.staged.copy_(staged)

    def nonfinite(self) -> list[str]:
        """Layers whose input, weight or gradient held a NaN or Inf since the last step, e.g. "model.layers.3.q (gradient)"."""
        return self.state.nonfinite()

    def idle(self) -> list[str]:
        """Layers that met no input in training mode since the last step: unused, or called around by whatever wraps them."""
        state = self.state
        return [n for n, amax in zip(state.names, state.staged[:, 0].tolist()) if amax == 0]

    def check_ran(self) -> None:
        """Before the first step is closed: layers that none of the passes went through.

        Raises:
            KaruiError: not one layer ran, so the step was in high precision. Some: a warning that names them.
        """
        if int(self.state.step) == 0 and (idle := self.idle()):
            names = f"{', '.join(idle[:5])}{', ...' if len(idle) > 5 else ''}"
            if len(idle) == len(self.state.names):
                raise KaruiError(
                    f"no low-precision layer ran before the first step ({names}): what wraps them multiplies with their "
                    f"weights itself, or the model is in eval mode; the step would have been in high precision."
                )
            logger.warning("%d low-precision layers did not run in the first step: %s", len(idle), names)

    def finish_step(self, *, skipped: bool = False) -> None:
        """Close an optimizer step: call it once, after `optimizer.step()` or after deciding not to take it."""
        self.state.update(skipped=skipped)

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Close every step of `optimizer` by itself; one with a NaN or Inf in a layer is not taken, counted and named.

        Before the first step it is checked that the layers ran: none at all is a `KaruiError`, some a warning. Whoever leaves
        out `optimizer.step()` (a gradient scaler after an overflow) calls `finish_step(skipped=True)` instead.
        """
        skipping = False

        def before(opt: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            nonlocal skipping
            self.check_ran()
            bad = self.nonfinite()
            skipping = bool(bad)
            if bad:
                logger.warning("step %d skipped: NaN or Inf in %s", int(self.state.step), ", ".join(bad))
                for group in opt.param_groups:
                    for parameter in group["params"]:
                        parameter.grad = None

        def after(opt: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            self.finish_step(skipped=skipping)

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)

    def table(self) -> str:
        """The report as text: one line per kind of layer, layers that share everything counted together."""
        groups: dict[tuple[str, ...], list[str]] = {}
        for row in self.report:
            leaf = row.name.rpartition(".")[2]
            weight = "frozen" if row.frozen else "trained"
            key = (leaf, row.formats, row.backend, row.padding or "-", weight, row.input, row.reason)
            groups.setdefault(key, []).append(row.name)
        lines: list[tuple[str, ...]] = [("layers", "name", "format", "backend", "padding", "weight", "input", "reason")]
        lines += [(str(len(names)), *key) for key, names in groups.items()]
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]) - 1)]
        return "\n".join("  ".join([*(c.ljust(w) for c, w in zip(line, widths)), line[-1]]) for line in lines)
