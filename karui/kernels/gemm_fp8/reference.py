"""Plain torch: dequantize both and multiply in fp32."""

from __future__ import annotations

import torch

from karui.kernels.quantize.scaled_float8 import ScaledFloat8


def gemm_fp8(a: ScaledFloat8, b: ScaledFloat8, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A B^T [M, N]; shapes as in `karui.kernels.gemm_fp8`."""
    return (a.dequantize() @ b.dequantize().t()).to(out_dtype)
