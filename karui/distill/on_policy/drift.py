"""How far the sampler's probabilities are from the trainer's for the same weights: other kernels, other precision, other cache.

A sampler that has drifted makes every "on-policy" update off-policy without anyone noticing (slime issue 714). So it is measured
where it must be near zero: on rollouts whose weights are the trainer's own. For log-ratios d = log p_trainer - log p_sampler of
drawn tokens: mean |d|, the largest |d|, and the k3 estimate of KL(sampler || trainer), mean(exp(d) - 1 - d) (Schulman 2020).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from karui.configs.errors import KaruiError


@dataclass(frozen=True)
class Drift:
    """Over `tokens` drawn tokens."""

    mean: float
    largest: float
    kl: float
    tokens: int

    @staticmethod
    def of(trainer: torch.Tensor, sampler: torch.Tensor) -> Drift:
        """Log-probabilities [n] of the same drawn tokens under both."""
        if not len(trainer):
            return Drift(0.0, 0.0, 0.0, 0)
        d = (trainer - sampler).double()
        return Drift(float(d.abs().mean()), float(d.abs().max()), float((d.exp() - 1 - d).mean()), len(d))

    def check(self, bound: float) -> None:
        """Raise `KaruiError` when the mean is above the bound."""
        if not self.mean <= bound:
            raise KaruiError(
                f"the sampler's log-probabilities differ from the trainer's by {self.mean:.3g} on average over {self.tokens} "
                f"drawn tokens (largest {self.largest:.3g}), bound {bound:g}: its text is not the student's. Take a wider grid "
                "for objective.engine (none is exact up to rounding), or raise objective.max_drift."
            )
