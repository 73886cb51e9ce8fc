"""A sampled teacher (Sparse Logit Sampling, arXiv 2503.16870): cross entropy against tokens drawn from its distribution.

    loss = -tau^2 sum_i w_i log S(x_i),   x_i ~ T

Its mean over draws is KL(T || S) plus the teacher's entropy, so the gradient is that of forward KL without bias, which no top-k
cut gives.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from karui.distill.teacher_rows import SampledRows


@dataclass(eq=False)
class Sampled:
    """teacher: N rows of draws."""

    teacher: SampledRows

    def __call__(self, start: int, stop: int, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tau = self.teacher.temperature
        ids, w = self.teacher.ids[start:stop], self.teacher.weights[start:stop].to(logits.dtype)
        log_s = (logits / tau).log_softmax(-1)
        value = -(w * log_s.gather(1, ids)).sum(-1)
        gradient = log_s.exp_().mul_(w.sum(-1, keepdim=True)).scatter_add_(1, ids, -w)
        return value * tau**2, gradient.mul_(tau)
