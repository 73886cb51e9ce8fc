"""Rotary position embedding (RoFormer, arXiv 2104.09864, eq. 34) in the half-split form of llama: pairs are (i, i + D/2).

    y = x cos + rotate_half(x) sin,  rotate_half([a, b]) = [-b, a]

The gradient is the rotation by the opposite angle, so nothing but cos and sin is kept.
"""

from __future__ import annotations

import torch

from karui.configs.errors import KaruiError
from karui.kernels.rope import reference
from karui.kernels.triton_support import Backend, use_triton


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, backend: Backend = "auto") -> torch.Tensor:
    """x [T, heads, D] rotated; computed in fp32 (fp64 for fp64), returned in x's dtype, contiguous on the Triton path.

    Args:
        x: the last dimension dense, the others of any stride (a slice of a fused projection, a transposed view).
        cos, sin: [T, D], or [T, D/2] for both halves; differ per token, not per head; no gradient.

    Raises:
        KaruiError: shapes that do not fit.
    """
    half = x.shape[-1] // 2
    if x.ndim != 3 or x.shape[-1] % 2 or cos.shape != sin.shape or tuple(cos.shape) not in (
        (x.shape[0], half), (x.shape[0], 2 * half)
    ):  # fmt: skip
        raise KaruiError(
            f"rope takes x [T, heads, D] with D even and cos, sin [T, D] or [T, D/2]; got {tuple(x.shape)}, {tuple(cos.shape)}, "
            f"{tuple(sin.shape)}."
        )
    refused = "" if x.dtype in (torch.float32, torch.bfloat16, torch.float16) else f"dtype {x.dtype}"
    if use_triton(backend, x.device, "rope", refused=refused):
        from karui.kernels.rope.triton import Rope

        return Rope.apply(x, cos[:, :half], sin[:, :half])
    return reference.rope(x, cos[:, :half], sin[:, :half])
