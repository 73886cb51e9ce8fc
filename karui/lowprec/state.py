"""What low-precision training remembers between steps, for all layers at once and in buffers of fixed shape.

The amax of every tensor is staged as it is quantized, by maximum, so that a micro-batch more or a recomputed forward pass
changes nothing. Once per optimizer step it goes into slot 0 of the history, the scales are renewed and the histories rolled
(TransformerEngine's delayed scaling):

    scale = (MAX / max(history)) / 2^margin;  an amax of 0, Inf or NaN keeps the old one;  an infinite scale becomes FLT_MAX
    new[i] = old[i + 1], new[last] = old[0], new[0] = 0

Between two updates nothing that a GEMM reads changes: recomputation gives the same bits. The buffers are small, not sharded,
and part of the model's state_dict: a resumed run continues with the same bits, under DDP and FSDP2 too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from karui.configs.errors import KaruiError
from karui.kernels.quantize.compat import FLT_MAX, divide
from karui.kernels.quantize.elements import E4M3, E5M2
from karui.lowprec.precision import Precision
from karui.lowprec.sharing import LastInput

ROLES = ("input", "weight", "gradient")
_TEXT_BYTES = 4096


class LowPrecisionState(nn.Module):
    """Amax histories, scales and the step of L layers; a submodule of the model it serves.

    Buffers:
        history: fp32 [L, 3, H], H = precision.history with delayed scaling, else 1; roles input, weight, gradient.
        scale: fp32 [L, 3], encode scales of delayed scaling; 0 until the first update (the current scale serves).
        step: int64 [], optimizer steps done.
        skipped: int64 [], steps dropped because of a NaN or Inf.
        identity: uint8 [4096], what the state belongs to; loading another's is an error.

    `staged`, fp32 [L, 3], is no buffer: it is 0 between steps, and DDP would overwrite it with the first rank's within one.
    `inputs` and `saved_inputs` are what layers that read one tensor share, forward and backward; empty between steps.
    """

    history: torch.Tensor
    scale: torch.Tensor
    step: torch.Tensor
    skipped: torch.Tensor
    identity: torch.Tensor

    def __init__(self, precision: Precision, names: list[str], device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.precision, self.names = precision, list(names)
        depth = precision.history if precision.uses_history else 1
        self.register_buffer("history", torch.zeros(len(names), 3, depth, device=device))
        self.register_buffer("scale", torch.zeros(len(names), 3, device=device))
        self.register_buffer("step", torch.zeros((), dtype=torch.int64, device=device))
        self.register_buffer("skipped", torch.zeros((), dtype=torch.int64, device=device))
        self.register_buffer("identity", _as_bytes(precision.identity()).to(device))
        self.staged = torch.zeros(len(names), 3, device=device)
        self.formats = precision.at(0)
        self.inputs, self.saved_inputs = LastInput(hold=False), LastInput(hold=True)

    def _apply(self, fn: Any, recurse: bool = True) -> LowPrecisionState:
        keep_dtypes(self, list(self._buffers), lambda: super(LowPrecisionState, self)._apply(fn, recurse))
        self.staged = self.staged.to(self.history.device)
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` itself: in an `nn.Sequential` the state is one of the modules that are run."""
        return x

    def record(self, layer: int, role: int, amax: torch.Tensor) -> None:
        """Note the amax (fp32 scalar) of a tensor of this step; NaN counts as Inf."""
        slot = self.staged[layer, role]
        torch.maximum(slot, torch.nan_to_num(amax, nan=math.inf, posinf=math.inf), out=slot)

    def nonfinite(self) -> list[str]:
        """Layers and roles that met a NaN or Inf since the last update, on any rank."""
        self._share()
        bad = torch.isinf(self.staged).nonzero().tolist()
        return [f"{self.names[layer]} ({ROLES[role]})" for layer, role in bad]

    def update(self, *, skipped: bool = False) -> None:
        """Close an optimizer step. A skipped one leaves histories and scales as they were and is counted."""
        self._share()
        if skipped:
            self.skipped += 1
        else:
            self.history[..., 0] = self.staged
            amax = self.history.amax(-1)
            largest = torch.tensor([E4M3.max, E4M3.max, E5M2.max], device=amax.device).expand_as(amax)
            scale = (divide(largest, amax) / 2.0**self.precision.margin).clamp(max=FLT_MAX)
            self.scale.copy_(torch.where(torch.isfinite(amax) & (amax > 0), scale, self.scale))
            self.history.copy_(torch.roll(self.history, -1, -1))
            self.history[..., 0] = 0
        self.staged.zero_()
        self.inputs.clear()
        self.saved_inputs.clear()
        self.step += 1
        self.formats = self.precision.at(int(self.step))

    def _share(self) -> None:
        """All ranks scale alike: the largest amax of each."""
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(self.staged, op=dist.ReduceOp.MAX)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        saved = state_dict.get(prefix + "identity")
        if saved is not None and not torch.equal(saved.cpu(), self.identity.cpu()):
            raise KaruiError(
                f"low-precision state of {_as_text(saved)} cannot be resumed with {_as_text(self.identity)}; "
                f"use the recipe the run began with, or start afresh from its weights."
            )
        history = state_dict.get(prefix + "history")
        if history is not None and history.shape != self.history.shape:
            raise KaruiError(
                f"low-precision state of {history.shape[0]} layers cannot be loaded into {self.history.shape[0]}; "
                f"the layer policy or the model is another."
            )
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self.formats = self.precision.at(int(self.step))


def keep_dtypes(module: nn.Module, names: list[str], apply: Callable[[], Any]) -> None:
    """Run `apply`, then undo its casts of the named buffers, bits and all: `model.bfloat16()` means the weights."""
    before = {name: getattr(module, name) for name in names}
    apply()
    for name, old in before.items():
        new = getattr(module, name)
        if new.dtype != old.dtype:
            setattr(module, name, old.to(new.device))


def _as_bytes(text: str) -> torch.Tensor:
    raw = text.encode()
    if len(raw) > _TEXT_BYTES:
        raise KaruiError(f"the low-precision recipe is {len(raw)} bytes long, at most {_TEXT_BYTES} fit; shorten its lists.")
    return torch.tensor(list(raw.ljust(_TEXT_BYTES, b"\0")), dtype=torch.uint8)


def _as_text(data: torch.Tensor) -> str:
    return bytes(data.cpu().tolist()).rstrip(b"\0").decode(errors="replace")
