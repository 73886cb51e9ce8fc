"""`Section`: what every part of a recipe is."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
Names = Annotated[tuple[str, ...], Field(min_length=1)]


class Section(BaseModel):
    """Base of every part of a recipe: frozen, no unknown keys, no infinity, no empty text, no true or false for a number."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _meant(cls, value: Any) -> Any:
        """Refuse what pydantic would take, though nobody means it: `steps: true` is 1 to it."""
        found: list[InitErrorDetails] = []
        for key, item in value.items() if isinstance(value, Mapping) else ():
            annotation = cls.model_fields[key].annotation if key in cls.model_fields else bool
            message = ""
            if isinstance(item, str) and not item:
                message = "an empty text; leave the key out, or give a value"
            elif isinstance(item, bool) and not _takes_bool(annotation):
                message = "true or false is no value of this key"
            if message:
                found.append({"type": PydanticCustomError("not_meant", message), "loc": (key,), "input": item})
        if found:
            raise ValidationError.from_exception_data(cls.__name__, found)
        return value


def _takes_bool(annotation: Any) -> bool:
    return annotation is bool or any(_takes_bool(a) for a in typing.get_args(annotation))
