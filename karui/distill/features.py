"""Feature losses: the student's hidden states against the teacher's at paired depths (FitNets, arXiv 1412.6550; TinyBERT,
arXiv 1909.10351; Minitron's recipe, arXiv 2407.14679, section 3.2: 1 - cos after a learned projection when widths differ).

    mse:     mean over the width of (P h_S - h_T)^2          cosine:  1 - cos(P h_S, h_T)

Both are per token and summed over tokens, so they obey the same contract as the logit losses. A *depth* d is the residual stream
after d layers; 0 is the embedding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from karui.configs.errors import KaruiError


def layer_map(kind: str, student_layers: int, teacher_layers: int, kept: Sequence[int] = ()) -> tuple[tuple[int, int], ...]:
    """Pairs (student depth, teacher depth), without the last depth, which the logits see.

    Args:
        kind: uniform (depth d beside round(d T / S)), kept (student layer i is teacher layer kept[i], for pruned students),
            embedding (depth 0 only), last (the final depth only).
    """
    if kind == "uniform":
        return tuple((d, round(d * teacher_layers / student_layers)) for d in range(1, student_layers))
    if kind == "kept":
        if len(kept) != student_layers:
            raise KaruiError(f"layer map 'kept' needs the teacher layer of each of the student's {student_layers} layers, got "
                             f"{len(kept)}; only a student made by dropping layers has them.")
        return tuple((i + 1, kept[i + 1] if i + 1 < student_layers else teacher_layers) for i in range(student_layers - 1))
    if kind == "embedding":
        return ((0, 0),)
    if kind == "last":
        return ((student_layers, teacher_layers),)
    raise KaruiError(f"layer map {kind!r} is not known; valid: uniform, kept, embedding, last.")


class FeatureLoss(nn.Module):
    """Holds the learned projections; with equal widths there are none unless `project` asks for them."""

    def __init__(self, pairs: Sequence[tuple[int, int]], student_width: int, teacher_width: int, kind: str = "cosine",
                 project: bool | None = None) -> None:
        super().__init__()
        if kind not in ("mse", "cosine"):
            raise KaruiError(f"feature loss {kind!r} is not known; valid: mse, cosine.")
        if not pairs:
            raise KaruiError("a feature loss needs at least one pair of layers.")
        if project is False and student_width != teacher_width:
            raise KaruiError(f"widths {student_width} and {teacher_width} differ, so a feature loss needs a projection; "
                             "leave `project` out.")
        self.pairs, self.kind = tuple(pairs), kind
        learned = student_width != teacher_width if project is None else project
        self.projections = nn.ModuleList(
            nn.Linear(student_width, teacher_width, bias=False) if learned else nn.Identity() for _ in self.pairs)

    def forward(self, student: Mapping[int, torch.Tensor], teacher: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """States [T, H] by depth -> sum over tokens, mean over pairs."""
        total: torch.Tensor | None = None
        for (d_s, d_t), project in zip(self.pairs, self.projections, strict=True):
            ours, theirs = project(student[d_s]), teacher[d_t].detach()
            if self.kind == "mse":
                loss = (ours - theirs).pow(2).mean(-1).sum()
            else:
                loss = (1 - nn.functional.cosine_similarity(ours, theirs, dim=-1)).sum()
            total = loss if total is None else total + loss
        assert total is not None
        return total / len(self.pairs)
