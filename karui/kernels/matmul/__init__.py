"""Matrix products of training, by our own fp32 kernel on a CPU where that is faster, else by torch.

Most of a fine-tuning step on a CPU are products with frozen weights of a few hundred rows; `native/sgemm.h` is written for
them. For use inside autograd functions: no gradient flows through.
"""

from __future__ import annotations

import torch

from karui.kernels.native import train as native


def matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """a b [m, n].

    Args:
        a, b: [m, k] and [k, n] of one dtype, any strides; transposed views cost nothing.
        out: [m, n] of the same dtype with dense rows, overwritten and returned; None makes one.
    """
    follows = torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)
    if follows or not native.product_usable(a, b):
        return a @ b if out is None else torch.mm(a, b, out=out)
    if out is None:
        out = a.new_empty(a.shape[0], b.shape[1])
    native.product(a, b, out, plus=False)
    return out


def add_matmul(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """out += a b, in place; shapes as in `matmul`."""
    if not native.product_usable(a, b) or out.stride(1) != 1:
        return out.addmm_(a, b)
    native.product(a, b, out, plus=True)
    return out


def low_rank_matmul(
    x: torch.Tensor, w: torch.Tensor, u: torch.Tensor, v: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x w + low v, low) with low = scaling x u.

    Args:
        x, w: [m, k] and [k, n].
        u, v: [k, r] and [r, n].
    """
    if native.product_usable(x, w) and u.dtype == v.dtype == x.dtype:
        return native.low_rank(x, w, u, v, scaling)
    low = (x @ u).mul_(scaling)
    return add_matmul(matmul(x, w), low, v), low
