"""Relation losses: how the tokens of a document lie to one another, which needs no equal widths and no projection.

    distance  (RKD, Park et al., arXiv 1904.05068, eq. 5): pairwise distances, each side divided by its mean, Huber loss
    angle     (RKD, eq. 8): cosine of the angle at token j in the triangle i, j, k, Huber loss
    value     (MiniLMv2, arXiv 2012.15828, eq. 4): KL between softmax(V V^T / sqrt(d)) rows, V cut into relation heads

Every loss is a mean over a document's pairs, triples or rows times its tokens, and documents are added up: the same for every
packing and micro-batch. Distances and angles look at no more than `most` tokens of a document, evenly spaced, since triples
grow with the cube.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from karui.configs.errors import KaruiError


def distance(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Document states [n, Hs], [n, Ht] -> mean over pairs."""
    a, b = (_pairwise(x) for x in (student, teacher))
    return F.smooth_l1_loss(a, b)


def angle(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """[n, Hs], [n, Ht] -> mean over triples."""
    a, b = (_angles(x) for x in (student, teacher))
    return F.smooth_l1_loss(a, b)


def value_relation(student: torch.Tensor, teacher: torch.Tensor, heads: int) -> torch.Tensor:
    """Value vectors [n, heads * ds], [n, heads * dt] of one layer -> mean over rows and relation heads of KL(T || S)."""
    if student.shape[-1] % heads or teacher.shape[-1] % heads:
        raise KaruiError(f"value relations: widths {student.shape[-1]} and {teacher.shape[-1]} do not divide into {heads} heads.")
    a, b = (_relation(x, heads) for x in (student, teacher))
    return (b.exp() * (b - a)).sum(-1).mean()


KINDS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"distance": distance, "angle": angle}


def relation_sum(kind: str, student: torch.Tensor, teacher: torch.Tensor, cu_seqlens: torch.Tensor, *, heads: int = 1,
                 most: int = 64) -> torch.Tensor:
    """Over a ragged row of documents: sum of each document's relation loss times its tokens.

    Args:
        kind: distance, angle or value.
        student, teacher: [T, *] states; for `value` the value vectors.
        cu_seqlens: [D + 1] document borders.
        heads: relation heads of `value`; most: tokens of a document that distances and angles look at.
    """
    if kind not in (*KINDS, "value"):
        raise KaruiError(f"relation {kind!r} is not known; valid: distance, angle, value.")
    total = student.new_zeros(())
    for a, b in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist()):
        n = b - a
        if n < 3:
            continue
        if kind == "value":
            loss = value_relation(student[a:b], teacher[a:b].detach(), heads)
        else:
            at = torch.linspace(a, b - 1, min(n, most), device=student.device).round().long()
            loss = KINDS[kind](student[at], teacher[at].detach())
        total = total + loss * n
    return total


def _pairwise(x: torch.Tensor) -> torch.Tensor:
    square = (x.unsqueeze(0) - x.unsqueeze(1)).pow(2).sum(-1)
    off = ~torch.eye(len(x), dtype=torch.bool, device=x.device)
    lengths = square[off].clamp(min=1e-12).sqrt()
    return lengths / lengths.mean()


def _angles(x: torch.Tensor) -> torch.Tensor:
    unit = F.normalize(x.unsqueeze(0) - x.unsqueeze(1), dim=-1)  # [j, i, :]: from j to i
    return torch.einsum("jih,jkh->jik", unit, unit)


def _relation(x: torch.Tensor, heads: int) -> torch.Tensor:
    v = x.view(len(x), heads, -1).transpose(0, 1)
    return (v @ v.transpose(1, 2) / v.shape[-1] ** 0.5).log_softmax(-1)
