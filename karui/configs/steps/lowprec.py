"""Low-precision training as a step of `prepare:`."""

from __future__ import annotations

from typing import Literal

from karui.configs.section import Section


class LowPrecisionStep(Section):
    """Linears trained in 8 or 4 bits (`karui.lowprec`); the weights that are saved are the ordinary ones."""

    method: Literal["fp8-delayed", "fp8-current", "fp8-rowwise", "fp8-blockwise", "mxfp8", "mxfp4", "nvfp4"]
