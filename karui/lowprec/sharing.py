"""Layers that read one tensor (q, k, v; gate and up) share its codes: quantized once, and kept once for the backward pass.

The layers need not know of each other: what was quantized last is remembered, and used again for the same tensor, unchanged, in
the same form. The bits are those of quantizing it anew: nothing that an input's codes depend on is a layer's own, but for the
scale of delayed scaling, which is compared (and on an accelerator, where that would wait for the device, not shared).
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

# inputs of one tensor under the usual names; what shares at run time is decided by the tensors themselves
ONE_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def readers(name: str, low: set[str]) -> list[str]:
    """The layers of `low` (full names) that read the input of layer `name`, itself among them, by the usual names."""
    parent, _, leaf = name.rpartition(".")
    family = next((f for f in ONE_INPUT if leaf in f), (leaf,))
    return [full for other in family if (full := f"{parent}.{other}" if parent else other) in low]


class LastInput:
    """What was made of the tensor quantized last, by keys of the caller's choice.

    hold: keep that tensor alive and know it by its memory (tensors saved for the backward pass are unpacked into new objects);
    otherwise know it by its object and forget all once that is gone.
    """

    def __init__(self, *, hold: bool) -> None:
        self.hold = hold
        self.clear()

    def clear(self) -> None:
        self._held: torch.Tensor | None = None
        self._seen: weakref.ref[torch.Tensor] | None = None
        self._mark: Any = None
        self._made: dict[Any, Any] = {}

    def of(self, x: torch.Tensor) -> dict[Any, Any]:
        """What was made of `x` so far: a dict to read and to add to; empty if `x` is another tensor or has changed."""
        if x.is_inference():  # such tensors do not count their changes
            return {}
        same = self._mark == self._marked(x) and (self.hold or (self._seen is not None and self._seen() is x))
        if not same:
            self.clear()
            self._mark = self._marked(x)
            if self.hold:
                self._held = x
            else:
                self._seen = weakref.ref(x, self._forget)
        return self._made

    def _marked(self, x: torch.Tensor) -> Any:
        return (x.data_ptr() if self.hold else 0, x.shape, x.stride(), x.dtype, x._version)

    def _forget(self, gone: weakref.ref[torch.Tensor]) -> None:
        if self._seen is gone:
            self.clear()
