"""Weights in the layout of weights.h: codes and scales are permuted and padded, never changed.

What becomes of a weight:
    int 2, 3, 4 bits (group, channel, tensor; symmetric or affine)   2, 3, 4 bits, integer products
    int 5, 6 bits; 7, 8 bits                                         6; 8 bits, integer products
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
from dataclasses import dataclass, replace

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
              else _laid_out(library, _codes(name, weight), activation_bits, arena))
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


@dataclass(frozen=True)
class _Codes:
    """A quantized matrix [n, k] before it is laid out: unsigned codes, a scale (and zero) per row and group [n, G], and the
    middle of the codes, which is their zero where there is none; value = (code - zero) * scale, or table[code] * scale."""

    kind: int
    bits: int
    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    middle: int
    group: int
    per_token: bool
    table: torch.Tensor | None

    def rows(self, index: torch.Tensor) -> _Codes:
        return replace(self, codes=self.codes[index].contiguous(), scale=self.scale[index],
                       zero=None if self.zero is None else self.zero[index])


def _codes(name: str, q: QTensor) -> _Codes:
    spec, (n, k) = q.spec, q.shape
    table, middle, scale = None, 0, q.scale
    if spec.format == "nf4":
        from karui.kernels.quantize.nf4 import CODEBOOK, block_absmax

        kind, bits, offset = NF4, 4, 0
        scale, table = block_absmax(q), torch.tensor(CODEBOOK, dtype=torch.float32)
    elif spec.format in ("mxfp4", "nvfp4"):
        kind, bits, offset, middle = E2M1, 4, 0, _MIDDLE
        scale, halves = _half_scale(q), [*_HALVES, *(-x for x in _HALVES)]
        table = torch.tensor(halves, dtype=torch.float32)
    else:
        kind = QUANTIZED
        bits = 2 if spec.format != "int" else spec.bits if spec.bits <= 4 else 6 if spec.bits <= 6 else 8
        offset = 1 if spec.format != "int" else 0 if q.zero is not None else 2 ** (bits - 1)
        middle = offset if q.zero is None else 2 ** (spec.bits - 1)
    if not torch.isfinite(scale.float()).all():
        raise CorruptError(f"{name} has NaN or infinite scales; the file is damaged or was never filled.")
    codes = (q.codes.reshape(n, k).to(torch.int16) + offset).to(torch.uint8).contiguous()
    scale = scale.expand(n, -1) if scale.shape[0] == 1 else scale
    scale = scale if scale.dtype == torch.float16 else scale.float()
    zero = None if q.zero is None else q.zero.expand(n, -1)
    return _Codes(kind, bits, codes, scale, zero, middle, spec.group_size or 0, spec.activation_bits == 8, table)


def _laid_out(library: Library, c: _Codes, activation_bits: int, arena: Arena) -> Packed:
    n, k = c.codes.shape
    k_padded = _up(k, math.lcm(CHUNK, c.group) if c.group else CHUNK)
    group = c.group or k_padded
    scales = arena.take(_by_panel(c.scale, n, k_padded // group))
    zeros = None if c.zero is None else arena.take(_by_panel(c.zero, n, k_padded // group))
    packed = arena.zeros(_up(n, PANEL) * k_padded * c.bits // 8, torch.uint8)
    library.pack(address(c.codes), n, k, k_padded, c.bits, address(packed))
    block = (group if group % CHUNK == 0 else math.gcd(group, CHUNK)) if c.per_token else math.gcd(group, CHUNK)
    linear = Linear(kind=c.kind, bits=c.bits, n=n, k=k, k_padded=k_padded, group=group, block=block, per_token=int(c.per_token),
                    act_bits=16 if c.kind == NF4 else activation_bits, scale_fp32=int(scales.dtype == torch.float32),
                    zero=c.middle, codes=address(packed), scales=address(scales), zeros=address(zeros), table=address(c.table))
    return Packed(linear, tuple(t for t in (packed, scales, zeros, c.table) if t is not None))


@dataclass(frozen=True)
class Across:
    """The two halves of latent attention's kv_b_proj, W_UK [A * rank, nope] across and W_UV [A * value, rank], each head's rows
    padded to a multiple of 16; and what the codes of W_UK lack: `scale` and `shift` [A, G, nope] or None, of G groups of `group`
    outputs."""

    fold: Packed
    unfold: Packed
    group: int
    scale: torch.Tensor | None
    shift: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        beside = sum(t.numel() * 4 for t in (self.scale, self.shift) if t is not None)
        return self.fold.nbytes + self.unfold.nbytes + beside


def pack_across(library: Library, name: str, weight: QTensor | torch.Tensor, heads: int, nope: int, activation_bits: int,
                arena: Arena) -> Across:
    """W_UK and W_UV of `weight` [A * (nope + value), rank]: the same codes, of W_UK those of a head transposed."""
    if isinstance(weight, QTensor) and not _fits(weight):
        log.info("%s: %s has no kernel of its own; kept as fp32", name, weight.spec)
        weight = weight.dequantize()
    (out, rank), each = weight.shape, weight.shape[0] // heads
    value = each - nope
    rows = torch.arange(out).view(heads, each)
    # rows of the padding repeat the last one; nothing reads what they give
    down = torch.arange(_up(rank, PANEL)).clamp_max(rank - 1)
    values = rows[:, nope:][:, torch.arange(_up(value, PANEL)).clamp_max(value - 1)].flatten()

    def across(x: torch.Tensor) -> torch.Tensor:
        return x[rows[:, :nope].flatten()].view(heads, nope, rank).transpose(1, 2)[:, down].reshape(-1, nope).contiguous()

    if isinstance(weight, torch.Tensor):
        return Across(_dense(name, across(weight), arena), _dense(name, weight[values], arena), rank, None, None)
    c = _codes(name, weight)
    bits = 16 if c.per_token else activation_bits  # such a grid rounds the latent, see `Latent.rounded`
    scale = c.scale.float()[rows[:, :nope]].transpose(1, 2).contiguous()
    shift = None if c.zero is None else (c.zero.float()[rows[:, :nope]].transpose(1, 2) - c.middle).contiguous()
    codes = across(c.codes)
    ones = torch.ones(len(codes), 1, dtype=torch.float16)
    bare = replace(c, codes=codes, scale=ones, zero=None, group=0, per_token=False)
    fold, unfold = (_laid_out(library, part, bits, arena) for part in (bare, c.rows(values)))
    return Across(fold, unfold, c.group or rank, scale, shift)


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
