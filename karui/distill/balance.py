"""What keeps the experts of a mixture evenly used while it is trained. Losses are sums over tokens, to be divided once by the
tokens of the whole update; of several layers they are added up, as the papers do.

    switch_sum     E sum_i f_i P_i over the tokens of an update (Switch Transformer, arXiv 2101.03961, eq. 4-6)
    sequence_sum   the same of each document by itself (DeepSeek-V3, arXiv 2412.19437, eq. 17-20)
    z_sum          squared log of the sum of exponentials of the logits (ST-MoE, arXiv 2202.08906, eq. 5)
    moved          no loss: a bias that only chooses (arXiv 2408.15664, algorithm 1; 2412.19437, eq. 16)

Shapes: T tokens, E experts, k of them a token.
"""

from __future__ import annotations

import torch


def shares(logits: torch.Tensor, sigmoid: bool) -> torch.Tensor:
    """[T, E] fp32: a token's scores, which sum to 1 (2412.19437, eq. 19; a softmax does already)."""
    logits = logits.float()
    if not sigmoid:
        return logits.softmax(-1)
    scores = logits.sigmoid()
    return scores / scores.sum(-1, keepdim=True).clamp_min(1e-20)


def counts(indices: torch.Tensor, experts: int) -> torch.Tensor:
    """[E] int64: tokens sent to each expert, from indices [T, k]."""
    flat = indices.reshape(-1)
    return torch.zeros(experts, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))


def switch_sum(share: torch.Tensor, load: torch.Tensor) -> torch.Tensor:
    """T E sum_i f_i P_i, P_i the mean of `share` [T, E] over the tokens.

    Args:
        load: f [E], tokens sent to each expert over all tokens; it sums to k, as in transformers' `load_balancing_loss_func`, so
            that an even load gives k. It has no gradient, and need not be of these tokens.
    """
    return load.numel() * (share.sum(0) @ load.to(share.dtype))


def sequence_sum(share: torch.Tensor, k: int, documents: torch.Tensor, number: int) -> torch.Tensor:
    """Sum over documents of T_d sum_i f_i P_i, f_i = E / (k T_d) times the tokens whose k best scores hold i (even: 1).

    Args:
        documents: [T] int64, the document of each token, from 0 to below `number`.
    """
    experts = share.shape[1]
    chosen = torch.zeros_like(share).scatter_(1, share.detach().topk(k, -1).indices, 1.0)
    of = torch.nn.functional.one_hot(documents, number).to(share.dtype).T  # [D, T]
    load = (of @ chosen) * experts / (k * of.sum(1, keepdim=True).clamp_min(1))
    return (load * (of @ share)).sum()


def z_sum(logits: torch.Tensor) -> torch.Tensor:
    """Sum over tokens of log(sum_j exp x_j)^2."""
    return logits.float().logsumexp(-1).square().sum()


def moved(bias: torch.Tensor, load: torch.Tensor, speed: float) -> torch.Tensor:
    """The bias after an update that sent `load` [E] tokens to each expert: up by `speed` where fewer than the mean came, down
    where more came."""
    return bias + speed * (load.mean() - load).sign().to(bias).view_as(bias)


def figures(loads: list[torch.Tensor], entropy: float) -> dict[str, float]:
    """How evenly the experts of a model were used.

    Args:
        loads: tokens sent to each expert, [E] of every layer.
        entropy: mean over tokens and layers of the router's entropy, as a share of log E.

    Returns:
        moe_max_load: tokens of a layer's busiest expert over the mean (1: even; E / k: always the same), mean over layers.
        moe_unused: share of all experts that no token was sent to.
        moe_entropy: as given; 1: every expert as likely as any other.
    """
    largest = [float(x.max() / x.double().mean()) for x in loads]
    unused = sum(int((x == 0).sum()) for x in loads) / sum(len(x) for x in loads)
    return {"moe_max_load": sum(largest) / len(largest), "moe_unused": unused, "moe_entropy": entropy}
