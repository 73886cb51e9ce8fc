"""The experts of a mixture (arXiv 1701.06538, top-k as in 2101.03961 and 2401.04088) on rows sorted by expert:

    y_t = sum over the k experts e that token t was sent to of  share_te down_e(act(gate_up_e x_t))

Products are given as functions of sorted rows, so that dense and packed experts, trained and frozen ones take the same path.
Nothing waits for the host, and gradients need no atomics: each token has exactly k rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from karui.kernels.gemm_grouped import Groups, group_rows
from karui.kernels.triton_support import Backend

Product = Callable[[torch.Tensor, Groups], torch.Tensor]


def mixture(x: torch.Tensor, chosen: torch.Tensor, share: torch.Tensor, num_experts: int, gate_up: Product,
            act: Callable[[torch.Tensor], torch.Tensor], down: Product, backend: Backend = "auto") -> torch.Tensor:  # fmt: skip
    """[T, H] in x's dtype.

    Args:
        x: [T, H].  chosen: integers [T, k], the experts of each token.  share: [T, k], what each of them counts.
        gate_up, down: (rows [R, in] sorted by expert, their `Groups`) -> [R, out].
        act: gate and up side by side [R, 2 F] -> [R, F].
    """
    groups = group_rows(chosen.flatten(), num_experts, backend)
    rows = down(act(gate_up(_Sorted.apply(x, groups, chosen.shape[1]), groups)), groups)
    rows = _Unsorted.apply(rows, groups).view(*chosen.shape, -1)
    return torch.bmm(share.to(rows.dtype)[:, None], rows)[:, 0].to(x.dtype)


class _Sorted(torch.autograd.Function):
    """Each token's row k times, in the order of the groups; its gradient adds a token's k rows in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, groups: Groups, each: int) -> torch.Tensor:
        ctx.groups, ctx.each = groups, each
        return x[groups.order // each]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grads[0][ctx.groups.place].view(-1, ctx.each, grads[0].shape[-1]).sum(1), None, None


class _Unsorted(torch.autograd.Function):
    """Sorted rows back in the tokens' order."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, groups: Groups) -> torch.Tensor:
        ctx.groups = groups
        return rows[groups.place]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grads[0][ctx.groups.order], None
