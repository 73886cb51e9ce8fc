"""What `accelerate launch` or its YAML says about precision, as a recipe: `mixed_precision: fp8` becomes a low-precision step.

accelerate hands its configuration to the processes in ACCELERATE_* variables. Its own FP8 wraps the model in torchao's or
TransformerEngine's modules, which need their packages and a GPU; here karui's linears serve, on a CPU by emulation.

    fp8_config: backend: AO    fp8-current with torchao's rounding (its tensor-wise default)
    fp8_config: backend: TE    fp8-delayed, with the configuration's amax_history_len and margin
    no backend                 fp8-current
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

from karui.configs.errors import UnsupportedError
from karui.configs.recipe import Recipe
from karui.configs.steps.lowprec import LowPrecisionStep

logger = logging.getLogger(__name__)
FP8_BACKEND = "ACCELERATE_FP8_BACKEND"


def resolve_precision(recipe: Recipe, environment: Mapping[str, str], *, cuda: bool) -> Recipe:
    """The recipe as it will run: FP8 asked for by `run.precision` or the launcher is a step of `prepare:`, the rest bf16 or fp32.

    Args:
        cuda: what is not in FP8 then runs under bf16 autocast (as accelerate has it); on a CPU in the weights' own dtype.

    Raises:
        UnsupportedError: an FP8 backend that nothing here stands for.
    """
    low = [step for step in recipe.prepare if isinstance(step, LowPrecisionStep)]
    launched = environment.get("ACCELERATE_MIXED_PRECISION", "").lower()
    if launched != "fp8" and recipe.run.precision != "fp8":
        if launched in ("bf16", "fp16") and launched != recipe.run.precision:
            logger.warning("accelerate's configuration says mixed_precision %s; the recipe's run.precision, %s, counts", launched,
                           recipe.run.precision)
        return recipe
    rest = "bf16" if cuda else "no"
    run = recipe.run.model_copy(update={"precision": rest if recipe.run.precision in ("fp8", "no") else recipe.run.precision})
    prepare = recipe.prepare
    if not low:
        step = LowPrecisionStep.model_validate(_step(environment if launched == "fp8" else {}))
        prepare = (*prepare, step)
        logger.info("precision fp8: %s, beside it %s", step.method, run.precision)
    return recipe.model_copy(update={"run": run, "prepare": prepare})


@contextmanager
def without(environment: MutableMapping[str, str], name: str) -> Iterator[None]:
    """Within, a variable of the launch is hidden from accelerate, which would act on it by itself."""
    held = environment.pop(name, None)
    try:
        yield
    finally:
        if held is not None:
            environment[name] = held


def _step(environment: Mapping[str, str]) -> dict[str, Any]:
    backend = environment.get(FP8_BACKEND, "").upper()
    if backend in ("", "NO"):
        return {"method": "fp8-current"}
    if backend == "AO":
        return {"method": "fp8-current", "compat": "ao"}
    if backend == "TE":
        keys = {"history": "ACCELERATE_FP8_AMAX_HISTORY_LEN", "margin": "ACCELERATE_FP8_MARGIN"}
        found = {k: environment.get(name, "None") for k, name in keys.items()}
        return {"method": "fp8-delayed", **{k: int(v) for k, v in found.items() if v not in ("", "None")}}
    raise UnsupportedError(f"accelerate's fp8_config names the backend {backend!r}; karui stands in for AO and TE. Change it, or "
                           f"leave mixed_precision at no and put a step such as `method: fp8-current` into prepare:.")
