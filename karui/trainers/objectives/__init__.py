"""The code behind each kind of `objective:`; imported when a recipe asks for it.

An objective is the module that DDP wraps: (tokens, positions, cu_seqlens, targets) of a packed row -> sum of the loss over the
supervised tokens in fp32, so that one reducer can divide by how many the whole step has. `LossSum` shows what else it may do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from karui.configs.objectives import DistilObjective, Eagle3Objective, MedusaObjective, OnPolicyObjective

if TYPE_CHECKING:
    from karui.trainers.model import LossSum
    from karui.trainers.run import Setup


def make_objective(setup: Setup) -> LossSum:
    """The recipe's objective around a prepared model, watching the routers of a mixture."""
    from karui.trainers.balance import watch

    made = _make(setup)
    watch(setup.recipe, made)
    return made


def _make(setup: Setup) -> LossSum:
    from karui.trainers.objectives.indexed import leave_alone
    from karui.trainers.objectives.indexed import make as make_indexed

    section = setup.recipe.objective
    if getattr(section, "indexer", None) is not None:
        return make_indexed(setup)
    leave_alone(setup.model)
    if isinstance(section, DistilObjective):
        from karui.trainers.objectives.distil import make

        return make(setup)
    if isinstance(section, OnPolicyObjective):
        from karui.trainers.objectives.on_policy import make as make_on_policy

        return make_on_policy(setup)
    if isinstance(section, MedusaObjective | Eagle3Objective):
        from karui.trainers.objectives.drafts import make as make_draft

        return make_draft(setup)
    from karui.trainers.model import LossSum

    return LossSum(setup.model, section.chunk_tokens)
