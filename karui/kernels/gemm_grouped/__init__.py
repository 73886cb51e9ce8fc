"""Products of a mixture of experts: rows sorted by expert, one weight per expert, one launch for all.

    y[o_e : o_(e+1)] = x[o_e : o_(e+1)] W_e^T

differentiable in x and W; an expert without rows gets a zero gradient. How rows fell to experts (`group_rows`) is worked out on
the device, so that nothing waits for the host and a CUDA graph can hold it all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from karui.configs.errors import KaruiError
from karui.kernels.gemm_grouped import reference
from karui.kernels.triton_support import Backend, use_triton


@dataclass(frozen=True)
class Groups:
    """R rows sorted by their E experts, all on the rows' device.

    order: int64 [R], which row stands at each sorted place; place: int64 [R], its inverse.
    offsets: int32 [E + 1]; expert e has the sorted rows offsets[e] : offsets[e + 1].
    tiles: int32 [tiles, 3]: expert, first sorted row and end of up to `block` rows of one expert; zeros past the last one.
    """

    order: torch.Tensor
    place: torch.Tensor
    offsets: torch.Tensor
    tiles: torch.Tensor
    block: int

    @property
    def num_experts(self) -> int:
        return self.offsets.shape[0] - 1


def group_rows(chosen: torch.Tensor, num_experts: int, backend: Backend = "auto") -> Groups:
    """Sort rows by the expert of each: `chosen` [R] integers from 0 to num_experts - 1; rows of one expert keep their order."""
    if chosen.ndim != 1 or chosen.is_floating_point():
        raise KaruiError(f"group_rows takes the expert of each row, integers [R]; got {chosen.dtype} {tuple(chosen.shape)}.")
    mean = -(-chosen.shape[0] // num_experts)
    block = min(max(16, 1 << (mean - 1).bit_length()), 64)
    if use_triton(backend, chosen.device, "group_rows"):
        from karui.kernels.gemm_grouped import triton

        order, place, offsets, tiles = triton.group_rows(chosen, num_experts, block)
    else:
        order, place, offsets, tiles = reference.group_rows(chosen, num_experts, block)
    return Groups(order, place, offsets, tiles, block)


def gemm_grouped(x: torch.Tensor, weight: torch.Tensor, groups: Groups, backend: Backend = "auto") -> torch.Tensor:
    """[R, N] in x's dtype.

    Args:
        x: [R, K], in the order of `groups`.
        weight: [E, N, K], x's dtype.

    Raises:
        KaruiError: shapes or dtypes that do not fit.
    """
    rows, experts = groups.order.shape[0], groups.num_experts
    if x.ndim != 2 or weight.ndim != 3 or weight.shape[2] != x.shape[1] or (x.shape[0], weight.shape[0]) != (rows, experts):
        raise KaruiError(
            f"gemm_grouped takes x [R, K] and weight [E, N, K], here of {rows} rows and {experts} experts; got {tuple(x.shape)}, "
            f"{tuple(weight.shape)}."
        )
    if x.dtype != weight.dtype:
        raise KaruiError(f"gemm_grouped: x is {x.dtype}, weight {weight.dtype}; cast one of them.")
    if use_triton(backend, x.device, "gemm_grouped", refused=f"dtype {x.dtype}" if x.dtype == torch.float64 else ""):
        from karui.kernels.gemm_grouped.triton import Grouped

        return Grouped.apply(x, weight, groups)
    return reference.gemm_grouped(x, weight, groups.offsets)
