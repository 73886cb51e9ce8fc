"""Rounding to nearest, with an optional search of each group's scale; the only method that serves every grid.

Needs no calibration. With `clip_search` the range of each group is shrunk until the squared error of its weights is least, which
at 3 and 2 bits is most of what can be had without data; FP8, NF4 and binary grids have their own fixed rule (see `grids`).
"""

from __future__ import annotations

import torch

from karui.configs.quantspec import QuantSpec
from karui.kernels.qtensor import QTensor
from karui.kernels.quantize import quantize
from karui.qat.calibration import Block
from karui.qat.grids import searched
from karui.qat.search import weight_error
from karui.qat.types import LayerReport, MethodConfig


class RTNConfig(MethodConfig):
    """clip_search: search each group's scale by squared weight error (False: absmax or min/max); steps: ratios tried;
    signed_scale: a negative scale may put the symmetric grid's spare code on the positive side."""

    clip_search: bool = True
    steps: int = 40
    signed_scale: bool = True


CONFIG = RTNConfig


def rounded(w: torch.Tensor, spec: QuantSpec, config: RTNConfig, name: str, weight: torch.Tensor | None = None) -> QTensor:
    """w [out, in] on the grid `spec`; `weight` [in] weighs the inputs in the search."""
    if not config.clip_search:
        return quantize(w, spec, name=name)
    return searched(w.float(), spec, weight=weight, steps=config.steps, signed=config.signed_scale, name=name)


def quantize_block(block: Block, config: RTNConfig) -> None:
    """Commit every targeted linear of the block."""
    for name, linear in block.linears.items():
        w = linear.weight.detach().float()
        q = rounded(w, block.specs[name], config, name)
        note = "clip search" if config.clip_search and q.spec.format in ("int", "ternary", "mxfp4", "nvfp4") else ""
        block.commit(name, q, LayerReport(name=name, spec=str(q.spec), method="rtn", error=weight_error(w, q), note=note))
