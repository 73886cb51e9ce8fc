"""Plain torch: unpack, dequantize in fp32, multiply."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from karui.kernels.pack import unpack
from karui.kernels.quantize.elements import E2M1, decode
from karui.kernels.quantize.microscaling import e8m0_value
from karui.kernels.quantize.nf4 import codebook

if TYPE_CHECKING:
    from karui.kernels.gemm_grouped import Groups
    from karui.kernels.gemm_weight import PackedWeight


def codes(w: PackedWeight) -> torch.Tensor:
    """uint8 [N, K]."""
    data = ((w.data >> 4) | (w.data << 4)) if w.high_first else w.data
    found = unpack(data, w.bits, w.shape[1])
    if not w.span:
        return found
    n, k = found.shape
    return found.view(n, k // w.span, -1, 32 // w.bits).transpose(2, 3).reshape(n, k)


def dequantize(w: PackedWeight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """W [N, K]."""
    c, scale = codes(w), e8m0_value(w.scale) if w.scale.dtype == torch.uint8 else w.scale.float()
    if w.form == "int":
        zero = w.middle if w.zero is None else w.zero.float().unsqueeze(-1)
        value = c.float().view(*scale.shape, -1) - zero
    elif w.form == "nf4":
        value = codebook(c.device)[c.int()].view(*scale.shape, -1)
    elif w.form == "e2m1":
        value = decode(c, E2M1).view(*scale.shape, -1)
    elif w.form == "e4m3":
        value = c.view(torch.float8_e4m3fn).float().view(*scale.shape, -1)
    else:
        assert w.divisor is not None
        value, scale = decode(c, E2M1).view(*scale.shape, -1), scale / w.divisor.unsqueeze(-1)
    return (value * scale.unsqueeze(-1)).view(w.shape).to(dtype)


def gemm_weight(x: torch.Tensor, w: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + bias in x's dtype."""
    return torch.nn.functional.linear(x, dequantize(w, x.dtype), bias)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(int8-valued fp32 codes, fp32 scales [..., 1]) per row: scale absmax / 127, at least 1e-12 / 127."""
    scale = x.float().abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127
    return (x.float() / scale).round(), scale


def on_int8_rows(x: torch.Tensor) -> torch.Tensor:
    """x on the grid of `quantize_rows`, in x's dtype."""
    rows, scale = quantize_rows(x)
    return (rows * scale).to(x.dtype)


def gemm_int8(x: torch.Tensor, w: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Integer products in float64, exact; scales in fp32."""
    rows, scale = quantize_rows(x)
    whole = (rows.double() @ (codes(w).double() - w.middle).t()).float()
    y = whole * scale * w.scale.float().view(-1)
    return (y if bias is None else y + bias.float()).to(x.dtype)


def gemm_float8(x: torch.Tensor, w: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Products of E4M3 codes in float64, exact; scales in fp32."""
    scale = x.float().abs().amax(-1, keepdim=True).clamp_min(1e-12) / 448
    rows = (x.float() / scale).to(torch.float8_e4m3fn)
    whole = (rows.double() @ codes(w).view(torch.float8_e4m3fn).double().t()).float()
    y = whole * scale * w.scale.float().view(-1)
    return (y if bias is None else y + bias.float()).to(x.dtype)


def by_expert(product: Callable[..., torch.Tensor], x: torch.Tensor, w: PackedWeight, bias: torch.Tensor | None,
              groups: Groups | None) -> torch.Tensor:  # fmt: skip
    """`product`, expert by expert where there are `groups`."""
    if groups is None:
        return product(x, w, bias)
    bounds, rows = groups.offsets.tolist(), torch.arange(w.shape[0], device=x.device).view(groups.num_experts, -1)
    return torch.cat([product(x[s:e], w.rows(own)) for s, e, own in zip(bounds, bounds[1:], rows)])
