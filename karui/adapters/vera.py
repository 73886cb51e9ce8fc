"""VeRA (arXiv 2310.11454) through peft: W + diag(b) B diag(d) A with shared random A, B and trained vectors b (zero), d.

The projections are stored with the adapter, so that no random generator has to repeat them on another machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from karui.adapters.files import quiet
from karui.adapters.targets import resolve_targets, shortest
from karui.configs.steps import VeraStep

if TYPE_CHECKING:
    from peft import PeftModel


def attach_vera(model: nn.Module, step: VeraStep) -> PeftModel:
    """Freeze `model` and put VeRA on its linears; raises as `resolve_targets` does."""
    from peft import VeraConfig, get_peft_model

    targets = resolve_targets(model, step.targets)
    config = VeraConfig(r=step.rank, target_modules=shortest(model, targets), vera_dropout=step.dropout, d_initial=step.d_initial,
                        projection_prng_key=step.seed, save_projection=True, task_type="CAUSAL_LM")
    with quiet():
        return get_peft_model(model, config)
