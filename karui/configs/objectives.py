"""What is minimised: one section per kind of `objective:`. `karui.trainers.objectives` holds the code behind each."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from karui.configs.section import Section


class SftObjective(Section):
    """Cross entropy of the supervised tokens."""

    kind: Literal["sft"] = "sft"
    chunk_tokens: int = Field(1024, ge=1, description="supervised tokens whose logits exist at one moment")


# A second kind makes this `Annotated[SftObjective | Other, Field(discriminator="kind")]`.
ObjectiveSection = SftObjective
