"""SwiGLU (arXiv 2002.05202, eq. 6) as one autograd node that keeps gate and up, not silu(gate) besides.

With s = sigmoid(gate): dup = dy gate s, dgate = dy up s (1 + gate (1 - s)).
"""

from __future__ import annotations

from typing import Any

import torch

from karui.kernels.native import train as native
from karui.kernels.triton_support import Backend, use_triton


def swiglu(gate: torch.Tensor, up: torch.Tensor, backend: Backend = "auto") -> torch.Tensor:
    """silu(gate) * up, elementwise; both of one shape and dtype."""
    if use_triton(backend, gate.device, "swiglu", refused=_refused(gate)):
        from karui.kernels.swiglu.triton import SwiGLU as Fused

        return Fused.apply(gate, up)
    return _SwiGLU.apply(gate, up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return product(gate, up)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        return gradients(grads[0], gate, up)[:2]


def product(gate: torch.Tensor, up: torch.Tensor, backend: Backend = "auto") -> torch.Tensor:
    """silu(gate) * up without autograd."""
    if use_triton(backend, gate.device, "swiglu", refused=_refused(gate)):
        from karui.kernels.swiglu import triton

        return triton.product(gate, up)
    if gate.is_contiguous() and up.is_contiguous() and native.usable(gate, up):
        return native.swiglu(gate, up)
    return torch.nn.functional.silu(gate).mul_(up)


def gradients(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, again: bool = False, backend: Backend = "auto"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(dgate, dup) and, with `again`, the product once more, in the same pass over memory."""
    if use_triton(backend, gate.device, "swiglu", refused=_refused(gate)):
        from karui.kernels.swiglu import triton

        return triton.gradients(dy, gate, up, again)
    if gate.is_contiguous() and up.is_contiguous() and native.usable(gate, up, dy):
        return native.swiglu_backward(dy.contiguous(), gate, up, again)
    silu = torch.nn.functional.silu(gate)
    dgate = torch.ops.aten.silu_backward(dy * up, gate)
    return dgate, silu * dy, silu.mul_(up) if again else None


def _refused(gate: torch.Tensor) -> str:
    return "" if gate.dtype in (torch.float32, torch.bfloat16, torch.float16) else f"dtype {gate.dtype}"
