"""Learning rate as a pure function of the step: resuming needs the step number and nothing else."""

from __future__ import annotations

import math

from karui.configs.recipe import OptimSection


def warmup_steps(optim: OptimSection, total: int) -> int:
    """`warmup` below 1 is a share of all steps (rounded), else a number of steps; never more than `total`."""
    return min(total, round(optim.warmup * total) if optim.warmup < 1 else int(optim.warmup))


def learning_rate(optim: OptimSection, step: int, total: int) -> float:
    """The rate of optimizer step `step` (from 0) of `total`.

    Warm-up: lr (step + 1) / (warmup + 1). Then, with p the share of the remaining steps already done: cosine
    final + (1 - final) (1 + cos(pi p)) / 2, linear 1 - (1 - final) p, constant 1, times lr.
    """
    warm = warmup_steps(optim, total)
    if step < warm:
        return optim.lr * (step + 1) / (warm + 1)
    done = (step - warm) / max(1, total - warm)
    if optim.schedule == "constant":
        return optim.lr
    if optim.schedule == "linear":
        return optim.lr * (1 - (1 - optim.final_lr) * done)
    return optim.lr * (optim.final_lr + (1 - optim.final_lr) * (1 + math.cos(math.pi * done)) / 2)
