"""LLM.int8() (Dettmers et al., arXiv 2208.07339): int8 matrix products, but for the few input columns that hold outliers.

    x [tokens, in] = outlier columns (any |x| > threshold, 6.0) + the rest
    y = x_rest,int8 W_int8^T  (per-token scale x per-channel scale)   +   x_outlier W_outlier^T in high precision

As in bitsandbytes' inference the weight is stored once, in int8 per output channel, and the outlier columns are multiplied with
its dequantized values; which columns are outliers is decided anew for every input. `linear` is that product in plain torch;
calibration measures how many columns of each layer would take the high-precision path and names them in the report. The runtime's
kernels have no such path, so the codes of a layer with outlier columns are marked `w8`: all of its activations stay in high
precision there (with the native runner's int8 activations they do not). `activations.attach(..., outlier=)` computes by column.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from pydantic import Field

from karui.configs.errors import UnsupportedError
from karui.kernels.qtensor import QTensor
from karui.kernels.quantize import quantize
from karui.qat.calibration import Block
from karui.qat.search import weight_error
from karui.qat.smoothquant import statistics
from karui.qat.types import LayerReport, MethodConfig


class LLMInt8Config(MethodConfig):
    """threshold: columns with an activation beyond it stay in high precision (paper: 6.0)."""

    threshold: float = Field(6.0, ge=0)


CONFIG = LLMInt8Config


def linear(x: torch.Tensor, q: QTensor, threshold: float = 6.0) -> torch.Tensor:
    """x [..., in] times the int8 weight q [out, in], transposed; shape [..., out], dtype of x. threshold 0: no outlier path."""
    flat = x.reshape(-1, x.shape[-1]).float()
    outlier = (flat.abs() > threshold).any(0) if threshold > 0 else torch.zeros(flat.shape[1], dtype=torch.bool, device=x.device)
    rest = flat.masked_fill(outlier, 0.0)
    scale = rest.abs().amax(1, keepdim=True) / 127
    codes = torch.round(rest / torch.where(scale == 0, torch.ones_like(scale), scale))
    y = (codes @ q.codes.float().T) * scale * q.scale.float().T
    if outlier.any():
        y += flat[:, outlier] @ q.dequantize()[:, outlier].T
    return y.reshape(*x.shape[:-1], -1).to(x.dtype)


def quantize_block(block: Block, config: LLMInt8Config) -> None:
    """Round to int8 per channel; count the outlier columns of each linear's inputs."""
    largest, seen, _ = statistics(block)
    maxima = {n: peak for group, peak in largest.items() for n in group.names}
    tokens = {n: count for group, count in seen.items() for n in group.names}
    for name, module in block.linears.items():
        spec = block.specs[name]
        if (
            spec.format != "int"
            or spec.bits != 8
            or spec.granularity != "channel"
            or not spec.symmetric
            or spec.activation_bits != 8
        ):
            raise UnsupportedError(f"{name}: LLM.int8() is int8 per channel with int8 activations, spec w8a8, not {spec}.")
        columns = (maxima[name] > config.threshold).nonzero().flatten().tolist()
        shown = ", ".join(map(str, columns[:16])) + (", ..." if len(columns) > 16 else "")
        note = f"{len(columns)} of {len(maxima[name])} columns beyond {config.threshold:g}" + (f": {shown}" if columns else "")
        spec = replace(spec, activation_bits=16 if columns else 8)
        w = module.weight.detach().float()
        q = quantize(w, spec, name=name)
        block.commit(
            name, q,
            LayerReport(name=name, spec=str(spec), method="llm_int8", error=weight_error(w, q), tokens=tokens[name], note=note),
        )  # fmt: skip
