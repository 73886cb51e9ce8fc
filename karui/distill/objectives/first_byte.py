"""Two vocabularies compared through the next byte: a divergence over 256 + 1 buckets that mean the same to both.

Where two tokenizers share a byte boundary, both models predict what follows the same text. Their tokens differ, the first byte
of the next token does not: P(b) = sum of the probabilities of all tokens that begin with b (special tokens share bucket 256).
Sorted probabilities (`sorted_l1`) compare the shape of the two only; this compares what is said. A bucket's pull goes to its
tokens in proportion to S, as a tail's does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from karui.distill.divergences import Divergence
from karui.distill.teacher_rows import DenseRows

NUM_BUCKETS = 257
FLOOR = -80.0


def first_bytes(tokens: Sequence[bytes | None]) -> torch.Tensor:
    """[V] int64: each token's bucket; None and empty tokens are special."""
    return torch.tensor([token[0] if token else 256 for token in tokens], dtype=torch.int64)


@dataclass(eq=False)
class FirstByte:
    """student, teacher buckets: [V] of each vocabulary, from `first_bytes`; teacher: N rows."""

    teacher: DenseRows
    divergence: Divergence
    student_buckets: torch.Tensor
    teacher_buckets: torch.Tensor

    def __call__(self, start: int, stop: int, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        s = logits.softmax(-1)
        mass = _sum(s, self.student_buckets)
        log_s = mass.log().clamp(min=FLOOR)
        log_t = _sum(self.teacher.logits(start, stop, logits.dtype).softmax(-1), self.teacher_buckets).log_().clamp_(min=FLOOR)
        value, pull = self.divergence(log_t, log_s)
        net = (pull / mass.clamp(min=torch.finfo(mass.dtype).tiny)) - pull.sum(-1, keepdim=True)
        return value, s.mul_(net.gather(1, self.student_buckets.expand(len(s), -1)))


def _sum(p: torch.Tensor, buckets: torch.Tensor) -> torch.Tensor:
    return p.new_zeros(len(p), NUM_BUCKETS).index_add_(1, buckets, p)
