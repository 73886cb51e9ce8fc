"""Medusa heads in the native kernels: one call per draft. `karui.inference.speculative.medusa` is the reference."""

from __future__ import annotations

import ctypes as C
from collections.abc import Mapping

import torch

from karui.configs.quantspec import QuantSpec
from karui.kernels.native import library
from karui.kernels.native.arena import Arena
from karui.kernels.native.library import Draft, Linear, Medusa, address
from karui.kernels.native.weights import Packed, pack


class MedusaLayer:
    """The packed heads.

    Args:
        tensors: weights by Medusa's names.
        heads, layers: heads, and residual blocks of each.
        projection: [D, H] for all heads, if that is neither the target's whole head nor the heads' own.
        ids: [D] the target's ids of a projection's rows; None: all, in order.
        vocab: the target's vocabulary.
        spec: grid of the matrices, "none" for fp32.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, heads: int, layers: int, projection: torch.Tensor | None,
                 ids: torch.Tensor | None, vocab: int, spec: QuantSpec) -> None:
        from karui.kernels.quantize import quantize

        self._lib, arena, held = library.load(), Arena(), []

        def matrix(name: str, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
            weight = weight.float()
            packed: Packed = pack(self._lib, name, weight if spec.format == "none" else quantize(weight, spec, name=name), bias,
                                  arena=arena)
            held.append(packed.tensors)
            return packed.linear

        names = [f"{i}.{j}.linear" for i in range(heads) for j in range(layers)]
        blocks = (Linear * len(names))(*(matrix(n, tensors[f"{n}.weight"], tensors[f"{n}.bias"]) for n in names))
        own = [tensors[f"{i}.{layers}.weight"] for i in range(heads) if f"{i}.{layers}.weight" in tensors]
        rows = own or ([] if projection is None else [projection])
        projections = (Linear * max(1, len(rows)))(*(matrix(f"projection {i}", weight) for i, weight in enumerate(rows)))
        ids = None if ids is None else ids.long().contiguous()
        self.hidden = tensors["0.0.linear.weight"].shape[0]
        self.medusa = Medusa(self.hidden, heads, layers, vocab if ids is None else len(ids), len(rows), 0, C.addressof(blocks),
                             C.addressof(projections), address(ids))
        self._held = (held, blocks, projections, ids)
        self.nbytes = sum(t.nbytes for tensors_ in held for t in tensors_)

    def draft(self, head: Linear, hidden: torch.Tensor, depth: int, width: int, nodes: int,
              least: float = 0.0) -> tuple[list[int], list[int], list[float]]:
        """Draft behind the token that `hidden` gave.

        Args:
            head: the target's, packed.
            hidden: [H] fp32, the target's last hidden state.
            depth: heads that guess; width: candidates of each; nodes: the likeliest paths that are kept.
            least: a draft that promises fewer accepted tokens is empty.
        Returns:
            the nodes' target tokens, parents (before their children, -1 for the root) and log-probabilities of their paths.
        """
        assert hidden.shape == (self.hidden,)
        hidden = hidden.float().contiguous()
        out, chances = torch.empty(2, nodes, dtype=torch.int32), torch.empty(nodes)
        step = Draft(1, 0, depth, width, nodes, least, None, None, address(hidden), None, None, address(out[0]), address(out[1]),
                     address(chances))
        count = self._lib.medusa(C.byref(self.medusa), C.byref(head), C.byref(step))
        return out[0, :count].tolist(), out[1, :count].tolist(), chances[:count].tolist()
