"""Whose bits a low-bit float quantizer reproduces: the three libraries differ in eps, in rounding and in the codes of edge cases.

te        TransformerEngine: fp32 throughout, no eps; an amax of 0, Inf or NaN gives scale 1; a scale that overflows is FLT_MAX
ao        torchao: amax at least 1e-12, tensor scales divided in float64; MX scales through log2 in fp32
deepgemm  DeepGEMM: amax at least 1e-4, scale = amax / 448; power-of-two scales by ceil, byte within 1..254
"""

from __future__ import annotations

from typing import Literal, get_args

import torch

from karui.configs.errors import UnsupportedError

Compat = Literal["te", "ao", "deepgemm"]
FLT_MAX = torch.finfo(torch.float32).max
AMAX_FLOOR = {"te": 0.0, "ao": 1e-12, "deepgemm": 1e-4}


def check_compat(compat: str, served: tuple[str, ...], what: str) -> None:
    """Raises `UnsupportedError` unless `compat` is among `served`."""
    if compat not in served:
        known = "" if compat in get_args(Compat) else " (not a known library)"
        raise UnsupportedError(f"{what} has no {compat!r} variant{known}; use one of {', '.join(served)}.")


def divide(a: torch.Tensor | float, b: torch.Tensor | float) -> torch.Tensor:
    """a / b in fp32, correctly rounded, at least one a tensor.

    torch turns `number / tensor` into `number * reciprocal(tensor)`, and on CUDA `tensor / number` into a product too: two
    roundings instead of one.
    """
    like = a if isinstance(a, torch.Tensor) else b
    assert isinstance(like, torch.Tensor)
    a, b = (v if isinstance(v, torch.Tensor) else torch.full_like(like, v) for v in (a, b))
    return a / b


def exponent_field(x: torch.Tensor) -> torch.Tensor:
    """The biased exponent (int32, 0..255) of each fp32 magnitude."""
    return (x.contiguous().view(torch.int32) >> 23) & 0xFF


def has_mantissa(x: torch.Tensor) -> torch.Tensor:
    """Whether each fp32 number is no power of two (or, with exponent field 0, not zero)."""
    return (x.contiguous().view(torch.int32) & 0x7FFFFF) != 0


def power_of_two_down(x: torch.Tensor) -> torch.Tensor:
    """fp32 with the mantissa cleared."""
    return (x.contiguous().view(torch.int32) & ~0x7FFFFF).view(torch.float32)


def tiled_amax(x: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """Largest magnitude of each rows x cols tile of fp32 [M, K]: [ceil(M/rows), ceil(K/cols)]. NaN wins."""
    tall, wide = -x.shape[0] % rows, -x.shape[1] % cols
    x = torch.nn.functional.pad(x, (0, wide, 0, tall)) if tall or wide else x
    return x.view(x.shape[0] // rows, rows, x.shape[1] // cols, cols).abs().amax((1, 3))


def spread(scale: torch.Tensor, rows: int, cols: int, shape: tuple[int, int] | torch.Size) -> torch.Tensor:
    """The inverse of tiling: each tile's value at every element, cut to `shape` [M, K]."""
    return scale.repeat_interleave(rows, 0)[: shape[0]].repeat_interleave(cols, 1)[:, : shape[1]]
