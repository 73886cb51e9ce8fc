"""Fill a teacher cache for a run's samples, and read it by the documents of a packed row."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from karui.configs.objectives import DistilObjective
from karui.distill.cache import SparseRows, TeacherCache, document_key
from karui.distill.teacher_rows import cut
from karui.distill.vocabulary import SharedVocabulary
from karui.trainers.data import IGNORE, SampleSet
from karui.trainers.objectives.teacher import Teacher, tokenizer_identity

logger = logging.getLogger(__name__)
Document = tuple[np.ndarray, np.ndarray]  # tokens [n], which positions carry loss [n]


def fill_cache(section: DistilObjective, samples: SampleSet, teacher: Teacher, tokenizer: Any, shared: SharedVocabulary,
               progress: Any = None) -> TeacherCache:
    """Open the cache of this teacher and data and score what it lacks."""
    digest = hashlib.sha256(samples.ids.tobytes() + samples.loss_mask.tobytes() + samples.offsets.tobytes())
    identity = {**teacher.identity(), **tokenizer_identity(tokenizer), "temperature": section.temperature,
                "data": digest.hexdigest()[:16], "kind": section.rows, "k": section.k, "vocabulary": shared.size}
    root = Path(os.environ.get("KARUI_CACHE", "~/.cache/karui")).expanduser() / "teachers"
    cache = TeacherCache.open(root if section.cache == "auto" else Path(str(section.cache)), identity)
    fresh = cache.fill(_documents(samples), lambda batch: score(section, batch, teacher, shared), progress=progress)
    logger.info("teacher cache %s: %d documents, %d new, %.0f bytes a token", cache.folder, len(cache), fresh,
                cache.bytes_per_token)
    return cache


def read_rows(cache: TeacherCache, tokens: torch.Tensor, cu_seqlens: torch.Tensor, targets: torch.Tensor) -> SparseRows | None:
    """The rows of a packed row's supervised positions; None when there are none."""
    keys = [key for key, _, supervised in packed_documents(tokens, cu_seqlens, targets) if supervised.any()]
    return cache.rows(keys).to(tokens.device) if keys else None


def packed_documents(tokens: torch.Tensor, cu_seqlens: torch.Tensor,
                     targets: torch.Tensor) -> Iterator[tuple[bytes, np.ndarray, np.ndarray]]:
    """(key, tokens, supervised) of each document of a packed row."""
    ids, supervised = tokens.cpu().numpy(), (targets != IGNORE).cpu().numpy()
    for a, b in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist()):
        yield document_key(ids[a:b], supervised[a:b]), ids[a:b], supervised[a:b]


def seed_of(key: bytes) -> int:
    """A document's own seed, for the draws of a sampled teacher."""
    return int.from_bytes(key[:7], "little")


@torch.no_grad()
def score(
    section: DistilObjective, documents: Sequence[Document], teacher: Teacher, shared: SharedVocabulary
) -> list[SparseRows]:
    """One packed row of documents through the teacher -> each one's rows at its supervised positions."""
    lengths = [len(tokens) for tokens, _ in documents]
    tokens = torch.from_numpy(np.concatenate([t for t, _ in documents]).astype(np.int64))
    positions = torch.cat([torch.arange(n) for n in lengths])
    borders = torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32)
    device = teacher.head.device
    hidden, _ = teacher.hidden(tokens.to(device), positions.to(device), borders)
    head, out, at = shared.rows(teacher.head), [], 0
    for n, (ids, supervised) in zip(lengths, documents):
        dense = teacher.over(hidden[at : at + n][torch.from_numpy(supervised).to(device)], head)
        out.append(cut(dense, section.rows, section.k, section.temperature, seed=seed_of(document_key(ids, supervised)),
                       chunk=section.chunk_tokens))
        at += n
    return out


def _documents(samples: SampleSet) -> Iterator[tuple[bytes, Document]]:
    for sample in samples:
        supervised = np.append(sample.loss_mask[1:], False)  # position t carries loss when token t + 1 is supervised
        if supervised.any():
            yield document_key(sample.ids, supervised), (np.asarray(sample.ids), supervised)
