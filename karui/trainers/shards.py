"""Checkpoints that every rank writes its part of: `torch.distributed.checkpoint` over safetensors files, nothing pickled.

    checkpoint-000012/
      sharded/shard-00001-model-00001-of-00001.safetensors   one per rank; its header says where in each tensor its pieces lie
      stages.safetensors                                     what the recipe's steps keep, where they keep something
      state.json                                             as in `karui.trainers.checkpoint`

The keys are `model/NAME` (all of a model that is trained whole; else what is trained) and `optimizer/KIND/NAME`. Any number of
ranks reads them: each asks for its own pieces, whatever files they lie in.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from karui.configs.errors import CorruptError

FOLDER = "sharded"


def tensors(loss: nn.Module, optimizer: torch.optim.Optimizer, *, adapter: bool) -> dict[str, torch.Tensor]:
    """What such a checkpoint holds, as it lies on this rank: parts are DTensors. The tensors are the run's own, not copies."""
    trained: dict[str, torch.Tensor] = {n: p for n, p in loss.named_parameters() if p.requires_grad}
    held = trained
    if not adapter:
        kept = loss.state_dict().keys()
        held = {**dict(loss.named_parameters()), **{n: b for n, b in loss.named_buffers() if n in kept}}
    found: dict[str, Any] = {f"model/{n}": value.detach() for n, value in held.items()}
    for name, parameter in trained.items():
        for kind, value in optimizer.state[parameter].items():
            found[f"optimizer/{kind}/{name}"] = value.view(1) if value.ndim == 0 else value
    return found


def write(folder: Path, held: dict[str, torch.Tensor]) -> None:
    """This rank's part into `folder`, which exists. A collective; an error on one rank is raised on all."""
    import torch.distributed.checkpoint as dcp

    dcp.save(held, storage_writer=_writer(folder / FOLDER), no_dist=not torch.distributed.is_initialized())


def _writer(folder: Path) -> Any:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    return HuggingFaceStorageWriter(str(folder), save_distributed=True)


def read(folder: Path, loss: nn.Module, optimizer: torch.optim.Optimizer, *, adapter: bool) -> None:
    """Put a checkpoint's tensors into the run's, which are laid out over any number of ranks. A collective.

    Raises:
        CorruptError: a tensor is missing or has another shape.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    for parameter in (p for p in loss.parameters() if p.requires_grad):
        optimizer.state[parameter] = {"step": torch.zeros((), device=parameter.device), "exp_avg": torch.zeros_like(parameter),
                                      "exp_avg_sq": torch.zeros_like(parameter)}
    held = tensors(loss, optimizer, adapter=adapter)
    reader = HuggingFaceStorageReader(str(folder / FOLDER))
    stored = reader.read_metadata().state_dict_metadata
    odd = [n for n, v in held.items() if n not in stored or tuple(stored[n].size) != tuple(v.shape)]  # type: ignore[union-attr]
    if odd or len(stored) != len(held):
        raise CorruptError(f"{folder}: {len(odd) or 'further'} tensors are missing or do not fit this model"
                           f"{f', first {odd[0]!r}' if odd else ''}. Resume with the recipe the run was started with.")
    try:
        dcp.load(held, storage_reader=reader, no_dist=not torch.distributed.is_initialized())
    except CheckpointException as error:
        raise CorruptError(f"{folder} cannot be read: {error}. Resume from an earlier checkpoint of the run.") from error
