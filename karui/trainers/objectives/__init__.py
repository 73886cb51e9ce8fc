"""The code behind each kind of `objective:`; imported when a recipe asks for it.

An objective is the module that DDP wraps: (tokens, positions, cu_seqlens, targets) of a packed row -> sum of the loss over the
supervised tokens in fp32, so that one reducer can divide by how many the whole step has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from karui.configs.objectives import SftObjective
from karui.configs.recipe import Recipe

if TYPE_CHECKING:
    from torch import nn

    from karui.trainers.model import LossSum


def make_objective(recipe: Recipe, model: nn.Module) -> LossSum:
    """The recipe's objective around a prepared model."""
    from karui.trainers.model import LossSum

    assert isinstance(recipe.objective, SftObjective), recipe.objective
    return LossSum(model, recipe.objective.chunk_tokens)
