"""Matrix products of training, by our own kernel on a CPU where that is faster, else by torch.

Most of a fine-tuning step on a CPU are products with frozen weights of a few hundred rows; `native/sgemm.h` is written for
them. For use inside autograd functions: no gradient flows through.

Within `matmul_precision` their operands are rounded to bf16 and the products summed in fp32, the backward pass's alone or all of
them. That is twice as fast where the CPU has AVX512-BF16, four times with AMX, and no faster, with the same rounding, elsewhere.
AMX is fast enough to make up an fp32 product of three in bf16, with a relative error of some 2^-17 a term (Henry, Tang and
Heinecke, arXiv 1904.06376), at twice the rate of fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import torch

from karui.configs.errors import KaruiError
from karui.kernels.native import train as native

Precision = Literal["fp32", "bf16x3", "bf16-backward", "bf16"]
_precision: Precision = "fp32"


@contextmanager
def matmul_precision(precision: Precision) -> Iterator[None]:
    """What this module's products of fp32 operands on a CPU are computed in, by the whole process (autograd has other threads).

    fp32: as given. bf16-backward: those of the backward pass in bf16, so that losses are those of fp32. bf16x3: the same, and
    those of the forward pass as three products in bf16 where the CPU has AMX. bf16: all. Products too small for the native kernel
    (`native.product_usable`) stay in fp32.

    Raises:
        KaruiError: another name, or bf16 asked for where the native kernels cannot run.
    """
    global _precision
    if precision not in get_args(Precision):
        raise KaruiError(f"matmul precision {precision!r} is not known; there are {', '.join(get_args(Precision))}.")
    if precision != "fp32" and not native.ready():
        raise KaruiError(f"matmul precision {precision} needs the native kernels (C++ compiler, torch on GNU OpenMP); use fp32.")
    was, _precision = _precision, precision
    try:
        yield
    finally:
        _precision = was


def current_precision() -> Precision:
    return _precision


def _operands(backward: bool) -> native.Operands:
    if _precision == "bf16" or (backward and _precision != "fp32"):
        return "bf16"
    return "bf16x3" if _precision == "bf16x3" else "fp32"


def matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None, *, backward: bool = False) -> torch.Tensor:
    """a b [m, n].

    Args:
        a, b: [m, k] and [k, n] of one dtype, any strides; transposed views cost nothing.
        out: [m, n] of the same dtype with dense rows, overwritten and returned; None makes one.
        backward: the product belongs to the backward pass, see `matmul_precision`.
    """
    follows = torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)
    if follows or not native.product_usable(a, b):
        return a @ b if out is None else torch.mm(a, b, out=out)
    if out is None:
        out = a.new_empty(a.shape[0], b.shape[1])
    native.product(a, b, out, plus=False, operands=_operands(backward))
    return out


def add_matmul(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, backward: bool = False) -> torch.Tensor:
    """out += a b, in place; shapes as in `matmul`."""
    if not native.product_usable(a, b) or out.stride(1) != 1:
        return out.addmm_(a, b)
    native.product(a, b, out, plus=True, operands=_operands(backward))
    return out


def low_rank_matmul(
    x: torch.Tensor, w: torch.Tensor, u: torch.Tensor, v: torch.Tensor, scaling: float, *, backward: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x w + low v, low) with low = scaling x u. The update is added in fp32 whatever x w is.

    Args:
        x, w: [m, k] and [k, n].
        u, v: [k, r] and [r, n].
    """
    if native.product_usable(x, w) and u.dtype == v.dtype == x.dtype:
        return native.low_rank(x, w, u, v, scaling, operands=_operands(backward))
    low = (x @ u).mul_(scaling)
    return add_matmul(matmul(x, w, backward=backward), low, v), low
