"""OLoRA (arXiv 2406.01775): orthonormal factors from the QR decomposition of the weight.

    W = Q R,   B = Q[:, :r],   A = R[:r],   base = W - s B A          (algorithm 1)

As in the paper and in peft the factors are not divided by s, so the trained part begins with s times the leading part of W.
"""

from __future__ import annotations

import torch

from karui.adapters.start import Start


def olora(weight: torch.Tensor, *, rank: int, scaling: float) -> Start:
    """The start for one weight [out, in]."""
    q, r = torch.linalg.qr(weight.detach().double())
    b, a = q[:, :rank].float().contiguous(), r[:rank].float().contiguous()
    return Start(a=a, b=b, scaling=scaling, u=b, v=a)
