"""One dense mask over the whole row: causal and block-diagonal by document, with `shared` the first one seen by all, banded with
`window`; a sink is one more key. Quadratic in the row; for tests."""

from __future__ import annotations

import torch


def document_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, scaling: float, *, shared: bool = False,
    window: int | None = None, sinks: torch.Tensor | None = None, softcap: float | None = None,
) -> torch.Tensor:
    """Shapes as in `karui.kernels.document_attention`; softmax of the full [T, T] scores under the mask."""
    tokens = q.shape[2]
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).to(torch.int64)
    document = torch.repeat_interleave(torch.arange(lengths.numel(), device=q.device), lengths.to(q.device))
    at = torch.arange(tokens, device=q.device)
    same = document[:, None] == document[None, :]
    seen = (same | (document[None, :] == 0) if shared else same) & (at[None, :] <= at[:, None])
    if window is not None:  # a document's rows follow on from the shared beginning as if it stood right before them
        start = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])[document]
        place = at - start + torch.where(document > 0, lengths[0] if shared else 0, 0)
        seen &= place[None, :] > place[:, None] - window
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.transpose(-1, -2)) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    return scores.softmax(-1)[..., :tokens] @ v
