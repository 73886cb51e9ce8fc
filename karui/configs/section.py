"""`Section`: what every part of a recipe is."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base of every part of a recipe: frozen, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")
