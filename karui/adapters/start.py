"""Where an adapter starts: factors A and B, and what has to be taken out of the base for them.

A technique that starts away from zero (PiSSA, OLoRA, LoftQ) changes the base so that base + s B A is close to W:

    base = grid(W - s U V)       grid: identity, or rounding to the base's `QuantSpec`

U and V are all it takes to make the same base again from the original model, so they are what is saved.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from karui.kernels.lora.residual import residual


@dataclass(frozen=True)
class Start:
    """Factors at the start of training, fp32.

    Attributes:
        a, b: A [rank, in] and B [out, rank].
        scaling: s.
        u, v: U [out, k] and V [k, in]; None: the base is grid(W).
    """

    a: torch.Tensor
    b: torch.Tensor
    scaling: float
    u: torch.Tensor | None = None
    v: torch.Tensor | None = None

    def base(self, weight: torch.Tensor) -> torch.Tensor:
        """W - s U V in W's dtype, before any grid."""
        return weight if self.u is None or self.v is None else residual(weight, self.u, self.v, self.scaling)


def truncated_svd(matrix: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The `rank` largest singular triples of [out, in]: U [out, rank], S [rank] falling, V^T [rank, in], float64.

    From the eigenvectors of the smaller Gram matrix, in float64: several times faster than a whole SVD, and exact where it
    matters here, among the largest values. Each pair's sign is fixed: the largest entry of its right vector is positive.
    """
    m = matrix.double()
    tall = m.shape[0] > m.shape[1]
    if tall:
        m = m.T
    _, vectors = torch.linalg.eigh(m @ m.T)
    u = vectors[:, -rank:].flip(1)
    s_vt = u.T @ m
    s = s_vt.norm(dim=1)
    vt = s_vt / s.clamp(min=torch.finfo(s.dtype).tiny).unsqueeze(1)
    if tall:
        u, vt = vt.T, u.T
    sign = vt.gather(1, vt.abs().argmax(1, keepdim=True)).sign()
    sign[sign == 0] = 1
    return u * sign.T, s, vt * sign


def halves(matrix: torch.Tensor, rank: int, scaling: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The L [out, rank] and R [rank, in], fp32, whose s L R is closest to the matrix; singular values are split evenly."""
    u, s, vt = truncated_svd(matrix, rank)
    root = (s / scaling).sqrt()
    return (u * root).float(), (root.unsqueeze(1) * vt).float()
