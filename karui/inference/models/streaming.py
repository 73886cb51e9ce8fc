"""Layers whose weights do not fit: which ones, and on a GPU how they come and go (on a CPU: kernels/native/spill.h).

A GPU reads such a layer from pinned main memory into one of two buffers while the layer before it is computed (as FlexGen, arXiv
2303.06865, section 4). A decoding step then takes what its bytes take over the bus, whatever the batch, so large batches lose
little and single streams much.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from karui.configs.errors import KaruiError
from karui.kernels.gemm_weight import PackedWeight
from karui.kernels.qtensor import QTensor

BUFFERS = 2
_LINE = 256  # bytes that a tensor of a layer begins at a multiple of


def streamed_layers(layers: Sequence[int], fixed: int, budget: int, buffers: int = BUFFERS) -> list[bool]:
    """Which of the layers of so many bytes do not stay, given `fixed` bytes that do: the fewest, spread evenly, so that one is
    read while others are computed. Buffers count.

    Raises:
        KaruiError: the budget does not even hold the buffers.
    """
    count, needed_by_buffers = len(layers), buffers * max(layers)
    for out in range(count + 1):
        chosen = [(i + 1) * out // count > i * out // count for i in range(count)]
        needed = fixed + sum(size for size, away in zip(layers, chosen) if not away) + (needed_by_buffers if out else 0)
        if needed <= budget:
            return chosen
    raise KaruiError(f"weight_memory of {budget:,} bytes is too little: embedding, head and norms take {fixed:,}, and {buffers} "
                     f"buffers for layers of up to {max(layers):,} bytes another {needed_by_buffers:,}.")


class StreamedLayers:
    """The weights of some layers in pinned memory, and two buffers on the GPU.

    `add` layers, then `open` with those that are to come and go, in the order in which they are computed. In each step `visit`
    gives a layer's weights on the GPU, to be used before the next visit, and sends for the next layer.

    Attributes:
        sizes: bytes of each layer that was added.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._layers: list[tuple[torch.Tensor, list[dict[str, Any]]]] = []  # bytes, and the weights as views of each buffer
        self._plans: dict[int, dict[str, Any]] = {}
        self._host: dict[int, torch.Tensor] = {}
        self._slots: list[torch.Tensor] = []
        self._visit = 0
        self._sent = -1
        self.sizes: list[int] = []

    def add(self, weights: Mapping[str, torch.Tensor | PackedWeight | QTensor]) -> None:
        """Take a layer's weights, by name, off the GPU."""
        size = sum(_up(t.numel() * t.element_size()) for w in weights.values() for t in _tensors(w).values())
        host = torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        at = 0
        for w in weights.values():
            for t in _tensors(w).values():
                part = _part(host, at, t)
                part.copy_(t.contiguous())
                at += _up(t.numel() * t.element_size())
        layer = len(self.sizes)
        self._host[layer], self._plans[layer] = host, {name: on_meta(w) for name, w in weights.items()}
        self.sizes.append(size)

    def open(self, layers: Sequence[int]) -> None:
        """Make the buffers, and forget other layers than these. Raises `torch.OutOfMemoryError`."""
        self._host = {layer: self._host[layer] for layer in layers}
        self._plans = {layer: self._plans[layer] for layer in layers}
        largest = max(self.sizes[layer] for layer in layers)
        self._slots = [torch.empty(largest, dtype=torch.uint8, device=self._device) for _ in range(BUFFERS)]
        self._layers = [(self._host[layer], [_placed(self._plans[layer], slot) for slot in self._slots]) for layer in layers]
        self._copying = torch.cuda.Stream(self._device)
        self._copying.wait_stream(torch.cuda.current_stream(self._device))  # the buffers' memory may have been another's
        self._arrived = [torch.cuda.Event() for _ in self._slots]
        self._left = [torch.cuda.Event() for _ in self._slots]

    def visit(self) -> dict[str, Any]:
        """The next layer's weights, by name."""
        now = self._visit
        computing = torch.cuda.current_stream(self._device)
        if now:  # what was computed until here is done with the buffer of the visit before
            self._left[(now - 1) % BUFFERS].record(computing)
        for visit in (now, now + 1):
            if visit > self._sent:
                self._send(visit)
        computing.wait_event(self._arrived[now % BUFFERS])
        self._visit = now + 1
        return self._layers[now % len(self._layers)][1][now % BUFFERS]

    def weights(self, layer: int) -> dict[str, Any]:
        """The weights of the layer of this number, where they lie: in main memory."""
        return _placed(self._plans[layer], self._host[layer])

    def _send(self, visit: int) -> None:
        slot, host = visit % BUFFERS, self._layers[visit % len(self._layers)][0]
        if visit >= BUFFERS:
            self._copying.wait_event(self._left[slot])
        with torch.cuda.stream(self._copying):
            self._slots[slot][: host.numel()].copy_(host, non_blocking=True)
        self._arrived[slot].record(self._copying)
        self._sent = visit


def _tensors(w: torch.Tensor | PackedWeight | QTensor) -> dict[str, torch.Tensor]:
    """What a weight consists of."""
    if isinstance(w, torch.Tensor):
        return {"": w}
    if isinstance(w, PackedWeight):
        return w.tensors
    found = {name: getattr(w, name) for name in ("codes", "scale", "zero") if getattr(w, name) is not None}
    return found | {f"extra.{k}": t for k, t in (w.extra or {}).items()}


def on_meta(w: torch.Tensor | PackedWeight | QTensor) -> Any:
    """The same weight without its values."""
    return _with(w, {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in _tensors(w).items()})


def _placed(plan: Mapping[str, Any], memory: torch.Tensor) -> dict[str, Any]:
    """The weights of `plan` as views of `memory`."""
    found, at = {}, 0
    for name, w in plan.items():
        parts = {}
        for part, t in _tensors(w).items():
            parts[part] = _part(memory, at, t)
            at += _up(t.numel() * t.element_size())
        found[name] = _with(w, parts)
    return found


def _with(w: Any, parts: dict[str, torch.Tensor]) -> Any:
    """The same weight of other tensors."""
    if isinstance(w, torch.Tensor):
        return parts[""]
    own = {name: t for name, t in parts.items() if not name.startswith("extra.")}
    if isinstance(w, QTensor) and w.extra:
        own["extra"] = {name: parts[f"extra.{name}"] for name in w.extra}  # type: ignore[assignment]
    return replace(w, **own)


def _part(memory: torch.Tensor, at: int, like: torch.Tensor) -> torch.Tensor:
    return memory[at : at + like.numel() * like.element_size()].view(like.dtype).view(like.shape)


def _up(size: int) -> int:
    return (size + _LINE - 1) // _LINE * _LINE
