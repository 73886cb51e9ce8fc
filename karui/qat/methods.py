"""The methods by name: those that find codes for a finished model, and those that train; code is imported when it is used."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType

from karui.configs.errors import KaruiError, UnsupportedError, nearest
from karui.configs.quantspec import QuantSpec

STEPPED = ("int", "ternary", "fp8", "mxfp8", "mxfp4", "nvfp4")  # grids with one step for every weight
ALL = (*STEPPED, "nf4", "binary")


@dataclass(frozen=True, kw_only=True)
class Method:
    """module has `CONFIG` and `quantize_block(block, config)`; grids: formats it serves; calibrates: needs rows; follows: needs
    the unquantized stream too; finishes: has `finish_model`, called after the last block with the unquantized model's last
    hidden states; keeps_zeros: a pruned model stays as sparse as it was."""

    name: str
    paper: str
    cost: str
    grids: tuple[str, ...] = ("int",)
    calibrates: bool = True
    follows: bool = False
    finishes: bool = False
    keeps_zeros: bool = True

    def load(self) -> ModuleType:
        return importlib.import_module(f"karui.qat.{self.name}")

    def check(self, spec: QuantSpec) -> None:
        """Raise `UnsupportedError` for a grid that the method does not serve, before a model is loaded."""
        if spec.format != "none" and spec.format not in self.grids:
            others = ", ".join(m.name for m in METHODS.values() if spec.format in m.grids)
            raise UnsupportedError(f"{self.name} serves {', '.join(self.grids)} grids, not {spec}, which these do: {others}.")


METHODS = {
    m.name: m
    for m in (
        Method(name="rtn", paper="rounding to nearest, scale search", cost="seconds, no data; all grids", grids=ALL,
               calibrates=False),
        Method(name="gptq", paper="GPTQ, arXiv 2210.17323", grids=STEPPED,
               cost="1.3 forward passes + one solve per layer; all grids but nf4 and w1"),
        Method(name="awq", paper="AWQ, arXiv 2306.00978", grids=STEPPED,
               cost="2 forward passes + a grid of 20 per layer; all grids but nf4 and w1"),
        Method(name="smoothquant", paper="SmoothQuant, arXiv 2211.10438", cost="2 forward passes; for w8a8, serves all grids",
               grids=ALL),
        Method(name="hqq", paper="HQQ, Badri and Shaji 2023", cost="seconds, no data; int grids", calibrates=False),
        Method(name="llm_int8", paper="LLM.int8(), arXiv 2208.07339", cost="2 forward passes; w8a8 only"),
        Method(name="rotation", paper="QuaRot 2404.00456, SpinQuant 2405.16406 (R1, R2)", cost="as gptq; unties a tied head",
               grids=STEPPED, keeps_zeros=False),
        Method(name="autoround", paper="AutoRound, arXiv 2309.05516", cost="200 steps per block; int grids", follows=True,
               keeps_zeros=False),
        Method(name="block_ap", paper="EfficientQAT phase 1, arXiv 2407.11062", cost="GPTQ, then an epoch per block; int grids",
               follows=True, keeps_zeros=False),
        Method(name="efficient_qat", paper="EfficientQAT, arXiv 2407.11062", follows=True, finishes=True, keeps_zeros=False,
               cost="block_ap, then an epoch of training; int grids"),
    )
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A method that is a step of a training run (`karui.configs.steps.qat`); lr: where `karui quantize` starts from; keeps_zeros:
    see `Method`."""

    name: str
    paper: str
    cost: str
    lr: float
    keeps_zeros: bool = True


_WHOLE = "training of all weights"
TRAINED = {
    m.name: m
    for m in (
        Trained(name="lsq", paper="LSQ, arXiv 1902.08153", cost=_WHOLE, lr=3e-4),
        Trained(name="lsq_plus", paper="LSQ+, arXiv 2004.09576", cost=f"{_WHOLE}; activation ranges too", lr=3e-4),
        Trained(name="pact", paper="PACT, arXiv 1805.06085", cost=f"{_WHOLE}; activation ranges too", lr=3e-4),
        Trained(name="seq", paper="ParetoQ's SEQ, arXiv 2502.02631", cost=f"{_WHOLE}; w2 and w1.58 only", lr=3e-4,
                keeps_zeros=False),
        Trained(name="bitnet", paper="BitNet, arXiv 2310.11453", cost=f"{_WHOLE}, long; w1 only", lr=5e-4, keeps_zeros=False),
        Trained(name="bitnet_158", paper="BitNet b1.58, arXiv 2402.17764", cost=f"{_WHOLE}, long; w1.58 only", lr=5e-4),
        Trained(name="llm_qat", paper="LLM-QAT, arXiv 2305.17888", cost=f"generation of the data, then {_WHOLE}", lr=3e-4),
        Trained(name="qat_lora", paper="QAT with LoRA (as torchao's recipe)", cost="training of an adapter", lr=1e-3,
                keeps_zeros=False),
    )
}


def method(name: str) -> Method:
    """The post-training method of that name.

    Raises:
        KaruiError: there is none; names the valid ones, and where a method that trains belongs.
    """
    if name in TRAINED:
        raise KaruiError(f"{name} trains on its grid: use it as a step of a recipe's `prepare:` or with `karui quantize`.")
    if name not in METHODS:
        raise KaruiError(f"unknown quantization method {name!r}; methods: {', '.join(METHODS)}.{nearest(name, METHODS)}")
    return METHODS[name]


def check_zeros(name: str, spec: QuantSpec, pruned_by: str) -> None:
    """Raise `UnsupportedError` where weights on this grid, once found or trained by this method, cannot hold a pruned model's
    zeros."""
    known: dict[str, Method | Trained] = {**METHODS, **TRAINED}
    if name in known and (not known[name].keeps_zeros or spec.format == "binary"):
        keep = ", ".join(m.name for m in known.values() if m.keeps_zeros)
        raise UnsupportedError(f"{name} on {spec} moves weights off the zeros that {pruned_by} made; these keep them, on every "
                               f"grid but w1: {keep}.")
