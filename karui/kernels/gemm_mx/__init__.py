"""Y = A B^T of block-scaled codes: MXFP8, MXFP4 (blocks of 32, E8M0 scales), NVFP4 (blocks of 16, E4M3 scales, an fp32 scale).

Blackwell multiplies such operands as they are (`tcgen05.mma` with block scales on sm_100, `mma` with block scales on sm_120).
Elsewhere the codes are decoded to bf16 on the way in, exactly: an E2M1 or E4M3 value times its block's scale has at most 6
significant bits.
"""

from __future__ import annotations

import torch

from karui.configs.errors import KaruiError
from karui.kernels.gemm_mx import reference
from karui.kernels.train_quantize import Coded
from karui.kernels.triton_support import Backend, use_triton


def gemm_mx(a: Coded, b: Coded, out_dtype: torch.dtype = torch.bfloat16, backend: Backend = "auto") -> torch.Tensor:
    """[M, N] in `out_dtype` of a [M, K] and b [N, K], both of one format, from `train_quantize` (scales per row: tile (1, block);
    NVFP4's 16 x 16 tiles are spread over their rows).

    Raises:
        KaruiError: shapes, formats or dtypes that do not fit.
        UnsupportedError: backend "triton" without a GPU of compute capability 8.0.
    """
    kinds = format_of(a), format_of(b)
    if a.shape[1] != b.shape[1] or kinds[0] != kinds[1]:
        raise KaruiError(f"gemm_mx takes a [M, K] and b [N, K] of one format; got {a.shape} {kinds[0]} and {b.shape} {kinds[1]}.")
    if out_dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise KaruiError(f"gemm_mx writes bf16, fp16 or fp32, not {out_dtype}.")
    refused = "an empty matrix" if 0 in (*a.shape, *b.shape) else ""
    if use_triton(backend, a.codes.device, "gemm_mx", refused=refused):
        from karui.kernels.gemm_mx import triton

        return triton.gemm_mx(a, b, out_dtype, kinds[0])
    return reference.gemm_mx(a, b, out_dtype)


def format_of(q: Coded) -> str:
    """mxfp8, mxfp4 or nvfp4; `KaruiError` for anything else."""
    if q.global_scale is not None and q.packed and q.tile in ((1, 16), (16, 16)):
        return "nvfp4"
    if q.scale.dtype == torch.uint8 and q.tile == (1, 32):
        return "mxfp4" if q.packed else "mxfp8"
    raise KaruiError(f"gemm_mx: codes {q.codes.dtype} with scales {q.scale.dtype} on tile {q.tile} are no MX or NVFP4 format.")


def row_scales(q: Coded) -> torch.Tensor:
    """One scale per row and block: 16 x 16 tiles repeated over their rows."""
    if q.tile[0] == 1:
        return q.scale.contiguous()
    return q.scale.view(torch.uint8).repeat_interleave(q.tile[0], 0)[: q.shape[0]].contiguous().view(q.scale.dtype)
