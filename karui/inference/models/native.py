"""`NativeRunner`: the `Runner` of the CPU kernels. One C call per engine step.

Exact by construction: a row's result has the same bits whatever the batch, the chunking, the number of threads or its
neighbours, because every sum has one fixed order (gemm.cpp, attention.h). So speculative equals greedy, a warm prefix a cold
one, chunked a whole prefill and batched alone, all by equality. It holds within one instruction set.

`forward` keeps torch on one thread while it runs; what runs between steps should be inside `karui.kernels.native.quiet_torch()`
too, which is the caller's to decide because it is process-wide.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from karui.configs.errors import KaruiError, UnsupportedError
from karui.inference.batch import Ahead, Gained, StepBatch, StepOutput
from karui.inference.cache import kivi
from karui.inference.cache.groups import MOST, LayerGroups, groups_of, one_group
from karui.inference.cache.kv import DTYPES, staged_bytes_per_token
from karui.inference.models.config import Latent as LatentConfig
from karui.inference.models.config import ModelConfig
from karui.inference.models.decoder import LoraWeights
from karui.inference.models.rope import cos_sin, halves, inverse_frequencies, kind_of
from karui.inference.models.streaming import streamed_layers
from karui.inference.models.weights import CORRECTION, CheckedWeights, Weights, canonical, take_rows
from karui.kernels.cores import usable_cores
from karui.kernels.native import quiet_torch
from karui.kernels.native.arena import Arena
from karui.kernels.native.kivi import UNIT, to_rows, to_units
from karui.kernels.native.library import (
    ACTIVATIONS,
    CACHE_TYPES,
    LATENT_TARGETS,
    NUM_TARGETS,
    TARGETS,
    Batch,
    Config,
    Indexer,
    Latent,
    Layer,
    Linear,
    Lora,
    Mixture,
    Rounds,
    Stream,
    address,
    load,
)
from karui.kernels.native.spill import BUFFERS, SpillFile
from karui.kernels.native.weights import Across, Packed, pack, pack_across
from karui.kernels.qtensor import QTensor

log = logging.getLogger(__name__)



def default_threads() -> int:
    """Physical cores this process may run on."""
    allowed = usable_cores()
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))


def _lacking(config: ModelConfig) -> str:
    """What of this model the native kernels do not compute, or an empty string."""
    experts = config.mixture
    parts = {
        "recurrent layers": config.recurrent, "gates on attention": config.attention_gate,
        "shared feed-forward layer": config.shared_mlp,
        "interleaved RoPE with norms": config.interleaved and config.qk_norm,
        config.activation: config.activation not in ACTIVATIONS,
        "norms behind or within experts": experts is not None and (config.norms[3] or config.sub_norms)}
    return ", ".join(name for name, there in parts.items() if there)


def _place(config: ModelConfig, target: str) -> tuple[str, torch.Tensor | None]:
    """The module within a layer that a target's outputs come from, and which of its rows they are, in order; None: all.

    The kernels rotate halves, so rows of q and k that are rotated in pairs are reordered.
    """
    if config.latent is not None:
        return _place_of_latent(config, config.latent, target)
    q, kv, f = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, config.intermediate_size
    sizes = dict(zip(TARGETS, (q, kv, kv, config.hidden_size, f, f, config.hidden_size)))
    fused = next((parts for parts, there in ((TARGETS[:3], config.fused_qkv), (TARGETS[4:6], config.fused_mlp))
                  if there and target in parts), None)
    turned = config.interleaved and target in TARGETS[:2]
    module = f"{'self_attn' if target in TARGETS[:4] else 'mlp'}.{target}"
    if fused is None and not turned:
        return module, None
    rows = torch.arange(sizes[target])
    if turned:
        rows = halves(rows.view(-1, config.head_dim), config.rotary_dim).flatten()
    if fused is None:
        return module, rows
    before = sum(sizes[part] for part in fused[: fused.index(target)])
    return ("self_attn.qkv_proj" if target in TARGETS[:3] else "mlp.gate_up_proj"), rows + before


def _place_of_latent(config: ModelConfig, m: LatentConfig, target: str) -> tuple[str, torch.Tensor | None]:
    name = "q_b_proj" if target == "q_proj" and m.query_rank is not None else target
    module = f"{'mlp' if target in TARGETS[4:] else 'self_attn'}.{name}"
    heads, before = {"q_proj": (config.num_heads, m.nope), "kv_a_proj_with_mqa": (1, m.rank)}.get(target, (0, 0))
    if not heads or not m.interleaved:
        return module, None
    rows = torch.arange(heads * (before + m.rope)).view(heads, -1)
    return module, torch.cat([rows[:, :before], halves(rows[:, before:], None)], 1).flatten()


def _targets(config: ModelConfig, layer: int) -> dict[int, str]:
    """The linears of a layer that the C++ side knows by number."""
    mixed = config.mixture is not None and config.mixture.layers[layer]
    names = TARGETS if config.latent is None else LATENT_TARGETS[: None if config.latent.query_rank else -1]
    return {i: name for i, name in enumerate(names) if not (mixed and 4 <= i < 7)}


class NativeRunner:
    """`Runner` over the native kernels.

    Args:
        config: the decoder's shape; head_dim up to 512.
        weights: Hugging Face names to tensors or `QTensor`s; all are checked (`check_weights`). Packed at load.
        threads: size of the team; default: physical cores.
        activation_bits: 8: int8 activations for integer weights (fast); 16: fp32 activations (reference, for evaluation).
        isa: instruction set, default the best one (or KARUI_ISA).
        weight_memory: bytes that weights may take. Layers beyond it lie in a file and are read, in every step, while others are
            computed; None: all stay in memory.
        offload_to: folder of that file, the system's temporary one when None.
    """

    supports_adapters = True

    def __init__(self, config: ModelConfig, weights: Weights, threads: int | None = None, activation_bits: int = 8,
                 isa: str | None = None, weight_memory: int | None = None, offload_to: str | Path | None = None) -> None:
        if config.head_dim > 512 or config.head_dim % 2:
            raise UnsupportedError(f"head_dim {config.head_dim} is not supported by the native kernels: even and at most 512.")
        if lacking := _lacking(config):
            raise UnsupportedError(f"the native kernels have no {lacking}.")
        if config.mixture is not None and weight_memory is not None:
            raise UnsupportedError("weight_memory: the native kernels read no layers with experts from a file; leave it out.")
        if config.latent is not None and weight_memory is not None:
            raise UnsupportedError("weight_memory: the native kernels read no layers with latent attention from a file; leave it "
                                   "out.")
        if threads is not None and threads < 1:
            raise KaruiError(f"threads must be at least 1, got {threads}.")
        self.config, self.threads, self.activation_bits = config, threads or default_threads(), activation_bits
        self._lib = load(isa)
        self.isa = self._lib.isa
        self._model: int | None = None
        self._block_size, self._groups = 0, one_group(config.num_layers)
        self._adapters: dict[int, dict[str, LoraWeights]] = {}
        self._loras: list[object] = []
        self._inv_freq, self._rope_factor = inverse_frequencies(config)
        self._inv_freq = self._inv_freq.float().contiguous()
        self._local_inv_freq = None
        if config.local_theta is not None:
            local = replace(config, rope_theta=config.local_theta, rope_scaling={})
            self._local_inv_freq = inverse_frequencies(local)[0].float().contiguous()
        self._dynamic = kind_of(config) == "dynamic"
        self._weight_memory, self._offload_to = weight_memory, offload_to
        self.load_weights(weights)

    def __del__(self) -> None:
        if getattr(self, "_model", None):
            self._lib.free(self._model)
            self._model = None

    # -- weights and adapters

    def load_weights(self, weights: Weights) -> None:
        """Replace all weights; KV memory and adapters stay. Nothing changes when the check fails."""
        if any(name.endswith("experts.gate_up_proj") for name in weights):
            weights = canonical(weights)
        c, checked = self.config, CheckedWeights(self.config, weights)
        arena, norms = Arena(), list[torch.Tensor]()
        file = None if self._weight_memory is None else SpillFile(self._offload_to)

        def matrix(module: str, where: Arena, activation_bits: int = self.activation_bits) -> Packed:
            return part(module, None, where, activation_bits)

        def part(module: str, rows: torch.Tensor | None, where: Arena, activation_bits: int = self.activation_bits) -> Packed:
            w, bias = checked[f"{module}.weight"], checked.get(f"{module}.bias")
            if rows is not None:
                w, bias = take_rows(w, rows), None if bias is None else take_rows(bias, rows)
            assert not isinstance(bias, QTensor)
            return pack(self._lib, f"{module}.weight", w, bias, activation_bits, where)

        def vector(name: str, offset: float = 0.0) -> int | None:
            w = checked.get(name)
            if w is None:
                return None
            norms.append((w.dequantize() if isinstance(w, QTensor) else w).float().add(offset).contiguous())
            return address(norms[-1])

        linears, vectors, places, mixtures, latents = [], [], [], [], []
        for i in range(c.num_layers):
            prefix = f"model.layers.{i}."
            mixed = c.mixture is not None and c.mixture.layers[i]
            own = {i: _place(c, target) for i, target in _targets(c, i).items() if target != "kv_b_proj"}
            linears.append([part(prefix + module, rows, arena if file is None else Arena()) for module, rows in own.values()])
            if c.latent is not None:
                latents.append(self._latent(f"{prefix}self_attn.", checked, linears[-1], vector, arena))
            mixtures.append(self._mixture(f"{prefix}mlp.", partial(matrix, where=arena), vector) if mixed else None)
            before, attended, between, fed = (name and f"{name}.weight" for name in c.norms)
            norms_here = (before, between, "self_attn.q_norm.weight", "self_attn.k_norm.weight", attended, fed,
                          "self_attn.attn_sub_norm.weight", "mlp.ffn_sub_norm.weight")
            vectors.append([name and vector(prefix + name, c.norm_offset) for name in norms_here])
            vectors[-1].append(vector(f"{prefix}self_attn.sinks"))
            places.append((0, 0))
            if file is not None:
                places[i] = file.add(linears[i])
                linears[i] = [Packed(packed.linear, (), packed.nbytes) for packed in linears[i]]  # what was written is let go
        embedding = matrix("model.embed_tokens", arena)
        head = embedding if c.tied else matrix("lm_head", arena)
        final, ends = vector("model.norm.weight", c.norm_offset), [embedding] if c.tied else [embedding, head]
        in_layers = sum(packed.nbytes for layer in linears for packed in layer)
        in_layers += sum(packed.nbytes for made in mixtures if made for packed in made[1])
        in_layers += sum(made[1].nbytes for made in latents)
        in_layers += sum(part.nbytes for made in latents if made[2] for part in made[2][1])
        fixed = sum(packed.nbytes for packed in ends) + sum(n.numel() * 4 for n in norms)
        if file is not None:
            assert self._weight_memory is not None
            away = streamed_layers([size for _, size in places], fixed, self._weight_memory, BUFFERS)
            for i, out in enumerate(away):
                if not out:
                    file.bring_back(linears[i], *places[i], arena)
                    places[i] = 0, 0
            if any(away):
                log.info("%d of %d layers, %d of %d bytes, are read in every step: they do not fit into weight_memory", sum(away),
                         c.num_layers, sum(size for _, size in places), in_layers + fixed)
        layers = (Layer * c.num_layers)()
        for i in range(c.num_layers):
            window = c.sliding_window[i] if c.sliding_window else None
            matrices, (*norms_of, sinks), made = [packed.linear for packed in linears[i]], vectors[i], mixtures[i]
            if latents:  # v is empty, and what makes a query's latent lies elsewhere
                matrices[2:] = [Linear(), *matrices[2:-1 if c.latent and c.latent.query_rank else None]]
            matrices += [Linear()] * (len(TARGETS) - len(matrices))
            turn = 0 if c.rotated and not c.rotated[i] else 2 if window and c.local_theta is not None else 1
            layers[i] = Layer(*matrices, *norms_of, turn, window or 0, *places[i], ctypes.addressof(made[0]) if made else None,
                              sinks, ctypes.addressof(latents[i][0]) if latents else None)
        config = Config(
            c.num_layers, c.hidden_size, c.num_heads, 1 if c.latent else c.num_kv_heads, c.head_dim, c.intermediate_size,
            c.vocab_size, self.threads, c.head_dim if c.rotary_dim is None else c.rotary_dim, c.row_norm,
            ACTIVATIONS[c.activation], c.centred, c.parallel, c.norm_turned, c.norm_eps, self._rope_factor, c.embed_scale,
            c.query_scale, c.residual_scale, 1 / c.logit_scale, c.attention_cap or 0.0, c.logit_cap or 0.0,
            address(self._inv_freq), address(self._local_inv_freq), final, ctypes.addressof(embedding.linear),
            ctypes.addressof(head.linear), ctypes.addressof(layers), -1 if file is None else file.fd)
        if self._model is None:
            self._model = self._lib.model(ctypes.byref(config))
            full = not self._model
        else:
            full = self._lib.configure(self._model, ctypes.byref(config)) != 0
        if full:
            raise KaruiError("no memory for the buffers of layers that are read from a file.")
        self.embedding: Linear = embedding.linear
        self.head: Linear = head.linear
        self._held = (linears, ends, norms, layers, file, mixtures, latents)  # what the C++ side points into
        self._weight_bytes = in_layers + fixed
        self.spilled_bytes = sum(size for _, size in places)

    def _latent(self, attention: str, weights: Weights, linears: list[Packed], vector: Callable[[str], int | None],
                arena: Arena) -> tuple[Latent, Across, Any]:
        """A layer's latent attention for C++, its kv_b_proj, and its indexer."""
        m, name = self.config.latent, f"{attention}kv_b_proj.weight"
        assert m is not None
        weight = weights[name]
        across = pack_across(self._lib, name, weight, self.config.num_heads, m.nope, self.activation_bits, arena)
        down = linears[-1].linear if m.query_rank else Linear()
        rounded = isinstance(weight, QTensor) and weight.spec.activation_bits == 8
        norms = [vector(f"{attention}{name}_a_layernorm.weight") for name in ("q", "kv")]
        indexed = m.indexer is not None and f"{attention}indexer.wk.weight" in weights
        made = self._indexer(m, attention, weights, arena) if indexed else None
        return Latent(m.rank, m.rope, m.nope, m.value, m.query_rank or 0, m.group, across.group, rounded, m.scale, 0, down,
                      across.fold.linear, across.unfold.linear, address(across.scale), address(across.shift), *norms,
                      None if made is None else ctypes.addressof(made[0]), m.indexer.top if m.indexer else 0), across, made

    def _indexer(self, m: LatentConfig, attention: str, weights: Weights, arena: Arena) -> tuple[Indexer, Any, Any]:
        """A layer's indexer for C++, its matrices and its norm. The weights of its heads are not multiplied in integers."""
        x = m.indexer
        assert x is not None
        key = torch.arange(x.head_dim)
        if x.interleaved:
            key = halves(key, m.rope)
        rows = {"wq_b": (torch.arange(x.heads)[:, None] * x.head_dim + key).flatten(), "wk": key, "weights_proj": None}
        parts = []
        for name, order in rows.items():
            full = f"{attention}indexer.{name}.weight"
            weight = weights[full] if order is None else take_rows(weights[full], order)
            parts.append(pack(self._lib, full, weight, None, self.activation_bits if order is not None else 16, arena))
        norm = []
        for name in ("weight", "bias"):
            w = weights[f"{attention}indexer.k_norm.{name}"]
            norm.append((w.dequantize() if isinstance(w, QTensor) else w).float()[key].contiguous())
        made = Indexer(x.heads, x.head_dim, x.top, 0, *(p.linear for p in parts), *(address(n) for n in norm))
        return made, parts, norm

    def _mixture(self, mlp: str, matrix: Callable[..., Packed], vector: Callable[[str], int | None]) -> tuple[Mixture, Any, Any]:
        """A layer's experts for C++, the matrices, and what else must stay alive."""
        m = self.config.mixture
        assert m is not None
        modules = [f"{mlp}experts.{e}" for e in range(m.experts)]
        modules += [mlp + ("shared_expert" if m.shared_gate else "shared_experts")] * bool(m.shared_width)
        experts = [matrix(f"{module}.{target}") for module in modules for target in TARGETS[-3:]]
        router = matrix(mlp + m.router, activation_bits=16)
        gate = matrix(f"{mlp}shared_expert_gate", activation_bits=16) if m.shared_width and m.shared_gate else None
        table = (Linear * len(experts))(*(packed.linear for packed in experts))
        alpha, limit = m.clamp or (0.0, 0.0)
        made = Mixture(
            m.experts, m.per_token, len(modules) - m.experts, m.sigmoid, m.normalized, ACTIVATIONS[self.config.activation],
            m.groups, m.groups_kept, m.group_best, 0, m.scaling, m.share_eps, m.share_min, alpha, limit,
            self.config.residual_scale, ctypes.addressof(router.linear), None if gate is None else ctypes.addressof(gate.linear),
            vector(f"{mlp}{m.router}.{CORRECTION}") if m.corrected else None, ctypes.addressof(table))
        return made, [*experts, router, *([gate] if gate else [])], table

    def weight_bytes(self) -> int:
        return self._weight_bytes

    def embedding_bytes(self) -> int:
        return self._held[1][0].nbytes

    def set_adapter(self, slot: int, layers: Mapping[str, LoraWeights] | None) -> None:
        """Put an adapter (module name -> `LoraWeights`) into `slot`, or empty it with None. An unknown module is an error."""
        c, known = self.config, dict[str, list[tuple[int, torch.Tensor | None]]]()
        for i in range(c.num_layers):
            for j, target in _targets(c, i).items():
                module, rows = _place(c, target)
                known.setdefault(f"model.layers.{i}.{module}", []).append((i * NUM_TARGETS + j, rows))
        for name in layers or {}:
            if name not in known:
                raise KaruiError(f"adapter module {name!r} is not a linear of this decoder; adapted are "
                                 f"{', '.join(dict.fromkeys(n.rpartition('.')[2] for n in known))}.")
        self._adapters.pop(slot, None)
        if layers is not None:
            self._adapters[slot] = dict(layers)
        slots = max(self._adapters, default=-1) + 1
        per_slot = self.config.num_layers * NUM_TARGETS
        table = (Lora * max(slots * per_slot, 1))()
        held: list[object] = [table]
        for at, modules in self._adapters.items():
            for name, w in modules.items():
                a = w.a.float().contiguous()
                held.append(a)
                for place, rows in known[name]:
                    b, row = (None if t is None else t if rows is None else t[rows] for t in (w.b, w.row_scale))
                    assert b is not None
                    b, row = (b.float() * w.scale).t().contiguous(), None if row is None else row.float().contiguous()
                    held += [b, row]
                    table[at * per_slot + place] = Lora(a.shape[0], 0, address(a), address(b), address(row))
        self._lib.set_loras(self._model, table, slots)
        self._loras = held

    # -- KV memory

    def kv_groups(self, kv_dtype: str) -> LayerGroups:
        """In the kivi formats one: pages of unfinished blocks are found by one table."""
        windows = self.config.sliding_window or (None,) * self.config.num_layers
        return groups_of(windows, self.config.max_context, 1 if kv_dtype in kivi.BITS else MOST)

    def allocate(self, num_blocks: int, block_size: int, kv_dtype: str, num_staged: int | None = None,
                 groups: LayerGroups | None = None) -> None:
        per_token = self.kv_bytes_per_token(kv_dtype)  # refuses a format that the kernels do not have
        staged, beside = num_blocks if num_staged is None else num_staged, self.kv_staged_bytes_per_token(kv_dtype)
        if beside:
            kivi.check_block(block_size, kv_dtype)
        self._groups = one_group(self.config.num_layers) if groups is None else groups
        places = torch.tensor(self._groups.places, dtype=torch.int32)
        if self._lib.allocate(self._model, num_blocks * block_size, CACHE_TYPES[kv_dtype], block_size, staged, address(places)):
            share = self._groups.size / self.config.num_layers
            need = (num_blocks * per_token + staged * beside) * share * block_size / 2**20
            raise KaruiError(f"no memory for {num_blocks} KV blocks of {block_size} tokens in {kv_dtype} ({need:.0f} MiB).")
        self._block_size, self._slots, self._kv_dtype = block_size, num_blocks * block_size, kv_dtype

    def kv_bytes_per_token(self, kv_dtype: str) -> int:
        if kv_dtype not in CACHE_TYPES:
            raise UnsupportedError(f"kv_dtype {kv_dtype!r} is not supported by the native kernels; use {', '.join(CACHE_TYPES)}.")
        c = self.config
        if c.latent is not None:
            return self._latent_bytes(c.latent, kv_dtype)
        padded = (c.head_dim + 15) // 16 * 16
        if kv_dtype in kivi.BITS:
            if c.head_dim % kivi.GROUP:
                raise UnsupportedError(f"kv_dtype {kv_dtype!r} needs heads of a multiple of {kivi.GROUP} dimensions in the "
                                       f"native kernels, not {c.head_dim}; load the engine with runner='torch'.")
            return kivi.code_bytes_per_token(c.num_layers, c.num_kv_heads, c.head_dim, kv_dtype)
        per_head = {"float32": 4 * padded, "float16": 2 * padded, "int8": padded + 4}[kv_dtype]
        return 2 * c.num_layers * c.num_kv_heads * per_head

    def _latent_bytes(self, m: LatentConfig, kv_dtype: str) -> int:
        if kv_dtype in kivi.BITS:
            raise UnsupportedError(f"kv_dtype {kv_dtype!r} is not supported for latent attention; use float32, float16 or int8.")
        layers, indexed = self.config.num_layers, 0 if m.indexer is None else sum(m.indexer.layers) * m.indexer.head_dim
        numbers = layers * sum((part + 15) // 16 * 16 for part in (m.rank, m.rope)) + indexed
        scales = 4 * (layers * (m.rank + m.rope) + indexed) // m.group
        return {"float32": 4 * numbers, "float16": 2 * numbers, "int8": numbers + scales}[kv_dtype]

    def kv_staged_bytes_per_token(self, kv_dtype: str) -> int:
        return staged_bytes_per_token(self.config.num_layers, self.config.num_kv_heads, self.config.head_dim, kv_dtype)

    def settle(self, blocks: Iterable[int]) -> None:
        listed = torch.tensor(sorted(blocks), dtype=torch.int32)
        self._lib.settle(self._model, address(listed), len(listed))

    def copy_slots(self, source: torch.Tensor, target: torch.Tensor) -> None:
        source, target = _int32(source), _int32(target)
        self._check(self._lib.copy_slots(self._model, address(source), address(target), len(source)))

    def read_slots(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        c, kind, slots = self.config, DTYPES[self._kv_dtype], _int32(slots)
        if self._kv_dtype in kivi.BITS:
            bits, count, first = kivi.BITS[self._kv_dtype], len(slots) // UNIT, slots[::UNIT].contiguous()
            units = torch.empty(count, c.num_layers, c.num_kv_heads, UNIT * 2 * c.head_dim * (bits + 1) // 8, dtype=torch.uint8)
            self._lib.move_units(self._model, address(first), count, address(units), 0)
            return to_rows(units, c.head_dim, bits, self._block_size), None
        parts, heads, dim = c.cache_shape
        data = torch.empty(parts, self._groups.size, len(slots), heads, dim, dtype=kind)
        scale = torch.empty(data.shape[:4]) if kind == torch.int8 else None
        self._lib.move_slots(self._model, address(slots), len(slots), address(data), address(scale), 0)
        return data, scale

    def write_slots(self, slots: torch.Tensor, data: torch.Tensor, scale: torch.Tensor | None) -> None:
        if self._kv_dtype in kivi.BITS:
            units = to_units(data, self.config.head_dim, kivi.BITS[self._kv_dtype], self._block_size)
            first = _int32(slots[::UNIT])
            self._lib.move_units(self._model, address(first), len(units), address(units), 1)
            return
        slots, data, scale = _int32(slots), data.contiguous(), None if scale is None else scale.contiguous()
        self._lib.move_slots(self._model, address(slots), len(slots), address(data), address(scale), 1)

    # -- the step

    def forward(self, batch: StepBatch) -> StepOutput:
        with quiet_torch():
            step, output, held = self._step(batch)
            failed = self._lib.forward(self._model, ctypes.byref(step))
            del held
        self._check(failed)
        return output

    @property
    def decodes_ahead(self) -> bool:
        """Whether `decode` can serve: dynamic RoPE gives each step its own table, which is not made in C++."""
        return not self._dynamic

    def decode(self, sequences: Sequence[Ahead], tables: np.ndarray, rounds: int, gain: int, aux_layers: Sequence[int] = (),
               drafts: Mapping[str, Any] | None = None) -> Gained:
        """Up to `rounds` greedy rounds in one call, each a step with the drafts it verifies; see kernels/native/rounds.h.

        It ends early with the round in which a sequence has gained `gain` tokens, has none left or meets an end token, and before
        one whose logits are not numbers.

        Args:
            tables: [groups of layers, S, B] int32 block ids, C order.
            aux_layers: what the drafts read, as in `StepBatch`.
            drafts: fields of `Rounds`, as the proposers' `native` has them; None for plain decoding.
        """
        count, nodes = len(sequences), 0 if drafts is None else drafts["nodes"]
        room, streams = gain + nodes + 1, (Stream * len(sequences))()
        buffers = np.empty((count, room), dtype=np.int32)
        ends = [np.fromiter(s.ends, dtype=np.int32) for s in sequences]
        for i, (s, stream) in enumerate(zip(sequences, streams, strict=True)):
            buffers[i, 0] = s.tokens[-1]
            stream.length, stream.known, stream.left, stream.reach = len(s.tokens), 1, s.left, s.reach
            stream.ends_n, stream.ends, stream.tokens = len(ends[i]), ends[i].ctypes.data, buffers[i].ctypes.data
            if s.proposer is not None:
                s.proposer.lend(s.tokens, stream, room)
        adapters = self._adapter_slots(torch.tensor([s.adapter for s in sequences], dtype=torch.int32))
        layers = np.array(aux_layers, dtype=np.int32)
        verdicts, seconds = np.zeros((2, rounds, count), dtype=np.int32), np.zeros(rounds)
        call = Rounds(sequences=count, table_width=tables.shape[2], block_size=self._block_size, aux_n=len(layers), most=rounds,
                      gain=gain, block_tables=tables.ctypes.data, adapters=address(adapters), aux_layers=layers.ctypes.data,
                      streams=ctypes.addressof(streams), depths=verdicts[0].ctypes.data, accepted=verdicts[1].ctypes.data,
                      seconds=seconds.ctypes.data, **drafts or {})
        with quiet_torch():
            done = self._lib.rounds(self._model, ctypes.byref(call))
        self._check(-done)
        gained: list[list[int]] = []
        for s, stream in zip(sequences, streams, strict=True):
            new = stream.length - len(s.tokens)
            gained.append((ctypes.c_int32 * new).from_address(stream.tokens + 4 * (stream.known - new))[:])
            if s.proposer is not None:
                s.proposer.take_back(stream)
        depths, accepted = verdicts.tolist()
        return Gained(gained, [(t, list(zip(d, a, strict=True))) for t, d, a in zip(seconds[:done].tolist(), depths, accepted)])

    def _check(self, failed: int) -> None:
        if failed > 0:
            raise KaruiError({1: "forward() before allocate(): there is no KV memory.",
                              2: f"a token id of the step is outside the vocabulary of {self.config.vocab_size}.",
                              4: "the file of the layers that do not fit into memory could not be read.",
                              5: "all pages of the KV cache's unfinished blocks are taken: blocks were not settled.",
                              6: f"the step has tables for other groups of layers than the {len(self._groups)} allocated ones.",
                              3: f"a slot of the step is outside the {getattr(self, '_slots', 0)} allocated ones."}[failed])

    def _step(self, batch: StepBatch) -> tuple[Batch, StepOutput, object]:
        """The step for C++, where its results go, and what must stay alive meanwhile."""
        c = self.config
        slots, tables = batch.slots, batch.block_tables
        if batch.others:
            slots, tables = (torch.cat([first, *rest]) for first, *rest in zip((slots, tables), *batch.others, strict=True))
        index = [_int32(t) for t in (batch.tokens, batch.positions, slots, batch.query_starts, batch.context_lens, tables,
                                     batch.logit_rows)]
        total, sequences, wanted = len(index[0]), len(index[4]), len(index[6])
        logits = torch.empty(wanted, c.vocab_size)
        hidden = torch.empty(wanted, c.hidden_size) if batch.want_hidden else None
        aux_layers = torch.tensor(batch.aux_layers, dtype=torch.int32) if batch.aux_layers else None
        aux = torch.empty(total, len(batch.aux_layers) * c.hidden_size) if batch.aux_layers else None
        cos = sin = None
        if self._dynamic:
            cos, sin = (t.float().contiguous() for t in cos_sin(c, index[1], (self._inv_freq, self._rope_factor)))
        masks, tree = None, None
        if batch.tree_masks is not None and any(m is not None for m in batch.tree_masks):
            if self._kv_dtype in kivi.BITS:
                raise UnsupportedError("a cache that codes whole blocks (kivi) serves no trees of drafts, only chains.")
            masks = [None if m is None else m.to(torch.uint8).contiguous() for m in batch.tree_masks]
            tree = (ctypes.c_void_p * sequences)(*(address(m) for m in masks))
        adapters = None if batch.adapters is None else self._adapter_slots(batch.adapters)
        width = index[5].shape[1] if index[5].dim() == 2 else 0
        step = Batch(total, sequences, width, wanted, len(batch.aux_layers), self._block_size, 1 + len(batch.others), 0,
                     *(address(t) for t in index),
                     None if tree is None else ctypes.addressof(tree), address(adapters), address(aux_layers), address(cos),
                     address(sin), address(logits), address(hidden), address(aux))
        return step, StepOutput(logits, hidden, aux), (index, masks, tree, adapters, aux_layers, cos, sin)

    def _adapter_slots(self, adapters: torch.Tensor) -> torch.Tensor | None:
        slots = adapters.tolist()
        for slot in slots:
            if slot >= 0 and slot not in self._adapters:
                raise KaruiError(f"adapter slot {slot} is empty; load the adapter before sending requests to it.")
        return _int32(adapters) if any(slot >= 0 for slot in slots) else None


def _int32(t: torch.Tensor) -> torch.Tensor:
    return t if t.dtype == torch.int32 and t.is_contiguous() else t.to(torch.int32).contiguous()
