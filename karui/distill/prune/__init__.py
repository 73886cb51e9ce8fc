"""Making students: structured pruning that leaves an ordinary, smaller model, and masks that leave a sparse one.

    layers     drop whole layers (depth)
    width      drop FFN neurons, KV groups of heads, hidden channels (Minitron)
    experts    drop experts of mixtures
    sparse     zero single weights, freely or n of m: SparseGPT, which mends the others, Wanda, magnitude

Each works in place on a transformers decoder and reads calibration text as `rows`, token tensors [T]. Nothing is trained here;
a pruned model is healed by distillation from the model it came from (`objective: distil` without a teacher's name).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from karui.configs.errors import KaruiError, UnsupportedError


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """What became of a model.

    Attributes:
        kept_layers: the original index of each layer that is left.
        masks: parameter name -> bool tensor of its shape, True where a weight is kept; empty for structured pruning.
        lines: one sentence per decision, for the log.
    """

    kept_layers: tuple[int, ...]
    masks: dict[str, torch.Tensor] = field(default_factory=dict)
    lines: tuple[str, ...] = ()


def decoder(model: nn.Module) -> Any:
    """The body with `layers`; raises `UnsupportedError` without one."""
    body: Any = model.get_decoder() if hasattr(model, "get_decoder") else None  # type: ignore[operator]
    if body is None or not isinstance(getattr(body, "layers", None), nn.ModuleList):
        raise UnsupportedError(f"{type(model).__name__} has no list of decoder layers; pruning knows decoder-only transformers.")
    return body


@torch.no_grad()
def forward(model: nn.Module, rows: Sequence[torch.Tensor]) -> None:
    """Run the body over calibration rows, one document each; hooks see what passes."""
    if not rows:
        raise KaruiError("pruning by importance needs calibration text; the recipe's training samples gave none.")
    body = decoder(model)
    device = next(model.parameters()).device
    for row in rows:
        body(input_ids=row.unsqueeze(0).to(device), position_ids=torch.arange(len(row), device=device).unsqueeze(0),
             use_cache=False)
