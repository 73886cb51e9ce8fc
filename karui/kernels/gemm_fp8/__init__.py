"""Y = A B^T of FP8 codes and their scales: per tensor, per row, or per tile of 128 with promotion to fp32 every 128 along K.

Hopper's tensor cores sum FP8 products in about 14 bits (DeepSeek-V3, arXiv 2412.19437, section 3.3.2); tiles of 128 therefore end
in an fp32 accumulator before the next one begins, and their scales are applied there.
"""

from __future__ import annotations

import torch

from karui.configs.errors import KaruiError
from karui.kernels.gemm_fp8 import reference
from karui.kernels.quantize.scaled_float8 import ScaledFloat8
from karui.kernels.triton_support import Backend, use_triton

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def gemm_fp8(
    a: ScaledFloat8, b: ScaledFloat8, out_dtype: torch.dtype = torch.bfloat16, backend: Backend = "auto"
) -> torch.Tensor:
    """[M, N] in `out_dtype` (bf16, fp16 or fp32) of a [M, K] and b [N, K].

    Args:
        a: tile tensor, row or 1x128.
        b: tile tensor or row (with a's tensor or row); 128x128 or 1x128 (with a's 1x128).

    Any M, N and K: K is padded with zeros to a multiple of 16 when it must be (a copy; `quantize` into padded rows avoids it).

    Raises:
        KaruiError: shapes or tiles that do not fit together.
        UnsupportedError: backend "triton" before compute capability 8.9, which has no FP8.
    """
    (m, k), (n, k_b) = a.codes.shape, b.codes.shape
    if k != k_b or a.codes.dtype not in _FLOAT8 or b.codes.dtype not in _FLOAT8:
        raise KaruiError(
            f"gemm_fp8 takes FP8 codes a [M, K], b [N, K]; got {tuple(a.codes.shape)} {a.codes.dtype}, {tuple(b.codes.shape)} "
            f"{b.codes.dtype}."
        )
    if out_dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise KaruiError(f"gemm_fp8 writes bf16, fp16 or fp32, not {out_dtype}.")
    kinds = tuple(scale_kind(t) for t in (a, b))
    if kinds not in (("whole", "whole"), ("1x128", "128x128"), ("1x128", "1x128")):
        raise KaruiError(
            f"gemm_fp8: tiles {a.tile} and {b.tile} do not go together; use per tensor or row on both, or tiles of 128."
        )
    refused = "an empty matrix" if 0 in (m, n, k) else ""
    if use_triton(backend, a.codes.device, "gemm_fp8", needs=89, refused=refused):
        from karui.kernels.gemm_fp8 import triton

        return triton.gemm_fp8(a, b, out_dtype, kinds[1])
    return reference.gemm_fp8(a, b, out_dtype)


def scale_kind(q: ScaledFloat8) -> str:
    """whole (one scale per row at most), 1x128 or 128x128."""
    rows, cols = q.tile
    if cols == 128 and rows in (1, 128) and q.scale.shape[1] == -(-q.codes.shape[1] // 128) and (rows == 1) == (
        q.scale.shape[0] == q.codes.shape[0]
    ):  # fmt: skip
        return f"{rows}x128"
    return "whole" if q.scale.numel() in (1, q.codes.shape[0]) else "other"
