"""A .gguf file opened with the gguf package, and everything in it checked that karui is going to read.

The package trusts a file: it builds an array of 2^60 elements where the file says so, takes a tensor's bytes from wherever its
offset points to, and has no error type of its own. Here what is read must lie in the file, tensors must lie one behind the other
as llama.cpp wants them (`gguf_init_from_file_ptr` in ggml/src/gguf.cpp), and keys must hold values of their kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType
from gguf.quants import dequantize

from karui.configs.errors import CorruptError, KaruiError, UnsupportedError

MOST_ELEMENTS = 1 << 24
"""Of an array in the metadata; the largest vocabularies have 2^18 tokens."""


class Reader(GGUFReader):
    """The package's reader within the bounds of the file."""

    def _get(self, offset: int, dtype: Any, count: Any = 1, override_order: Any = None) -> np.ndarray:
        end = int(offset) + int(count) * np.dtype(dtype).itemsize
        if not 0 <= int(offset) <= end <= len(self.data):
            raise ValueError(f"something in it reaches to byte {end:,}, the file has {len(self.data):,}")
        return super()._get(int(offset), dtype, count, override_order)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type == GGUFValueType.ARRAY and (length := int(self._get(orig_offs + 4, np.uint64)[0])) > MOST_ELEMENTS:
            raise ValueError(f"an array in its metadata has {length:,} elements")
        return super()._get_field_parts(orig_offs, raw_type)


def read(path: Path) -> tuple[Reader, dict[str, Any]]:
    """The file and its key-value pairs.

    Raises:
        KaruiError: no such file, or none that may be read.
        UnsupportedError: one part of several, or of the other byte order.
        CorruptError: cut short, tensors that overlap or lie elsewhere, values that are not of their key's kind.
    """
    try:
        with np.errstate(over="ignore"):
            reader = Reader(path)
    except OSError as error:
        raise KaruiError(f"{path} cannot be read: {error.strerror or error}.") from error
    except Exception as error:  # the reader has no error type of its own
        raise CorruptError(f"{path}: not a complete GGUF file ({type(error).__name__}: {error}); fetch it again.") from error
    if reader.byte_order != "I":
        raise UnsupportedError(f"{path}: a GGUF file of the other byte order is not read; fetch the one for this processor.")
    try:
        meta = {key: field.contents() for key, field in reader.fields.items()}
    except (UnicodeDecodeError, IndexError) as error:
        raise CorruptError(f"{path}: its metadata holds what is not text ({error}); fetch it again.") from error
    if isinstance(parts := meta.get("split.count"), int) and parts > 1:
        raise UnsupportedError(f"{path}: one of {parts} parts of a model; merge them with llama.cpp's llama-gguf-split first.")
    _check_kinds(path, meta)
    _check_places(path, reader)
    return reader, meta


def values(tensor: Any) -> np.ndarray:
    """A tensor of the file in fp32, infinite where its scales are. Raises `UnsupportedError` for a type without a decoder."""
    try:
        with np.errstate(all="ignore"):
            return dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    except NotImplementedError:
        raise UnsupportedError(f"GGUF tensor {tensor.name!r} is in {tensor.tensor_type.name}, which is not read; use another "
                               "quantization of the model, or its safetensors.") from None


def _check_places(path: Path, reader: Reader) -> None:
    expected = reader.data_offset
    for tensor in reader.tensors:
        if tensor.data_offset != expected:
            raise CorruptError(f"{path}: tensor {tensor.name!r} lies at byte {tensor.data_offset:,}; by those before it, at "
                               f"{expected:,}. Fetch the file again.")
        expected += -(-tensor.n_bytes // reader.alignment) * int(reader.alignment)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _count(value: Any) -> bool:
    return _whole(value) and 1 <= value < 2**31


def _real(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, str) for v in value)


def _check_kinds(path: Path, meta: dict[str, Any]) -> None:
    """Raise `CorruptError` for a key that does not hold what it should; keys that are missing are the reader's to miss."""
    kind, tokens = meta.get("general.architecture"), meta.get("tokenizer.ggml.tokens")
    size = len(tokens) if isinstance(tokens, list) else 0
    text: tuple[Callable[[Any], bool], str] = (lambda v: isinstance(v, str), "a text")
    count, real = (_count, "a whole number above 0"), (_real, "a number above 0")
    token = (lambda v: _whole(v) and 0 <= v < size, f"one of {size:,} tokens")
    counted = ("embedding_length", "feed_forward_length", "block_count", "context_length", "attention.head_count",
               "attention.head_count_kv", "attention.key_length", "rope.dimension_count")
    wanted = {
        "general.architecture": text, "tokenizer.ggml.model": text, "tokenizer.ggml.pre": text, "tokenizer.chat_template": text,
        "tokenizer.ggml.tokens": (lambda v: _texts(v) and bool(v), "a list of texts"),
        "tokenizer.ggml.merges": (_texts, "a list of texts"),
        "tokenizer.ggml.token_type": (lambda v: isinstance(v, list) and len(v) == size and all(map(_whole, v)),
                                      f"a list of {size:,} whole numbers"),
        "tokenizer.ggml.add_bos_token": (lambda v: isinstance(v, bool), "true or false"),
        **{f"tokenizer.ggml.{role}_token_id": token for role in ("bos", "eos", "unknown", "padding")},
        **{f"{kind}.{key}": count for key in counted},
        **{f"{kind}.{key}": real for key in ("attention.layer_norm_rms_epsilon", "rope.freq_base")},
    }  # fmt: skip
    for key, (right, expected) in wanted.items():
        if key in meta and not right(meta[key]):
            said = repr(meta[key])
            raise CorruptError(f"{path}: its {key} is {said if len(said) < 60 else said[:57] + '...'}; {expected} was expected. "
                               "Fetch the file again.")
