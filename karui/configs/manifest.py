"""`Manifest`: what a bundle's `manifest.json` says about the files beside it.

A bundle is a folder: `manifest.json`, `config.json`, the tokenizer's files, and `model.safetensors` (or shards of it). The
manifest names every stored tensor with its grid, shape and sha256, so that a reader can tell a complete bundle from any other
folder. `FORMAT` below is the contract between writer, readers and the independent decoder.
"""

from __future__ import annotations

import json
import re
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from karui.configs.errors import CorruptError, KaruiError
from karui.configs.quantspec import QuantSpec

SCHEMA_VERSION = 1
MANIFEST_NAME = "manifest.json"

FORMAT = """
A tensor NAME kept in high precision is stored as NAME. A quantized one of logical shape [..., in], rows = product of the leading
dimensions, is stored as
    NAME.codes   fp8, mxfp8: float8_e4m3fn [rows, in]. Others: uint8 [rows, ceil(in * bits / 8)], each row a dense little-endian
                 bit stream of (code - smallest code), element 0 in the lowest bits of byte 0 (binary: 0 for -1 and 1 for +1)
    NAME.scale   [rows, G] or [1, 1] in the grid's scale dtype (e8m0 and double-quantized nf4: uint8)
    NAME.zero    uint8 [rows, G], affine grids
    NAME.EXTRA   what else the grid needs (nf4dq: absmax_scale, absmax_mean; nvfp4: global_scale)
Tied weights are stored once, under the first name of their group.
"""

_COMPONENT = re.compile(r"[A-Za-z0-9_][\w.+\-]*", re.ASCII)


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def check_inside(name: str) -> str:
    """`name` when it is a plain relative path inside the bundle; ValueError for `..`, absolute paths and the like."""
    path = PurePosixPath(name)
    if path.is_absolute() or str(path) != name or not all(_COMPONENT.fullmatch(part) for part in path.parts) or not path.parts:
        raise ValueError(f"file name {name!r} is not a plain path inside the bundle")
    return name


class FileRecord(_Frozen):
    """One file beside the manifest. `sha256` is absent for weight files: their tensors carry it."""

    bytes: int = Field(ge=0)
    sha256: str | None = Field(None, pattern=r"^[0-9a-f]{64}$")


class TensorRecord(_Frozen):
    """One logical tensor.

    Attributes:
        spec: the grid's short spelling; `none` when it is kept in high precision.
        shape: logical shape.
        dtype: dtype of the stored values (kept) or of the weights that were quantized.
        parts: sha256 of the bytes of each stored part: `codes`, `scale`, ...; the empty name is the tensor itself.
        fate: quantized, kept (as asked), or fell_back (a grid was asked for and could not be used).
        why: the reason, in words.
    """

    spec: str = "none"
    shape: tuple[int, ...]
    dtype: str
    parts: dict[str, str]
    fate: Literal["quantized", "kept", "fell_back"] = "kept"
    why: str = ""

    @field_validator("spec")
    @classmethod
    def _spec_is_known(cls, value: str) -> str:
        QuantSpec.parse(value)
        return value

    @model_validator(mode="after")
    def _parts_fit(self) -> TensorRecord:
        needed = {""} if self.spec == "none" else {"codes", "scale"}
        if not needed <= self.parts.keys() or (self.spec == "none" and len(self.parts) > 1):
            raise ValueError(f"parts {sorted(self.parts)} do not make a tensor of spec {self.spec!r}")
        if any(size < 0 for size in self.shape):
            raise ValueError(f"negative shape {self.shape}")
        return self

    def stored_names(self, name: str) -> dict[str, str]:
        """part -> name in the safetensors file."""
        return {part: f"{name}.{part}" if part else name for part in self.parts}


class Provenance(_Frozen):
    """Where a bundle comes from. `base_sha256` identifies the base model's weights."""

    karui: str
    torch: str = ""
    source_model: str = ""
    base_sha256: str = ""
    adapter: str = ""
    created: str = ""
    notes: dict[str, Any] = {}


class Manifest(_Frozen):
    """Every file of the bundle except the manifest itself is listed in `weight_files` or `files`."""

    schema_version: int = SCHEMA_VERSION
    kind: Literal["karui-bundle"] = "karui-bundle"
    model: dict[str, Any]  # the Hugging Face config.json
    recipe: dict[str, Any] | None = None
    tensors: dict[str, TensorRecord]
    tied: tuple[tuple[str, ...], ...] = ()  # groups of names that share one tensor; the first is the stored one
    weight_files: dict[str, FileRecord]
    files: dict[str, FileRecord] = {}
    chat_template: str | None = None
    provenance: Provenance
    parity: dict[str, Any] | None = None  # what the parity gate measured
    adapters: dict[str, Any] = {}
    heads: dict[str, Any] = {}
    plan: dict[str, Any] = {}

    @field_validator("weight_files", "files")
    @classmethod
    def _names_stay_inside(cls, value: dict[str, FileRecord]) -> dict[str, FileRecord]:
        for name in value:
            check_inside(name)
        return value

    @model_validator(mode="after")
    def _tied_names_exist(self) -> Manifest:
        for group in self.tied:
            if len(group) < 2 or group[0] not in self.tensors or any(name in self.tensors for name in group[1:]):
                raise ValueError(f"tied group {group}: the first name must be stored and the others must not")
        stored = [s for name, record in self.tensors.items() for s in record.stored_names(name).values()]
        if len(stored) != len(set(stored)):
            raise ValueError("two tensors are stored under one name")
        return self

    def dumps(self) -> str:
        return json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Parse `folder/manifest.json`.

        Raises:
            KaruiError: the folder is no bundle, or is of a schema this version does not know.
            CorruptError: the manifest is malformed or names a path outside the bundle.
        """
        path = folder / MANIFEST_NAME
        if not path.is_file():
            raise KaruiError(f"{folder}: no {MANIFEST_NAME}, so this is not a karui bundle; write one with `karui export`.")
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise CorruptError(f"{path}: not valid JSON ({error}).") from error
        if not isinstance(content, dict) or content.get("kind") != "karui-bundle":
            raise KaruiError(f"{path}: not the manifest of a karui bundle (its kind is not 'karui-bundle').")
        version = content.get("schema_version")
        if version != SCHEMA_VERSION:
            newer = isinstance(version, int) and version > SCHEMA_VERSION
            remedy = "upgrade karui" if newer else "export the model again"
            raise KaruiError(f"{path}: schema version {version!r}; this karui reads version {SCHEMA_VERSION}: {remedy}.")
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise CorruptError(f"{path}: {where + ': ' if where else ''}{first['msg']}.") from error
