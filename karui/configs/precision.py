"""The words of low-precision training, which recipes and `karui.lowprec` share."""

from __future__ import annotations

from typing import Literal

Gemm = Literal["fprop", "dgrad", "wgrad"]
RecipeName = Literal["fp8-delayed", "fp8-current", "fp8-rowwise", "fp8-blockwise", "mxfp8", "mxfp4", "nvfp4"]
GemmFormat = Literal["fp8-delayed", "fp8-current", "fp8-rowwise", "fp8-blockwise", "mxfp8", "mxfp4", "nvfp4", "high"]
OptimizerName = Literal["adamw", "adamw8bit", "adamw-fp8", "paged-adamw8bit", "paged-adamw-fp8", "adafactor", "muon",
                        "bnb-adamw8bit", "bnb-paged-adamw8bit"]  # fmt: skip
Backend = Literal["auto", "emulate", "scaled_mm", "triton", "te"]
Library = Literal["te", "ao", "deepgemm"]
