"""Plain torch: gather each row's matrices, multiply in fp32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from karui.kernels.lora_rows import Stack


def lora_rows(y: torch.Tensor, x: torch.Tensor, slots: torch.Tensor, stack: Stack) -> None:
    """See `karui.kernels.lora_rows.lora_rows`."""
    rank, at = stack.b.shape[2], slots.long().clamp(min=0)
    low = torch.einsum("trk,tk->tr", stack.a[at].float(), x.float()).to(x.dtype).float().view(len(x), -1, rank)
    update = torch.einsum("tnr,tnr->tn", stack.b[at].float(), low[:, stack.part.long()])
    new = y.float() + update
    if stack.gain is not None:
        new = new * stack.gain[at]
    y.copy_(torch.where(slots[:, None] >= 0, new.to(y.dtype), y))
