"""Plain torch: all logits at once, probabilities by softmax, autograd. What the chunked forms are tested against."""

from __future__ import annotations

from collections.abc import Callable

import torch

from karui.configs.errors import KaruiError


def divergence(kind: str, teacher: torch.Tensor, student: torch.Tensor, parameter: float = 0.0) -> torch.Tensor:
    """Divergence of two distributions over the last dimension, straight from the textbook, in probability space.

    Args:
        kind: forward_kl, reverse_kl, jsd (parameter beta), skewed_kl and skewed_reverse_kl (parameter alpha),
            total_variation, sorted_l1.
        teacher, student: [..., m] probabilities; for sorted_l1 the two may differ in m.
    """
    t, s = teacher, student

    def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return (p * (p / q).log()).sum(-1)

    if kind == "forward_kl" or (kind == "jsd" and parameter == 0):
        return kl(t, s)
    if kind == "reverse_kl" or (kind == "jsd" and parameter == 1):
        return kl(s, t)
    if kind == "jsd":
        m = (1 - parameter) * s + parameter * t
        return parameter * kl(t, m) + (1 - parameter) * kl(s, m)
    if kind == "skewed_kl":
        return kl(t, parameter * t + (1 - parameter) * s)
    if kind == "skewed_reverse_kl":
        return kl(s, (1 - parameter) * t + parameter * s)
    if kind == "total_variation":
        return (t - s).abs().sum(-1) / 2
    if kind == "sorted_l1":
        width = max(t.shape[-1], s.shape[-1])
        pad = torch.nn.functional.pad
        t, s = (pad(x, (0, width - x.shape[-1])).sort(-1, descending=True).values for x in (t, s))
        return (t - s).abs().sum(-1)
    raise KaruiError(f"no reference for the divergence {kind!r}.")


def loss_sum(
    hidden: torch.Tensor, weight: torch.Tensor, teacher_logits: torch.Tensor,
    of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    temperature: float = 1.0,
) -> torch.Tensor:
    """temperature^2 times the sum over rows of `of(teacher, student)` probabilities at that temperature."""
    student = (hidden @ weight.T / temperature).softmax(-1)
    return of((teacher_logits / temperature).softmax(-1), student).sum() * temperature**2


def buckets(probabilities: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """[n, V] -> [n, k + 1]: the probabilities at ids [n, k], and everything else in one tail bucket."""
    kept = probabilities.gather(-1, ids)
    return torch.cat([kept, 1 - kept.sum(-1, keepdim=True)], -1)
