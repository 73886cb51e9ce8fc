"""y = x W^T for a W kept as 2-, 4- or 8-bit codes: decoded in registers on its way to the tensor cores, never written out.

    pack_weight(qtensor)           int 2, 4, 8 bits (symmetric, affine), ternary, binary, nf4, mxfp4; any scales
    gemm_weight(x, w)              the product, for a few rows (decoding) up to many
    gemm_weight_dgrad(dy, w)       dy W, for training on a frozen base (QLoRA, arXiv 2305.14314)
    dequantize_weight(w, dtype)    W itself, for products large enough that cuBLAS on a decoded copy wins
    gemm_int8(x, w)                W8A8 and ternary x int8: x quantized per row, products exact in int32
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from karui.configs.errors import KaruiError, UnsupportedError
from karui.kernels.gemm_weight import reference
from karui.kernels.pack import pack
from karui.kernels.qtensor import QTensor
from karui.kernels.quantize.elements import E2M1, values
from karui.kernels.quantize.microscaling import e8m0_value
from karui.kernels.quantize.nf4 import block_absmax
from karui.kernels.triton_support import Backend, use_triton

# From this many rows on decoding W once and calling cuBLAS costs less than decoding it in every row of tiles.
DEQUANTIZE_ROWS = 512


@dataclass(frozen=True)
class PackedWeight:
    """W [N, K] as codes, value = (code - zero) * scale, or table[code] * scale (nf4, mxfp4).

    data: uint8 [N, K * bits / 8], lowest bits first (4 bits with high_first: the first of a pair in the high half).
    scale: fp32, bf16 or fp16 [N, G]; zero: int32-valued uint8 [N, G] or None (then `middle`).
    """

    data: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    table: torch.Tensor | None
    bits: int
    middle: int
    shape: tuple[int, int]
    high_first: bool = False

    @property
    def group(self) -> int:
        return self.shape[1] // self.scale.shape[1]

    def to(self, device: torch.device | str) -> PackedWeight:
        held = {name: getattr(self, name) for name in ("data", "scale", "zero", "table")}
        moved: dict[str, Any] = {name: None if t is None else t.to(device) for name, t in held.items()}
        return replace(self, **moved)

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.data, self.scale, self.zero) if t is not None)


def pack_weight(q: QTensor) -> PackedWeight:
    """A matrix [N, K] of the grids named above as `PackedWeight`.

    Raises:
        UnsupportedError: another grid or width, groups below 32, K no multiple of what fills a byte.
    """
    bits = {"ternary": 2, "binary": 2, "nf4": 4, "mxfp4": 4}.get(q.spec.format, q.spec.bits)
    if q.spec.format not in ("int", "ternary", "binary", "nf4", "mxfp4") or bits not in (2, 4, 8) or len(q.shape) != 2:
        raise UnsupportedError(
            f"no packed kernel for {q.spec} of shape {q.shape}; kernels take int 2, 4, 8 bits, ternary, binary, nf4, mxfp4."
        )
    n, k = q.shape
    if k % (8 // bits):
        raise UnsupportedError(f"{q.spec}: an input width of {k} does not fill whole bytes of {bits}-bit codes.")
    table, middle = None, 0
    if q.spec.format == "nf4":
        from karui.kernels.quantize.nf4 import CODEBOOK

        scale, codes = block_absmax(q), q.codes
        table = torch.tensor(CODEBOOK, device=codes.device)
    elif q.spec.format == "mxfp4":
        scale, codes, table = e8m0_value(q.scale.view(torch.uint8)), q.codes, values(E2M1).to(q.codes.device)
    else:
        scale = q.scale
        middle = 0 if q.zero is not None else 1 if q.spec.format in ("ternary", "binary") else 2 ** (bits - 1)
        codes = (q.codes.to(torch.int16) + middle).to(torch.uint8)
    scale = scale.expand(n, -1) if scale.shape[0] == 1 else scale
    group = k // scale.shape[1]
    if group < k and (group < 32 or group & (group - 1)):
        raise UnsupportedError(f"{q.spec}: groups of {group}; the kernels take powers of two from 32 on, or whole rows.")
    zero = None if q.zero is None else q.zero.contiguous()
    return PackedWeight(pack(codes, bits).contiguous(), scale.contiguous(), zero, table, bits, middle, (n, k))


def gemm_weight(
    x: torch.Tensor, w: PackedWeight, bias: torch.Tensor | None = None, backend: Backend = "auto"
) -> torch.Tensor:
    """x [..., K] (bf16, fp16, fp32) times W^T, plus bias [N]: [..., N] in x's dtype."""
    _check(x, w.shape[1], w, "gemm_weight")
    if use_triton(backend, x.device, "gemm_weight", refused=_refused(x)):
        from karui.kernels.gemm_weight import triton

        rows = x.reshape(-1, w.shape[1])
        if backend == "auto" and rows.shape[0] >= DEQUANTIZE_ROWS:
            return torch.nn.functional.linear(x, triton.dequantize(w, x.dtype), bias)
        return triton.gemm(rows, w, bias).view(*x.shape[:-1], w.shape[0])
    return reference.gemm_weight(x, w, bias)


def gemm_weight_dgrad(dy: torch.Tensor, w: PackedWeight, backend: Backend = "auto") -> torch.Tensor:
    """dy [..., N] times W: [..., K] in dy's dtype."""
    _check(dy, w.shape[0], w, "gemm_weight_dgrad")
    if use_triton(backend, dy.device, "gemm_weight_dgrad", refused=_refused(dy)):
        from karui.kernels.gemm_weight import triton

        rows = dy.reshape(-1, w.shape[0])
        if backend == "auto" and rows.shape[0] >= DEQUANTIZE_ROWS:
            return dy @ triton.dequantize(w, dy.dtype)
        return triton.dgrad(rows, w).view(*dy.shape[:-1], w.shape[1])
    return dy @ reference.dequantize(w, dy.dtype)


def dequantize_weight(w: PackedWeight, dtype: torch.dtype = torch.bfloat16, backend: Backend = "auto") -> torch.Tensor:
    """W [N, K], computed in fp32 and cast."""
    if use_triton(backend, w.data.device, "dequantize_weight"):
        from karui.kernels.gemm_weight import triton

        return triton.dequantize(w, dtype)
    return reference.dequantize(w, dtype)


def gemm_int8(x: torch.Tensor, w: PackedWeight, bias: torch.Tensor | None = None, backend: Backend = "auto") -> torch.Tensor:
    """As `gemm_weight` with x rounded to int8 per row first (scale absmax / 127); W symmetric, 2 or 8 bits, scales per row.

    Raises:
        UnsupportedError: groups, zero points, 4-bit or nf4 weights.
    """
    _check(x, w.shape[1], w, "gemm_int8")
    if w.bits == 4 or w.zero is not None or w.table is not None or w.scale.shape[1] != 1:
        raise UnsupportedError("gemm_int8 takes symmetric 8-bit or ternary weights with one scale per row; use gemm_weight.")
    if use_triton(backend, x.device, "gemm_int8", refused=_refused(x)):
        from karui.kernels.gemm_weight import triton

        return triton.gemm_int8(x.reshape(-1, w.shape[1]), w, bias).view(*x.shape[:-1], w.shape[0])
    return reference.gemm_int8(x, w, bias)


def _check(x: torch.Tensor, width: int, w: PackedWeight, op: str) -> None:
    if x.shape[-1] != width:
        raise KaruiError(f"{op}: expected a last dimension of {width} for a weight {w.shape}, got shape {tuple(x.shape)}.")


def _refused(x: torch.Tensor) -> str:
    return "" if x.dtype in (torch.bfloat16, torch.float16, torch.float32) else f"dtype {x.dtype}"
