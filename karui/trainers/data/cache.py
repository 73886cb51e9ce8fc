"""Tokenized sets on disk: one safetensors file per key, its arrays mapped into memory rather than read.

The key is a hash of everything that decides the tokens: the content of the files, the tokenizer (vocabulary, merges,
normalisation, special tokens, chat template), the data section, this package's code and the versions of the libraries that
tokenize and render. A stale hit is therefore impossible, and a damaged file is made again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from karui.catalogue.store import cache_root
from karui.trainers.data.sources import Source
from karui.trainers.data.spool import ARRAYS
from karui.trainers.data.types import Counts, SampleSet

if TYPE_CHECKING:
    from karui.configs.recipe import DataSection

log = logging.getLogger(__name__)
# the files' content and the mix's shares are in the source's fingerprint
_IRRELEVANT = {"packing", "shuffle", "shuffle_window", "workers", "train", "eval", "mix", "weight", "repeat"}
_NUMPY = dict(ARRAYS.values())


def cache_key(section: DataSection, tokenizer: Any, source: Source, split: str) -> str:
    """Hex sha256 of everything that decides the samples of a split."""
    fields = {k: v for k, v in section.model_dump(mode="json").items() if k not in _IRRELEVANT}
    parts = {"section": fields, "own_eval": section.eval is not None, "split": split, "source": source.fingerprint(),
             "label": source.label, "tokenizer": tokenizer_hash(tokenizer), "code": _code()}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def tokenizer_hash(tokenizer: Any) -> str:
    """Hex sha256 of what a tokenizer does to text, its chat template included."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    # to_str() holds the truncation and padding of the last call, which do not touch ids without padding
    if backend is not None:
        model = json.dumps({k: v for k, v in json.loads(model).items() if k not in ("truncation", "padding")}, sort_keys=True)
    specials = {k: str(v) for k, v in tokenizer.special_tokens_map.items()}
    rest = [type(tokenizer).__name__, getattr(tokenizer, "chat_template", None), specials]
    return hashlib.sha256((model + json.dumps(rest, sort_keys=True)).encode()).hexdigest()


@cache
def _code() -> str:
    import jinja2
    import tokenizers
    import transformers

    digest = hashlib.sha256(f"{transformers.__version__} {tokenizers.__version__} {jinja2.__version__}".encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def cache_path(key: str) -> Path:
    return cache_root() / "data" / f"{key[:32]}.safetensors"


def describe_cached(key: str, counts: Counts, about: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of a cache file; `about` has a set's source, format and notes."""
    return {"key": key, "counts": counts.to_json(), **about}


@contextmanager
def building(key: str) -> Iterator[None]:
    """Held by one process of this machine at a time, so that ranks that start together tokenize once."""
    path = cache_path(key).with_suffix(".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError:  # a cache that cannot be written is warned of when it is
        yield
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        file.close()
        path.unlink(missing_ok=True)


def write_cache(key: str, samples: SampleSet) -> None:
    """Keep a set, atomically. A disk that cannot take it is logged: the samples are in memory anyway."""
    from safetensors.numpy import save_file

    path = cache_path(key)
    about = describe_cached(key, samples.counts, {"source": samples.source, "format": samples.format, "notes": samples.notes})
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: getattr(samples, name) for name in ARRAYS}, temporary, metadata={"karui": json.dumps(about)})
        os.replace(temporary, path)
    except Exception as error:  # safetensors wraps OSError in a type of its own
        temporary.unlink(missing_ok=True)
        log.warning("tokenized data could not be cached in %s (%s); it will be tokenized again next time", path.parent, error)


def read_cache(key: str) -> SampleSet | None:
    """The set kept under this key; None when there is none, or when the file is damaged (which is logged)."""
    path = cache_path(key)
    if not path.is_file():
        return None
    try:
        with path.open("rb") as handle:
            size = int.from_bytes(handle.read(8), "little")
            if size > path.stat().st_size:
                raise ValueError("truncated header")
            header = json.loads(handle.read(size))
        about = json.loads(header["__metadata__"]["karui"])
        if about["key"] != key:
            raise ValueError("written for another key")
        arrays = {name: _mapped(path, 8 + size, header[name]) for name in ARRAYS}
        counts = Counts(**about["counts"])
        if {len(arrays["ids"]), len(arrays["loss_mask"]), int(arrays["offsets"][-1])} != {counts.tokens}:
            raise ValueError("the arrays do not fit its counts")
        return SampleSet(**arrays, counts=counts, source=about["source"], format=about["format"], notes=tuple(about["notes"]))
    except (ValueError, KeyError, TypeError, OSError) as error:
        log.warning("the tokenized data in %s is damaged (%s); tokenizing again", path, error)
        return None


def _mapped(path: Path, start: int, entry: dict[str, Any]) -> np.ndarray:
    dtype, (begin, end), shape = np.dtype(_NUMPY[entry["dtype"]]), entry["data_offsets"], tuple(entry["shape"])
    if end - begin != dtype.itemsize * int(np.prod(shape)) or start + end > path.stat().st_size:
        raise ValueError("truncated")
    return np.memmap(path, dtype, "r", start + begin, shape)
