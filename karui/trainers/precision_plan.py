"""`karui plan RECIPE --gpu NAME`: what a recipe's low precision would do on a GPU that need not be there.

The model is built without storage; the times are a roofline over datasheet limits (`karui.lowprec.plan`), the bytes the formulas
of `karui.trainers.estimate`. Predictions, not measurements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from karui.configs.errors import KaruiError
from karui.configs.recipe import Recipe
from karui.configs.steps.lowprec import LowPrecisionStep
from karui.lowprec.plan import Gpu, LayerPlan, find_gpu, plan_layers
from karui.lowprec.precision import RECIPES, Precision
from karui.trainers.estimate import Memory, Outline, memory, outline


@dataclass(frozen=True, kw_only=True)
class PrecisionPlan:
    """A recipe on a GPU.

    Attributes:
        layers: every linear of the model.
        tokens: of the micro-batch planned for.
        memory: bytes by purpose at that micro-batch, in high precision.
        saved_bytes: activations that low precision keeps in fewer bytes, already taken off in `peak_bytes`.
    """

    gpu: Gpu
    method: str
    tokens: int
    layers: tuple[LayerPlan, ...]
    memory: Memory

    @property
    def saved_bytes(self) -> int:
        return sum(x.saved_bytes for x in self.layers)

    @property
    def peak_bytes(self) -> int:
        return max(self.memory.loading, self.memory.peak - self.saved_bytes)

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.gpu.memory_gb * 1e9

    @property
    def speed_up(self) -> float:
        """Of all linears together, output head included, against bf16."""
        return sum(x.high_seconds for x in self.layers) / sum(x.seconds for x in self.layers)


def _step(recipe: Recipe) -> LowPrecisionStep | None:
    return next((s for s in recipe.prepare if isinstance(s, LowPrecisionStep)), None)


def has_low_precision(recipe: Recipe) -> bool:
    """Whether a recipe has a step to plan."""
    return _step(recipe) is not None


def plan_recipe(
    recipe: Recipe, gpu: str, *, tokens: int | None = None, method: str | None = None, model: Outline | None = None
) -> PrecisionPlan:  # fmt: skip
    """Plan a recipe's low-precision step.

    Args:
        tokens: of a micro-batch; None: the recipe's `optim.micro_tokens`.
        method: plan this low-precision recipe in place of the one in `prepare:` (or where it has none).
        model: the recipe's, when it was made before; where only adapters are trained it is frozen here.

    Raises:
        KaruiError: an unknown GPU or method, or a recipe without low precision when no method is given.
    """
    import torch

    card = find_gpu(gpu)
    step = _step(recipe)
    if method is not None:
        precision = Precision.parse(method)
    elif step is not None:
        precision = Precision.of(step)
    else:
        raise KaruiError(f"recipe {recipe.name!r} has no low-precision step to plan; add one to prepare: (methods: "
                         f"{', '.join(RECIPES)}), or name one with --method.")
    model = model or outline(recipe)
    count = tokens or recipe.optim.micro_tokens
    if not model.trained.full:
        model.model.requires_grad_(False)
    with torch.device("meta"):
        layers = plan_layers(model.model, precision, card.name, count)
    return PrecisionPlan(gpu=card, method=precision.recipe, tokens=count, layers=tuple(layers),
                         memory=memory(recipe, model.shape, model.trained, tokens=count, supervised=count))


def rows(plan: PrecisionPlan) -> list[list[str]]:
    """The plan as a table: layers that share everything but their block counted together."""
    groups: dict[tuple[str, ...], list[LayerPlan]] = {}
    for x in plan.layers:
        groups.setdefault((x.name.rpartition(".")[2], x.formats, x.hardware, x.backend, x.padding or "-", x.reason), []).append(x)
    return [
        [str(len(layers)), *key[:2], key[2].removesuffix(" tensor cores"), *key[3:5], f"{layers[0].speed_up:.2f}",
         _gb(sum(x.saved_bytes for x in layers)), key[5]]
        for key, layers in groups.items()
    ]  # fmt: skip


COLUMNS = ("layers", "name", "format", "multiplies", "backend", "padding", "speed-up", "saved", "reason")


def lines(plan: PrecisionPlan) -> list[str]:
    """What stands below the table."""
    m, gpu = plan.memory, plan.gpu
    parts = {"weights": m.weights + m.adapter, "gradients": m.gradients, "optimizer": m.optimizer, "activations": m.activations,
             "logits": m.logits + m.head}
    kept = ", ".join(f"{k} {_gb(v)}" for k, v in parts.items())
    return [
        f"{plan.method} on {gpu.name} (sm_{gpu.sm}), micro-batches of {plan.tokens:,} tokens: linears {plan.speed_up:.2f} times "
        f"as fast as in bf16, predicted from datasheet limits",
        f"memory: {kept}; saved by codes {_gb(plan.saved_bytes)}; peak {_gb(plan.peak_bytes)} of {gpu.memory_gb:g} GB: "
        f"{'fits' if plan.fits else 'does not fit'}",
        f"limits: {gpu.source}; compared with a copy of it: {gpu.checked}",
    ]


def as_json(plan: PrecisionPlan) -> dict[str, Any]:
    """The plan as JSON-able values."""
    from dataclasses import asdict

    return {
        "gpu": asdict(plan.gpu), "method": plan.method, "tokens": plan.tokens, "speed_up": plan.speed_up,
        "memory": asdict(plan.memory), "saved_bytes": plan.saved_bytes, "peak_bytes": plan.peak_bytes, "fits": plan.fits,
        "layers": [asdict(x) for x in plan.layers],
    }


def _gb(value: float) -> str:
    return f"{value / 1e9:.2f} GB" if value >= 1e7 else f"{value / 1e6:.2f} MB"


__all__ = ["COLUMNS", "PrecisionPlan", "as_json", "lines", "plan_recipe", "rows"]
