"""What everything agrees on: `Recipe`, `QuantSpec`, `Manifest`, and the errors a user sees."""

from karui.configs.errors import CorruptError, KaruiError, UnsupportedError
from karui.configs.quantspec import QuantSpec
from karui.configs.recipe import Recipe

__all__ = ["CorruptError", "KaruiError", "QuantSpec", "Recipe", "UnsupportedError"]
