"""A teacher's words on disk: computed once per document, read by every student.

    FOLDER/KEY/cache.json                 what the rows depend on, and their layout
    FOLDER/KEY/shard-00000.safetensors    documents, [D, 16] keys, [D + 1] offsets, and the rows of their supervised positions

KEY is a hash of the identity (teacher, tokenizer, template, temperature, data, rows' kind), so nothing can be read that was made
under other conditions. A document is found by a hash of its tokens and of which of them are supervised, so the order of the data,
packing and micro-batches do not matter. Shards are renamed into place when they are whole: a killed run goes on behind the last.

A row of k tokens takes k * (2 bytes of id, 3 in vocabularies over 65,536, + 2 bytes of logprob in fp16) + 2 bytes of tail: 202
bytes at k = 50 for SmolLM2. The fp16 error of a logprob l is at most |l| / 2048 and only unlikely tokens have a large |l|.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from karui.configs.errors import CorruptError, KaruiError
from karui.distill.teacher_rows import SampledRows, TopKRows

KEY_BYTES = 16
SparseRows = TopKRows | SampledRows


def document_key(tokens: np.ndarray, supervised: np.ndarray) -> bytes:
    """16 bytes that stand for a document's tokens [n] and for which positions carry loss [n] (bool)."""
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    digest.update(np.ascontiguousarray(tokens, dtype=np.int64).tobytes())
    digest.update(np.packbits(np.asarray(supervised, dtype=bool)).tobytes())
    return digest.digest()


def identity_key(identity: Mapping[str, Any]) -> str:
    """The folder's name: a hash of everything the rows depend on."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:20]


@dataclass
class TeacherCache:
    """One identity's cache. `open` makes or reads it; `fill` adds what is missing; `rows` reads.

    Attributes:
        folder: FOLDER/KEY.
        identity: JSON-able; must hold `kind` ("topk" or "sampled"), `k`, `vocabulary` and `temperature`.
    """

    folder: Path
    identity: dict[str, Any]
    _where: dict[bytes, tuple[int, int, int]] = field(default_factory=dict)  # key -> shard, first row, rows
    _shards: list[dict[str, torch.Tensor]] = field(default_factory=list)

    @classmethod
    def open(cls, root: Path, identity: Mapping[str, Any]) -> TeacherCache:
        """The cache of an identity under `root`, made when it is not there.

        Raises:
            KaruiError: `root` is itself a cache, and one of another identity; names what differs.
            CorruptError: a shard that cannot be read.
        """
        wanted: dict[str, Any] = json.loads(json.dumps(identity))
        folder = root if (root / "cache.json").is_file() else root / identity_key(wanted)
        path = folder / "cache.json"
        if path.is_file():
            try:
                stored = json.loads(path.read_text(encoding="utf-8"))["identity"]
            except (ValueError, KeyError, TypeError) as error:
                raise CorruptError(f"{path} cannot be read ({error!r}); remove {folder} and let it be made again.") from error
            different = [k for k in sorted(set(stored) | set(wanted)) if stored.get(k) != wanted.get(k)]
            if different:
                shown = "; ".join(f"{k}: {stored.get(k)!r} there, {wanted.get(k)!r} needed" for k in different[:4])
                raise KaruiError(f"{folder} holds another teacher's cache ({shown}). Leave out objective.cache to have the right "
                                 "one found or made, or give the settings it was made with.")
        else:
            folder.mkdir(parents=True, exist_ok=True)
            _write(path, json.dumps({"identity": wanted}, indent=1).encode())
        cache = cls(folder, wanted)
        for shard in sorted(folder.glob("shard-*.safetensors")):
            cache._add(shard)
        return cache

    def __contains__(self, key: bytes) -> bool:
        return key in self._where

    def __len__(self) -> int:
        return len(self._where)

    @property
    def num_rows(self) -> int:
        return sum(n for _, _, n in self._where.values())

    @property
    def bytes_per_token(self) -> float:
        """Size of the shards over supervised tokens; 0 for an empty cache."""
        size = sum(p.stat().st_size for p in self.folder.glob("shard-*.safetensors"))
        return size / self.num_rows if self.num_rows else 0.0

    def rows(self, keys: Sequence[bytes]) -> SparseRows:
        """The rows of documents, one after the other.

        Raises:
            KaruiError: a document was never scored.
        """
        parts: dict[str, list[torch.Tensor]] = {}
        for key in keys:
            if key not in self._where:
                raise KaruiError(f"the teacher cache {self.folder} does not hold a document of this run; the data or its "
                                 "template changed after it was filled. Start the run anew so that it is filled.")
            shard, first, n = self._where[key]
            for name, value in self._shards[shard].items():
                parts.setdefault(name, []).append(value[first : first + n])
        return self._decode({name: torch.cat(value) for name, value in parts.items()})

    def fill(
        self, documents: Iterable[tuple[bytes, Any]], score: Callable[[Sequence[Any]], Sequence[SparseRows]], *,
        batch: int = 8, rows_per_shard: int = 65536, progress: Callable[[int], None] | None = None,
    ) -> int:
        """Score the documents that are missing and write them, a shard at a time; returns how many there were.

        Args:
            documents: (key, whatever `score` takes), in any order; repeats are scored once.
            score: a batch of documents -> each one's rows.
            progress: called with the number of documents done.
        """
        waiting: list[tuple[bytes, Any]] = []
        scored: list[tuple[bytes, SparseRows]] = []
        seen: set[bytes] = set()
        done = 0

        def run() -> None:
            nonlocal done
            for (key, _), rows in zip(waiting, score([d for _, d in waiting]), strict=True):
                scored.append((key, rows))
            done += len(waiting)
            waiting.clear()
            if progress:
                progress(done)
            if sum(len(rows) for _, rows in scored) >= rows_per_shard:
                self._flush(scored)

        for key, document in documents:
            if key in self._where or key in seen:
                continue
            seen.add(key)
            waiting.append((key, document))
            if len(waiting) == batch:
                run()
        if waiting:
            run()
        self._flush(scored)
        return done

    def _flush(self, scored: list[tuple[bytes, SparseRows]]) -> None:
        from safetensors.torch import save

        if not scored:
            return
        parts = [self._encode(rows) for _, rows in scored]
        tensors = {name: torch.cat([p[name] for p in parts]).contiguous() for name in parts[0]}
        tensors["keys"] = torch.from_numpy(np.frombuffer(b"".join(k for k, _ in scored), np.uint8).copy()).view(-1, KEY_BYTES)
        tensors["offsets"] = torch.tensor(np.cumsum([0, *(len(rows) for _, rows in scored)]))
        taken = [int(p.stem.removeprefix("shard-")) for p in self.folder.glob("shard-*.safetensors")]
        number = max(taken, default=-1) + 1
        path = self.folder / f"shard-{number:05d}.safetensors"
        _write(path, save(tensors))
        scored.clear()
        self._add(path)

    def _add(self, path: Path) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            tensors = load_file(str(path))  # memory-mapped: pages come in as rows are read
            keys, offsets = tensors.pop("keys").numpy(), tensors.pop("offsets").tolist()
        except (SafetensorError, KeyError, OSError) as error:
            raise CorruptError(f"{path} cannot be read ({error}); remove it and its documents are scored again.") from error
        for i, key in enumerate(keys):
            self._where.setdefault(key.tobytes(), (len(self._shards), offsets[i], offsets[i + 1] - offsets[i]))
        self._shards.append(tensors)

    def _encode(self, rows: SparseRows) -> dict[str, torch.Tensor]:
        ids = rows.ids.to(torch.int32)
        out = {"ids": (ids & 0xFFFF).to(torch.uint16)}
        if self.identity["vocabulary"] > 65536:
            out["high"] = (ids >> 16).to(torch.uint8)
        if isinstance(rows, TopKRows):
            out["logprobs"], out["tail"] = rows.logprobs.to(torch.float16), rows.tail.clamp(min=-6e4).to(torch.float16)
        else:
            out["weights"] = rows.weights.to(torch.float16)
        return out

    def _decode(self, found: Mapping[str, torch.Tensor]) -> SparseRows:
        ids = found["ids"].to(torch.int32).to(torch.int64)
        if "high" in found:
            ids |= found["high"].to(torch.int64) << 16
        temperature = float(self.identity["temperature"])
        if self.identity["kind"] == "topk":
            return TopKRows(ids, found["logprobs"].float(), found["tail"].float(), temperature)
        return SampledRows(ids, found["weights"].float(), temperature)


def _write(path: Path, content: bytes) -> None:
    scratch = path.with_name(f".{path.name}.tmp{os.getpid()}")
    scratch.write_bytes(content)
    os.replace(scratch, path)
