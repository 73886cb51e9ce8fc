"""HQQ, half-quadratic quantization (Badri and Shaji, 2023, mobiusml.github.io/hqq_blog): calibration free, robust to outlier
weights.

    minimise ||W - deq(q)||_p^p, p < 1, by splitting off an error matrix E:
        E <- shrink(W - deq(q)),  shrink(x) = sign(x) relu(|x| - |x|^(p-1) / beta)          (eq. 4)
        affine:     z <- mean over a group of (q - (W - E) / s)                              (eq. 5)
        s <- <q - z, W - E> / <q - z, q - z>
        beta <- kappa beta, until the error stops falling

Departures: our zero points are stored as integers, so z is rounded each round and alone would rarely move; the scale is fitted
too. The start is the searched scale of RTN (`search`); each group keeps the best of its rounds by the l_p error itself.
"""

from __future__ import annotations

import torch
from pydantic import Field

from karui.configs.errors import UnsupportedError
from karui.configs.quantspec import QuantSpec
from karui.kernels.qtensor import QTensor
from karui.kernels.quantize import checked_rows
from karui.kernels.quantize.grid import DTYPES, grouped, inverse
from karui.kernels.quantize.integer import find_range
from karui.qat.calibration import Block
from karui.qat.search import encode, search_scale, weight_error
from karui.qat.types import LayerReport, MethodConfig


class HQQConfig(MethodConfig):
    """p: the norm; beta, kappa: the splitting's weight and its growth per round (the authors' 1e1 and 1.01); rounds: at most;
    search: start from searched scales instead of the range."""

    p: float = Field(0.7, gt=0, le=1)
    beta: float = Field(10.0, gt=0)
    kappa: float = Field(1.01, ge=1)
    rounds: int = Field(20, ge=1)
    search: bool = True


CONFIG = HQQConfig


def solve(w: torch.Tensor, spec: QuantSpec, config: HQQConfig, *, name: str = "tensor") -> QTensor:
    """Codes of w [out, in] fp32 on an int grid.

    Raises:
        UnsupportedError: another grid. KaruiError: weights that are not finite, groups that do not divide; says `name`.
    """
    if spec.format != "int":
        raise UnsupportedError(f"HQQ serves int grids, not {spec}; use rtn for it.")
    checked_rows(w, spec, name)
    x = grouped(w, spec)
    scale, zero = search_scale(w, spec) if config.search else find_range(x, spec)
    best_scale, best_zero = scale, zero
    best, beta = torch.full(scale.shape, float("inf"), device=w.device), config.beta
    low, high = spec.code_range
    for _ in range(config.rounds):
        step = inverse(scale).unsqueeze(-1)
        shift = None if zero is None else zero.float().unsqueeze(-1)
        codes = torch.round(x / step)
        codes = (codes if shift is None else codes + shift).clamp_(low, high)
        value = codes if shift is None else codes - shift
        delta = x - value * step
        error = delta.abs().pow(config.p).sum(-1)
        better = error < best
        if not better.any():
            break
        best = torch.where(better, error, best)
        best_scale = torch.where(better, scale, best_scale)
        if zero is not None and best_zero is not None:
            best_zero = torch.where(better, zero, best_zero)
        magnitude = delta.abs()
        split = delta.sign() * (magnitude - magnitude.clamp_min(1e-8).pow(config.p - 1) / beta).clamp_min(0)
        target = x - split
        fitted = ((value * target).sum(-1) / value.square().sum(-1).clamp_min(1e-30)).to(DTYPES[spec.scale_dtype])
        scale = torch.where((fitted != 0) & torch.isfinite(fitted), fitted, scale)
        if zero is not None:
            zero = (codes - target / inverse(scale).unsqueeze(-1)).mean(-1).round().clamp(0, high).to(torch.uint8)
        beta *= config.kappa
    return encode(w, spec, best_scale, best_zero, tuple(w.shape))


def quantize_block(block: Block, config: HQQConfig) -> None:
    """Commit every targeted linear of the block."""
    for name, linear in block.linears.items():
        w = linear.weight.detach().float()
        q = solve(w, block.specs[name], config, name=name)
        block.commit(name, q, LayerReport(name=name, spec=str(q.spec), method="hqq", error=weight_error(w, q)))
