"""LoRA (arXiv 2106.09685), rsLoRA (2312.03732), QLoRA (2305.14314) and DoRA (2402.09353): put adapters on a model.

Layers are peft's own classes with a fused forward. Where A and B start, and what the base loses for it, is a file per
technique: `loftq`, `pissa`, `olora`, `eva`. One weight is worked on at a time, so that a model which fits in memory is enough.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from karui.adapters.files import fingerprint, keep_residual, quiet
from karui.adapters.loftq import loftq
from karui.adapters.olora import olora
from karui.adapters.pissa import pissa
from karui.adapters.quantized_linear import NOT_QUANTIZED, QuantizedLinear
from karui.adapters.start import Start
from karui.adapters.targets import check_rank, head_names, is_tied, resolve_lora_targets, resolve_modules, shortest
from karui.configs.errors import KaruiError
from karui.kernels.quantize import quantize

if TYPE_CHECKING:
    from peft import PeftModel

    from karui.configs.steps import LoraStep

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Attached:
    """What `attach` did.

    Attributes:
        model: the model with adapters, its base frozen.
        targets: full names of the layers that got an adapter.
        quantized: full names of the layers whose base was quantized.
        base: fingerprint of the base before anything was done to it.
    """

    model: PeftModel
    targets: tuple[str, ...]
    quantized: tuple[str, ...]
    base: str


@dataclass(frozen=True, kw_only=True)
class Look:
    """What `init: eva` looks at: batches, and how the model is run on one."""

    batches: Sequence[Any]
    forward: Callable[[nn.Module, Any], Any]


def attach(model: nn.Module, step: LoraStep, *, look: Look | None = None) -> Attached:
    """Freeze `model`, quantize its linears when the step says so, and add adapters; where `init` draws A, from torch's RNG.

    Raises:
        KaruiError: targets that match nothing, a rank above a target's dimensions, a tied head as target, a weight that does
            not fit the grid, `init: eva` without anything to look at.
    """
    from peft import LoraConfig, get_peft_model

    from karui.adapters import dora, fused

    base = fingerprint(model)
    targets = resolve_lora_targets(model, step.targets)
    check_rank(model, targets, step.rank)
    also = resolve_modules(model, step.train_also) if step.train_also else []
    if step.init == "eva" and look is None:
        raise KaruiError("init eva starts from what the layers see, so attach needs batches to look at.")
    tied = is_tied(model)
    config = LoraConfig(
        r=step.rank,
        lora_alpha=int(step.alpha) if step.alpha == int(step.alpha) else step.alpha,  # type: ignore[arg-type]
        lora_dropout=step.dropout,
        use_rslora=step.rslora,
        use_dora=step.dora,
        target_modules=shortest(model, targets),
        modules_to_save=also or None,
        ensure_weight_tying=tied and any(model.get_submodule(n) is model.get_input_embeddings() for n in also),  # type: ignore[operator]
        init_lora_weights="gaussian" if step.init == "gaussian" else True,
        task_type="CAUSAL_LM",
        bias="none",
    )
    starts, quantized = _prepare_base(model, step, targets)
    config._register_custom_module((dora if step.dora else fused).custom_modules())
    with quiet():
        peft_model = get_peft_model(model, config)
    for name, start in starts.items():
        set_start(peft_model.get_base_model().get_submodule(name), start)
    if look is not None and step.init == "eva":
        from karui.adapters.eva import start_from_activations

        start_from_activations(peft_model, look.batches, look.forward, rho=step.eva_rho)
    return Attached(model=peft_model, targets=tuple(targets), quantized=tuple(quantized), base=base)


def make_start(step: LoraStep, weight: torch.Tensor, name: str) -> Start | None:
    """Where the adapter of one weight [out, in] starts; None: where peft puts it (B = 0)."""
    if step.init == "loftq":
        return loftq(weight, step.base, rank=step.rank, scaling=step.scaling, steps=step.init_steps or 5, name=name)
    if step.init == "pissa":
        return pissa(weight, step.base, rank=step.rank, scaling=step.scaling, steps=step.init_steps or 1, name=name)
    return olora(weight, rank=step.rank, scaling=step.scaling) if step.init == "olora" else None


@torch.no_grad()
def set_start(layer: Any, start: Start, adapter: str = "default") -> None:
    """Put the factors into a layer, and keep beside them what its base lost."""
    layer.lora_A[adapter].weight.copy_(start.a)
    layer.lora_B[adapter].weight.copy_(start.b)
    if adapter in layer.lora_magnitude_vector:
        layer.lora_magnitude_vector[adapter].weight.copy_(layer.norm(adapter))
    if start.u is not None and start.v is not None:
        keep_residual(layer, (start.u, start.v), adapter)


@torch.no_grad()
def _prepare_base(model: nn.Module, step: LoraStep, targets: list[str]) -> tuple[dict[str, Start], list[str]]:
    """Starts by layer, and the base made ready for them: parts taken out, weights packed; one layer after the other."""
    wanted, head = set(targets), head_names(model)
    starts: dict[str, Start] = {}
    quantized: list[str] = []
    for name, module in [(n, m) for n, m in model.named_modules() if type(m) is nn.Linear]:
        start = make_start(step, module.weight, name) if name in wanted else None
        if start is not None:
            starts[name] = start
        if step.base.format != "none" and name not in head and not name.endswith(NOT_QUANTIZED):
            weight = module.weight if start is None else start.base(module.weight.float())
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, QuantizedLinear(quantize(weight, step.base, name=name), module.bias))
            quantized.append(name)
        elif start is not None:
            module.weight.copy_(start.base(module.weight.float()))
    fused = [p for n, p in model.named_parameters() if p.ndim == 3 and "experts." in n]
    if step.base.format != "none" and fused:
        logger.warning("base %s: %d tensors of fused experts stay in %s, %.0f %% of what is held in high precision", step.base,
                       len(fused), str(fused[0].dtype).removeprefix("torch."),
                       100 * sum(p.numel() for p in fused) / sum(p.numel() for p in model.parameters()))
    if step.base.format != "none" and not quantized:
        raise KaruiError(f"no linear layer to quantize to {step.base} in {type(model).__name__}.")
    return starts, quantized
