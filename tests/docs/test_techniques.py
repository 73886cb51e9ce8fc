"""The index of techniques: its files exist and say the paper it names; nothing that a recipe or an engine can be asked for is missing."""

import re
from pathlib import Path
from typing import Any, get_args

import pytest

from karui.configs.objectives import DistilObjective
from karui.configs.recipe import Recipe, shipped_recipes
from karui.configs.steps import prune
from karui.inference.cache.kv import DTYPES
from karui.inference.speculative.config import METHODS as SPECULATION
from karui.lowprec.precision import RECIPES
from karui.qat.methods import METHODS, TRAINED

DOCS = Path(__file__).resolve().parents[2] / "docs"
TEXT = (DOCS / "techniques.md").read_text(encoding="utf-8")
ROWS = [line for line in TEXT.splitlines() if line.startswith("| ") and not line.startswith(("| technique", "| ---"))]
SPELLED = set(re.findall(r"[\w.+-]+", TEXT))


def steps() -> set[str]:
    """Every `method:` of `prepare:`."""
    schema: Any = Recipe.model_json_schema()["$defs"]
    found = {name for part in schema.values() for name in _names(part.get("properties", {}).get("method", {}))}
    assert {"lora", "mla", "nvfp4", "prune-width"} <= found
    return found


def _names(field: dict[str, Any]) -> list[str]:
    return field.get("enum", [field["const"]] if "const" in field else [])


@pytest.mark.parametrize("row", ROWS, ids=[row.split("|")[1].strip() for row in ROWS])
def test_a_row_names_files_that_name_its_paper(row: str) -> None:
    links = [DOCS / target for target in re.findall(r"\]\(([^)#]+)\)", row)]
    assert all(path.exists() for path in links), row
    files = [f for path in links for f in (path.rglob("*") if path.is_dir() else [path]) if f.suffix in (".py", ".h")]
    said = "".join(f.read_text(encoding="utf-8") for f in files)
    missing = [paper for paper in re.findall(r"\d{4}\.\d{5}", row.split("|")[2]) if paper not in said]
    assert not missing, f"{row}: no file of the row names {missing}"


@pytest.mark.parametrize(("kind", "names"), [
    ("post-training methods", {*METHODS}), ("training on the grid", {*TRAINED}),
    ("steps of prepare:", steps()), ("pruning", {*get_args(prune.PruneStep.model_fields["method"].annotation)}),
    ("precisions", {*RECIPES}), ("divergences", {*get_args(DistilObjective.model_fields["divergence"].annotation)}),
    ("speculation", {*SPECULATION} - {"none"}), ("caches", {*DTYPES} - {"float32", "float16", "bfloat16"}),
])  # fmt: skip
def test_nothing_is_missing(kind: str, names: set[str]) -> None:
    missing = sorted(name for name in names if name not in SPELLED and f"{name}.py" not in SPELLED)
    assert not missing, f"docs/techniques.md has no {kind}: {missing}"


def test_every_shipped_recipe_is_named() -> None:
    assert sorted(name for name in shipped_recipes() if f"karui train {name}" not in TEXT) == ["demo", "sft-full"]
