"""NF4 and its double quantization (QLoRA, arXiv 2305.14314, sections 2 and 3), bit-compatible with bitsandbytes.

    code  = nearest entry of the codebook to w / absmax of its block of 64 (the lower one on a tie)
    nf4dq: absmax - mean(absmax) in blocks of 256, each divided by its own absmax, stored as the nearest entry of the
           8-bit dynamic map (8-bit optimizers, arXiv 2110.02861, section 2)

As in bitsandbytes the 4-bit codes come from the exact absmax, and only the stored absmax is rounded.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from karui.configs.quantspec import QuantSpec
from karui.kernels.qtensor import QTensor
from karui.kernels.quantize.grid import grouped, inverse, stored_scale

ABSMAX_BLOCK = 256
CODEBOOK = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


def encode(rows: torch.Tensor, spec: QuantSpec) -> dict[str, Any]:
    """[R, in] fp32 -> codes uint8 0..15, scale = absmax [R, G] (nf4dq: its 8-bit codes), and the double quantization's parts."""
    x = grouped(rows, spec)
    absmax = x.abs().amax(-1)
    scale = absmax if spec.double_quant else stored_scale(absmax, absmax > 0, spec)
    codes = nearest_entry(x / inverse(scale).unsqueeze(-1), codebook(x.device)).reshape(rows.shape)
    if not spec.double_quant:
        return {"codes": codes, "scale": scale, "zero": None}
    mean = absmax.mean()
    flat = torch.nn.functional.pad((absmax - mean).flatten(), (0, -absmax.numel() % ABSMAX_BLOCK)).view(-1, ABSMAX_BLOCK)
    block = flat.abs().amax(-1)
    entries = nearest_entry(flat / inverse(block).unsqueeze(-1), _dynamic_map_on(x.device)).flatten()
    stored = entries[: absmax.numel()].view_as(absmax)
    return {"codes": codes, "scale": stored, "zero": None, "extra": {"absmax_scale": block, "absmax_mean": mean.reshape(1)}}


def decode(q: QTensor) -> torch.Tensor:
    """[R, in] fp32 values."""
    x = grouped(codebook(q.codes.device)[q.codes.reshape(-1, q.shape[-1]).int()], q.spec)
    return (x * block_absmax(q).unsqueeze(-1)).reshape(-1, q.shape[-1])


def block_absmax(q: QTensor) -> torch.Tensor:
    """The fp32 absmax [R, G] that `q` stores, double quantization undone."""
    if not q.spec.double_quant:
        return q.scale.float()
    assert q.extra is not None
    block = q.extra["absmax_scale"].repeat_interleave(ABSMAX_BLOCK)[: q.scale.numel()].view_as(q.scale)
    return _dynamic_map_on(q.scale.device)[q.scale.int()] * block + q.extra["absmax_mean"]


@cache
def codebook(device: torch.device) -> torch.Tensor:
    """`CODEBOOK` fp32 [16] on a device, copied there once: a copy makes the host wait."""
    return torch.tensor(CODEBOOK, device=device)


@cache
def _dynamic_map_on(device: torch.device) -> torch.Tensor:
    return dynamic_map().to(device)


def nearest_entry(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Index (uint8) of the sorted table's entry nearest to each x; the lower entry on a tie."""
    return torch.bucketize(x, (table[1:] + table[:-1]) / 2, right=False).to(torch.uint8)


@cache
def dynamic_map() -> torch.Tensor:
    """The 256 sorted values of the signed 8-bit dynamic data type: a sign, a unary exponent in tens, a linear fraction."""
    values = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1.0, 2**exponent + 1, dtype=torch.float32)
        means = 10.0 ** (exponent - 6) * ((edges[:-1] + edges[1:]) / 2)
        values += means.tolist() + (-means).tolist()
    return torch.tensor(sorted(values), dtype=torch.float32)
