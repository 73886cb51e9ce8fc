"""What everything agrees on: `Recipe`, `QuantSpec`, `Manifest`, and the errors a user sees.

Recipes and manifests are pydantic's, and imported when they are asked for; kernels and the engine's models need neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from karui.configs.errors import CorruptError, KaruiError, UnsupportedError
from karui.configs.quantspec import QuantSpec

if TYPE_CHECKING:
    from karui.configs.recipe import Recipe

__all__ = ["CorruptError", "KaruiError", "QuantSpec", "Recipe", "UnsupportedError"]


def __getattr__(name: str) -> Any:
    if name != "Recipe":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from karui.configs.recipe import Recipe

    return Recipe
