"""`tl.dot` that is right in the interpreter too: there bf16 lies as raw 16-bit integers, and `tl.dot` multiplies those.

In the interpreter bf16 operands are widened to fp32 first, which changes no product; on a GPU this is `tl.dot`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from karui.kernels.triton_support import interpreting

_INTERPRETED = tl.constexpr(interpreting())
_TF32 = tl.constexpr("tf32")  # Triton 3.6 takes a default that is a string for no compile-time value


@triton.jit
def dot(a, b, acc, precision: tl.constexpr = _TF32):
    """acc + a @ b, accumulated in fp32 (int32 for int8); `precision` is fp32 operands' on a GPU."""
    if _INTERPRETED:
        if a.dtype == tl.bfloat16:
            a = a.to(tl.float32)
        if b.dtype == tl.bfloat16:
            b = b.to(tl.float32)
        return tl.dot(a, b, acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision=precision)
