"""What passes between the data side and the loop: `Sample`, `SampleSet` with its `Counts`, `PackedBatch`.

Shape legend: T tokens of a micro-batch, D documents in it, N samples of a set.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
import torch

IGNORE = -100  # the target of a position that carries no loss, as in torch's cross entropy


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One document, ready to train on.

    Attributes:
        ids: [n] int32 token ids.
        loss_mask: [n] bool; True: this token is a supervised target. The first is never one: nothing predicts it.
        source_row: the row of the source it came from, counted from 0.
    """

    ids: np.ndarray
    loss_mask: np.ndarray
    source_row: int

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What became of the rows. `rows` = samples seen before the length policy + `empty`, unless windows were cut.

    Attributes:
        rows: rows read from the source.
        used: samples that can be trained on.
        empty: rows of raw text with no characters but white space; left out.
        truncated: samples cut to `max_length` (overlong: truncate); those that kept a supervised token are used.
        dropped_overlong: samples left out because they are longer than `max_length` (overlong: drop).
        unsupervised: samples left out because no token of theirs carries loss (after truncation, if any).
        duplicates: samples with exactly the tokens of an earlier one; kept and only counted, or left out (`data.dedup`).
        merged_boundaries: turns whose first token holds characters of both sides of the supervised boundary.
        split: overlong texts that were cut into pieces (overlong: split).
        trimmed_tokens: tokens left out because they follow the last supervised one, so that no loss depends on them.
        tokens: tokens of the used samples.
        supervised_tokens: how many of them carry loss.
        longest: tokens of the longest sample before the length policy.
    """

    rows: int = 0
    used: int = 0
    empty: int = 0
    truncated: int = 0
    dropped_overlong: int = 0
    unsupervised: int = 0
    duplicates: int = 0
    split: int = 0
    merged_boundaries: int = 0
    trimmed_tokens: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    longest: int = 0

    def to_json(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleSet(Sequence[Sample]):
    """All samples of a split in four flat arrays, so that a large set costs 5 bytes a token and no objects.

    Attributes:
        ids: [tokens] int32, sample after sample.
        loss_mask: [tokens] bool.
        offsets: [N + 1] int64; sample i is `ids[offsets[i]:offsets[i + 1]]`.
        source_rows: [N] int64.
        counts: what became of the rows.
        source: the source as a person would name it.
        format: chat, prompt or text, after `auto` was resolved.
        notes: choices that were made, one sentence each; the preflight prints them.
    """

    ids: np.ndarray
    loss_mask: np.ndarray
    offsets: np.ndarray
    source_rows: np.ndarray
    counts: Counts
    source: str = ""
    format: str = "text"
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, samples: Sequence[Sample], counts: Counts | None = None, **about: Any) -> SampleSet:
        """Pack a list of samples; without `counts` only used, tokens and supervised tokens are filled in."""
        ids = np.concatenate([s.ids for s in samples] or [np.empty(0, np.int32)]).astype(np.int32, copy=False)
        mask = np.concatenate([s.loss_mask for s in samples] or [np.empty(0, bool)]).astype(bool, copy=False)
        offsets = np.concatenate([[0], np.cumsum([len(s) for s in samples], dtype=np.int64)]).astype(np.int64)
        counts = replace(counts or Counts(rows=len(samples)), used=len(samples), tokens=len(ids),
                         supervised_tokens=int(mask.sum()))
        rows = np.array([s.source_row for s in samples], np.int64)
        return cls(ids=ids, loss_mask=mask, offsets=offsets, source_rows=rows, counts=counts, **about)

    @property
    def lengths(self) -> np.ndarray:
        """[N] int64, tokens per sample; what `plan_epoch` takes."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        at = int(index) + (len(self) if index < 0 else 0)
        if not 0 <= at < len(self):
            raise IndexError(f"sample {index} of a set of {len(self)}")
        part = slice(int(self.offsets[at]), int(self.offsets[at + 1]))
        return Sample(ids=self.ids[part], loss_mask=self.loss_mask[part], source_row=int(self.source_rows[at]))

    def __iter__(self) -> Iterator[Sample]:
        return (self[i] for i in range(len(self)))


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedBatch:
    """One micro-batch: D documents end to end in one ragged row, without padding.

    Attributes:
        tokens: [T] int64.
        positions: [T] int64, from 0 in every document.
        cu_seqlens: [D + 1] int32; document d is `tokens[cu_seqlens[d]:cu_seqlens[d + 1]]`.
        targets: [T] int64; at t the id of token t + 1 of the same document when that token is supervised, else -100.
        num_supervised: how many targets are not -100; what the loss sum is divided by, summed over the whole step.
        num_samples: documents that come from the data; 0 for the filler that keeps ranks in lock step.
        max_length: tokens of the longest document.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    cu_seqlens: torch.Tensor
    targets: torch.Tensor
    num_supervised: int
    num_samples: int
    max_length: int

    @property
    def num_tokens(self) -> int:
        return int(self.tokens.shape[0])

    def to(self, device: torch.device | str) -> PackedBatch:
        moved = {f.name: getattr(self, f.name).to(device, non_blocking=True)
                 for f in fields(self) if isinstance(getattr(self, f.name), torch.Tensor)}
        return replace(self, **moved)


def documents_of_tokens(cu_seqlens: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of a row's documents: [T] each token's, from 0, and [D] int64 how many tokens and how many supervised ones each has."""
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).long().to(targets.device)
    document = torch.repeat_interleave(torch.arange(len(lengths), device=targets.device), lengths)
    return document, lengths, torch.zeros_like(lengths).index_add_(0, document, (targets != IGNORE).long())
