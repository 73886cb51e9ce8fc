"""Dense bit packing of codes along the last dimension.

Element 0 is in the lowest bits of byte 0, without padding between elements: the little-endian bit stream that GGUF's and
compressed-tensors' 2-, 4- and 8-bit layouts also are. 3 bits: 8 elements in 3 bytes.
"""

from __future__ import annotations

import math

import torch

from karui.configs.errors import KaruiError
from karui.kernels.triton_support import Backend, use_triton


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes [..., n] uint8 below 2**bits into [..., ceil(n * bits / 8)] uint8; the last byte is filled with zeros.

    Raises:
        KaruiError: not uint8, bits outside 1..8, or a code that needs more bits.
    """
    _check_bits(bits)
    if codes.dtype != torch.uint8:
        raise KaruiError(f"pack takes uint8 codes, got {codes.dtype}; subtract the smallest code and cast first.")
    if bits == 8:
        return codes.clone()
    if codes.numel() and int(codes.max()) >= 2**bits:
        raise KaruiError(f"code {int(codes.max())} does not fit in {bits} bits.")
    if 8 % bits == 0:
        cells = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % (8 // bits))).unflatten(-1, (-1, 8 // bits))
        out = cells[..., 0].clone()
        for i in range(1, 8 // bits):
            out |= cells[..., i] << (i * bits)
        return out
    period = 8 // math.gcd(8, bits)  # elements after which the stream is byte-aligned again
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % period))
    cells = padded.unflatten(-1, (-1, period)).to(torch.int64)
    word = (cells << (torch.arange(period, device=codes.device) * bits)).sum(-1)
    num_bytes = period * bits // 8
    out = (word.unsqueeze(-1) >> (torch.arange(num_bytes, device=codes.device) * 8)) & 0xFF
    return out.flatten(-2)[..., : packed_width(codes.shape[-1], bits)].to(torch.uint8).contiguous()


def unpack(packed: torch.Tensor, bits: int, n: int) -> torch.Tensor:
    """The inverse of `pack`: [..., packed_width(n, bits)] uint8 -> codes [..., n] uint8.

    Raises:
        KaruiError: the packed width is not that of n codes.
    """
    _check_bits(bits)
    if packed.shape[-1] != packed_width(n, bits):
        raise KaruiError(f"{n} codes of {bits} bits take {packed_width(n, bits)} bytes, got {packed.shape[-1]}.")
    if bits == 8:
        return packed.clone()
    if 8 % bits == 0:  # whole codes in each byte: no wide integers needed
        mask = 2**bits - 1
        cells = torch.stack([(packed >> shift) & mask for shift in range(0, 8, bits)], -1)
        return cells.flatten(-2)[..., :n].contiguous()
    period = 8 // math.gcd(8, bits)
    num_bytes = period * bits // 8
    padded = torch.nn.functional.pad(packed, (0, -packed.shape[-1] % num_bytes))
    cells = padded.unflatten(-1, (-1, num_bytes)).to(torch.int64)
    word = (cells << (torch.arange(num_bytes, device=packed.device) * 8)).sum(-1)
    out = (word.unsqueeze(-1) >> (torch.arange(period, device=packed.device) * bits)) & (2**bits - 1)
    return out.flatten(-2)[..., :n].to(torch.uint8).contiguous()


def transpose_pairs(data: torch.Tensor, k: int, fill: int = 2, backend: Backend = "auto") -> torch.Tensor:
    """4-bit codes [n, k] in bytes [n, at least k / 2] -> the transpose's, [k, n / 2], n made a multiple of `fill` by zeros.

    Raises:
        KaruiError: too few bytes for k codes, or an odd `fill`.
    """
    if data.shape[1] * 2 < k or fill % 2:
        raise KaruiError(f"transpose_pairs: {data.shape[1]} bytes a row do not hold {k} codes, or fill {fill} is odd.")
    if use_triton(backend, data.device, "transpose_pairs"):
        from karui.kernels.pack import triton

        return triton.transpose_pairs(data.contiguous(), k, fill)
    codes = unpack(data, 4, data.shape[1] * 2)[:, :k]
    return pack(torch.nn.functional.pad(codes.t(), (0, -data.shape[0] % fill)).contiguous(), 4)


def packed_width(n: int, bits: int) -> int:
    """Bytes that n codes take."""
    return (n * bits + 7) // 8


def _check_bits(bits: int) -> None:
    if not 1 <= bits <= 8:
        raise KaruiError(f"codes have 1 to 8 bits, got {bits}.")
