"""What the grid families share: splitting rows into groups and rounding scales to the dtype they are stored in."""

from __future__ import annotations

import torch

from karui.configs.errors import KaruiError
from karui.configs.quantspec import QuantSpec

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def grouped(rows: torch.Tensor, spec: QuantSpec) -> torch.Tensor:
    """[R, in] -> [R', G, n] with one scale per (R', G): a view, R' = 1 for granularity tensor."""
    if spec.granularity == "tensor":
        return rows.reshape(1, 1, -1)
    return rows.reshape(rows.shape[0], -1, spec.group_size or rows.shape[1])


def stored_scale(scale: torch.Tensor, used: torch.Tensor, spec: QuantSpec) -> torch.Tensor:
    """Round `scale` to its storage dtype.

    A scale that would round to zero although the group holds values (`used`) becomes the smallest positive number, so that
    no group vanishes silently; one beyond the dtype's range is an error.
    """
    dtype = DTYPES[spec.scale_dtype]
    rounded = scale.to(dtype)
    if torch.isinf(rounded).any():
        raise KaruiError(f"a scale of {float(scale.max()):.4g} is too large for {spec.scale_dtype}; write {spec._stem()}:fp32.")
    tiny = torch.tensor(torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps, dtype=dtype)
    return torch.where((rounded == 0) & used, tiny, rounded)


def inverse(scale: torch.Tensor) -> torch.Tensor:
    """The fp32 scale to divide by: zero scales (all-zero groups) become 1 so that their codes are 0, not NaN."""
    value = scale.float()
    return torch.where(value == 0, torch.ones_like(value), value)
