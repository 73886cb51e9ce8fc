"""The teacher's whole distribution: any divergence at a temperature (Hinton et al., arXiv 1503.02531, section 2).

    loss = tau^2 D(softmax(z_T / tau), softmax(z_S / tau)),   d loss / d z_S = tau (w - S sum(w)),   w the divergence's pull

tau^2 keeps the gradient's size when tau changes. The temperature here is the loss's alone; rollouts have their own. On a GPU
forward and reverse KL and JSD are one Triton kernel that never stores a probability (`kernels.linear_loss`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from karui.distill.divergences import Divergence, named
from karui.distill.teacher_rows import DenseRows
from karui.kernels.triton_support import Backend, use_triton


@dataclass(eq=False)
class Logits:
    """teacher: N rows, over the same vocabulary (over any when the divergence is `sorted_l1`)."""

    teacher: DenseRows
    divergence: Divergence
    temperature: float = 1.0
    backend: Backend = "auto"

    def __call__(self, start: int, stop: int, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tau, kernel = self.temperature, named(self.divergence)
        refused = "no kernel for this divergence" if kernel is None else "float64" if logits.dtype == torch.float64 else ""
        if use_triton(self.backend, logits.device, "divergence", refused=refused):
            from karui.kernels.linear_loss import triton

            assert kernel is not None
            gradient = torch.empty_like(logits)
            teacher = self.teacher.logits(start, stop, logits.dtype)
            return triton.divergence(kernel[0], teacher, logits, gradient, tau, kernel[1]), gradient
        log_s = (logits / tau if tau != 1 else logits).log_softmax(-1)
        s = log_s.exp()
        log_t = (self.teacher.logits(start, stop, logits.dtype) / tau).log_softmax(-1)
        value, pull = self.divergence(log_t, log_s)
        gradient = pull.sub_(s.mul_(pull.sum(-1, keepdim=True)))
        return value * tau**2, gradient.mul_(tau) if tau != 1 else gradient
