"""The recipe reference in the docs is what the schema says now, and holds every key."""

from pathlib import Path

from karui.configs.recipe import Recipe, shipped_recipes
from karui.configs.reference import reference

PAGE = Path(__file__).resolve().parents[2] / "docs" / "recipe.md"


def test_the_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == reference(), "run `python -m karui.configs.reference > docs/recipe.md`"


def test_every_section_and_recipe_is_in_it():
    text = reference()
    for key in Recipe.model_fields:
        assert f"## {key}" in text or f"| `{key}` |" in text, key
    for name in shipped_recipes():
        assert f"| `{name}` |" in text
    assert "| `rank` | whole number >= 1 | `16` |" in text and "PydanticUndefined" not in text and "typing." not in text
