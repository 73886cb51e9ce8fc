"""Plain torch: unpack, dequantize in fp32, multiply."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from karui.kernels.pack import unpack

if TYPE_CHECKING:
    from karui.kernels.gemm_weight import PackedWeight


def codes(w: PackedWeight) -> torch.Tensor:
    """uint8 [N, K]."""
    data = ((w.data >> 4) | (w.data << 4)) if w.high_first else w.data
    return unpack(data, w.bits, w.shape[1])


def dequantize(w: PackedWeight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """W [N, K]."""
    c = codes(w)
    if w.table is not None:
        value = w.table[c.int()].view(*w.scale.shape, -1)
    else:
        zero = w.middle if w.zero is None else w.zero.float().unsqueeze(-1)
        value = c.float().view(*w.scale.shape, -1) - zero
    return (value * w.scale.float().unsqueeze(-1)).view(w.shape).to(dtype)


def gemm_weight(x: torch.Tensor, w: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + bias in x's dtype."""
    return torch.nn.functional.linear(x, dequantize(w, x.dtype), bias)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(int8-valued fp32 codes, fp32 scales [..., 1]) per row: scale absmax / 127, at least 1e-12 / 127."""
    scale = x.float().abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127
    return (x.float() / scale).round(), scale


def gemm_int8(x: torch.Tensor, w: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Integer products in float64, exact; scales in fp32."""
    rows, scale = quantize_rows(x)
    whole = (rows.double() @ (codes(w).double() - w.middle).t()).float()
    y = whole * scale * w.scale.float().view(-1)
    return (y if bias is None else y + bias.float()).to(x.dtype)
