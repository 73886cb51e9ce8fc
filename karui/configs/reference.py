"""docs/recipe.md, written from the recipe's schema: `python -m karui.configs.reference > docs/recipe.md`."""

from __future__ import annotations

import itertools
import sys
import types
import typing
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from karui.configs.quantspec import QuantSpec
from karui.configs.recipe import Recipe, sections_in, shipped_recipes, tags_of

HEAD = """# Recipe reference

Every key of a recipe, from its schema. `karui recipes` lists the shipped recipes, `karui recipes NAME` prints one to copy. A
key that does not exist is an error that lists the valid ones; `--set optim.lr=1e-4`, `--set prepare.0.rank=8` override single
keys. This page is written by `python -m karui.configs.reference`.
"""


def reference() -> str:
    """The whole page, Markdown."""
    parts = [HEAD, "## Shipped recipes\n", "| recipe | what it does |", "| --- | --- |"]
    for name, path in shipped_recipes().items():
        lines = itertools.takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
        what = " ".join(line.lstrip("# ") for line in lines).replace("|", "\\|")
        parts.append(f"| `{name}` | {what} |")
    parts.append("")
    plain = [(k, f) for k, f in Recipe.model_fields.items() if not _sections(f.annotation)]
    parts += ["## Top level\n", *_table(plain)]
    for key, field in Recipe.model_fields.items():
        sections = _sections(field.annotation)
        many = typing.get_origin(field.annotation) is tuple
        for section in sections:
            tags = tags_of(section)
            where = f"{key}[]" if many else key
            if len(sections) > 1:
                tag = next(k for k in ("method", "kind") if k in section.model_fields)
                where += f", {tag}: " + ", ".join(tags)
            parts.append(f"## {where}\n")
            if section.__doc__:
                parts.append(" ".join(section.__doc__.split()) + "\n")
            hidden = ("method", "kind") if len(tags) == 1 else ()
            parts += _table([(k, f) for k, f in section.model_fields.items() if k not in hidden])
            parts += _nested(section)
    return "\n".join(parts).rstrip() + "\n"


def _nested(section: type[BaseModel]) -> list[str]:
    out = []
    for key, field in section.model_fields.items():
        for inner in _sections(field.annotation):
            out += [f"### {key}\n", *([" ".join(inner.__doc__.split()) + "\n"] if inner.__doc__ else []),
                    *_table(list(inner.model_fields.items()))]
    return out


def _table(fields: list[tuple[str, FieldInfo]]) -> list[str]:
    if not fields:
        return []
    rows = ["| key | value | default | meaning |", "| --- | --- | --- | --- |"]
    for key, field in fields:
        rows.append(f"| `{key}` | {_type(field)} | {_default(field)} | {(field.description or '').replace('|', chr(92) + '|')} |")
    return [*rows, ""]


def _type(field: FieldInfo) -> str:
    limits = " and ".join(
        f"{sign} {getattr(m, name):.10g}"
        for m in field.metadata for name, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<")) if hasattr(m, name)
    )
    return (_name(field.annotation) + (f" {limits}" if limits else "")).replace("|", "\\|")


def _name(annotation: Any) -> str:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{a}`" for a in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_name(a) for a in args))
    if origin is tuple:
        return f"list of {_name(args[0])}"
    if origin is typing.Annotated:
        return _name(args[0])
    if origin is dict:
        return f"mapping of {_name(args[1])}"
    if annotation is QuantSpec:
        return "grid"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "see below"
    names = {str: "text", int: "whole number", float: "number", bool: "true or false", type(None): "null", Any: "anything"}
    return names.get(annotation, str(annotation))


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, BaseModel):
        return ""
    if value is None:
        return "`null`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, float):
        return f"`{value:g}`"
    if isinstance(value, tuple):
        return "`[" + ", ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in value) + "]`"
    return f"`{value}`"


def _sections(annotation: Any) -> list[type[BaseModel]]:
    """The sections of an annotation; a grid is a value, written in its short spelling."""
    return [section for section in sections_in(annotation) if section is not QuantSpec]


if __name__ == "__main__":
    sys.stdout.write(reference())
