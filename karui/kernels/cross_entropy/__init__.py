"""Cross entropy of a linear head, in chunks: the [rows, vocabulary] logits never exist as a whole.

Rows are handled `chunk` at a time; the gradient with respect to hidden (and weight) is computed in the forward pass while a
chunk's logits are there, so nothing of the size of the vocabulary is kept for the backward pass (as in Liger-Kernel,
arXiv 2410.10989, section 3.2). With E = exp(logits - max) and s = sum E, the gradient of a row is (E @ W) / s - W[target],
so the probabilities are never formed: two passes over the chunk fewer than softmax and its correction at the target.
"""

from __future__ import annotations

from typing import Any

import torch

from karui.configs.errors import KaruiError
from karui.kernels.linear_loss import RowLoss, linear_loss
from karui.kernels.matmul import add_matmul, matmul
from karui.kernels.triton_support import Backend, use_triton


def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, chunk: int = 1024, backend: Backend = "auto",
    *, softcap: float | None = None,
) -> tuple[torch.Tensor, int]:
    """Sum of -log softmax(hidden @ weight.T)[target] over the rows, and how many rows there were.

    Args:
        hidden: [N, H], any float dtype; only rows that are supervised (N may be 0).
        weight: [V, H], same dtype as hidden.
        targets: [N] int64 in 0..V-1.
        chunk: rows whose logits exist at one moment: chunk * V values of scratch.
        softcap: c, logits s are c tanh(s / c); the probabilities are then formed (`linear_loss`).

    Returns:
        loss_sum: scalar, fp32 (fp64 for fp64 input), differentiable once in hidden and weight.
        count: N.

    Raises:
        KaruiError: shapes that do not fit, a target outside the vocabulary (on a GPU that is an assertion of the device's).
    """
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1] or targets.shape != hidden.shape[:1]:
        raise KaruiError(
            f"linear_cross_entropy takes hidden [N, H], weight [V, H], targets [N]; got {tuple(hidden.shape)}, "
            f"{tuple(weight.shape)}, {tuple(targets.shape)}."
        )
    if chunk < 1:
        raise KaruiError(f"chunk must be at least 1, got {chunk}.")
    if targets.is_cuda:  # to look would wait for all that was launched before
        torch._assert_async(((targets >= 0) & (targets < weight.shape[0])).all(), "linear_cross_entropy: targets")
    elif targets.numel() and not (int(targets.min()) >= 0 and int(targets.max()) < weight.shape[0]):
        raise KaruiError(
            f"targets lie in {int(targets.min())}..{int(targets.max())}, the vocabulary in 0..{weight.shape[0] - 1}; "
            f"give only supervised rows (no -100), and the tokenizer that belongs to the model."
        )
    if softcap is not None:
        return linear_loss(hidden, weight, _rows(targets), chunk, softcap)[0], targets.numel()
    refused = f"dtype {hidden.dtype}" if hidden.dtype not in (torch.float32, torch.bfloat16, torch.float16) else ""
    if use_triton(backend, hidden.device, "linear_cross_entropy", refused=refused):
        from karui.kernels.cross_entropy.triton import LinearCrossEntropy

        return LinearCrossEntropy.apply(hidden, weight, targets, chunk), targets.numel()
    return _LinearCrossEntropy.apply(hidden, weight, targets, chunk), targets.numel()


def _rows(targets: torch.Tensor) -> RowLoss:
    def rows(start: int, stop: int, logits: torch.Tensor) -> torch.Tensor:
        at = targets[start:stop].unsqueeze(1)
        logits -= logits.logsumexp(-1, keepdim=True)
        losses = -logits.gather(1, at).squeeze(1)
        logits.exp_().scatter_add_(1, at, logits.new_full((), -1.0).expand(at.shape))
        return losses

    return rows


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, chunk: int) -> torch.Tensor:
        num_rows, vocabulary = hidden.shape[0], weight.shape[0]
        exact = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        grad_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros(weight.shape, dtype=exact, device=weight.device) if ctx.needs_input_grad[1] else None
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        scratch = hidden.new_empty(min(chunk, num_rows), vocabulary, dtype=exact)
        for start in range(0, num_rows, chunk):
            h, t = hidden[start : start + chunk], targets[start : start + chunk]
            logits = scratch[: h.shape[0]]
            if h.dtype == exact:
                matmul(h, weight.T, out=logits)
            else:
                logits.copy_(matmul(h, weight.T))
            logits.sub_(logits.amax(-1, keepdim=True))
            at_target = logits.gather(1, t.unsqueeze(1)).squeeze(1)
            scale = logits.exp_().sum(-1)  # logits now holds E
            total += (scale.log() - at_target).sum(dtype=torch.float64)
            shares = logits.to(h.dtype) if grad_hidden is not None or grad_weight is not None else logits
            if grad_hidden is not None:
                pulled = matmul(shares, weight, backward=True).to(exact) / scale.unsqueeze(1) - weight[t].to(exact)
                grad_hidden[start : start + chunk] = pulled.to(hidden.dtype)
            if grad_weight is not None:
                # E^T (h / s): the division is over H columns, not over V
                scaled = h.to(exact) / scale.unsqueeze(1)
                if h.dtype == exact:
                    add_matmul(grad_weight, logits.T, scaled, backward=True)
                else:
                    grad_weight += (shares.T @ scaled.to(h.dtype)).to(exact)
                grad_weight.index_add_(0, t, h.to(exact), alpha=-1)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        return total.to(exact)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        (grad,) = grads
        return (
            None if grad_hidden is None else grad_hidden * grad.to(grad_hidden.dtype),
            None if grad_weight is None else (grad_weight * grad).to(ctx.weight_dtype),
            None,
            None,
        )
