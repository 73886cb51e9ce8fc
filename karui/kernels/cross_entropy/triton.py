"""Cross entropy of a linear head on a GPU: cuBLAS makes a chunk of logits, one kernel turns each row into its loss and, in place,
its gradient, and cuBLAS pulls that back (Liger-Kernel, arXiv 2410.10989, section 3.2).

A row is read twice: max and sum of exponentials together (the online softmax of arXiv 1805.02867), then the gradient. Under
autocast the three products are in its dtype, as those of torch's own linear layers are; sums and losses are in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from karui.kernels.triton_support.offline import WIDE_LOADS, Case


@triton.jit
def _rows(logits_ptr, targets_ptr, loss_ptr, stride, vocabulary, GRADIENT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    target = tl.load(targets_ptr + row)
    cols = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        x = tl.load(logits_ptr + start + cols, start + cols < vocabulary, float("-inf")).to(tl.float32)
        bigger = tl.maximum(largest, x)
        # a lane that has seen nothing yet: -inf minus -inf would be NaN
        total = tl.where(bigger == float("-inf"), 0.0, total * tl.exp(largest - bigger) + tl.exp(x - bigger))
        largest = bigger
    top = tl.max(largest)
    total_sum = tl.sum(total * tl.exp(largest - top))
    at_target = tl.load(logits_ptr + target).to(tl.float32)
    tl.store(loss_ptr + row, tl.log(total_sum) - (at_target - top))
    if GRADIENT:
        # at_target must have been read by every thread before one of them overwrites it
        tl.debug_barrier()
        for start in range(0, vocabulary, BLOCK):
            at = start + cols
            x = tl.load(logits_ptr + at, at < vocabulary, float("-inf")).to(tl.float32)
            share = tl.exp(x - top) / total_sum - tl.where(at == target, 1.0, 0.0)
            tl.store(logits_ptr + at, share.to(logits_ptr.dtype.element_ty), at < vocabulary)


def rows(logits: torch.Tensor, targets: torch.Tensor, gradient: bool = True) -> torch.Tensor:
    """-log softmax(logits)[target] of each row, fp32 [c]; `logits` [c, V] then hold the gradient if it is wanted."""
    losses = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    block = min(triton.next_power_of_2(logits.shape[1]), 8192)
    if logits.shape[0]:
        _rows[(logits.shape[0],)](logits, targets, losses, logits.stride(0), logits.shape[1], GRADIENT=gradient, BLOCK=block,
                                  num_warps=8 if block > 1024 else 4)  # fmt: skip
    return losses


class LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, chunk: int) -> torch.Tensor:
        needs_hidden, needs_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        ctx.dtypes, kind = (hidden.dtype, weight.dtype), hidden.device.type
        if torch.is_autocast_enabled(kind):
            hidden, weight = (x.to(torch.get_autocast_dtype(kind)) for x in (hidden, weight))
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if needs_weight else None
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        for start in range(0, hidden.shape[0], chunk):
            h, stop = hidden[start : start + chunk], start + chunk
            logits = h @ weight.T
            total += rows(logits, targets[start:stop], needs_hidden or needs_weight).sum(dtype=torch.float64)
            if grad_hidden is not None:
                torch.mm(logits, weight, out=grad_hidden[start:stop])
            if grad_weight is not None:
                grad_weight += logits.T @ h
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total.float()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return (
            None if grad_hidden is None else grad_hidden.to(ctx.dtypes[0]) * grads[0].to(ctx.dtypes[0]),
            None if grad_weight is None else (grad_weight * grads[0]).to(ctx.dtypes[1]),
            None,
            None,
        )


def offline_cases() -> list[Case]:
    signature = {"logits_ptr": "*bf16", "targets_ptr": "*i64", "loss_ptr": "*fp32", "stride": "i32", "vocabulary": "i32"}
    return [Case("cross_entropy rows", _rows, signature, {"GRADIENT": True, "BLOCK": 8192}, WIDE_LOADS, num_warps=8, on="one")]
