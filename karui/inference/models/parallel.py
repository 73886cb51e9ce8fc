"""One model on several ranks: its layers cut across (tensor parallelism, Megatron-LM, arXiv 1909.08053) or dealt out one after
the other (pipeline parallelism).

    torchrun --nproc_per_node 2 script.py        with torch.distributed.init_process_group("gloo" or "nccl") at its beginning
    engine = Engine.load(path, parallel="tensor")

Every rank runs the same script and the same engine on the same requests: schedules and draws are functions of what all ranks
know, so nothing but activations is exchanged, and every rank has every answer. What would differ from rank to rank, the room for
keys and the seeds of requests without one, is agreed on. What depends on clocks (speculation) is refused.

    tensor      q, k, v, gate, up by rows and o, down by columns; two sums over the ranks per layer; weights and keys shrink alike
    pipeline    whole layers; one hand-over per rank and step; a rank waits while others compute, so it saves memory, not time

Embedding and head are on every rank. Quantized weights stay codes where a cut does not go through a group.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from karui.configs.errors import KaruiError, UnsupportedError
from karui.inference.cache.groups import LayerGroups, groups_of, one_group
from karui.inference.models.config import ModelConfig
from karui.inference.models.decoder import LoraWeights, TorchRunner
from karui.inference.models.weights import Weights, check_weights
from karui.kernels.qtensor import QTensor

logger = logging.getLogger(__name__)

_ROWS, _COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
_CUT = ("int", "ternary", "binary", "fp8")  # formats whose codes and scales are cut; others are dequantized first


class _Ranks(TorchRunner):
    """What both have in common."""

    supports_adapters = False

    def __init__(self, config: ModelConfig, weights: Weights, device: torch.device | str = "cpu",
                 dtype: torch.dtype = torch.float32, group: Any = None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise KaruiError("a model on several ranks needs a process group: start the script with torchrun and call "
                             "torch.distributed.init_process_group at its beginning.")
        if config.recurrent is not None:
            raise UnsupportedError(f"a {config.model_type} has recurrent layers, which are not cut or dealt out; load it on one "
                                   "device.")
        self.group, self.rank, self.world = group, dist.get_rank(group), dist.get_world_size(group)
        self.whole = config
        super().__init__(self._own_config(), weights, device, dtype)

    def load_weights(self, weights: Weights, partial: bool = False) -> None:
        """As `TorchRunner.load_weights`; given are the whole model's weights on every rank."""
        if partial:
            raise UnsupportedError("a model on several ranks takes whole sets of weights, not parts.")
        super().load_weights(self._own_weights(check_weights(self.whole, weights)))

    def set_adapter(self, slot: int, layers: Mapping[str, LoraWeights] | None) -> None:
        raise UnsupportedError("a model on several ranks serves no adapters; merge the adapter into the model.")

    def agree(self, value: int) -> int:
        """The smallest of all ranks' values."""
        found = torch.tensor(value, dtype=torch.int64, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MIN, self.group)
        return int(found)

    def _own_config(self) -> ModelConfig:
        raise NotImplementedError

    def _own_weights(self, weights: dict[str, QTensor | torch.Tensor]) -> dict[str, QTensor | torch.Tensor]:
        raise NotImplementedError


class TensorParallelRunner(_Ranks):
    """Each rank has its share of the heads and of the feed-forward's width.

    Raises:
        UnsupportedError: heads or widths that the ranks do not divide, and what is not cut: mixtures of experts, latent
            attention, fused projections, sinks, norms that need whole rows.
    """

    def _own_config(self) -> ModelConfig:
        c, n = self.whole, self.world
        whole = {"mixtures of experts": c.mixture, "latent attention": c.latent, "sinks": c.sinks,
                 "fused projections": c.fused_qkv or c.fused_mlp, "norms over all heads": c.sub_norms or c.row_norm}
        if names := " and no ".join(name for name, there in whole.items() if there):
            raise UnsupportedError(f"tensor parallelism serves no {names}; use pipeline.")
        sizes = {"attention heads": c.num_heads, "key heads": c.num_kv_heads, "intermediate size": c.intermediate_size}
        if odd := next((f"{name}, {size}" for name, size in sizes.items() if size % n), None):
            raise UnsupportedError(f"{n} ranks do not divide the model's {odd}; use another number of ranks, or pipeline.")
        heads, kv_heads, width = (size // n for size in sizes.values())
        return replace(c, num_heads=heads, num_kv_heads=kv_heads, intermediate_size=width)

    def _own_weights(self, weights: dict[str, QTensor | torch.Tensor]) -> dict[str, QTensor | torch.Tensor]:
        found = dict(weights)
        for name, w in weights.items():
            module, _, kind = name.rpartition(".")
            last = module.rpartition(".")[2]
            if last in _ROWS:
                found[name] = _cut(w, 0, self.rank, self.world, name)
            elif last in _COLUMNS and kind == "weight":
                found[name] = _cut(w, 1, self.rank, self.world, name)
            elif last in _COLUMNS and self.rank:  # the sum over the ranks holds a bias once
                assert isinstance(w, torch.Tensor)
                found[name] = torch.zeros_like(w)
        return found

    def _linear(self, x: torch.Tensor, module: str, adapters: dict[int, torch.Tensor]) -> torch.Tensor:
        y = super()._linear(x, module, adapters)
        if module.endswith(_COLUMNS):
            dist.all_reduce(y, group=self.group)
        return y


class PipelineRunner(_Ranks):
    """Each rank has some of the layers, the first ranks one more where they do not divide.

    Raises:
        UnsupportedError: more ranks than layers; a rank whose first layer needs what the indexer of a layer before it picked.
    """

    def _own_layers(self) -> tuple[int, int]:
        """The first one, and the one after the last."""
        each, more = divmod(self.whole.num_layers, self.world)
        first = self.rank * each + min(self.rank, more)
        return first, first + each + (self.rank < more)

    def kv_groups(self, kv_dtype: str) -> LayerGroups:
        # one schedule for all ranks, whose layers differ: blocks come back where all layers have the same window
        found = groups_of(self.whole.sliding_window or (None,), self.whole.max_context, 1)
        return one_group(self.config.num_kv_layers, found.windows[0])

    def _own_config(self) -> ModelConfig:
        c = self.whole
        if c.num_layers < self.world:
            raise UnsupportedError(f"{self.world} ranks are more than the model's {c.num_layers} layers.")
        first, last = self._own_layers()
        mixture = None if c.mixture is None else replace(c.mixture, layers=c.mixture.layers[first:last])
        latent = c.latent
        if latent is not None and latent.indexer is not None:
            latent = replace(latent, indexer=replace(latent.indexer, layers=latent.indexer.layers[first:last]))
            if not c.latent.indexer.layers[first]:  # type: ignore[union-attr]
                raise UnsupportedError(f"layer {first}, the first of rank {self.rank}, has no indexer and uses what the layer "
                                       f"before it picked; {self.world} ranks cannot serve this model.")
        return replace(c, num_layers=last - first, sliding_window=c.sliding_window[first:last],
                       rotated=c.rotated[first:last], mixture=mixture, latent=latent)

    def _own_weights(self, weights: dict[str, QTensor | torch.Tensor]) -> dict[str, QTensor | torch.Tensor]:
        first, last = self._own_layers()
        found = {}
        for name, w in weights.items():
            number, _, rest = name.removeprefix("model.layers.").partition(".")
            if not name.startswith("model.layers."):
                found[name] = w
            elif first <= int(number) < last:
                found[f"model.layers.{int(number) - first}.{rest}"] = w
        return found

    def _enter(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.rank == 0:
            return super()._enter(tokens)
        x = torch.empty(len(tokens), self.config.hidden_size, dtype=self.dtype, device=self.device)
        dist.recv(x, group=self.group, group_src=self.rank - 1)
        return x

    def _leave(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        if self.rank + 1 < self.world:
            dist.send(x, group=self.group, group_dst=self.rank + 1)
        dist.broadcast(x, group=self.group, group_src=self.world - 1)
        return x


def _cut(w: QTensor | torch.Tensor, side: int, rank: int, world: int, name: str) -> QTensor | torch.Tensor:
    """The rank's share of the rows (side 0) or columns (1)."""
    if isinstance(w, torch.Tensor):
        return w.chunk(world, side)[rank].clone()
    spec, group = w.spec, w.spec.group_size
    whole_groups = side == 0 or group is None or w.shape[1] // world % group == 0
    if spec.format not in _CUT or w.extra or len(w.shape) != 2 or not whole_groups:
        logger.info("%s is dequantized before it is cut: %s", name, spec)
        return w.dequantize().chunk(world, side)[rank].clone()

    def part(t: torch.Tensor | None) -> torch.Tensor | None:  # of scales and zeros: those of a row or a column's groups
        return t if t is None or t.shape[side] == 1 else t.chunk(world, side)[rank].clone()

    scale = part(w.scale)
    assert scale is not None
    shape = tuple(size // world if i == side else size for i, size in enumerate(w.shape))
    return replace(w, codes=w.codes.chunk(world, side)[rank].clone(), scale=scale, zero=part(w.zero), shape=shape)
