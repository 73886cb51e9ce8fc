"""Products of a mixture of experts: rows sorted by expert, one weight per expert, one launch for all.

    y[o_e : o_(e+1)] = x[o_e : o_(e+1)] W_e^T

differentiable in x and W; an expert without rows gets a zero gradient.
"""

from __future__ import annotations

import torch

from karui.configs.errors import KaruiError
from karui.kernels.gemm_grouped import reference
from karui.kernels.triton_support import Backend, use_triton


def gemm_grouped(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, backend: Backend = "auto") -> torch.Tensor:
    """[T, N] in x's dtype.

    Args:
        x: [T, K], rows of expert e are offsets[e] : offsets[e + 1].
        weight: [E, N, K], x's dtype.
        offsets: [E + 1] integers from 0 to T, never falling.

    Raises:
        KaruiError: shapes or dtypes that do not fit.
    """
    if x.ndim != 2 or weight.ndim != 3 or weight.shape[2] != x.shape[1] or offsets.shape != (weight.shape[0] + 1,):
        raise KaruiError(
            f"gemm_grouped takes x [T, K], weight [E, N, K], offsets [E + 1]; got {tuple(x.shape)}, {tuple(weight.shape)}, "
            f"{tuple(offsets.shape)}."
        )
    if x.dtype != weight.dtype:
        raise KaruiError(f"gemm_grouped: x is {x.dtype}, weight {weight.dtype}; cast one of them.")
    refused = f"dtype {x.dtype}" if x.dtype == torch.float64 or (x.is_cuda and x.dtype == torch.float32) else ""
    if use_triton(backend, x.device, "gemm_grouped", refused=refused):
        from karui.kernels.gemm_grouped.triton import Grouped

        return Grouped.apply(x, weight, offsets)
    return reference.gemm_grouped(x, weight, offsets)
