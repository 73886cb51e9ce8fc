"""Any loss of a linear head's logits, in chunks: the [rows, vocabulary] logits never exist as a whole.

The caller's `rows` turns a chunk of logits into losses and into their gradient while the logits are there; the gradients of
hidden and weight follow at once (dlogits @ W, dlogits^T @ h), so nothing of the size of the vocabulary outlives its chunk. The
scheme is Liger-Kernel's fused linear cross entropy (arXiv 2410.10989, section 3.2) with the loss left open; `cross_entropy`
beside it is the special case that never forms probabilities. Under autocast on a GPU the products are in its dtype, the losses
and the weight's gradient in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from karui.configs.errors import KaruiError
from karui.kernels.matmul import add_matmul, matmul

RowLoss = Callable[[int, int, torch.Tensor], torch.Tensor]
"""(start, stop, logits [c, V] fp32 or fp64) -> losses [c]; overwrites `logits` with d loss / d logits of each row."""


def linear_loss(
    hidden: torch.Tensor, weight: torch.Tensor, rows: RowLoss, chunk: int = 128, softcap: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum over rows of a loss of `hidden @ weight.T`, and each row's loss without gradient.

    Args:
        hidden: [N, H], any float dtype; N may be 0.
        weight: [V, H], same dtype as hidden.
        rows: see `RowLoss`; called once per chunk, in order, also when no gradient is needed.
        chunk: rows whose logits exist at one moment. 128 keeps a chunk of a 50,000-token vocabulary near a CPU's last cache.
        softcap: c, logits s are c tanh(s / c) (Gemma 2, arXiv 2408.00118); `rows` sees and derives by those.

    Returns:
        loss_sum: scalar, fp32 (fp64 for fp64 input), differentiable once in hidden and weight.
        per_row: [N], same dtype, detached.

    Raises:
        KaruiError: shapes that do not fit, a cap that is not positive.
    """
    if softcap is not None and not softcap > 0:
        raise KaruiError(f"softcap must be positive, got {softcap}.")
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise KaruiError(f"linear_loss takes hidden [N, H] and weight [V, H]; got {tuple(hidden.shape)}, {tuple(weight.shape)}.")
    if chunk < 1:
        raise KaruiError(f"chunk must be at least 1, got {chunk}.")
    out: tuple[torch.Tensor, torch.Tensor] = _LinearLoss.apply(hidden, weight, rows, chunk, softcap)
    return out


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, rows: RowLoss, chunk: int, softcap: float | None
    ) -> Any:
        ctx.dtypes, num_rows, vocabulary = (hidden.dtype, weight.dtype), hidden.shape[0], weight.shape[0]
        if hidden.is_cuda and torch.is_autocast_enabled("cuda"):
            hidden, weight = (x.to(torch.get_autocast_dtype("cuda")) for x in (hidden, weight))
        exact = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        grad_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros(weight.shape, dtype=exact, device=weight.device) if ctx.needs_input_grad[1] else None
        per_row = torch.zeros(num_rows, dtype=exact, device=hidden.device)
        scratch = hidden.new_empty(min(chunk, num_rows), vocabulary, dtype=exact)
        for start in range(0, num_rows, chunk):
            h = hidden[start : start + chunk]
            stop = start + h.shape[0]
            logits = scratch[: h.shape[0]]
            if h.dtype == exact:
                matmul(h, weight.T, out=logits)
            else:
                logits.copy_(matmul(h, weight.T))
            share = None
            if softcap is not None:
                share = logits.div_(softcap).tanh_().clone()
                logits.mul_(softcap)
            per_row[start:stop] = rows(start, stop, logits)
            if share is not None:  # the cap's derivative, 1 - tanh^2
                logits -= logits * share.square_()
            pull = logits.to(h.dtype)
            if grad_hidden is not None:
                grad_hidden[start:stop] = matmul(pull, weight, backward=True)
            if grad_weight is not None:
                if h.dtype == exact:
                    add_matmul(grad_weight, pull.T, h, backward=True)
                else:
                    grad_weight += (pull.T @ h).to(exact)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.mark_non_differentiable(per_row)
        return per_row.sum(dtype=torch.float64).to(exact), per_row

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        grad = grads[0]
        return (
            None if grad_hidden is None else grad_hidden.to(ctx.dtypes[0]) * grad.to(ctx.dtypes[0]),
            None if grad_weight is None else (grad_weight * grad).to(ctx.dtypes[1]),
            None,
            None,
            None,
        )
