"""What a teacher says about N positions, in the three forms the losses read; none of them is ever a whole [N, V] matrix.

Legend: N rows (supervised positions), V vocabulary, H the teacher's hidden size, k tokens kept per row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from karui.configs.errors import CorruptError, KaruiError


class _Rows:
    """Shared: indexing the row tensors (all but `shared` ones), moving, lengths."""

    shared: tuple[str, ...] = ()

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for f in fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            if isinstance(value, torch.Tensor):
                yield f.name, value

    def __len__(self) -> int:
        return next(len(v) for name, v in self._tensors() if name not in self.shared)

    def take(self, rows: Any) -> Any:
        """The rows of a slice, an index tensor or a mask."""
        return replace(self, **{n: v[rows] for n, v in self._tensors() if n not in self.shared})  # type: ignore[type-var]

    def to(self, device: torch.device | str) -> Any:
        return replace(self, **{n: v.to(device) for n, v in self._tensors()})  # type: ignore[type-var]


@dataclass(frozen=True, eq=False)
class DenseRows(_Rows):
    """The whole distribution, held as hidden states [N, H] and the head's weight [V, H]; logits are made chunk by chunk, with
    c tanh(logits / c) where there is a soft cap c."""

    hidden: torch.Tensor
    weight: torch.Tensor
    softcap: float | None = None
    shared = ("weight",)

    def logits(self, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """[stop - start, V] in `dtype`. Raises `CorruptError` when they are not numbers."""
        logits = (self.hidden[start:stop] @ self.weight.T).to(dtype)
        if self.softcap is not None:
            logits = logits.div_(self.softcap).tanh_().mul_(self.softcap)
        if not torch.isfinite(logits.sum()):
            raise CorruptError(f"the teacher's logits are not finite in rows {start} to {stop}: its weights or its input are "
                               "damaged, or its dtype overflows. Load it in float32 and check it with `karui eval`.")
        return logits


@dataclass(frozen=True, eq=False)
class TopKRows(_Rows):
    """The k likeliest tokens and one bucket for the rest.

    Attributes:
        ids: [N, k] int64.
        logprobs: [N, k], log of the teacher's probabilities at `temperature`, not renormalised.
        tail: [N], log of what all other tokens have together, from their own log-sum-exp.
        temperature: the teacher's, which the loss must share.
    """

    ids: torch.Tensor
    logprobs: torch.Tensor
    tail: torch.Tensor
    temperature: float = 1.0

    @staticmethod
    def of(logits: torch.Tensor, k: int, temperature: float = 1.0) -> TopKRows:
        """From full logits [n, V]; overwrites them. The tail is exact: -inf only if k covers the vocabulary."""
        if not 1 <= k <= logits.shape[-1]:
            raise KaruiError(f"top-k keeps 1 to {logits.shape[-1]} tokens (the vocabulary), got k = {k}.")
        logits = logits.div_(temperature)
        whole = logits.logsumexp(-1, keepdim=True)
        values, ids = logits.topk(k, dim=-1)
        tail = logits.scatter_(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)
        return TopKRows(ids, values - whole, (tail - whole).squeeze(-1), temperature)


@dataclass(frozen=True, eq=False)
class SampledRows(_Rows):
    """Tokens drawn from the teacher, which estimate its distribution without bias (arXiv 2503.16870).

    Attributes:
        ids: [N, k] int64, repeats allowed.
        weights: [N, k], each draw's share; rows sum to 1.
    """

    ids: torch.Tensor
    weights: torch.Tensor
    temperature: float = 1.0

    @staticmethod
    def of(logits: torch.Tensor, draws: int, generator: torch.Generator, temperature: float = 1.0) -> SampledRows:
        """`draws` draws with replacement from softmax(logits / temperature), [n, V]."""
        if draws < 1:
            raise KaruiError(f"a sampled teacher draws at least 1 token a position, got {draws}.")
        ids = torch.multinomial((logits / temperature).softmax(-1), draws, replacement=True, generator=generator)
        return SampledRows(ids, torch.full(ids.shape, 1 / draws, dtype=logits.dtype), temperature)


def cut(
    dense: DenseRows, kind: str, k: int, temperature: float = 1.0, *, seed: int = 0, chunk: int = 128
) -> TopKRows | SampledRows:
    """Whole rows cut down to their k likeliest tokens ("topk") or to k draws ("sampled"), a chunk of logits at a time.

    Draws depend on `seed` and the order of the rows, not on `chunk`; with a seed per document they do not depend on packing.
    """
    generator = torch.Generator(dense.hidden.device).manual_seed(seed)
    parts: list[Any] = []
    for start in range(0, len(dense), chunk):
        logits = dense.logits(start, min(start + chunk, len(dense)), torch.float32)
        parts.append(TopKRows.of(logits, k, temperature) if kind == "topk" else SampledRows.of(logits, k, generator, temperature))
    return concat(parts) if parts else SampledRows(torch.zeros(0, k, dtype=torch.int64), torch.zeros(0, k), temperature)


def concat(parts: Sequence[Any]) -> Any:
    """Rows of one kind, one after the other."""
    names = [name for name, _ in parts[0]._tensors() if name not in parts[0].shared]
    return replace(parts[0], **{name: torch.cat([getattr(p, name) for p in parts]) for name in names})


TeacherRows = DenseRows | TopKRows | SampledRows
