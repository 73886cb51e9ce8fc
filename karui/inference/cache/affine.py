"""Affine codes of 2 or 4 bits in groups of neighbours, packed into bytes: what the int4 and KIVI caches keep.

A group of values x has min and step = (max - min) / (2^bits - 1), both rounded to fp16 first, and the codes
round((x - min) / step); a row of n values is stored as its codes, the first in the lowest bits of its byte, then the
groups' steps, then their mins.
"""

from __future__ import annotations

import math

import torch

from karui.configs.errors import UnsupportedError
from karui.kernels.pack import pack, unpack

GROUP = 32
LARGEST = 65504.0
"""Of fp16; larger values are cut to it."""


def group_of(width: int) -> int:
    """Neighbours that share a step in a row of `width` values: 32, or the largest power of two in `width` below that.

    Raises:
        UnsupportedError: it would be less than 8, where steps and mins would be most of the bytes.
    """
    group = math.gcd(width, GROUP)
    if group < 8:
        raise UnsupportedError(f"caches of 2 and 4 bits need heads of a multiple of 8 dimensions, not {width}; use int8 or "
                               "float16.")
    return group


def row_bytes(width: int, bits: int, group: int) -> int:
    """Bytes of a row of `width` values."""
    return width * bits // 8 + width // group * 4


def encode(x: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """x [..., n] -> uint8 [..., row_bytes(n, bits, group)]; NaN stays NaN when decoded."""
    top = 2**bits - 1
    x = x.float().clamp(-LARGEST, LARGEST).unflatten(-1, (-1, group))
    low = x.amin(-1).half()
    step = ((x.amax(-1) - low.float()) / top).half()
    codes = (x - low[..., None].float()) / step[..., None].float()
    codes = torch.where(step[..., None] == 0, 0.0, codes).round().clamp(0, top).nan_to_num(0.0).to(torch.uint8)
    return torch.cat([pack(codes.flatten(-2), bits), step.contiguous().view(torch.uint8), low.contiguous().view(torch.uint8)], -1)


def decode(data: torch.Tensor, width: int, bits: int, group: int, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of `encode`: [..., width] in `dtype`, computed as code * step + min in fp32."""
    count, groups = width * bits // 8, width // group
    codes = unpack(data[..., :count], bits, width).unflatten(-1, (groups, group))
    step, low = (data[..., at:at + 2 * groups].contiguous().view(torch.float16).float() for at in (count, count + 2 * groups))
    return (codes * step[..., None] + low[..., None]).flatten(-2).to(dtype)
