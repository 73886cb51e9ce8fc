"""What is left of a weight when a low-rank part is taken out: the base of PiSSA, OLoRA and LoftQ."""

from __future__ import annotations

import torch


def residual(weight: torch.Tensor, u: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
    """W - s U V [out, in] in W's dtype, computed in float64, so that every machine and thread count rounds to the same values.

    Args:
        weight: W [out, in].
        u, v: U [out, k] and V [k, in].
        scaling: s, the adapter's.
    """
    return (weight.double() - scaling * (u.double() @ v.double())).to(weight.dtype)
