"""Weights in the layout of weights.h: codes and scales are permuted and padded, never changed.

What becomes of a weight:
    int 2, 3, 4 bits (group, channel, tensor; symmetric or affine)   2, 3, 4 bits, integer products
    int 5 to 8 bits                                                  8 bits, integer products
    ternary, binary                                                  2 bits, integer products
    nf4, nf4dq                                                       4 bits and a table of 16 values, float products
    mxfp4, nvfp4                                                     4 bits, integer products: E2M1 is whole numbers of halves
    fp16, bf16, fp32 tensors                                         kept, float products
    anything else, and groups that are no multiple of 16             dequantized to fp32 (exact), float products; logged
"""

from __future__ import annotations

import ctypes
import logging
import math
from dataclasses import dataclass

import torch

from karui.configs.errors import CorruptError, KaruiError
from karui.kernels.native.arena import Arena
from karui.kernels.native.library import BF16, E2M1, FP16, FP32, NF4, QUANTIZED, Library, Linear, address
from karui.kernels.qtensor import QTensor

log = logging.getLogger(__name__)

PANEL, CHUNK = 16, 32
_HALVES, _MIDDLE = (0, 1, 2, 3, 4, 6, 8, 12), 12  # of E2M1's positive codes; what simd.h adds to them where codes are unsigned
_DENSE = {torch.float32: FP32, torch.float16: FP16, torch.bfloat16: BF16}


@dataclass(frozen=True)
class Packed:
    """A packed matrix: the C structure, and the tensors it points into; `elsewhere`: bytes of those that this no longer holds."""

    linear: Linear
    tensors: tuple[torch.Tensor, ...]
    elsewhere: int = 0

    @property
    def nbytes(self) -> int:
        return self.elsewhere + sum(t.numel() * t.element_size() for t in self.tensors)


def pack(library: Library, name: str, weight: QTensor | torch.Tensor, bias: torch.Tensor | None = None,
         activation_bits: int = 8, arena: Arena | None = None) -> Packed:
    """`weight` [out, in] (and bias [out]) ready for the kernels.

    Args:
        activation_bits: 8: activations are quantized to int8 at run time, one scale per block of 32 inputs (16 if groups have
            16), or one per token when the weight's own spec says `a8`. 16: activations stay fp32, codes are dequantized on the
            fly.
        arena: memory for the packed tensors, so that the matrices of a model lie in the order they are read; its own when None.

    Raises `CorruptError` naming the tensor when scales or values are NaN or infinite.
    """
    if activation_bits not in (8, 16):
        raise KaruiError(f"activation_bits must be 8 or 16, got {activation_bits}.")
    arena = arena or Arena()
    extra: list[torch.Tensor] = []
    if bias is not None:
        extra.append(arena.take(bias.detach().float()))
    if isinstance(weight, QTensor) and not _fits(weight):
        log.info("%s: %s has no kernel of its own; kept as fp32", name, weight.spec)
        weight = weight.dequantize()
    packed = (_dense(name, weight, arena) if isinstance(weight, torch.Tensor)
              else _quantized(library, name, weight, activation_bits, arena))
    if bias is not None:
        packed.linear.bias = address(extra[0])
    return Packed(packed.linear, (*packed.tensors, *extra))


def _fits(q: QTensor) -> bool:
    group = q.spec.group_size
    known = q.spec.format in ("int", "ternary", "binary", "nf4", "mxfp4", "nvfp4")
    return known and len(q.shape) == 2 and (group is None or group % 16 == 0)


def _dense(name: str, w: torch.Tensor, arena: Arena) -> Packed:
    w = w.detach()
    if w.dtype not in _DENSE:
        w = w.float()
    if not torch.isfinite(w).all():
        raise CorruptError(f"{name} holds NaN or infinity; the file is damaged or was never filled.")
    n, k = w.shape
    n_padded, k_padded = _up(n, PANEL), _up(k, CHUNK)
    padded = torch.zeros(n_padded, k_padded, dtype=w.dtype)
    padded[:n, :k] = w
    codes = arena.take(padded.view(-1, PANEL, k_padded).transpose(1, 2))
    linear = Linear(kind=_DENSE[w.dtype], bits=8 * w.element_size(), n=n, k=k, k_padded=k_padded, group=k_padded, block=CHUNK,
                    act_bits=16, codes=address(codes))
    return Packed(linear, (codes,))


def _quantized(library: Library, name: str, q: QTensor, activation_bits: int, arena: Arena) -> Packed:
    spec, (n, k) = q.spec, q.shape
    group = spec.group_size or 0
    k_padded = _up(k, math.lcm(CHUNK, group) if group else CHUNK)
    table: tuple[torch.Tensor, ...] = ()
    scale = q.scale
    if spec.format == "nf4":
        from karui.kernels.quantize.nf4 import CODEBOOK, block_absmax

        kind, bits, offset = NF4, 4, 0
        scale, table = block_absmax(q), (torch.tensor(CODEBOOK, dtype=torch.float32),)
    elif spec.format in ("mxfp4", "nvfp4"):
        kind, bits, offset = E2M1, 4, 0
        scale, halves = _half_scale(q), [*_HALVES, *(-x for x in _HALVES)]
        table = (torch.tensor(halves, dtype=torch.float32),)
    else:
        kind = QUANTIZED
        bits = 2 if spec.format != "int" else spec.bits if spec.bits <= 4 else 8
        offset = 1 if spec.format != "int" else 0 if q.zero is not None else 2 ** (bits - 1)
    if not torch.isfinite(scale.float()).all():
        raise CorruptError(f"{name} has NaN or infinite scales; the file is damaged or was never filled.")
    codes = (q.codes.reshape(n, k).to(torch.int16) + offset).to(torch.uint8).contiguous()
    group = group or k_padded
    scale = scale.expand(n, -1) if scale.shape[0] == 1 else scale
    scale = scale if scale.dtype == torch.float16 else scale.float()
    scales = arena.take(_by_panel(scale, n, k_padded // group))
    zeros = None if q.zero is None else arena.take(_by_panel(q.zero.expand(n, -1), n, k_padded // group))
    packed = arena.zeros(_up(n, PANEL) * k_padded * bits // 8, torch.uint8)
    library.pack(address(codes), n, k, k_padded, bits, address(packed))
    per_token = spec.activation_bits == 8
    block = (group if group % CHUNK == 0 else math.gcd(group, CHUNK)) if per_token else math.gcd(group, CHUNK)
    linear = Linear(kind=kind, bits=bits, n=n, k=k, k_padded=k_padded, group=group, block=block, per_token=int(per_token),
                    act_bits=16 if kind == NF4 else activation_bits, scale_fp32=int(scales.dtype == torch.float32),
                    zero=_MIDDLE if kind == E2M1 else offset,
                    codes=address(packed), scales=address(scales), zeros=address(zeros),
                    table=address(table[0]) if table else None)
    return Packed(linear, (packed, scales, *(() if zeros is None else (zeros,)), *table))


def _half_scale(q: QTensor) -> torch.Tensor:
    """Half of each block's scale [n, G], fp32 or, where that loses nothing, fp16: the factor of a code's number of halves."""
    if q.spec.format == "mxfp4":
        from karui.kernels.quantize.microscaling import e8m0_value

        scale = e8m0_value(q.scale.view(torch.uint8)) / 2
        return scale.half() if torch.equal(scale.half().float(), scale) else scale
    assert q.extra is not None
    return q.scale.float() / q.extra["global_scale"].float() / 2


def _by_panel(x: torch.Tensor, n: int, groups: int) -> torch.Tensor:
    """[n, G] -> [panel, groups, 16], zeros in the padding."""
    padded = torch.zeros(_up(n, PANEL), groups, dtype=x.dtype)
    padded[:n, : x.shape[1]] = x
    return padded.view(-1, PANEL, groups).transpose(1, 2)


def _up(a: int, b: int) -> int:
    return (a + b - 1) // b * b


def linear(library: Library, packed: Packed, x: torch.Tensor) -> torch.Tensor:
    """x [rows, in] fp32 -> [rows, out] fp32 on the calling thread: one packed matrix alone, for tests and other callers."""
    x = x.float().contiguous()
    y = torch.empty(x.shape[0], packed.linear.n)
    library.linear(ctypes.byref(packed.linear), address(x), x.shape[0], address(y))
    return y
