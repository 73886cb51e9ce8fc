"""A frozen linear with a low-rank update as one autograd node: y = x W^T + bias + s (x A^T) B^T (LoRA, arXiv 2106.09685, eq. 3).

Autograd over the written-out form keeps x twice under dropout or casts, builds the base activation, the update and their sum
as three tensors, and scales a full-size one. Here the update is accumulated into the base product and only x and x A^T are
kept: dx = dy W + s (dy B) A, dA = s (dy B)^T x, dB = s dy^T (x A^T).

W comes from a callable, so that a quantized base is dequantized when it is needed, twice, and never stored. On a GPU a Triton
kernel makes base product and update from one reading of x (or of dy); over a 4-bit base and a few hundred rows it decodes W
itself, where the callable has a `packed`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from karui.kernels.gemm_weight import PackedWeight, gemm_weight, gemm_weight_dgrad
from karui.kernels.matmul import low_rank_matmul, matmul
from karui.kernels.swiglu import gradients, product
from karui.kernels.triton_support import Backend, use_triton

Weight = Callable[[torch.dtype], torch.Tensor]
LARGEST_RANK = 128  # of the kernel: a tile's share of the update must stay in registers


def lora_linear(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
    scaling: float,
    backend: Backend = "auto",
) -> torch.Tensor:
    """The layer's output [..., out].

    Args:
        x: [..., in].
        weight: called with x's dtype, gives W [out, in]; frozen, gets no gradient. Called again in the backward pass. Its
            method `packed`, if it has one, gives W as a `PackedWeight`, or None where no kernel reads it.
        bias: [out], frozen, or None.
        a, b: A [rank, in] and B [out, rank], same dtype as x.
        scaling: alpha / rank (or alpha / sqrt(rank)).
        backend: "triton" takes bf16 and fp16 (in the interpreter fp32 too), ranks up to 128.
    """
    return _LoraLinear.apply(x, a, b, weight, bias, scaling, backend)


def gated_lora_linear(
    gate: torch.Tensor, up: torch.Tensor, weight: Weight, bias: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor,
    scaling: float, backend: Backend = "auto",
) -> torch.Tensor:
    """`lora_linear` of x = silu(gate) up, which is not kept but made again in the backward pass (arXiv 1604.06174).

    x is the widest tensor of a layer; the pass that gives the gradients of gate and up gives x besides at no cost.
    """
    return _GatedLoraLinear.apply(gate, up, a, b, weight, bias, scaling, backend)


def frozen_linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """y = x W^T + bias [..., out] for a frozen W made on demand; nothing is kept for the backward pass."""
    return _FrozenLinear.apply(x, weight, bias)


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, weight: Weight, bias: torch.Tensor | None, scaling: float,
        backend: Backend,
    ) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out, low = _forward(rows, weight, bias, a, b, scaling, backend)
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, low if ctx.needs_input_grad[2] else None, a, b)
        ctx.weight, ctx.scaling, ctx.shape, ctx.backend = weight, scaling, x.shape, backend
        return out.view(*x.shape[:-1], out.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, low, a, b = ctx.saved_tensors
        dy = grads[0].reshape(-1, grads[0].shape[-1])
        dx = da = db = None
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            if ctx.needs_input_grad[0]:
                dx, pulled = _dgrad(dy, ctx.weight, a, b, ctx.scaling, ctx.backend)
                dx = dx.view(ctx.shape)
            else:
                pulled = (dy @ b).mul_(ctx.scaling)  # [rows, rank]
            if ctx.needs_input_grad[1]:
                da = matmul(pulled.T, rows)
        if ctx.needs_input_grad[2]:
            db = _grad_b(dy, low)
        return dx, da, db, None, None, None, None


class _GatedLoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate: torch.Tensor, up: torch.Tensor, a: torch.Tensor, b: torch.Tensor, weight: Weight,
        bias: torch.Tensor | None, scaling: float, backend: Backend,
    ) -> torch.Tensor:
        rows = product(gate, up, backend).view(-1, gate.shape[-1])
        out, low = _forward(rows, weight, bias, a, b, scaling, backend)
        ctx.save_for_backward(gate, up, low, a, b)
        ctx.weight, ctx.scaling, ctx.backend = weight, scaling, backend
        return out.view(*gate.shape[:-1], out.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate, up, low, a, b = ctx.saved_tensors
        dy = grads[0].reshape(-1, grads[0].shape[-1])
        dx, pulled = _dgrad(dy, ctx.weight, a, b, ctx.scaling, ctx.backend)
        dgate, dup, rows = gradients(dx.view(gate.shape), gate, up, again=ctx.needs_input_grad[2], backend=ctx.backend)
        da = None if rows is None else matmul(pulled.T, rows.view(-1, rows.shape[-1]))
        db = _grad_b(dy, low) if ctx.needs_input_grad[3] else None
        return dgate, dup, da, db, None, None, None, None


def packed_of(weight: Weight) -> PackedWeight | None:
    """W as packed codes where the callable has them and a kernel reads them."""
    packed: Callable[[], PackedWeight | None] | None = getattr(weight, "packed", None)
    return None if packed is None else packed()


def _forward(
    rows: torch.Tensor, weight: Weight, bias: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor, scaling: float,
    backend: Backend,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output [rows, out], and s x A^T [rows, rank]."""
    if use_triton(backend, rows.device, "lora_linear", refused=_refused(rows, a, b)):
        from karui.kernels.lora import triton

        return triton.forward(rows, weight, bias, a, b, scaling)
    out, low = low_rank_matmul(rows, weight(rows.dtype).T, a.T, b.T, scaling)
    return out if bias is None else out.add_(bias.to(rows.dtype)), low


def _dgrad(
    dy: torch.Tensor, weight: Weight, a: torch.Tensor, b: torch.Tensor, scaling: float, backend: Backend
) -> tuple[torch.Tensor, torch.Tensor]:
    """dy W + s (dy B) A [rows, in], and s dy B [rows, rank]."""
    if use_triton(backend, dy.device, "lora_linear", refused=_refused(dy, a, b)):
        from karui.kernels.lora import triton

        return triton.dgrad(dy, weight, a, b, scaling)
    return low_rank_matmul(dy, weight(dy.dtype), b, a, scaling, backward=True)


def _refused(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> str:
    if x.dtype not in (torch.bfloat16, torch.float16) and (x.is_cuda or x.dtype != torch.float32):
        return f"dtype {x.dtype}"
    if a.dtype != x.dtype or b.dtype != x.dtype:
        return f"factors in {a.dtype} and {b.dtype} beside {x.dtype}"
    return f"a rank of {a.shape[0]}, more than {LARGEST_RANK}" if a.shape[0] > LARGEST_RANK else ""


def _grad_b(dy: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """dy^T (s x A^T) [out, rank]; the product with few rows runs faster than the one with few columns.

    It and A's gradient stay in fp32 under `matmul_precision`: with so few rows rounding takes longer than it saves.
    """
    return matmul(low.T, dy).T


class _FrozenLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.weight = weight
        rows = x.reshape(-1, x.shape[-1])
        packed = packed_of(weight) if x.is_cuda else None
        bias = None if bias is None else bias.to(rows.dtype)
        out = _base(rows, weight, bias) if packed is None else gemm_weight(rows, packed, bias)
        return out.view(*x.shape[:-1], out.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        if not ctx.needs_input_grad[0]:
            return None, None, None
        dy = grads[0].reshape(-1, grads[0].shape[-1])
        packed = packed_of(ctx.weight) if dy.is_cuda else None
        dx = matmul(dy, ctx.weight(dy.dtype), backward=True) if packed is None else gemm_weight_dgrad(dy, packed)
        return dx.view(*grads[0].shape[:-1], dx.shape[-1]), None, None


def _base(rows: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
    w = weight(rows.dtype)
    out = matmul(rows, w.T)
    return out if bias is None else out.add_(bias)
