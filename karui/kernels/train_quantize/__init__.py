"""Codes of a matrix along its rows and along its columns from one reading of it: what a training linear needs of x and of dy.

    quantize_both(x, kind)   ->  Coded along K, and Coded of x^T along M

kind: e4m3-tensor, e4m3-row, e4m3-1x128, e4m3-128x128 (and e5m2-...), mxfp8, mxfp4, nvfp4, nvfp4-16x16.
The codes are those of `karui.kernels.quantize` bit for bit; the column-wise ones may be taken after the random Hadamard transform
and rounded stochastically (Pretraining LLMs with NVFP4, arXiv 2509.25149).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from karui.configs.errors import KaruiError
from karui.kernels.quantize import elements
from karui.kernels.quantize.compat import Compat, spread
from karui.kernels.quantize.elements import E2M1
from karui.kernels.quantize.microscaling import e8m0_value
from karui.kernels.triton_support import Backend, use_triton

KINDS = tuple(f"{e}-{t}" for e in ("e4m3", "e5m2") for t in ("tensor", "row", "1x128", "128x128")) + (
    "mxfp8", "mxfp4", "nvfp4", "nvfp4-16x16",
)  # fmt: skip
_BLOCKS = {"mxfp8": (1, 32), "mxfp4": (1, 32), "nvfp4": (1, 16), "nvfp4-16x16": (16, 16)}


@dataclass(frozen=True)
class Noise:
    """Key of stochastic rounding, see `quantize.noise`; the step is an int or an int64 tensor of one element."""

    seed: int
    step: int | torch.Tensor
    layer: int
    tensor: int


@dataclass(frozen=True)
class Coded:
    """A matrix [R, C] as codes.

    codes: float8 [R, C], or uint8 [R, ceil(C / block) * block / 2], the even element in the low nibble, padded with zero codes.
    scale: what a value is multiplied by: fp32 [ceil(R/r), ceil(C/c)] (fp8), E8M0 bytes uint8 (mx), float8_e4m3fn (nvfp4).
    tile: (r, c).  global_scale: S_enc fp32 [1] (nvfp4): value = code * scale / global_scale.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    tile: tuple[int, int]
    shape: tuple[int, int]
    global_scale: torch.Tensor | None = None

    @property
    def packed(self) -> bool:
        return self.codes.dtype == torch.uint8

    def dequantize(self) -> torch.Tensor:
        """fp32 [R, C]."""
        if not self.packed:
            values = self.codes.float()
        else:
            values = elements.decode(elements.unpack_pairs(self.codes), E2M1)[:, : self.shape[1]]
        if self.global_scale is not None:
            scale = self.scale.float() / self.global_scale
        else:
            scale = e8m0_value(self.scale) if self.scale.dtype == torch.uint8 else self.scale
        return values * spread(scale, *self.tile, self.shape)


def tile_of(kind: str, shape: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns that share a scale, for a matrix of this shape. Raises `KaruiError` for an unknown kind."""
    if kind not in KINDS:
        raise KaruiError(f"train_quantize: kind {kind!r} is not known; use one of {', '.join(KINDS)}.")
    if kind in _BLOCKS:
        return _BLOCKS[kind]
    form = kind.split("-")[1]
    return {"tensor": shape, "row": (1, shape[1]), "1x128": (1, 128), "128x128": (128, 128)}[form]


def quantize_both(
    x: torch.Tensor,
    kind: str,
    *,
    rows: bool = True,
    cols: bool = True,
    compat: Compat = "te",
    power_of_two: bool | None = None,
    scale: torch.Tensor | None = None,
    hadamard: bool = False,
    row_noise: Noise | None = None,
    col_noise: Noise | None = None,
    seen: torch.Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Coded | None, Coded | None]:
    """Codes of `x` [M, K] along K, and of its transpose [K, M] along M (each None if not wanted).

    Args:
        compat: whose bits; see `quantize.compat` (nvfp4: te; mx: te or deepgemm, the rounding of scales is rceil).
        power_of_two: fp8 scales are powers of two; None as in `quantize_float8`.
        scale: a given encode scale, fp32 [1] (delayed scaling), kinds ...-tensor only.
        hadamard: transform x^T in pieces of 16 along M, padded to a multiple of 16, before it is coded (mxfp4, nvfp4).
        row_noise, col_noise: round stochastically (mxfp4, nvfp4); the keys of `quantize.noise.noise_bits`.
        seen: fp32, one element, not negative: raised to the largest magnitude of `x`, Inf where there is a NaN.

    Raises:
        KaruiError: not a matrix, an unknown kind, options that the kind does not have.
        UnsupportedError: backend "triton" that cannot serve the call.
    """
    from karui.kernels.train_quantize import reference

    if x.dim() != 2:
        raise KaruiError(f"quantize_both takes a matrix, got shape {tuple(x.shape)}.")
    tile_of(kind, (x.shape[0], x.shape[1]))
    if hadamard and not kind.startswith(("mxfp4", "nvfp4")):
        raise KaruiError(f"the Hadamard transform belongs to mxfp4 and nvfp4, not to {kind}.")
    if (row_noise or col_noise) and kind not in ("mxfp4", "nvfp4", "nvfp4-16x16"):
        raise KaruiError(f"stochastic rounding is for E2M1 codes, not for {kind}.")
    if scale is not None and not kind.endswith("tensor"):
        raise KaruiError(f"a given scale works per tensor, not with {kind}.")
    if use_triton(backend, x.device, "quantize_both", refused=_refused(x, kind, compat, row_noise, col_noise)):
        from karui.kernels.train_quantize import triton

        return triton.quantize_both(x, kind, rows, cols, compat, power_of_two, scale, hadamard, row_noise, col_noise, seen)
    if seen is not None and x.numel():
        top = x.abs().amax().float()
        seen.copy_(torch.maximum(seen, top.where(top.isfinite(), float("inf"))))
    return reference.quantize_both(x, kind, rows, cols, compat, power_of_two, scale, hadamard, row_noise, col_noise)


def _refused(x: torch.Tensor, kind: str, compat: str, row_noise: Noise | None, col_noise: Noise | None) -> str:
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"dtype {x.dtype}"
    if x.numel() == 0 or x.numel() >= 2**31:
        return f"{x.numel()} values, not between 1 and 2^31 - 1"
    if kind.startswith("nvfp4") and compat != "te":
        return f"no {compat} variant of {kind} in the kernel"
    if kind == "mxfp4" and compat != "te" or kind == "mxfp8" and compat == "ao":
        return f"no {compat} variant of {kind} in the kernel"
    if (row_noise and x.shape[1] % 4) or (col_noise and x.shape[0] % 4):
        return f"noise for a width that is no multiple of 4 (shape {tuple(x.shape)})"
    return ""
