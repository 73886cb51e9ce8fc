"""Where rows come from: jsonl, json, parquet and text files, folders of one kind of them, the hub, and the shipped samples.

A source is opened without reading it; rows are streamed. Every row carries the place a person would look for it at, so that
a bad one can be named.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from karui.configs.errors import CorruptError, KaruiError, nearest

log = logging.getLogger(__name__)

SAMPLES = Path(__file__).parent.parent / "samples"
SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".parquet": "parquet", ".txt": "txt"}
FORMS = "a shipped sample, a .jsonl, .json, .parquet or .txt file, a folder of such files, or a hub data set (owner/name[:split])"
_HUB = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(?::(?P<config>[\w.-]+)(?=:))?(?::(?P<split>[\w.\[\]%:-]+))?")


@dataclass(frozen=True)
class Row:
    """One row: its number from 0 over the whole source, the place to look for it at, its fields, and its part of a mix."""

    index: int
    place: str
    fields: dict[str, Any]
    part: int = 0


class Source(Protocol):
    """What `open_source` returns."""

    @property
    def label(self) -> str: ...

    @property
    def is_text(self) -> bool: ...

    def rows(self) -> Iterator[Row]:
        """All rows, in order. A text file is one row with the field `text`."""
        ...

    def fingerprint(self) -> str:
        """Changes whenever the content changes."""
        ...


def shipped_samples() -> dict[str, Path]:
    """The data sets in the package, by name."""
    return {p.stem: p for p in sorted(SAMPLES.glob("*.jsonl"))}


def open_source(name: str, *, default_splits: tuple[str, ...] = ("train",)) -> Source:
    """The source a recipe's `data.train` or `data.eval` names; `default_splits`: hub splits tried when none is written.

    Raises:
        KaruiError: no such file, folder or shipped sample, nothing readable in a folder, an unknown suffix.
    """
    shipped, path = shipped_samples(), Path(name).expanduser()
    if path.is_dir():
        return _folder(path, name)
    if path.is_file():
        return FileSource(name, (path,), _kind(path))
    if name in shipped:
        return FileSource(name, (shipped[name],), "jsonl")
    looks_local = path.suffix.lower() in SUFFIXES or name.startswith((".", "/", "~")) or "/" not in name
    match = _HUB.fullmatch(name)
    if looks_local or match is None:
        raise KaruiError(f"data {name!r}: no such file or folder (looked in {Path.cwd()}), and no shipped sample of that name "
                         f"(shipped: {', '.join(shipped)}). Expected {FORMS}.{nearest(name, shipped)}")
    splits = (match["split"],) if match["split"] else default_splits
    return HubSource(name, match["id"], match["config"], splits)


def _kind(path: Path) -> str:
    kind = SUFFIXES.get(path.suffix.lower())
    if kind is None:
        raise KaruiError(f"data {str(path)!r}: suffix {path.suffix!r} is not known; expected {', '.join(SUFFIXES)}. "
                         "Rename or convert the file.")
    return kind


def _folder(path: Path, name: str) -> FileSource:
    if any((path / known).is_file() for known in ("dataset_info.json", "dataset_dict.json")):
        raise KaruiError(f"data {name!r}: this folder was written by save_to_disk of datasets; write its rows as a file instead: "
                         "load_from_disk(folder).to_parquet(file), of a split if it has several.")
    files = [p for p in sorted(path.rglob("*")) if p.is_file() and p.suffix.lower() in SUFFIXES
             and not any(part.startswith(".") for part in p.relative_to(path).parts)]
    kinds = sorted({_kind(p) for p in files})
    if not kinds:
        raise KaruiError(f"data {name!r}: no {', '.join(SUFFIXES)} files in this folder; put the data there or name a file.")
    if len(kinds) > 1:
        raise KaruiError(f"data {name!r}: this folder mixes {' and '.join(kinds)} files; keep one kind per folder.")
    return FileSource(name, tuple(files), kinds[0])


@dataclass(frozen=True)
class FileSource:
    """Files of one kind, read one after the other in the order of their names."""

    label: str
    files: tuple[Path, ...]
    kind: str

    @property
    def is_text(self) -> bool:
        return self.kind == "txt"

    def fingerprint(self) -> str:
        digest = hashlib.sha256(self.kind.encode())
        for path in self.files:
            with path.open("rb") as handle:
                digest.update(hashlib.file_digest(handle, "sha256").digest())
        return digest.hexdigest()

    def rows(self) -> Iterator[Row]:
        reader = {"jsonl": _jsonl, "json": _json, "parquet": _parquet, "txt": _txt}[self.kind]
        found = chain.from_iterable(reader(path) for path in self.files)
        for index, (place, fields) in enumerate(found):
            if not isinstance(fields, dict):
                raise KaruiError(f"{place}: a row is an object with named fields, this one is a {type(fields).__name__}; "
                                 'write e.g. {"prompt": "...", "completion": "..."}.')
            yield Row(index, place, fields)


def _bytes(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise KaruiError(f"{path}: cannot be read ({error.strerror}).") from error
    if not data.strip():
        raise KaruiError(f"{path}: the file is empty; name one that holds samples.")
    return data


def _decode(data: bytes, place: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise KaruiError(f"{place}: not valid UTF-8 (byte {data[error.start]:#04x} at offset {error.start}); "
                         "convert the file, e.g. iconv -f latin1 -t utf-8.") from error


def _whole(value: Any, text: str, place: str) -> None:
    """Refuse half of a surrogate pair, which JSON can spell and no text can hold."""
    if "\\ud" not in text and "\\uD" not in text:
        return
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise KaruiError(f"{place}: {error.object[error.start]!r} is half of a surrogate pair, so the text was cut inside a "
                         "character; mend or remove it.") from error


def _jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    empty = True
    try:
        with path.open("rb") as handle:
            for number, line in enumerate(handle, 1):
                if not line.strip():
                    continue
                empty, place = False, f"{path} line {number}"
                text = _decode(line, place)
                try:
                    value = json.loads(text)
                    _whole(value, text, place)
                    yield place, value
                except (json.JSONDecodeError, RecursionError) as error:
                    why = ": nested too deep" if isinstance(error, RecursionError) else f" at column {error.colno}: {error.msg}"
                    raise KaruiError(f"{place}: malformed JSON{why}. Every line of a .jsonl file is one JSON object; "
                                     "mend or remove that line.") from error
    except OSError as error:
        raise KaruiError(f"{path}: cannot be read ({error.strerror}).") from error
    if empty:
        raise KaruiError(f"{path}: the file is empty; name one that holds samples.")


def _json(path: Path) -> Iterator[tuple[str, Any]]:
    text = _decode(_bytes(path), str(path))
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        where = (": nested too deep" if isinstance(error, RecursionError)
                 else f" at line {error.lineno} column {error.colno}: {error.msg}")
        hint = " One object per line belongs in a .jsonl file." if "Extra data" in where else ""
        raise KaruiError(f"{path}: malformed JSON{where}.{hint}") from error
    _whole(value, text, str(path))
    if isinstance(value, dict) and isinstance(value.get("data"), list):
        value = value["data"]
    if not isinstance(value, list):
        raise KaruiError(f"{path}: expected a list of objects (or an object with such a list under 'data'), "
                         f"found a {type(value).__name__}.")
    for index, row in enumerate(value):
        yield f"{path} row {index}", row


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    index = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    yield f"{path} row {index}", row
                    index += 1
    except UnicodeDecodeError as error:
        raise KaruiError(f"{path} near row {index}: not valid UTF-8 ({error.reason}); write the file again.") from error
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:
        raise CorruptError(f"{path}: not a readable parquet file ({error}); fetch or write it again.") from error


def _txt(path: Path) -> Iterator[tuple[str, Any]]:
    yield str(path), {"text": _decode(_bytes(path), str(path))}


@dataclass(frozen=True)
class HubSource:
    """A data set on the hub, through `datasets`; downloaded when the first row is asked for, then cached by `datasets`."""

    label: str
    id: str
    config: str | None
    splits: tuple[str, ...]
    is_text: bool = False

    def _load(self) -> Any:
        import datasets

        problem: Exception | None = None
        for split in self.splits:
            try:
                found = datasets.load_dataset(self.id, self.config, split=split)
                if len(self.splits) > 1:
                    log.info("data %s: using the split %r", self.label, split)
                return found
            except ValueError as error:  # unknown split or missing configuration: the message lists the valid ones
                problem = error
            except Exception as error:  # connection errors come as a dozen types of four libraries
                raise KaruiError(
                    f"data {self.label!r}: no such file here, and the hub's data set {self.id!r} cannot be fetched "
                    f"({type(error).__name__}: {_first_line(error)}). Offline? Give a file instead; wrong name? Expected {FORMS}."
                ) from error
        raise KaruiError(f"data {self.label!r}: {_first_line(problem)} Write it as owner/name:split or owner/name:config:split.")

    def fingerprint(self) -> str:
        return f"hub:{self.id}:{self.config}:{self._load()._fingerprint}"

    def rows(self) -> Iterator[Row]:
        for index, fields in enumerate(self._load()):
            yield Row(index, f"{self.label} row {index}", dict(fields))


def _first_line(error: Exception | None) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]
