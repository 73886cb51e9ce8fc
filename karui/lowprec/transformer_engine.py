"""TransformerEngine as a backend: its recipe from a `Precision`, and its linears in place of ours.

Conversion is all or nothing: every layer is checked and built before the first is put in place, so a layer that does not fit
(TransformerEngine wants multiples of 16, NVFP4 and MXFP8 of 32) stops it before anything changed. The forward pass then runs
under `transformer_engine.pytorch.autocast(recipe=te_recipe(precision))`.

The package is optional and imported here alone. Its recipes import without a GPU; its modules need the compiled part.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch import nn

from karui.configs.errors import KaruiError, UnsupportedError
from karui.lowprec.policy import decide
from karui.lowprec.precision import Precision

logger = logging.getLogger(__name__)
_MULTIPLE = {"mxfp8": 32, "nvfp4": 32}


def te_recipe(precision: Precision) -> Any:
    """The `transformer_engine.common.recipe` object that trains as `precision` does.

    Raises:
        UnsupportedError: TransformerEngine is not installed, or has nothing that equals `precision` (named).
    """
    if precision.schedule or any((precision.fprop, precision.dgrad, precision.wgrad)):
        raise UnsupportedError("TransformerEngine has one format for all three GEMMs; drop fprop, dgrad, wgrad and schedule.")
    if precision.compat not in (None, "te"):
        raise UnsupportedError(f"TransformerEngine cannot round as {precision.compat!r}; drop compat.")
    if not precision.tensor_scale:
        raise UnsupportedError("TransformerEngine's NVFP4 always has the tensor's scale; drop tensor_scale.")
    if precision.recipe in ("fp8-rowwise", "mxfp4"):
        raise UnsupportedError(f"TransformerEngine has no recipe for {precision.recipe}; use backend emulate or scaled_mm.")
    module = _load("transformer_engine.common.recipe")
    hybrid, e4m3 = module.Format.HYBRID, module.Format.E4M3
    if precision.recipe == "fp8-delayed":
        return module.DelayedScaling(
            margin=precision.margin, fp8_format=hybrid, amax_history_len=precision.history, amax_compute_algo="max"
        )
    if precision.recipe == "fp8-current":
        return module.Float8CurrentScaling(fp8_format=hybrid)
    if precision.recipe == "fp8-blockwise":
        return module.Float8BlockScaling(fp8_format=e4m3)
    if precision.recipe == "mxfp8":
        return module.MXFP8BlockScaling(fp8_format=e4m3)
    return module.NVFP4BlockScaling(
        disable_rht=not precision.hadamard,
        disable_stochastic_rounding=not precision.stochastic,
        disable_2d_quantization=not precision.square_weights,
    )


def convert(
    model: nn.Module, precision: Precision, factory: Callable[[nn.Linear], nn.Module] | None = None
) -> tuple[dict[str, str], dict[str, nn.Module]]:
    """Put TransformerEngine linears where the layer policy trains in low precision; parameters stay the same objects.

    Args:
        factory: makes the new layer of an old one; None: `transformer_engine.pytorch.Linear`.

    Returns:
        reason by name of each linear that stays, new module by name of each that was replaced.

    Raises:
        KaruiError: a layer that does not fit; all of them are named and none is replaced.
        UnsupportedError: TransformerEngine, or its compiled part, is not there.
    """
    factory = factory or _te_linear
    reasons = decide(model, precision)
    multiple = _MULTIPLE.get(precision.recipe, 16)
    wanted = {n: model.get_submodule(n) for n, reason in reasons.items() if not reason}
    odd = [n for n, m in wanted.items() if m.in_features % multiple or m.out_features % multiple]  # type: ignore[operator]
    if odd:
        raise KaruiError(
            f"TransformerEngine's {precision.recipe} wants multiples of {multiple}, which {len(odd)} layers are not: "
            f"{', '.join(odd)}. Name them in policy.skip, or use backend emulate or scaled_mm, which pad."
        )
    built = {n: factory(m) for n, m in wanted.items() if isinstance(m, nn.Linear)}
    for name, module in built.items():
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, module)
    logger.info("TransformerEngine %s: %d of %d linears", precision.recipe, len(built), len(reasons))
    return {n: r for n, r in reasons.items() if r}, built


class TransformerEngineModel:
    """A model whose linears are TransformerEngine's and whose forward passes run under its autocast with our recipe.

    Raises:
        KaruiError, UnsupportedError: as `te_recipe` and `convert` do; and for fp8-delayed, whose amax history lies in the modules
            in a form that karui's checkpoints do not hold, so that a resumed run would differ.
    """

    def __init__(self, model: nn.Module, precision: Precision) -> None:
        if precision.recipe == "fp8-delayed":
            raise UnsupportedError(
                "backend te with fp8-delayed could not be resumed exactly: TransformerEngine keeps the amax history in its own "
                "state. Use fp8-current, or backend auto."
            )
        self.model, self.precision, self.enabled = model, precision, True
        recipe = te_recipe(precision)
        engine = _load("transformer_engine.pytorch")
        self._plain = {n: m for n, m in model.named_modules() if type(m) is nn.Linear}
        self.reasons, self.built = convert(model, precision)
        self._body = getattr(model, "get_decoder", lambda: model)()
        self._forward = self._body.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            with engine.autocast(enabled=self.enabled, recipe=recipe):
                return self._forward(*args, **kwargs)

        self._body.forward = forward

    def lines(self) -> list[str]:
        """What became of the linears."""
        high = [f"{name}: high precision, {reason}" for name, reason in self.reasons.items()]
        return [f"{len(self.built)} linears in {self.precision.recipe} by TransformerEngine", *high]

    @contextmanager
    def high_precision(self) -> Iterator[None]:
        """While it lasts, TransformerEngine multiplies in the weights' own precision."""
        self.enabled = False
        try:
            yield
        finally:
            self.enabled = True

    def undo(self) -> None:
        """Put the ordinary linears back, with the trained parameters."""
        self._body.forward = self._forward
        for name in self.built:
            plain, module = self._plain[name], self.built[name]
            plain.weight, plain.bias = module.weight, module.bias if plain.bias is not None else None  # type: ignore[assignment]
            parent, _, leaf = name.rpartition(".")
            setattr(self.model.get_submodule(parent), leaf, plain)


def _te_linear(linear: nn.Linear) -> nn.Module:
    te = _load("transformer_engine.pytorch")
    new = te.Linear(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        params_dtype=linear.weight.dtype,
        device=linear.weight.device,
    )
    new.weight = linear.weight
    if linear.bias is not None:
        new.bias = linear.bias
    return new


def _load(name: str) -> ModuleType:
    import torch  # noqa: F401  TransformerEngine's libraries are found only once torch's are loaded

    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == "transformer_engine":
            raise UnsupportedError(
                "TransformerEngine is not installed; pip install karui[te], or use backend emulate or scaled_mm."
            ) from error
        raise UnsupportedError(f"{name} cannot be imported: {error}. Use backend emulate or scaled_mm.") from error
    except (ImportError, OSError, RuntimeError) as error:
        raise UnsupportedError(
            f"{name} is installed but its compiled part does not load here ({error}). Use backend emulate or scaled_mm."
        ) from error
