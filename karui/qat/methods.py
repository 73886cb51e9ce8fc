"""The post-training methods by name; a method's code is imported when it is used."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType

from karui.configs.errors import KaruiError, nearest


@dataclass(frozen=True, kw_only=True)
class Method:
    """module has `CONFIG` and `quantize_block(block, config)`; calibrates: needs rows; follows: needs the unquantized stream
    too; finishes: has `finish_model`, called after the last block with the unquantized model's last hidden states."""

    name: str
    paper: str
    cost: str
    calibrates: bool = True
    follows: bool = False
    finishes: bool = False

    def load(self) -> ModuleType:
        return importlib.import_module(f"karui.qat.{self.name}")


METHODS = {
    m.name: m
    for m in (
        Method(name="rtn", paper="rounding to nearest, scale search", cost="seconds, no data", calibrates=False),
        Method(name="gptq", paper="GPTQ, arXiv 2210.17323", cost="1.3 forward passes + one solve per layer"),
        Method(name="awq", paper="AWQ, arXiv 2306.00978", cost="2 forward passes + a grid of 20 per layer"),
        Method(name="smoothquant", paper="SmoothQuant, arXiv 2211.10438", cost="2 forward passes; for w8a8"),
        Method(name="hqq", paper="HQQ, Badri and Shaji 2023", cost="seconds, no data", calibrates=False),
        Method(name="llm_int8", paper="LLM.int8(), arXiv 2208.07339", cost="2 forward passes; w8a8 only"),
        Method(name="rotation", paper="QuaRot 2404.00456, SpinQuant 2405.16406 (R1, R2)", cost="as gptq; unties a tied head"),
        Method(name="autoround", paper="AutoRound, arXiv 2309.05516", cost="200 steps per block", follows=True),
        Method(
            name="block_ap", paper="EfficientQAT phase 1, arXiv 2407.11062", cost="GPTQ, then an epoch per block", follows=True
        ),
        Method(
            name="efficient_qat", paper="EfficientQAT, arXiv 2407.11062", cost="block_ap, then an epoch of training",
            follows=True, finishes=True,
        ),  # fmt: skip
    )
}


def method(name: str) -> Method:
    """The method of that name; `KaruiError` names the valid ones."""
    if name not in METHODS:
        raise KaruiError(f"unknown quantization method {name!r}; methods: {', '.join(METHODS)}.{nearest(name, METHODS)}")
    return METHODS[name]
