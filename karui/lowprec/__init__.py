"""Low-precision training: linears whose GEMMs run in FP8, MXFP8, MXFP4 or NVFP4, exactly as the field's libraries do it.

from karui.lowprec import LowPrecision, Precision

low = LowPrecision(Precision.parse("nvfp4"))
low.prepare(model)
print(low.table())
low.attach(optimizer)
"""

from __future__ import annotations

from typing import Any

__all__ = ["LayerPolicy", "LayerReport", "LowPrecision", "LowPrecisionLinear", "LowPrecisionState", "Precision", "Switch"]

_HOMES = {
    "LayerPolicy": "precision",
    "LayerReport": "converter",
    "LowPrecision": "converter",
    "LowPrecisionLinear": "linear",
    "LowPrecisionState": "state",
    "Precision": "precision",
    "Switch": "precision",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"karui.lowprec.{_HOMES[name]}"), name)
