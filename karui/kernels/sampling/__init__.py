"""One token per row of logits, on the device that holds them: greedy, or temperature with top-k, top-p and min-p.

A sample is argmax(p_i / e_i) with e_i exponential (the Gumbel trick): no sort is needed to draw. A row's random numbers depend
on its seed and position alone (Philox), not on the batch around it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from karui.configs.errors import KaruiError
from karui.kernels.sampling import reference
from karui.kernels.triton_support import Backend, current, use_triton


@dataclass(frozen=True)
class Settings:
    """Per row, [L] each: temperature (0: greedy), top_k (0: all), top_p (1: all), min_p (0: all), any float and integer dtypes;
    seed int64, position below 2^31."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor


def sample(
    logits: torch.Tensor, settings: Settings, backend: Backend = "auto"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A token per row of logits [L, V] (any float dtype), and how likely it was.

    top_k, then top_p, then min_p, on probabilities after temperature. The kernel finds the cut of top_k and top_p by bisection on
    the probability to 2^-24 of the largest: tokens closer than that to the border may fall on either side.

    Returns:
        tokens: int64 [L].
        chances: fp32 [L], the token's probability among those that were kept; 1 for greedy rows.
        logprobs: fp32 [L], its log-probability under softmax(logits), without temperature and cuts.

    Raises:
        KaruiError: not a matrix, or settings of another length.
    """
    if logits.ndim != 2 or any(t.shape != logits.shape[:1] for t in vars(settings).values()):
        raise KaruiError(f"sample takes logits [L, V] and settings of length L, got {tuple(logits.shape)}.")
    if use_triton(backend, logits.device, "sample", refused="float64" if logits.dtype == torch.float64 else ""):
        from karui.kernels.sampling import triton

        with current(logits.device):
            return triton.sample(logits, settings)
    return reference.sample(logits, settings)
