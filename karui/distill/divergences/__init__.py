"""Divergences between a teacher's and a student's distribution, each in closed form with its gradient; one per file.

A divergence D(T, S) is a function of log-probabilities that gives its value and the *pull* w = S * dD/dS per bucket. Through a
softmax at temperature tau the gradient of a logit is then (w_j - S_j * sum(w)) / tau, whatever the divergence
(`objectives.logits`), and a tail bucket hands its pull out in proportion to S (`objectives.topk`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from karui.configs.errors import KaruiError, nearest
from karui.distill.divergences.forward_kl import forward_kl
from karui.distill.divergences.jsd import jsd
from karui.distill.divergences.reverse_kl import reverse_kl
from karui.distill.divergences.skewed_kl import skewed_kl, skewed_reverse_kl
from karui.distill.divergences.sorted_l1 import sorted_l1
from karui.distill.divergences.total_variation import total_variation

Divergence = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(log T [c, m], log S [c, m]) -> (values [c], pull [c, m]). May overwrite its arguments."""

PLAIN: dict[str, Divergence] = {
    "forward_kl": forward_kl, "reverse_kl": reverse_kl, "total_variation": total_variation, "sorted_l1": sorted_l1,
}
WITH_PARAMETER: dict[str, tuple[Callable[..., Any], str]] = {
    "jsd": (jsd, "beta"), "skewed_kl": (skewed_kl, "alpha"), "skewed_reverse_kl": (skewed_reverse_kl, "alpha"),
}
NAMES = (*PLAIN, *WITH_PARAMETER)


def divergence(kind: str, parameter: float | None = None) -> Divergence:
    """By name; `parameter` is jsd's beta or the skew alpha, and belongs to no other.

    Raises:
        KaruiError: an unknown name, a parameter that is missing, superfluous or outside 0..1.
    """
    if kind in PLAIN:
        if parameter is not None:
            raise KaruiError(f"divergence {kind} has no parameter, got {parameter}; only {', '.join(WITH_PARAMETER)} have one.")
        return PLAIN[kind]
    if kind not in WITH_PARAMETER:
        raise KaruiError(f"divergence {kind!r} is not known; valid: {', '.join(NAMES)}.{nearest(kind, NAMES)}")
    function, name = WITH_PARAMETER[kind]
    if parameter is None or not 0 <= parameter <= 1:
        raise KaruiError(f"divergence {kind} needs {name} between 0 and 1, got {parameter}.")
    return partial(function, **{name: parameter})


def named(which: Divergence) -> tuple[str, float] | None:
    """(forward_kl, reverse_kl or jsd; jsd's beta, else 0) of what `divergence` gave: those that a kernel has; else None."""
    if isinstance(which, partial) and which.func is jsd:
        beta = float(which.keywords["beta"])
        return ("forward_kl", 0.0) if beta == 0 else ("reverse_kl", 0.0) if beta == 1 else ("jsd", beta)
    return next(((name, 0.0) for name in ("forward_kl", "reverse_kl") if PLAIN[name] is which), None)
