"""SwiGLU (arXiv 2002.05202, eq. 6) as one autograd node that keeps gate and up, not silu(gate) besides.

With s = sigmoid(gate): dup = dy gate s, dgate = dy up s (1 + gate (1 - s)).
"""

from __future__ import annotations

from typing import Any

import torch

from karui.kernels.triton_support import Backend, use_triton


def swiglu(gate: torch.Tensor, up: torch.Tensor, backend: Backend = "auto") -> torch.Tensor:
    """silu(gate) * up, elementwise; both of one shape and dtype."""
    refused = "" if gate.dtype in (torch.float32, torch.bfloat16, torch.float16) else f"dtype {gate.dtype}"
    if use_triton(backend, gate.device, "swiglu", refused=refused):
        from karui.kernels.swiglu.triton import SwiGLU as Fused

        return Fused.apply(gate, up)
    return _SwiGLU.apply(gate, up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return torch.nn.functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        (dy,) = grads
        dup = torch.nn.functional.silu(gate).mul_(dy)
        dgate = torch.ops.aten.silu_backward(dy * up, gate)
        return dgate, dup
