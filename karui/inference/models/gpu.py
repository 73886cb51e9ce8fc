"""The runner for GPUs: the decoder on karui's Triton kernels, with a CUDA graph per batch size for decoding.

    linears     q, k, v (and gate, up) as one product each; codes of 2, 4 and 8 bits, NF4, FP8, MX and NVFP4 are decoded in
                registers (`gemm_weight`); 8-bit inputs on 8-bit or ternary weights are multiplied as codes
    norms       fused with the residual addition before them
    attention   paged, over fp32, fp16, bf16, int8 or fp8 blocks; trees of drafts are verified in the same kernel
    decoding    steps of one row per sequence replay a graph; batches are padded to the next size, padded rows write nowhere

Legend for shapes: T tokens in the step, S sequences, H hidden, A attention heads, G kv heads, D head_dim.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from karui.configs.errors import UnsupportedError
from karui.inference.batch import StepBatch, StepOutput
from karui.inference.models.config import ModelConfig
from karui.inference.models.decoder import TorchRunner, _int8_per_token
from karui.inference.models.rope import cos_sin
from karui.inference.models.weights import Weights, check_weights, nbytes
from karui.kernels.gemm_weight import (
    PackedWeight,
    dequantize_weight,
    gemm_float8,
    gemm_int8,
    gemm_weight,
    pack_weight,
    takes_float8,
    takes_int8,
)
from karui.kernels.paged_attention import Cache, Plan, paged_attention, tree_words, write_kv
from karui.kernels.qtensor import QTensor
from karui.kernels.triton_support import Backend, obstacle
from karui.kernels.triton_support.driver import explained

logger = logging.getLogger(__name__)

MODELS = ("llama", "mistral", "qwen2", "qwen3")
GRAPH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_FUSED = {"self_attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
          "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj")}
_EMBEDDING = "model.embed_tokens"
_SINGLE = ("self_attn.o_proj", "mlp.down_proj")


@dataclass
class _Product:
    """One linear, or several that read the same input: y = x W^T + bias, rows of W one after the other."""

    weight: torch.Tensor | PackedWeight | QTensor
    bias: torch.Tensor | None
    int8_input: bool
    float8_input: bool = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.weight, PackedWeight):
            # the kernel wherever this runner runs; torch's path would decode all of W for every step
            backend: Backend = "auto" if x.is_cuda else "triton"
            if self.int8_input and takes_int8(self.weight):
                return gemm_int8(x, self.weight, self.bias, backend)
            if self.float8_input and takes_float8(self.weight):
                return gemm_float8(x, self.weight, self.bias, backend)
            return gemm_weight(_int8_per_token(x) if self.int8_input else x, self.weight, self.bias, backend)
        x = _int8_per_token(x) if self.int8_input else x
        w = self.weight.dequantize(x.dtype) if isinstance(self.weight, QTensor) else self.weight
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

    Raises:
        UnsupportedError: no Triton, a GPU before compute capability 8.0 (8.9 for activations in FP8), a model that the plain
            runner must serve.
    """

    def __init__(self, config: ModelConfig, weights: Weights, device: torch.device | str = "cuda",
                 dtype: torch.dtype = torch.bfloat16, graphs: bool = True, activation_bits: int = 16) -> None:
        reason = unsuited(config, torch.device(device))
        if not reason and activation_bits == 8 and (reason := obstacle(torch.device(device), 89)):
            reason = f"FP8 activations: {reason}; with activation_bits=16 FP8 weights are decoded on any GPU"
        if reason:
            raise UnsupportedError(f"the triton runner cannot serve this: {reason}; use runner='torch'.")
        self._graphs: dict[int, _Graph] = {}
        self._packed = False
        self._products: dict[str, _Product] = {}
        self._use_graphs = graphs and torch.device(device).type == "cuda"
        self._float8_input = activation_bits == 8
        super().__init__(config, weights, device, dtype)

    # -- Runner protocol

    def allocate(self, num_blocks: int, block_size: int, kv_dtype: str) -> None:
        self._graphs.clear()
        needed = num_blocks * block_size * self.kv_bytes_per_token(kv_dtype)
        try:
            super().allocate(num_blocks, block_size, kv_dtype)
        except torch.OutOfMemoryError as error:
            free = torch.cuda.mem_get_info(self.device)[0]
            fits = free // (block_size * self.kv_bytes_per_token(kv_dtype))
            raise UnsupportedError(
                f"{num_blocks} blocks of KV cache need {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free; {fits} blocks "
                f"would fit (fewer sequences, a shorter context, or kv_dtype='fp8' or 'int8')."
            ) from error
        assert self._kv is not None
        scale = self._kv.scale
        self._caches = [Cache(self._kv.data[0, i], self._kv.data[1, i], *((None, None) if scale is None else (scale[0, i],
                                                                                                              scale[1, i])))
                        for i in range(self.config.num_layers)]

    def weight_bytes(self) -> int:
        rest = sum(nbytes(w) for name, w in self._weights.items() if not name.endswith(_IN_PRODUCTS))
        return rest + sum(p.nbytes for p in self._products.values())

    def load_weights(self, weights: Weights, partial: bool = False) -> None:
        """As `TorchRunner.load_weights`; with packed weights only whole sets, because their sources are not kept."""
        if partial and self._packed:
            raise UnsupportedError("a quantized model on the triton runner takes whole sets of weights, not parts.")
        checked = check_weights(self.config, {**self._weights, **weights} if partial else weights)
        self._graphs.clear()
        self._packed, self._products, self._weights = False, {}, {}
        for i in range(self.config.num_layers):
            layer = f"model.layers.{i}."
            for name, parts in _FUSED.items():
                self._make(layer + name, [layer + part for part in parts], checked)
            for name in _SINGLE:
                self._make(layer + name, [layer + name], checked)
        if not self.config.tied:
            self._make("lm_head", ["lm_head"], checked)
        else:
            self._pack_embedding(checked)
        self._weights |= {name: self._moved(w) for name, w in checked.items()}
        if self._packed:
            for name in [n for n in self._weights if n.endswith(_IN_PRODUCTS)]:
                del self._weights[name]
        self.supports_partial_weights = not self._packed

    def dense_weight(self, module: str) -> torch.Tensor:
        """The fp32 weight [out, in] of a linear, dequantized."""
        if f"{module}.weight" in self._weights:
            return super().dense_weight(module)
        prefix, leaf = module.rsplit(".", 2)[0], module.split(".", 3)[-1]
        for fused, parts in _FUSED.items():
            if leaf in parts:
                product = self._products[f"{prefix}.{fused}"]
                start, stop = self._bounds(f"{prefix}.{fused}")[parts.index(leaf)]
                return _dense(product.weight)[start:stop]
        return _dense(self._products[module].weight)

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> StepOutput:
        with explained("use runner='torch'"):
            return self._forward(batch)

    def _forward(self, batch: StepBatch) -> StepOutput:
        size = len(batch.tokens)
        adapters = self._adapter_rows(batch)
        one_row_each = size == len(batch.context_lens) == len(batch.logit_rows)
        decoding = one_row_each and not (adapters or batch.aux_layers or batch.tree_masks)
        if self._use_graphs and decoding and 0 < size <= GRAPH_SIZES[-1]:
            hidden, logits = self._replay(batch, size)
            logits, hidden = logits[batch.logit_rows.long()], hidden[batch.logit_rows.long()]
            return StepOutput(logits, hidden.float() if batch.want_hidden else None)
        tokens, positions, slots = (x.to(self.device, torch.int32) for x in (batch.tokens, batch.positions, batch.slots))
        x, aux = self._run(tokens, positions, slots, self._plan(batch, positions), adapters, batch.aux_layers)
        hidden = self._norm(x[batch.logit_rows.long().to(self.device)], "model.norm.weight")
        return StepOutput(self._head(hidden), hidden.float() if batch.want_hidden else None, None if aux is None else aux.float())

    # -- the decoder

    def _run(self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, plan: Plan, adapters: dict[int,
                                                                                                                  torch.Tensor],
             aux_layers: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Residual stream [T, H] before the last norm."""
        from karui.kernels.rms_norm.triton import add_rms_norm
        from karui.kernels.rope.triton import rotate
        from karui.kernels.swiglu.triton import SwiGLU

        c = self.config
        total, update = self._embed(tokens.long()), None
        cos, sin = (t.float().contiguous() for t in cos_sin(c, positions.long(), self._frequencies))
        aux = []

        def norm(x: torch.Tensor, residual: torch.Tensor | None, name: str) -> tuple[torch.Tensor, torch.Tensor]:
            weight = self._weights[name]
            assert isinstance(weight, torch.Tensor)
            return add_rms_norm(x, residual, weight, c.norm_eps, self.dtype)[:2]

        for i in range(c.num_layers):
            p = f"model.layers.{i}."
            h, total = norm(total if update is None else update, None if update is None else total, p + "input_layernorm.weight")
            if i in aux_layers:
                aux.append(total)
            qkv = self._product(h, p + "self_attn.qkv", adapters)
            q, k, v = qkv.unflatten(-1, (-1, c.head_dim)).split((c.num_heads, c.num_kv_heads, c.num_kv_heads), 1)
            if c.qk_norm:
                q, k = norm(q, None, p + "self_attn.q_norm.weight")[0], norm(k, None, p + "self_attn.k_norm.weight")[0]
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            write_kv(k, v, slots, self._caches[i], "triton")
            window = c.sliding_window[i] if c.sliding_window else None
            mixed = paged_attention(q, self._caches[i], plan, c.head_dim**-0.5, window, "triton")
            update = self._product(mixed.flatten(-2), p + "self_attn.o_proj", adapters)
            h, total = norm(update, total, p + "post_attention_layernorm.weight")
            gate, up = self._product(h, p + "mlp.gate_up", adapters).chunk(2, -1)
            update = self._product(SwiGLU.apply(gate, up), p + "mlp.down_proj", adapters)
        return total + update if update is not None else total, torch.cat(aux, -1) if aux else None

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

    def _product(self, x: torch.Tensor, name: str, adapters: dict[int, torch.Tensor]) -> torch.Tensor:
        y = self._products[name](x)
        for slot, rows in adapters.items():
            prefix, leaf = name.split(".self_attn")[0].split(".mlp")[0], name.split(".", 3)[-1]
            for part, (start, stop) in zip(_FUSED.get(leaf, (leaf,)), self._bounds(name)):
                lora = self._adapters[slot].get(f"{prefix}.{part}")
                if lora is not None:
                    new = y[rows, start:stop] + lora.scale * F.linear(F.linear(x[rows], lora.a), lora.b)
                    y[rows, start:stop] = new if lora.row_scale is None else new * lora.row_scale
        return y

    def _bounds(self, name: str) -> list[tuple[int, int]]:
        """Where each part of a fused product's output begins and ends."""
        c, leaf = self.config, name.split(".", 3)[-1]
        sizes = {"self_attn.qkv": [c.num_heads * c.head_dim] + [c.num_kv_heads * c.head_dim] * 2,
                 "mlp.gate_up": [c.intermediate_size] * 2}
        widths = sizes.get(leaf) or [self._products[name].weight.shape[0]]
        ends = torch.tensor(widths).cumsum(0).tolist()
        return list(zip([0, *ends], ends))

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
            self._weights |= {f"{part}.bias": b for part, b in zip(parts, biases) if b is not None}
        int8_input = any(isinstance(w, QTensor) and w.spec.activation_bits == 8 for w in weights)
        joined = self._joined(name, weights)
        self._products[name] = _Product(joined, bias, int8_input, self._float8_input)
        if isinstance(joined, torch.Tensor):
            views = joined.split([w.shape[0] for w in weights])
            self._weights |= {f"{part}.weight": view for part, view in zip(parts, views)}
        elif isinstance(joined, QTensor):
            self._weights[f"{parts[0]}.weight"] = joined

    def _pack_embedding(self, checked: dict[str, QTensor | torch.Tensor]) -> None:
        """A tied embedding on a grid is held once, as the head's product reads it; look-ups decode their rows of it."""
        name = f"{_EMBEDDING}.weight"
        w = self._moved(checked[name])
        if not isinstance(w, QTensor):
            return
        try:
            self._products[_EMBEDDING] = _Product(pack_weight(w), None, False)
        except UnsupportedError as error:
            logger.info("the embedding is dequantized in every step: %s", error)
            return
        self._packed = True
        del checked[name]

    def _moved(self, w: QTensor | torch.Tensor) -> QTensor | torch.Tensor:
        return w.to(self.device) if isinstance(w, QTensor) else w.to(self.device, self.dtype)

    def _joined(self, name: str, weights: list[QTensor | torch.Tensor]) -> torch.Tensor | PackedWeight | QTensor:
        packed: list[PackedWeight] = []
        for w in weights:
            if isinstance(w, QTensor):
                try:
                    packed.append(pack_weight(w))
                except UnsupportedError as error:
                    logger.info("%s is dequantized in every product: %s", name, error)
        kinds = {(w.form, w.bits, w.middle, w.group, w.scale.dtype, w.zero is None) for w in packed}
        if len(packed) == len(weights) and len(kinds) == 1:
            self._packed = True
            return _concatenated(packed)
        if len(weights) == 1:
            return weights[0]
        return torch.cat([w.dequantize(self.dtype) if isinstance(w, QTensor) else w for w in weights])

    # -- the step

    def _plan(self, batch: StepBatch, positions: torch.Tensor) -> Plan:
        starts = batch.query_starts
        rows = (starts[1:] - starts[:-1]).tolist()
        tree = None
        if batch.tree_masks and any(m is not None for m in batch.tree_masks):
            tree = tree_words(batch.tree_masks, rows).to(self.device)
        starts, contexts, tables = (x.to(self.device, torch.int32) for x in (starts, batch.context_lens, batch.block_tables))
        return Plan(starts, contexts, tables.contiguous(), self._block_size, max(rows), tree, positions)

    def _replay(self, batch: StepBatch, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        padded = next(s for s in GRAPH_SIZES if s >= size)
        width = batch.block_tables.shape[1]
        graph = self._graphs.get(padded)
        if graph is None or graph.tables.shape[1] < width:
            graph = self._graphs[padded] = self._capture(padded, max(16, 1 << (width - 1).bit_length()))
        for to, value in ((graph.tokens, batch.tokens), (graph.positions, batch.positions), (graph.slots, batch.slots),
                          (graph.contexts, batch.context_lens)):
            to[:size].copy_(value, non_blocking=True)
        graph.slots[size:].fill_(-1)
        graph.contexts[size:].fill_(1)
        graph.tables[:size, :width].copy_(batch.block_tables, non_blocking=True)
        graph.replay()
        return graph.hidden[:size], graph.logits[:size]

    def _capture(self, size: int, width: int) -> _Graph:
        """Record a decoding step of `size` sequences with tables of `width` blocks."""
        new = lambda *shape: torch.zeros(*shape, dtype=torch.int32, device=self.device)  # noqa: E731
        tokens, positions, slots, contexts, tables = new(size), new(size), new(size), new(size), new(size, width)
        slots.fill_(-1)
        contexts.fill_(1)
        starts = torch.arange(size + 1, dtype=torch.int32, device=self.device)
        plan = Plan(starts, contexts, tables, self._block_size, 1, None, positions)

        def step() -> tuple[torch.Tensor, torch.Tensor]:
            x, _ = self._run(tokens, positions, slots, plan, {}, ())
            hidden = self._norm(x, "model.norm.weight")
            return hidden, self._head(hidden)

        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(2):  # compiles the kernels, which a capture may not
                step()
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            hidden, logits = step()
        return _Graph(tokens, positions, slots, contexts, tables, hidden, logits, graph.replay)


@dataclass
class _Graph:
    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    contexts: torch.Tensor
    tables: torch.Tensor
    hidden: torch.Tensor
    logits: torch.Tensor
    replay: Callable[[], None]


_IN_PRODUCTS = tuple(f"{part}.weight" for part in (*(f".{p}" for ps in _FUSED.values() for p in ps), *(f".{p}" for p in _SINGLE),
                                                   "lm_head"))


def unsuited(config: ModelConfig, device: torch.device) -> str:
    """Why `TritonRunner` cannot serve this model on this device, or an empty string."""
    if config.model_type not in MODELS:
        return f"model type {config.model_type}"
    if config.beyond_llama:
        return config.beyond_llama
    if config.head_dim > 256:
        return f"a head dimension of {config.head_dim}, more than 256"
    return obstacle(device)


def _concatenated(parts: list[PackedWeight]) -> PackedWeight:
    first = parts[0]
    cat = [torch.cat([getattr(p, name) for p in parts]) for name in ("data", "scale")]
    zero, divisor = (None if getattr(first, name) is None else torch.cat([getattr(p, name) for p in parts])
                     for name in ("zero", "divisor"))
    shape = (sum(p.shape[0] for p in parts), first.shape[1])
    return replace(first, data=cat[0], scale=cat[1], zero=zero, divisor=divisor, shape=shape)


def _dense(w: torch.Tensor | PackedWeight | QTensor) -> torch.Tensor:
    if isinstance(w, PackedWeight):
        return dequantize_weight(w, torch.float32)
    return w.dequantize(torch.float32) if isinstance(w, QTensor) else w.float()
