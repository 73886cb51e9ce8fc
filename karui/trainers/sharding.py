"""FSDP2: parameters, gradients and optimizer states split over the ranks (arXiv 2304.11277; torch's `fully_shard`).

Every decoder layer is a unit that is gathered while it computes; embedding, final norm and head form the root. What is
trained and what is frozen may lie in one unit, so adapters work as whole models do. Codes of a quantized base are buffers:
each rank holds them.

Asked for by `run.sharding: fsdp2`, or by launching with an accelerate configuration that has FSDP in version 2. The module is
wrapped here and not by accelerate, so that CPU ranks (gloo) take the same path as GPUs, and so that saved states are whole: a
checkpoint has the same files whatever the number of ranks, and goes on with another number.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from karui.configs.errors import KaruiError, UnsupportedError
from karui.configs.recipe import Recipe
from karui.trainers.model import base_model

if TYPE_CHECKING:
    from accelerate import Accelerator


def wanted(recipe: Recipe, accelerator: Accelerator) -> bool:
    """Whether this run is sharded, as recipe and launch say together.

    Raises:
        UnsupportedError: an accelerate configuration with FSDP in version 1.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    launched = plugin is not None or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    version = getattr(plugin, "fsdp_version", None) or int(os.environ.get("FSDP_VERSION", "2"))
    if launched and version != 2:
        raise UnsupportedError(f"the accelerate configuration asks for FSDP version {version}; set fsdp_version: 2.")
    if recipe.run.sharding not in ("auto", "fsdp2") and launched:
        raise KaruiError(f"run.sharding is {recipe.run.sharding}, but the run was launched with FSDP; leave it at auto, or "
                         "launch without FSDP.")
    return accelerator.num_processes > 1 and (launched or recipe.run.sharding == "fsdp2")


def shard(loss: nn.Module, accelerator: Accelerator) -> None:
    """Split the parameters of an objective module in place, layer by layer and then the rest; they become DTensors.

    Every rank must hold the same values before.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    asked = getattr(plugin, "cpu_offload", False)  # accelerate turns a truth value into a policy
    offload = (asked is True or isinstance(asked, CPUOffloadPolicy)) and accelerator.device.type != "cpu"
    split_again = getattr(plugin, "reshard_after_forward", True)
    options: dict[str, Any] = {"mesh": mesh, "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy()}
    for layer in decoder_layers(loss):
        fully_shard(layer, reshard_after_forward=bool(split_again), **options)
    # the root's own parameters are needed again at once, by the backward pass of the head
    fully_shard(loss, reshard_after_forward=False, **options)


def decoder_layers(loss: Any) -> list[nn.Module]:
    body = base_model(loss.model).get_decoder()  # type: ignore[operator]
    layers = getattr(body, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise UnsupportedError(f"{type(body).__name__} has no list of decoder layers to split by; run it with DDP.")
    return list(layers)


def is_sharded(module: nn.Module) -> bool:
    """Split by FSDP2, or by ZeRO 3: ranks that hold parts of a model go through it together."""
    return hasattr(module, "set_requires_gradient_sync") or any(hasattr(p, "ds_id") for p in module.parameters())


def reshard(module: nn.Module) -> None:
    """Split what a forward pass without a backward one leaves gathered (FSDP2's root), so that names lead to the parameters."""
    for unit in module.modules():
        if hasattr(unit, "reshard"):
            unit.reshard()  # type: ignore[operator]


def whole(value: torch.Tensor) -> torch.Tensor:
    """A DTensor's full value, any other tensor as it is. A collective: every rank calls it in the same order."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def split_like(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """`value`, which every rank holds, laid out over the ranks as `parameter` is."""
    if not hasattr(parameter, "device_mesh"):
        return value.to(parameter.device)
    from torch.distributed.tensor import distribute_tensor

    value = value.to(parameter.device)
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)  # type: ignore[attr-defined]


@contextmanager
def gathered(module: nn.Module, *, frozen: bool) -> Iterator[None]:
    """Within, the main rank's modules hold whole tensors on the CPU, so that they can be saved as ever. A collective.

    Args:
        frozen: also those that are not trained; else they stay split, and must not be touched.
    """
    main = int(os.environ.get("RANK", "0")) == 0
    held: list[tuple[nn.Module, str, nn.Parameter]] = []
    seen: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in list(owner._parameters.items()):
            if parameter is None or not hasattr(parameter, "full_tensor") or not (frozen or parameter.requires_grad):
                continue
            if id(parameter) not in seen:  # tied ones stay tied
                full = whole(parameter.detach())
                seen[id(parameter)] = nn.Parameter(full.cpu() if main else full.new_empty(0), parameter.requires_grad)
            held.append((owner, name, parameter))
            owner._parameters[name] = seen[id(parameter)]
    try:
        yield
    finally:
        for owner, name, parameter in held:
            owner._parameters[name] = parameter
