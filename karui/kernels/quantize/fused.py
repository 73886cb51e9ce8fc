"""Emulated operands in one pass: value = round(x * encode scale) * decode scale, over tiles that share a scale.

Emulation multiplies values, not codes; this gives them without the codes between. On a CPU the native kernel (`lowbit.cpp`)
serves, elsewhere, or without a compiler, the same arithmetic in torch. Both give the bits of `encode(...).dequantize()` of the
oracle, whose scales they are handed. A transposed matrix is worked on where it lies.
"""

from __future__ import annotations

import ctypes as C
import logging
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from karui.configs.errors import KaruiError
from karui.kernels.native import train
from karui.kernels.native.build import LOWBIT, build, chosen_isa
from karui.kernels.quantize.compat import spread, tiled_amax
from karui.kernels.quantize.elements import E2M1, Element, round_values
from karui.kernels.quantize.noise import noise_bits

logger = logging.getLogger(__name__)
_ELEMENT = {"e4m3": 0, "e5m2": 1, "e2m1": 2}


@dataclass(frozen=True)
class NoiseKey:
    """What the random bits of one tensor's stochastic rounding are a function of; see `noise_bits`."""

    seed: int
    step: int | torch.Tensor
    layer: int
    tensor: int

    def bits(self, shape: tuple[int, ...] | torch.Size, device: torch.device | str = "cpu") -> torch.Tensor:
        """int32 `shape` in [0, 2^31)."""
        return noise_bits(shape, seed=self.seed, step=self.step, layer=self.layer, tensor=self.tensor, device=device)


def tile_amax(x: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """Largest magnitude of each rows x cols tile of `x` [M, K], any float dtype: fp32 [ceil(M/rows), ceil(K/cols)]; NaN wins."""
    lib = _serving(x)
    if lib is None:
        return tiled_amax(x.float(), rows, cols)
    matrix, down, tile = _as_it_lies(x, (rows, cols))
    out = torch.empty(-(-matrix.shape[0] // tile[0]), -(-matrix.shape[1] // tile[1]))
    lib.karui_lowbit_amax(matrix.data_ptr(), *matrix.shape, *tile, out.data_ptr())
    return out.t() if down else out


def scaled_values(
    x: torch.Tensor,
    encode_scale: torch.Tensor,
    decode_scale: torch.Tensor,
    tile: tuple[int, int],
    element: Element,
    noise: NoiseKey | None = None,
) -> torch.Tensor:
    """fp32 [M, K] of `x` [M, K], any float dtype, laid out in memory as `x` is.

    Args:
        encode_scale, decode_scale: fp32 [ceil(M/rows), ceil(K/cols)].
        noise: stochastic rounding (E2M1); element (m, k) takes the bits of index m * K + k.
    """
    lib = _serving(x)
    if lib is None or (noise is not None and (x.shape[1] % 4 or (tile[1] > 1 and 64 % tile[1]))):
        bits = None if noise is None else noise.bits(x.shape, x.device)
        scaled = x.float() * spread(encode_scale, *tile, x.shape)
        return round_values(scaled, element, noise=bits) * spread(decode_scale, *tile, x.shape)
    matrix, down, tile = _as_it_lies(x, tile)
    enc, dec = ((s.t() if down else s).contiguous() for s in (encode_scale, decode_scale))
    out = torch.empty_like(matrix)
    if noise is None:
        lib.karui_lowbit_nearest(matrix.data_ptr(), *matrix.shape, *tile, enc.data_ptr(), dec.data_ptr(), _ELEMENT[element.name],
                                 out.data_ptr())  # fmt: skip
    else:
        assert element is E2M1
        words = (noise.seed, noise.seed >> 32, int(noise.step), noise.layer, noise.tensor)
        key = (C.c_uint32 * 5)(*(w & 0xFFFFFFFF for w in words))
        lib.karui_lowbit_stochastic(matrix.data_ptr(), *matrix.shape, *tile, enc.data_ptr(), dec.data_ptr(), int(down), key,
                                    out.data_ptr())  # fmt: skip
    return out.t() if down else out


def scaled_codes(
    x: torch.Tensor, encode_scale: torch.Tensor, decode_scale: torch.Tensor, element: Element
) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes in the element's float8 dtype, values fp32) of `x` [M, K] under one scale (one element each), E4M3 or E5M2."""
    assert element.dtype is not None
    lib = _serving(x)
    if lib is None:
        codes = (x.float() * encode_scale.reshape(())).clamp(-element.max, element.max).to(element.dtype)
        return codes, codes.float() * decode_scale.reshape(())
    matrix, down, _ = _as_it_lies(x, (1, 1))
    codes, out = torch.empty_like(matrix, dtype=element.dtype), torch.empty_like(matrix)
    lib.karui_lowbit_codes(matrix.data_ptr(), matrix.numel(), float(encode_scale), float(decode_scale), _ELEMENT[element.name],
                           codes.data_ptr(), out.data_ptr())  # fmt: skip
    return (codes.t(), out.t()) if down else (codes, out)


def exact_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A [M, K] times B [N, K] transposed, fp32 [M, N]; both fp32 with values that are bf16 numbers.

    Every product is exact and sums are in fp32; their order differs between the native kernel, which serves CPUs with AVX512-BF16
    or AMX (twice and four times torch's rate for fp32 there), and torch.
    """
    if _serving(a) is None or not b.numel() or not train.has_bf16():
        return a @ b.t()
    out = torch.empty(a.shape[0], b.shape[0])
    train.product(a, b.t(), out, plus=False, operands="bf16")
    return out


def hadamard_blocks(x: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """`x` [M, K], K a multiple of 16, times diag(signs) Sylvester16 / 4 in pieces of 16 along K; fp32.

    Butterflies of strides 1, 2, 4, 8: four sums in a fixed order, so the bits are the same wherever it runs.
    """
    lib = _serving(x)
    if lib is None:
        return _butterflies(x.float() * signs.to(x.device).repeat(x.shape[1] // 16)) * 0.25
    matrix, down, _ = _as_it_lies(x, (1, 1))
    out = torch.empty_like(matrix)
    lib.karui_lowbit_hadamard(matrix.data_ptr(), *matrix.shape, int(down), signs.data_ptr(), out.data_ptr())
    return out.t() if down else out


def _butterflies(x: torch.Tensor) -> torch.Tensor:
    for stride in (1, 2, 4, 8):
        pairs = x.reshape(-1, 2, stride)
        x = torch.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], 1).reshape(x.shape)
    return x


def _as_it_lies(x: torch.Tensor, tile: tuple[int, int]) -> tuple[torch.Tensor, bool, tuple[int, int]]:
    """(row-major fp32 matrix, whether it is the transpose of `x`, the tile on it)."""
    if not x.is_contiguous() and x.t().is_contiguous():
        return x.t().float(), True, (tile[1], tile[0])
    return x.float().contiguous(), False, tile


def _serving(x: torch.Tensor) -> Any:
    return _library() if x.device.type == "cpu" and x.numel() else None


@cache
def _library() -> Any:
    """The compiled kernels, or None (logged once) where they cannot be compiled."""
    try:
        lib = C.CDLL(str(build(chosen_isa(), LOWBIT)))
    except (KaruiError, OSError) as error:
        logger.warning("low-precision emulation runs in plain torch, several times slower: %s", error)
        return None
    p, n, i, f = C.c_void_p, C.c_int64, C.c_int, C.c_float
    for name, arguments in (
        ("nearest", [p, n, n, n, n, p, p, i, p]),
        ("stochastic", [p, n, n, n, n, p, p, i, p, p]),
        ("codes", [p, n, f, f, i, p, p]),
        ("amax", [p, n, n, n, n, p]),
        ("hadamard", [p, n, n, i, p, p]),
    ):
        function = getattr(lib, f"karui_lowbit_{name}")
        function.restype, function.argtypes = None, arguments
    return lib
