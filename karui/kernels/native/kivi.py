"""Units of a KIVI cache of kivi.h to the rows of karui/inference/cache/kivi.py and back, so that prefixes can be handed over.

Legend: U units of 32 tokens, L layers, G kv heads, D head_dim, T = 32 U tokens. Both hold the same codes,
steps and mins: a unit [codes of keys, of values, steps of keys, mins, steps of values, mins], a row its codes, steps, mins.
"""

from __future__ import annotations

import torch

from karui.kernels.pack import pack, unpack

UNIT = 32


def to_rows(units: torch.Tensor, dim: int, bits: int, block: int) -> torch.Tensor:
    """uint8 [U, L, G, bytes] -> uint8 [2, L, T, G, D (bits + 1) / 8], in blocks of `block` tokens."""
    keys, values, *tails = units.split([dim * 4 * bits, dim * 4 * bits, *[2 * dim] * 4], -1)
    per = block // UNIT
    k = _codes(keys.unflatten(-1, (dim * bits // 4, 16)), bits)  # [U, L, G, D, 32]
    v = _codes(values.unflatten(-1, (8 * bits, dim // UNIT, 16)).transpose(-3, -2), bits).transpose(-3, -2).flatten(-2)

    def of_block(x: torch.Tensor) -> torch.Tensor:  # [U, L, G, D, n] -> [blocks, L, G, D, per * n]
        return x.unflatten(0, (-1, per)).movedim(1, -2).flatten(-2)

    k = torch.cat([pack(of_block(k), bits), *(of_block(t.unflatten(-1, (dim, 2))) for t in tails[:2])], -1)
    k = k.flatten(-2).unflatten(-1, (block, -1)).movedim(3, 1).flatten(0, 1)  # [T, L, G, bytes]
    per_token = [t.unflatten(-1, (dim // UNIT, UNIT, 2)).transpose(-3, -2).flatten(-2) for t in tails[2:]]
    v = torch.cat([pack(v, bits), *per_token], -1)
    return torch.stack([k, v.movedim(3, 1).flatten(0, 1)]).transpose(1, 2).contiguous()


def to_units(rows: torch.Tensor, dim: int, bits: int, block: int) -> torch.Tensor:
    """The inverse of `to_rows`."""
    per, groups, count = block // UNIT, dim // UNIT, rows.shape[2]
    k, v = rows.transpose(1, 2).unbind(0)  # [T, L, G, bytes]
    k = k.unflatten(0, (-1, block)).movedim(1, 3).flatten(-2).unflatten(-1, (dim, -1))  # [blocks, L, G, D, bytes]

    def of_units(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (per, -1)).movedim(-2, 1).flatten(0, 1)

    codes, *key_tails = k.split([block * bits // 8, 2 * per, 2 * per], -1)
    keys = _halves(of_units(unpack(codes, bits, block)), bits).flatten(-2)
    v = v.unflatten(0, (count // UNIT, UNIT)).movedim(1, 3)  # [U, L, G, 32, bytes]
    codes, *value_tails = v.split([dim * bits // 8, 2 * groups, 2 * groups], -1)
    values = unpack(codes, bits, dim).unflatten(-1, (groups, UNIT)).transpose(-3, -2)  # [U, L, G, groups, 32, 32]
    values = _halves(values, bits).transpose(-3, -2).flatten(-3)
    tails = [of_units(t).flatten(-2) for t in key_tails]
    tails += [t.unflatten(-1, (groups, 2)).transpose(-3, -2).flatten(-3) for t in value_tails]
    return torch.cat([keys, values, *tails], -1).contiguous()


def _codes(data: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows of 32 codes [..., R, 32] out of [..., R bits / 4, 16] bytes, which hold elements i and 16 + i of 4 / bits rows."""
    fields = torch.stack([(data >> shift) & (2**bits - 1) for shift in range(0, 8, bits)], -2)  # [..., R', 8 / bits, 16]
    return fields.unflatten(-2, (4 // bits, 2)).flatten(-2).flatten(-3, -2)


def _halves(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `_codes`."""
    fields = codes.unflatten(-2, (-1, 4 // bits)).unflatten(-1, (2, 16)).flatten(-3, -2)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    return (fields << shifts[:, None]).sum(-2, dtype=torch.uint8)
