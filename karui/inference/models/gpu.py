"""The runner for GPUs: the decoder on karui's Triton kernels, with a CUDA graph per batch size for decoding.

    linears     q, k, v (and gate, up) as one product each; codes of 2 to 8 bits (3 in fields of 4, 5 to 7 of 8), NF4, FP8, MX
                and NVFP4 are decoded in registers (`gemm_weight`); 8-bit inputs on 8-bit or ternary weights are multiplied as
                codes
    experts     rows sorted by expert on the device, one grouped product for all experts (`mixture`); dense ones through
                `gemm_grouped`, codes through `gemm_weight`
    norms       fused with the residual addition before them; those of q and k with the rotation and the cache's writing
    attention   paged, over fp32, fp16, bf16, int8, fp8, int4 or kivi blocks; trees of drafts are verified in the same kernel
    decoding    steps of one row per sequence replay a graph, one per size of batch and reach of the context (and one with
                adapters, a number per row); batches are padded to the next size, padded rows write nowhere. One copy brings a
                step's numbers to the GPU

Legend for shapes: T tokens in the step, S sequences, H hidden, A attention heads, G kv heads, D head_dim.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F

from karui.configs.errors import UnsupportedError
from karui.inference.batch import StepBatch, StepOutput
from karui.inference.cache.affine import group_of
from karui.inference.cache.groups import LayerGroups
from karui.inference.cache.kivi import KiviStore
from karui.inference.cache.kv import KVStore, check_dtype
from karui.inference.models.config import ModelConfig
from karui.inference.models.decoder import LoraWeights, TorchRunner
from karui.inference.models.rope import cos_sin
from karui.inference.models.streaming import StreamedLayers, on_meta, streamed_layers
from karui.inference.models.weights import Weights, check_weights, nbytes
from karui.kernels.gemm_grouped import Groups, gemm_grouped
from karui.kernels.gemm_weight import (
    PackedWeight,
    dequantize_weight,
    gemm_float8,
    gemm_int8,
    gemm_weight,
    on_int8_rows,
    pack_weight,
    takes_float8,
    takes_int8,
)
from karui.kernels.kvquant import BITS
from karui.kernels.lora_rows import Stack, lora_rows
from karui.kernels.mixture import mixture
from karui.kernels.paged_attention import Cache, KiviCache, Plan, enter, paged_attention, tree_words
from karui.kernels.qtensor import QTensor
from karui.kernels.triton_support import Backend, current, obstacle
from karui.kernels.triton_support.driver import explained

logger = logging.getLogger(__name__)

MODELS = ("llama", "mistral", "ministral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "seed_oss", "cwm")
GRAPH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
GRAPH_BLOCKS = tuple(16 * 4**i for i in range(10))  # widths of their block tables: the reach decides how keys are split
_EMBEDDING = "model.embed_tokens"


def _products(config: ModelConfig, layer: int) -> dict[str, tuple[str, ...]]:
    """The products of a layer, each with the linears that it stands for, one after the other."""

    def gated(where: str) -> dict[str, tuple[str, ...]]:
        return {f"{where}.gate_up": (f"{where}.gate_proj", f"{where}.up_proj"), f"{where}.down_proj": (f"{where}.down_proj",)}

    found: dict[str, tuple[str, ...]] = {"self_attn.qkv": tuple(f"self_attn.{x}_proj" for x in "qkv"),
                                         "self_attn.o_proj": ("self_attn.o_proj",)}
    m = config.mixture
    if m is None or not m.layers[layer]:
        return found | gated("mlp")
    experts = [f"mlp.experts.{e}" for e in range(m.experts)]
    found |= {"mlp.gate": ("mlp.gate",), "mlp.experts.down": tuple(f"{e}.down_proj" for e in experts),
              "mlp.experts.gate_up": tuple(f"{e}.{part}_proj" for e in experts for part in ("gate", "up"))}
    if m.shared_width:
        found |= gated("mlp.shared_expert") | {"mlp.shared_expert_gate": ("mlp.shared_expert_gate",)}
    return found


@dataclass
class _Product:
    """One linear, or several that read the same input: y = x W^T + bias, rows of W one after the other; or the same linears of
    all experts, on rows sorted by expert."""

    weight: torch.Tensor | PackedWeight | QTensor
    bias: torch.Tensor | None
    int8_input: bool
    float8_input: bool = False

    def __call__(self, x: torch.Tensor, groups: Groups | None = None) -> torch.Tensor:
        # the kernel wherever this runner runs; torch's path would decode all of W for every step
        backend: Backend = "auto" if x.is_cuda else "triton"
        if isinstance(self.weight, PackedWeight):
            if self.int8_input and takes_int8(self.weight):
                return gemm_int8(x, self.weight, self.bias, backend, groups)
            if self.float8_input and takes_float8(self.weight):
                return gemm_float8(x, self.weight, self.bias, backend, groups)
            return gemm_weight(on_int8_rows(x, backend) if self.int8_input else x, self.weight, self.bias, backend, groups)
        x = on_int8_rows(x, backend) if self.int8_input else x
        w = self.weight.dequantize(x.dtype) if isinstance(self.weight, QTensor) else self.weight
        if groups is not None:
            return gemm_grouped(x, w.view(groups.num_experts, -1, w.shape[1]), groups, backend)
        return F.linear(x, w, self.bias)

    @property
    def nbytes(self) -> int:
        w = self.weight.num_bytes if isinstance(self.weight, PackedWeight) else nbytes(self.weight)
        return w + (0 if self.bias is None else self.bias.numel() * self.bias.element_size())


class TritonRunner(TorchRunner):
    """`Runner` on Triton kernels.

    Args:
        config, weights, device, dtype: as for `TorchRunner`. Weights of grids without a kernel stay codes and are dequantized in
            each product; the log names them once.
        graphs: decode with CUDA graphs (on a GPU).
        activation_bits: 8: inputs of FP8 weights are rounded to E4M3 row by row and multiplied as codes; 16: FP8 weights are
            decoded. Whether inputs of integer weights are rounded is their grid's.
        weight_memory: bytes of the GPU that weights may take; layers beyond it lie in pinned main memory and come when their turn
            comes (`StreamedLayers`), without graphs. None: all stay on the GPU.

    Windows give blocks back where all layers have the same one.

    Raises:
        UnsupportedError: no Triton, a GPU before compute capability 8.0 (8.9 for activations in FP8), a model that the plain
            runner must serve.
    """

    most_groups = 1
    paged_at = "cpu"  # so that no step waits for the GPU to know its pages

    def __init__(self, config: ModelConfig, weights: Weights, device: torch.device | str = "cuda",
                 dtype: torch.dtype = torch.bfloat16, graphs: bool = True, activation_bits: int = 16,
                 weight_memory: int | None = None) -> None:
        reason = unsuited(config, torch.device(device))
        if not reason and activation_bits == 8 and (reason := obstacle(torch.device(device), 89)):
            reason = f"FP8 activations: {reason}; with activation_bits=16 FP8 weights are decoded on any GPU"
        if reason:
            raise UnsupportedError(f"the triton runner cannot serve this: {reason}; use runner='torch'.")
        self._graphs: dict[tuple[int, int, bool], _Graph] = {}
        self._stacks: dict[str, Stack] | None = None
        self._caches: list[Cache] | list[KiviCache] = []
        self._packed = False
        self._products: dict[str, _Product] = {}
        self._parts: dict[str, dict[str, slice]] = {}
        self._within: dict[str, str] = {}
        self._use_graphs = graphs and torch.device(device).type == "cuda"
        self._weight_memory = weight_memory
        self._streamed: StreamedLayers | None = None
        self._away: frozenset[int] = frozenset()
        self._float8_input = activation_bits == 8
        self._stream: torch.cuda.Stream | None = None
        super().__init__(config, weights, device, dtype)

    # -- Runner protocol

    def kv_bytes_per_token(self, kv_dtype: str) -> int:
        if check_dtype(kv_dtype) in BITS:
            raise UnsupportedError(f"kv_dtype {kv_dtype!r} has no Triton kernel; use kivi4, int4, fp8 or int8, or load with "
                                   "runner='torch'.")
        return super().kv_bytes_per_token(kv_dtype)

    def allocate(self, num_blocks: int, block_size: int, kv_dtype: str, num_staged: int | None = None,
                 groups: LayerGroups | None = None) -> None:
        assert groups is None, "layers have one table of blocks here"
        self._graphs.clear()
        self._caches = []  # views, which would hold the old blocks beside the new ones
        needed = num_blocks * block_size * self.kv_bytes_per_token(kv_dtype)
        try:
            super().allocate(num_blocks, block_size, kv_dtype, num_staged)
        except torch.OutOfMemoryError as error:
            free = torch.cuda.mem_get_info(self.device)[0]
            fits = free // (block_size * self.kv_bytes_per_token(kv_dtype))
            raise UnsupportedError(
                f"{num_blocks} blocks of KV cache need {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free; {fits} blocks "
                f"would fit (fewer sequences, a shorter context, or kv_dtype='fp8', 'int8' or 'int4')."
            ) from error
        if isinstance(store := self._kv, KiviStore):
            self._caches = [KiviCache(store.keys[i], store.values[i], store.pages[0, i], store.pages[1, i], store.bits,
                                      block_size, store.group) for i in range(self.config.num_layers)]
            return
        assert isinstance(self._kv, KVStore)
        scale, width = self._kv.scale, self.config.head_dim
        packed = (width, group_of(width)) if kv_dtype == "int4" else None
        self._caches = [Cache(self._kv.data[0, i], self._kv.data[1, i], None if scale is None else scale[0, i],
                              None if scale is None else scale[1, i], packed) for i in range(self.config.num_layers)]

    def weight_bytes(self) -> int:
        rest = sum(nbytes(w) for name, w in self._weights.items() if name.rpartition(".")[0] not in self._within)
        return rest + sum(p.nbytes for p in self._products.values())

    def embedding_bytes(self) -> int:
        packed = self._products.get(_EMBEDDING)
        return super().embedding_bytes() if packed is None else packed.nbytes

    def load_weights(self, weights: Weights, partial: bool = False) -> None:
        """As `TorchRunner.load_weights`; with packed weights only whole sets, because their sources are not kept."""
        if partial and self._packed:
            raise UnsupportedError("a quantized model on the triton runner takes whole sets of weights, not parts.")
        with current(self.device):
            self._take(check_weights(self.config, {**self._weights, **weights} if partial else weights))

    def _take(self, checked: dict[str, QTensor | torch.Tensor]) -> None:
        self._graphs.clear()
        self._packed, self._products, self._weights, self._parts, self._within = False, {}, {}, {}, {}
        streamed = None if self._weight_memory is None else StreamedLayers(self.device)
        for i in range(self.config.num_layers):
            layer = f"model.layers.{i}."
            for name, parts in _products(self.config, i).items():
                self._make(layer + name, [layer + part for part in parts], checked)
            if streamed is not None:
                streamed.add({name: self._products[layer + name].weight for name in _products(self.config, i)})
                self._forget(i)
        if not self.config.tied:
            self._make("lm_head", ["lm_head"], checked)
        self._pack_embedding(checked)
        self._weights |= {name: self._moved(w) for name, w in checked.items()}
        if self._packed:
            for name in self._within:
                self._weights.pop(f"{name}.weight", None)
        self.supports_partial_weights = not self._packed
        if streamed is not None:
            self._divide(streamed)

    def _forget(self, layer: int) -> None:
        """Drop what the GPU holds of a layer's products; sizes stay known."""
        self._packed = True  # its parts cannot be swapped one by one
        for name in _products(self.config, layer):
            product = self._products[f"model.layers.{layer}.{name}"]
            product.weight = on_meta(product.weight)
            for part in self._parts[f"model.layers.{layer}.{name}"]:
                self._weights.pop(f"{part}.weight", None)

    def _divide(self, streamed: StreamedLayers) -> None:
        """What fits into `weight_memory` goes back to the GPU, the rest will come and go."""
        assert self._weight_memory is not None
        fixed = self.weight_bytes() - sum(p.nbytes for name, p in self._products.items() if name.startswith("model.layers."))
        away = streamed_layers(streamed.sizes, fixed, self._weight_memory)
        for i in range(self.config.num_layers):
            if not away[i]:
                for name, w in streamed.weights(i).items():
                    self._products[f"model.layers.{i}.{name}"].weight = w.to(self.device)
        self._away = frozenset(i for i, out in enumerate(away) if out)
        self._streamed = streamed if self._away else None
        if self._streamed is not None:
            self._use_graphs = False
            self._streamed.open(sorted(self._away))
            logger.info("%d of %d layers, %d of %d bytes, come from main memory in every step: weight_memory does not hold them",
                        len(self._away), len(away), sum(streamed.sizes[i] for i in self._away), fixed + sum(streamed.sizes))

    def dense_weight(self, module: str) -> torch.Tensor:
        """The fp32 weight [out, in] of a linear, dequantized."""
        if f"{module}.weight" in self._weights:
            return super().dense_weight(module)
        name = self._within.get(module, module)
        w, own = self._product_weight(name), self._parts[name][module]
        if isinstance(w, PackedWeight):
            with current(self.device):
                return dequantize_weight(w.rows(torch.arange(own.start, own.stop, device=self.device)), torch.float32)
        return (w.dequantize(torch.float32) if isinstance(w, QTensor) else w.float())[own]

    def _product_weight(self, name: str) -> torch.Tensor | PackedWeight | QTensor:
        if name.startswith("model.layers.") and self._streamed is not None:
            layer, _, rest = name.removeprefix("model.layers.").partition(".")
            if int(layer) in self._away:
                return self._streamed.weights(int(layer))[rest].to(self.device)
        return self._products[name].weight

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """As `TorchRunner.embed`."""
        with current(self.device):
            return super().embed(tokens)

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> StepOutput:
        with explained("use runner='torch'"), current(self.device):
            return self._forward(batch)

    def _forward(self, batch: StepBatch) -> StepOutput:
        size, pages = len(batch.tokens), None
        if isinstance(self._kv, KiviStore):
            if batch.tree_masks is not None:
                raise UnsupportedError("a cache that codes whole blocks (kivi) serves no trees of drafts, only chains.")
            pages = self._kv.place(batch.slots.long()).int()
        one_each = 0 < size == len(batch.context_lens) and size <= GRAPH_SIZES[-1]
        adapters = self._adapters_of(batch) if one_each else self._adapter_rows(batch)
        decoding = one_each and not (batch.aux_layers or batch.tree_masks)
        if decoding and batch.logit_rows.tolist() == list(range(size)):
            graph = self._graph_for(size, batch.block_tables.shape[1], isinstance(adapters, torch.Tensor))
            if graph is not None:
                hidden, logits = graph.replay(batch, pages)
                # the next replay overwrites both; logits are read before it, hidden states may be kept
                return StepOutput(logits, hidden.to(torch.float32, copy=True) if batch.want_hidden else None)
        adapters = self._here(adapters) if isinstance(adapters, torch.Tensor) else adapters
        tokens, positions, slots, rows = (self._here(x) for x in (batch.tokens, batch.positions, batch.slots, batch.logit_rows))
        pages, plan = None if pages is None else self._here(pages), self._plan(batch, positions)
        (update, total), aux = self._run(tokens, positions, slots, plan, adapters, batch.aux_layers, pages)
        hidden = self._last_norm(update[rows], total[rows])
        return StepOutput(self._head(hidden), hidden.float() if batch.want_hidden else None, None if aux is None else aux.float())

    def _here(self, x: torch.Tensor) -> torch.Tensor:
        """Integers of a batch as int32 on the device. From ordinary memory a copy that waits for nobody is safe: CUDA has taken
        the bytes when the call returns."""
        return x.to(self.device, torch.int32, non_blocking=True)

    # -- the decoder

    def _run(self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, plan: Plan,
             adapters: _Adapters,
             aux_layers: tuple[int, ...],
             pages: torch.Tensor | None) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor | None]:
        """What the last layer adds and the residual stream before it, each [T, H], and the streams entering `aux_layers`. pages:
        [T] where rows lie in a KIVI cache's pages."""
        c = self.config
        total, update = self._embed(tokens.long()), None
        cos, sin = (t.float().contiguous() for t in cos_sin(c, positions.long(), self._frequencies))
        aux = []
        for i in range(c.num_layers):
            p = f"model.layers.{i}."
            if i in self._away:
                assert self._streamed is not None
                for name, w in self._streamed.visit().items():
                    self._products[p + name].weight = w
            h, total = self._add_norm(total if update is None else update, None if update is None else total,
                                      p + "input_layernorm.weight")
            if i in aux_layers:
                aux.append(total)
            qkv = self._product(h, p + "self_attn.qkv", adapters)
            norms = tuple(self._dense(f"{p}self_attn.{x}_norm.weight") for x in "qk") if c.qk_norm else None
            mixed = self._attend(i, qkv, norms, cos, sin, slots, plan, pages)
            update = self._product(mixed.flatten(-2), p + "self_attn.o_proj", adapters)
            h, total = self._add_norm(update, total, p + "post_attention_layernorm.weight")
            is_mixture = c.mixture is not None and c.mixture.layers[i]
            update = self._experts(h, p + "mlp") if is_mixture else self._gated_mlp(h, p + "mlp", adapters)
        assert update is not None
        return (update, total), torch.cat(aux, -1) if aux else None

    def _attend(self, layer: int, qkv: torch.Tensor, norms: tuple[torch.Tensor, ...] | None, cos: torch.Tensor, sin: torch.Tensor,
                slots: torch.Tensor, plan: Plan, pages: torch.Tensor | None) -> torch.Tensor:
        """[T, A, D] of a layer's product; keys and values go into the cache."""
        c, cache = self.config, self._caches[layer]
        window, scaling = c.sliding_window[layer] if c.sliding_window else None, c.head_dim**-0.5
        if isinstance(cache, KiviCache):
            from karui.kernels.paged_attention import kivi

            assert pages is not None
            q = kivi.enter(qkv, c.num_heads, cos, sin, slots, pages, cache, norms, c.norm_eps)
            return kivi.kivi_attention(q, cache, plan, pages, scaling, window)
        q = enter(qkv, c.num_heads, cos, sin, slots, cache, norms, c.norm_eps, "triton")
        return paged_attention(q, cache, plan, scaling, window, "triton")

    def _dense(self, name: str) -> torch.Tensor:
        weight = self._weights[name]
        assert isinstance(weight, torch.Tensor)
        return weight

    def _add_norm(self, x: torch.Tensor, residual: torch.Tensor | None, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of x + residual, x + residual)."""
        from karui.kernels.rms_norm.triton import add_rms_norm

        return add_rms_norm(x, residual, self._dense(name), self.config.norm_eps, self.dtype)[:2]

    def _last_norm(self, update: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        return self._add_norm(update, total, "model.norm.weight")[0]

    def _gated_mlp(self, h: torch.Tensor, module: str, adapters: _Adapters) -> torch.Tensor:
        return self._product(_gated(self._product(h, f"{module}.gate_up", adapters)), f"{module}.down_proj", adapters)

    def _experts(self, h: torch.Tensor, module: str) -> torch.Tensor:
        """As `TorchRunner._mixture`, without asking the host where tokens went."""
        m = self.config.mixture
        assert m is not None
        share, chosen = self._products[f"{module}.gate"](h).float().softmax(-1).topk(m.per_token, -1)
        if m.normalized:
            share = share / share.sum(-1, keepdim=True)
        gate_up, down = self._products[f"{module}.experts.gate_up"], self._products[f"{module}.experts.down"]
        out = mixture(h, chosen, share, m.experts, gate_up, _gated, down, "auto" if h.is_cuda else "triton")
        if m.shared_width:
            out += self._products[f"{module}.shared_expert_gate"](h).sigmoid() * self._gated_mlp(h, f"{module}.shared_expert", {})
        return out

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 logits."""
        product = self._products.get(_EMBEDDING if self.config.tied else "lm_head")
        return (self._linear(hidden, _EMBEDDING, {}) if product is None else product(hidden)).float()

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        product = self._products.get(_EMBEDDING)
        if product is None:
            return super()._embed(tokens)
        assert isinstance(product.weight, PackedWeight)
        return dequantize_weight(product.weight.rows(tokens), self.dtype, "auto" if self.device.type == "cuda" else "triton")

    def _product(self, x: torch.Tensor, name: str, adapters: _Adapters) -> torch.Tensor:
        y = self._products[name](x)
        if isinstance(adapters, torch.Tensor):
            if (stack := self._stacked().get(name)) is not None:
                lora_rows(y, x, adapters, stack, "triton")
            return y
        for slot, rows in adapters.items():
            for part, own in self._parts[name].items():
                lora = self._adapters[slot].get(part)
                if lora is not None:
                    new = y[rows, own] + lora.scale * F.linear(F.linear(x[rows], lora.a), lora.b)
                    y[rows, own] = new if lora.row_scale is None else new * lora.row_scale
        return y

    # -- adapters

    def set_adapter(self, slot: int, layers: Mapping[str, LoraWeights] | None) -> None:
        """As `TorchRunner.set_adapter`."""
        super().set_adapter(slot, layers)
        self._stacks = None
        self._graphs = {key: graph for key, graph in self._graphs.items() if not key[2]}

    def _adapters_of(self, batch: StepBatch) -> _Adapters:
        """Of a step with one row per sequence: int32 [T] on the CPU, or nothing."""
        if batch.adapters is None or int(batch.adapters.max()) < 0:
            return {}
        self._check_slots(batch.adapters)
        return batch.adapters

    def _stacked(self) -> dict[str, Stack]:
        """All adapters, product by product."""
        if self._stacks is None:
            self._stacks = {}
            for name, parts in self._parts.items():
                found = {(slot, i): lora for slot, held in self._adapters.items() for i, part in enumerate(parts)
                         if (lora := held.get(part)) is not None}
                if found:
                    self._stacks[name] = _stack(found, list(parts.values()), 1 + max(self._adapters), self.dtype, self.device)
        return self._stacks

    # -- weights

    def _make(self, name: str, parts: list[str], checked: dict[str, QTensor | torch.Tensor]) -> None:
        """Take the parts of one product out of `checked`. One product's codes lie unpacked on the GPU at a time, and dense
        parts are kept as views of their product, so that nothing is held twice."""
        weights = [self._moved(checked.pop(f"{part}.weight")) for part in parts]
        biases = [self._moved(checked.pop(f"{part}.bias")) if f"{part}.bias" in checked else None for part in parts]
        bias = None
        if any(b is not None for b in biases):
            zeros = [torch.zeros(w.shape[0], device=self.device, dtype=self.dtype) for w in weights]
            bias = torch.cat([z if b is None else z + b for z, b in zip(zeros, biases)])  # type: ignore[operator]
        int8_input = any(isinstance(w, QTensor) and w.spec.activation_bits == 8 for w in weights)
        joined = self._joined(name, weights)
        self._products[name] = _Product(joined, bias, int8_input, self._float8_input)
        ends = list(accumulate((w.shape[0] for w in weights), initial=0))
        self._parts[name] = {part: slice(start, stop) for part, start, stop in zip(parts, ends, ends[1:])}
        self._within |= dict.fromkeys(parts, name)
        if bias is not None:
            self._weights |= {f"{part}.bias": bias[self._parts[name][part]] for part, b in zip(parts, biases) if b is not None}
        if isinstance(joined, torch.Tensor):
            self._weights |= {f"{part}.weight": joined[own] for part, own in self._parts[name].items()}
        elif isinstance(joined, QTensor):
            self._weights[f"{parts[0]}.weight"] = joined

    def _pack_embedding(self, checked: dict[str, QTensor | torch.Tensor]) -> None:
        """An embedding on a grid is held as a product reads it (the head's, when they are tied); look-ups decode their rows."""
        name = f"{_EMBEDDING}.weight"
        w = self._moved(checked[name])
        if not isinstance(w, QTensor):
            return
        try:
            self._products[_EMBEDDING] = _Product(pack_weight(w), None, False)
            self._parts[_EMBEDDING] = {_EMBEDDING: slice(0, w.shape[0])}
        except UnsupportedError as error:
            logger.info("the embedding is dequantized in every step: %s", error)
            return
        self._packed = True
        del checked[name]

    def _moved(self, w: QTensor | torch.Tensor) -> QTensor | torch.Tensor:
        return w.to(self.device) if isinstance(w, QTensor) else w.to(self.device, self.dtype)

    def _joined(self, name: str, weights: list[QTensor | torch.Tensor]) -> torch.Tensor | PackedWeight | QTensor:
        packed: list[PackedWeight] = []
        coded, reason = [w for w in weights if isinstance(w, QTensor)], "its parts are on different grids"
        try:
            packed = [pack_weight(w) for w in coded]
        except UnsupportedError as error:
            reason = str(error)
        kinds = {(q.spec.format, w.bits, w.middle, w.group, w.scale.dtype, w.zero is None, w.span) for q, w in zip(coded, packed)}
        if len(packed) == len(weights) and len(kinds) == 1:
            self._packed = True
            return _concatenated(packed)
        if coded:
            logger.info("%s is dequantized %s: %s", name, "in every product" if len(weights) == 1 else "once, here", reason)
        if len(weights) == 1:
            return weights[0]
        return torch.cat([w.dequantize(self.dtype) if isinstance(w, QTensor) else w for w in weights])

    # -- the step

    def _plan(self, batch: StepBatch, positions: torch.Tensor) -> Plan:
        starts = batch.query_starts
        rows = (starts[1:] - starts[:-1]).tolist()
        tree = None
        if batch.tree_masks and any(m is not None for m in batch.tree_masks):
            tree = self._here(tree_words(batch.tree_masks, rows))
        starts, contexts, tables = (self._here(x) for x in (starts, batch.context_lens, batch.block_tables))
        return Plan(starts, contexts, tables.contiguous(), self._block_size, max(rows), tree, None if tree is None else positions)

    def _graph_for(self, size: int, width: int, adapted: bool = False) -> _Graph | None:
        """The graph for `size` sequences with tables of `width` blocks; None without graphs, or without memory for this one."""
        if not self._use_graphs:
            return None
        key = next(s for s in GRAPH_SIZES if s >= size), next(b for b in GRAPH_BLOCKS if b >= width), adapted
        if key not in self._graphs:
            try:
                self._graphs[key] = self._capture(*key)
            except torch.OutOfMemoryError as error:
                self._use_graphs = False
                logger.warning("no memory is left to record a CUDA graph of %d sequences; kernels are launched one by one from "
                               "here on, which is slower (give the KV cache less: memory=...): %s", key[0], error)
        return self._graphs.get(key)

    def warm_up(self, sequences: int, blocks: int) -> int:
        """Record the graphs of all decoding steps of up to so many sequences with so many blocks each; returns their number."""
        with explained("use runner='torch'"), current(self.device), torch.inference_mode():
            for size in GRAPH_SIZES[:1 + sum(s < sequences for s in GRAPH_SIZES[:-1])]:
                for width in GRAPH_BLOCKS[:1 + sum(b < blocks for b in GRAPH_BLOCKS[:-1])]:
                    self._graph_for(size, width)
        return len(self._graphs)

    def _capture(self, size: int, width: int, adapted: bool) -> _Graph:
        """Record a decoding step of `size` sequences with tables of `width` blocks.

        All graphs share one pool of memory, for only one runs at a time, and one stream, so that cuBLAS keeps one workspace. A
        pool ends with its last graph, so it is asked of a living one.
        """
        inputs = _Inputs(size, width, self.device)
        starts = torch.arange(size + 1, dtype=torch.int32, device=self.device)
        plan = Plan(starts, inputs.contexts, inputs.tables, self._block_size, 1)

        def step() -> tuple[torch.Tensor, torch.Tensor]:
            own: _Adapters = inputs.adapters if adapted else {}
            pages = inputs.pages if isinstance(self._kv, KiviStore) else None
            last, _ = self._run(inputs.tokens, inputs.positions, inputs.slots, plan, own, (), pages)
            hidden = self._last_norm(*last)
            return hidden, self._head(hidden)

        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            for _ in range(2):  # compiles the kernels, which a capture may not
                step()
        torch.cuda.current_stream(self.device).wait_stream(self._stream)
        graph, pool = torch.cuda.CUDAGraph(), next((g.recorded.pool() for g in self._graphs.values()), None)
        # other threads may go on using the GPU
        with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
            hidden, logits = step()
        return _Graph(inputs, plan, hidden, logits, graph)


_Adapters = dict[int, torch.Tensor] | torch.Tensor
"""Rows of each adapter in use, or the adapter of each row."""


class _Inputs:
    """A decoding step's integers, int32, one after the other in one tensor: each part begins at a multiple of 16 bytes."""

    def __init__(self, size: int, width: int, device: torch.device | str) -> None:
        each = max(4, size)
        self.all = torch.zeros(6 * each + size * width, dtype=torch.int32, device=device)
        self.tokens, self.positions, self.slots, self.contexts, self.adapters, self.pages = (
            self.all[i * each:i * each + size] for i in range(6))
        self.tables = self.all[6 * each:].view(size, width)
        self.slots.fill_(-1)  # a row of padding writes nowhere, and sees one key
        self.adapters.fill_(-1)
        self.pages.fill_(-1)
        self.contexts.fill_(1)

    def take(self, batch: StepBatch, pages: torch.Tensor | None = None) -> None:
        """Fill in a batch of `size` sequences or fewer."""
        (rows, columns), (size, width) = self.tables.shape, batch.block_tables.shape
        step = _Inputs(rows, columns, "cpu")
        for to, value in ((step.tokens, batch.tokens), (step.positions, batch.positions), (step.slots, batch.slots),
                          (step.contexts, batch.context_lens)):
            to[:size] = value
        if batch.adapters is not None:
            step.adapters[:size] = batch.adapters
        if pages is not None:
            step.pages[:size] = pages
        step.tables[:size, :width] = batch.block_tables
        self.all.copy_(step.all, non_blocking=True)


@dataclass
class _Graph:
    """A recorded step, with all tensors that it reads and writes."""

    inputs: _Inputs
    plan: Plan
    hidden: torch.Tensor
    logits: torch.Tensor
    recorded: torch.cuda.CUDAGraph

    def replay(self, batch: StepBatch, pages: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(hidden, logits) of the batch, overwritten by the next replay."""
        self.inputs.take(batch, pages)
        self.recorded.replay()
        size = len(batch.tokens)
        return self.hidden[:size], self.logits[:size]


def unsuited(config: ModelConfig, device: torch.device) -> str:
    """Why `TritonRunner` cannot serve this model on this device, or an empty string."""
    if config.model_type not in MODELS:
        return f"model type {config.model_type}"
    if beyond := replace(config, mixture=None).beyond_llama:
        return beyond
    if config.head_dim > 256:
        return f"a head dimension of {config.head_dim}, more than 256"
    return obstacle(device)


def _stack(found: dict[tuple[int, int], LoraWeights], own: list[slice], slots: int, dtype: torch.dtype,
           device: torch.device) -> Stack:
    """(slot, part) -> adapted linear, as one product's `Stack`; the parts' outputs are at `own`."""
    rank, n = max(lora.a.shape[0] for lora in found.values()), own[-1].stop
    a = torch.zeros(slots, len(own) * rank, next(iter(found.values())).a.shape[1], dtype=dtype, device=device)
    b = torch.zeros(slots, n, rank, dtype=dtype, device=device)
    gain = torch.ones(slots, n, device=device) if any(lora.row_scale is not None for lora in found.values()) else None
    for (slot, i), lora in found.items():
        r = lora.a.shape[0]
        a[slot, i * rank:i * rank + r] = lora.a
        b[slot, own[i], :r] = lora.b * lora.scale
        if lora.row_scale is not None:
            assert gain is not None
            gain[slot, own[i]] = lora.row_scale.float()
    part = torch.cat([torch.full((o.stop - o.start,), i, dtype=torch.int32) for i, o in enumerate(own)])
    return Stack(a, b, part.to(device), gain)


def _concatenated(parts: list[PackedWeight]) -> PackedWeight:
    first = parts[0]
    joined: dict[str, Any] = {name: torch.cat([p.tensors[name] for p in parts]) for name in first.tensors}
    return replace(first, **joined, shape=(sum(p.shape[0] for p in parts), first.shape[1]))


def _gated(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of both side by side."""
    from karui.kernels.swiglu.triton import of_halves

    return of_halves(gate_up)
