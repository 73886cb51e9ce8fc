"""Where samples go while a set is made: into memory while they are few, then to the disk, so that a large set costs no memory.

What is on the disk at the end is the cache's own file (`karui.trainers.data.cache`), mapped into memory rather than read.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from karui.configs.errors import KaruiError
from karui.trainers.data.types import Counts, Sample, SampleSet

SPILL_TOKENS = 1 << 24  # 84 MB in memory
ARRAYS: dict[str, tuple[str, Any]] = {
    "offsets": ("I64", np.int64), "source_rows": ("I64", np.int64), "ids": ("I32", np.int32), "loss_mask": ("BOOL", np.bool_)}


class Spool:
    """Collects samples in order; `finish` makes the set.

    Args:
        path: the cache file to write, made whole or not at all; None: everything stays in memory.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.samples: list[Sample] = []
        self.tokens = self.used = self.supervised = 0
        self._held = 0
        self._folder: Path | None = None
        self._files: dict[str, Any] = {}

    def add(self, sample: Sample) -> None:
        self.samples.append(sample)
        self.used += 1
        self.tokens += len(sample)
        self.supervised += int(sample.loss_mask.sum())
        self._held += len(sample)
        if self.path is not None and self._held >= SPILL_TOKENS:
            self._spill()

    @property
    def spilled(self) -> bool:
        return self._folder is not None

    def finish(self, counts: Counts, about: Mapping[str, Any], header: Mapping[str, Any]) -> SampleSet | None:
        """The set in memory; or None when it went to disk and now lies under `path`, with `header` as its metadata."""
        if not self.spilled:
            return SampleSet.of(self.samples, counts, **about)
        self._spill()
        assert self._folder is not None and self.path is not None
        for file in self._files.values():
            file.close()
        try:
            _compose(self._folder, self.path, header)
        except OSError as error:
            raise self._full(error) from error
        finally:
            self.discard()
        return None

    def discard(self) -> None:
        """Remove what was written so far."""
        for file in self._files.values():
            file.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _spill(self) -> None:
        assert self.path is not None
        try:
            if self._folder is None:
                self._folder = self.path.with_name(f".{self.path.name}.{uuid.uuid4().hex[:8]}")
                self._folder.mkdir(parents=True)
                self._files = {name: (self._folder / name).open("wb") for name in ARRAYS}
                self._files["offsets"].write(np.zeros(1, np.int64).tobytes())
                self._at = 0
            ends = self._at + np.cumsum([len(s) for s in self.samples], dtype=np.int64)
            self._at = int(ends[-1]) if len(ends) else self._at
            self._files["offsets"].write(ends.tobytes())
            self._files["source_rows"].write(np.array([s.source_row for s in self.samples], np.int64).tobytes())
            for sample in self.samples:
                self._files["ids"].write(np.ascontiguousarray(sample.ids, np.int32).tobytes())
                self._files["loss_mask"].write(np.ascontiguousarray(sample.loss_mask, np.bool_).tobytes())
        except OSError as error:
            self.discard()
            raise self._full(error) from error
        self.samples, self._held = [], 0

    def _full(self, error: OSError) -> KaruiError:
        assert self.path is not None
        return KaruiError(f"tokenized data could not be written to {self.path.parent} ({error}); it needs about 5 bytes a token. "
                          "Make room, or set KARUI_CACHE to a folder on another disk.")


def _compose(folder: Path, path: Path, about: Mapping[str, Any]) -> None:
    """One safetensors file of the arrays in `folder`, copied in pieces."""
    header: dict[str, Any] = {"__metadata__": {"karui": json.dumps(about)}}
    at = 0
    for name, (code, dtype) in ARRAYS.items():
        size = (folder / name).stat().st_size
        header[name] = {"dtype": code, "shape": [size // np.dtype(dtype).itemsize], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    whole = folder / "whole"
    with whole.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name in ARRAYS:
            with (folder / name).open("rb") as part:
                shutil.copyfileobj(part, out, 1 << 20)
            (folder / name).unlink()
    os.replace(whole, path)
