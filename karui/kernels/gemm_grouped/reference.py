"""Plain torch: a stable sort, and one product per expert."""

from __future__ import annotations

import torch


def group_rows(chosen: torch.Tensor, num_experts: int, block: int) -> tuple[torch.Tensor, ...]:
    """(order, place, offsets, tiles) of `Groups`."""
    chosen, rows = chosen.long(), chosen.shape[0]
    order = chosen.argsort(stable=True)
    offsets = torch.searchsorted(chosen[order], torch.arange(num_experts + 1, device=chosen.device))
    counts = (offsets[1:] - offsets[:-1] + block - 1) // block
    number = torch.arange(max_tiles(rows, num_experts, block), device=chosen.device)
    expert = torch.searchsorted(counts.cumsum(0), number, right=True)
    known, expert = expert < num_experts, expert.clamp(max=num_experts - 1)
    first = offsets[expert] + (number - (counts.cumsum(0) - counts)[expert]) * block
    tiles = torch.stack([expert, first, (first + block).minimum(offsets[expert + 1])], 1) * known[:, None]
    return order, order.argsort(), offsets.to(torch.int32), tiles.to(torch.int32)


def max_tiles(rows: int, num_experts: int, block: int) -> int:
    """The most tiles that `rows` can make: every expert's last one may be short."""
    used = min(rows, num_experts)
    return used + (rows - used) // block


def gemm_grouped(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Shapes as in `karui.kernels.gemm_grouped`; differentiable."""
    bounds = offsets.tolist()
    return torch.cat([x[s:e] @ w.t() for s, e, w in zip(bounds, bounds[1:], weight)])
