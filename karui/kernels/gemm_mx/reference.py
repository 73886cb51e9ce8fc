"""Plain torch: dequantize both and multiply in fp32."""

from __future__ import annotations

import torch

from karui.kernels.train_quantize import Coded


def gemm_mx(a: Coded, b: Coded, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A B^T [M, N]; operands as in `karui.kernels.gemm_mx`."""
    return (a.dequantize() @ b.dequantize().t()).to(out_dtype)
