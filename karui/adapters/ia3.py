"""IA3 (arXiv 2205.05638) through peft: one trained factor per output of a target, or per input of a feed-forward one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from karui.adapters.files import quiet
from karui.adapters.targets import resolve_targets, shortest
from karui.configs.errors import KaruiError
from karui.configs.steps import Ia3Step

if TYPE_CHECKING:
    from peft import PeftModel


def attach_ia3(model: nn.Module, step: Ia3Step) -> PeftModel:
    """Freeze `model` and scale its targets.

    Raises:
        KaruiError: targets that match nothing, feed-forward layers that are not among the targets.
    """
    from peft import IA3Config, get_peft_model

    targets, inner = resolve_targets(model, step.targets), resolve_targets(model, step.feedforward) if step.feedforward else []
    if odd := sorted(set(inner) - set(targets)):
        raise KaruiError(f"ia3: feedforward {odd[0]!r} is not among the targets; add it there.")
    config = IA3Config(target_modules=shortest(model, targets), feedforward_modules=shortest(model, inner) if inner else [],
                       task_type="CAUSAL_LM")
    with quiet():
        return get_peft_model(model, config)
