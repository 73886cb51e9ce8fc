"""The reference runner: all of `families.FAMILIES` as one decoder over a dictionary of weights, in plain torch.

Legend for shapes: T tokens in the step, H hidden.

Quantized weights stay codes in memory and are dequantized in each linear; the native runner multiplies with the codes.
`bit_exact=True` runs the step token by token: every token then goes through the same one-row program over the same keys,
so its bits cannot depend on the batch around it, on chunking, on a warm cache or on speculation. It is slow and meant for tests
and for debugging; the native runner has the property at full speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from karui.configs.errors import KaruiError, UnsupportedError
from karui.inference.batch import StepBatch, StepOutput
from karui.inference.cache import kvquant
from karui.inference.cache.groups import MOST, LayerGroups, groups_of, one_group
from karui.inference.cache.kivi import KiviStore
from karui.inference.cache.kv import STAGED, KVStore, bytes_per_token, check_dtype, staged_bytes_per_token
from karui.inference.cache.kvquant import KVQuantStore
from karui.inference.cache.states import StateStore, page_bytes
from karui.inference.models import latent
from karui.inference.models.attention import attend
from karui.inference.models.config import ModelConfig
from karui.inference.models.rope import cos_sin, halves, inverse_frequencies, rotate
from karui.inference.models.step import Step
from karui.inference.models.weights import CORRECTION, WIDE, Weights, check_weights, nbytes
from karui.kernels.gemm_weight import on_int8_rows
from karui.kernels.kvquant import BITS, KVLevels, file_of
from karui.kernels.qtensor import QTensor

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu, "relu2": lambda x: F.relu(x).square(), "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh")}
_NOT_ADAPTED = (".mlp.gate", ".mlp.router", ".weights_proj")
MLP = ("mlp", "shared_mlp")
"""Names of the feed-forward layer; the second is Granite's, see `ModelConfig.shared_mlp`."""


@dataclass(frozen=True)
class LoraWeights:
    """One adapted linear: a [r, in], b [out, r], y += scale * b a x; `row_scale` [out] is DoRA's m / ||W + s b a||, else None."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    row_scale: torch.Tensor | None = None


class TorchRunner:
    """`Runner` in plain torch on any device.

    Args:
        config: the decoder's shape.
        weights: Hugging Face names to tensors or `QTensor`s; all are checked (`check_weights`).
        device: where weights and KV cache live.
        dtype: dtype of activations and dense weights; norms, rotation and logits are fp32 (float64 when `dtype` is).
        bit_exact: process tokens one by one, see the module's docstring.
    """

    supports_adapters = True
    supports_partial_weights = True
    most_groups = MOST
    paged_at: str | None = None

    def __init__(self, config: ModelConfig, weights: Weights, device: torch.device | str = "cpu",
                 dtype: torch.dtype = torch.float32, bit_exact: bool = False) -> None:
        self.config, self.device, self.dtype, self.bit_exact = config, torch.device(device), dtype, bit_exact
        self._wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.default_kv_dtype = str(dtype).removeprefix("torch.").replace("float64", "float32")
        self._adapters: dict[int, dict[str, LoraWeights]] = {}
        self._kv_levels: dict[int, KVLevels] = {}
        f, factor = inverse_frequencies(config)
        self._frequencies = (f.to(self.device), factor)
        self._local = None if config.local_theta is None else replace(config, rope_theta=config.local_theta, rope_scaling={})
        self._local_frequencies = None if self._local is None else (inverse_frequencies(self._local)[0].to(self.device), 1.0)
        self.load_weights(weights)

    # -- Runner protocol

    def kv_groups(self, kv_dtype: str) -> LayerGroups:
        c = self.config
        if c.latent is not None or c.recurrent is not None or not any(c.sliding_window):
            return one_group(c.num_kv_layers)
        # levels of kvquant are each layer's own: its blocks are of all layers
        return groups_of(c.sliding_window, c.max_context, 1 if kv_dtype in BITS else self.most_groups)

    def allocate(self, num_blocks: int, block_size: int, kv_dtype: str, num_staged: int | None = None,
                 groups: LayerGroups | None = None) -> None:
        c = self.config
        self._groups = one_group(c.num_kv_layers) if groups is None else groups
        layers = self._groups.size
        self._kv: KVStore | KiviStore | KVQuantStore | latent.LatentStore | None = None
        if c.latent is not None:
            self._kv = latent.LatentStore(c, num_blocks * block_size, kv_dtype, self.device)
        elif kv_dtype in BITS:
            self._kv = KVQuantStore(self._levels(kv_dtype), num_blocks, block_size, c.num_kv_heads, c.head_dim, self._turn_keys,
                                    self.device)
        elif check_dtype(kv_dtype) in STAGED:
            self._kv = KiviStore(layers, num_blocks, block_size, c.num_kv_heads, c.head_dim, kv_dtype, self.device,
                                 num_staged, self.paged_at)
        else:
            self._kv = KVStore(layers, num_blocks * block_size, c.num_kv_heads, c.head_dim, kv_dtype, self.device)
        self._block_size = block_size

    @property
    def state_bytes(self) -> int:
        kind = self.config.recurrent
        return 0 if kind is None else page_bytes(kind, self.dtype, self._wide)

    def allocate_states(self, num_pages: int) -> None:
        assert self.config.recurrent is not None
        self._states: StateStore | None = None
        self._states = StateStore(self.config.recurrent, num_pages, self.dtype, self._wide, self.device)

    def set_kv_levels(self, levels: KVLevels) -> None:
        """What `allocate` needs for the kvquant formats. Raises `UnsupportedError` when they do not fit the model."""
        c, shape = self.config, tuple(levels.key_low.shape)
        if c.latent is not None or c.keys_differ or shape != (c.num_kv_layers, c.num_kv_heads * c.head_dim):
            raise UnsupportedError(f"these KV levels are for {shape[0]} layers of {shape[1]} channels, all rotated alike; this "
                                   f"model has {c.num_kv_layers} of {c.num_kv_heads * c.head_dim}"
                                   f"{c.keys_differ and f', which {c.keys_differ}'}.")
        self._kv_levels[levels.bits] = levels.to(self.device)

    def _levels(self, kv_dtype: str) -> KVLevels:
        if (found := self._kv_levels.get(BITS[kv_dtype])) is None:
            raise UnsupportedError(f"kv_dtype {kv_dtype!r} needs levels fitted to this model: karui kv-levels makes "
                                   f"them, {file_of(kv_dtype)} in the model's folder is where they are looked for.")
        return found

    def _turn_keys(self, k: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Cached keys [C, G, D] as they are rotated at `positions`."""
        if self.config.rotary_dim == 0:
            return k
        return rotate(k, *self._turns(self.config, positions, self._frequencies))

    def settle(self, blocks: Iterable[int]) -> None:
        if isinstance(self._kv, KiviStore):
            self._kv.settle(blocks)

    def kv_bytes_per_token(self, kv_dtype: str) -> int:
        if self.config.latent is not None:
            return latent.bytes_per_token(self.config, kv_dtype)
        if kv_dtype in BITS:
            return kvquant.bytes_per_token(self._levels(kv_dtype))
        return bytes_per_token(self.config.num_kv_layers, self.config.num_kv_heads, self.config.head_dim, kv_dtype)

    def kv_staged_bytes_per_token(self, kv_dtype: str) -> int:
        return staged_bytes_per_token(self.config.num_kv_layers, self.config.num_kv_heads, self.config.head_dim, kv_dtype)

    def weight_bytes(self) -> int:
        return sum(nbytes(w) for w in self._weights.values())

    def embedding_bytes(self) -> int:
        table = self._weights.get("model.embed_tokens.weight")
        return 0 if table is None else nbytes(table)

    def copy_slots(self, source: torch.Tensor, target: torch.Tensor) -> None:
        assert self._kv is not None, "allocate() first"
        self._kv.copy(source.long().to(self.device), target.long().to(self.device))

    def read_slots(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert self._kv is not None, "allocate() first"
        return self._kv.take(slots.long().to(self.device))

    def write_slots(self, slots: torch.Tensor, data: torch.Tensor, scale: torch.Tensor | None) -> None:
        assert self._kv is not None, "allocate() first"
        self._kv.put(slots.long().to(self.device), data, scale)

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> StepOutput:
        if batch.tree_masks is not None and self._kv is not None and self._kv.staged:
            raise UnsupportedError("a cache that codes whole blocks (kivi) serves no trees of drafts, only chains.")
        step = Step.of(batch, self._block_size, self._adapter_rows(batch), self.device)
        if not self.bit_exact:
            x, aux = self._layers(step, batch.aux_layers)
        else:
            rows = [self._layers(one, batch.aux_layers) for one in step.rows()]
            x = torch.cat([row for row, _ in rows])
            aux = torch.cat([a for _, a in rows if a is not None]) if batch.aux_layers else None
        wanted = x[batch.logit_rows.long().to(self.device)]
        pieces = wanted.split(1) if self.bit_exact and len(wanted) else [wanted]
        hidden = torch.cat([self._norm(p, "model.norm.weight") for p in pieces])
        head = "model.embed_tokens" if self.config.tied else "lm_head"
        logits = torch.cat([self._linear(h, head, {}) for h in (hidden.split(1) if self.bit_exact and len(hidden) else [hidden])])
        if self.config.logit_scale != 1:
            logits = logits / self.config.logit_scale
        if self.config.logit_cap is not None:
            logits = (logits / self.config.logit_cap).tanh() * self.config.logit_cap
        return StepOutput(logits.float() if self._wide == torch.float32 else logits,
                          hidden.float() if batch.want_hidden else None, None if aux is None else aux.float())

    # -- weights and adapters

    def load_weights(self, weights: Weights, partial: bool = False) -> None:
        """Replace all weights, or with `partial` those that are named. Nothing changes when the check fails."""
        checked = check_weights(self.config, {**self._weights, **weights} if partial else weights)
        self._weights: dict[str, QTensor | torch.Tensor] = {
            name: w.to(self.device) if isinstance(w, QTensor) else
            w.to(self.device, self._wide if name.rpartition(".")[2] in (CORRECTION, *WIDE) else self.dtype)
            for name, w in checked.items()}
        kind = self.config.recurrent
        self._mixers: dict[int, dict[str, Any]] = {  # what a recurrent layer has besides its projections
            i: {name: self._weights[f"model.layers.{i}.{kind.module}.{name}"] for name in kind.shapes(self.config.hidden_size)
                if not name.startswith((*kind.projections, "out_proj"))}
            for i in range(self.config.num_layers) if kind is not None and kind.layers[i]}

    def set_adapter(self, slot: int, layers: Mapping[str, LoraWeights] | None) -> None:
        """Put an adapter (module name -> `LoraWeights`) into `slot`, or empty it with None."""
        expert = next((name for name in layers or {} if "expert" in name or name.endswith(_NOT_ADAPTED)), None)
        if expert is not None:
            raise UnsupportedError(f"adapter module {expert!r}: adapters of experts and their router, and of an indexer's "
                                   "weights, are not run; adapt the attention only.")
        self._adapters.pop(slot, None)
        if layers is not None:
            self._adapters[slot] = {
                name: replace(w, a=w.a.to(self.device, self.dtype), b=w.b.to(self.device, self.dtype),
                              row_scale=None if w.row_scale is None else w.row_scale.to(self.device, self.dtype))
                for name, w in layers.items()}

    @torch.inference_mode()
    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embeddings [n, H] fp32 of token ids [n], on the CPU."""
        return self._embed(tokens.long().to(self.device)).float().cpu()

    def dense_weight(self, module: str) -> torch.Tensor:
        """The fp32 weight [out, in] of a linear, dequantized."""
        w = self._weights[f"{module}.weight"]
        return w.dequantize(torch.float32) if isinstance(w, QTensor) else w.float()

    # -- the decoder

    def _layers(self, step: Step, aux_layers: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor | None]:
        c = self.config
        x = self._enter(step.tokens)
        turns = [self._turns(c, step.positions, self._frequencies)]
        if self._local is not None and self._local_frequencies is not None:
            turns.append(self._turns(self._local, step.positions, self._local_frequencies))
        aux = []
        for i in range(c.num_layers):
            if i in aux_layers:
                aux.append(x)
            p = f"model.layers.{i}."
            step.cos, step.sin = turns[-1 if c.sliding_window and c.sliding_window[i] else 0]
            h = self._maybe_norm(x, p, c.norms[0])
            y = self._maybe_norm(self._mix(i, h, step), p, c.norms[1])
            x = x + (y if c.residual_scale == 1 else y * c.residual_scale)
            h = h if c.parallel else self._maybe_norm(x, p, c.norms[2])
            is_mixture = c.mixture is not None and c.mixture.layers[i]
            y = self._mixture(h, p + "mlp") if is_mixture else self._gated(h, p + MLP[c.shared_mlp], step.adapters)
            if c.shared_mlp and is_mixture:
                y = y + self._gated(h, p + MLP[True], step.adapters)
            y = self._maybe_norm(y, p, c.norms[3])
            x = x + (y if c.residual_scale == 1 else y * c.residual_scale)
        return self._leave(x), torch.cat(aux, -1) if aux else None

    def _turns(self, config: ModelConfig, positions: torch.Tensor,
               frequencies: tuple[torch.Tensor, float]) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [T, 1, D/2] of the positions [T]."""
        cos, sin = (t.to(self._wide)[:, None] for t in cos_sin(config, positions, frequencies))
        return cos, sin

    def _maybe_norm(self, x: torch.Tensor, layer: str, name: str | None) -> torch.Tensor:
        return x if name is None else self._norm(x, f"{layer}{name}.weight")

    def _mix(self, layer: int, h: torch.Tensor, step: Step) -> torch.Tensor:
        """h [T, H] -> [T, H]: what one layer mixes among the tokens of a sequence."""
        if self.config.recurrent is not None and self.config.recurrent.layers[layer]:
            return self._recur(layer, h, step)
        c, p = self.config, f"model.layers.{layer}.self_attn."
        if c.latent is not None:
            return latent.mix(self, layer, h, step)
        if c.fused_qkv:
            kv = c.num_kv_heads * c.head_dim
            q, k, v = self._linear(h, p + "qkv_proj", step.adapters).split([c.num_heads * c.head_dim, kv, kv], -1)
        else:
            q, k, v = (self._linear(h, p + name, step.adapters) for name in ("q_proj", "k_proj", "v_proj"))
        if c.row_norm:
            q, k = self._norm(q, p + "q_norm.weight"), self._norm(k, p + "k_norm.weight")
        q, gate = q.unflatten(-1, (c.num_heads, -1)), None
        k, v = (x.unflatten(-1, (c.num_kv_heads, c.head_dim)) for x in (k, v))
        if c.attention_gate:
            q, gate = q.chunk(2, -1)
        if c.qk_norm and not c.row_norm and not c.norm_turned:
            q, k = self._norm(q, p + "q_norm.weight"), self._norm(k, p + "k_norm.weight")
        plain = k
        if c.rotary_dim != 0 and (not c.rotated or c.rotated[layer]):
            q, k = (rotate(halves(x, c.rotary_dim) if c.interleaved else x, step.cos, step.sin) for x in (q, k))
        if c.norm_turned:
            q, k = self._norm(q, p + "q_norm.weight"), self._norm(k, p + "k_norm.weight")
        if c.query_scale != 1:
            q = q * c.query_scale
        assert self._kv is not None and not isinstance(self._kv, latent.LatentStore), "allocate() first"
        group, number = self._groups.places[c.counted[layer]]
        mine = step.of_group(group)
        if isinstance(self._kv, KVQuantStore):
            self._kv.write(number, mine.slots, plain, v, step.positions)
        else:
            self._kv.write(number, mine.slots, k, v)
        sinks = self._weight(p + "sinks", self._wide) if c.sinks else None
        mixed = attend(self._kv, number, q, mine, c.sliding_window[layer] if c.sliding_window else None, c.attention_cap, sinks)
        mixed = mixed.flatten(-2)
        if gate is not None:
            mixed = mixed * gate.flatten(-2).sigmoid()
        if c.sub_norms:
            mixed = self._norm(mixed, p + "attn_sub_norm.weight")
        return self._linear(mixed, p + "o_proj", step.adapters)

    def _recur(self, layer: int, h: torch.Tensor, step: Step) -> torch.Tensor:
        """A recurrent layer, from and to the pages that the step names."""
        kind, p = self.config.recurrent, f"model.layers.{layer}."
        assert kind is not None and self._states is not None, "allocate_states() first"
        p, number = f"{p}{kind.module}.", self.config.counted[layer]
        projected = [self._linear(h, p + name, step.adapters) for name in kind.projections]
        weights = self._mixers[layer]
        mixed = h.new_empty(len(h), kind.inner)
        for part in step.states:
            mixed[part.rows], state = kind.mix([x[part.rows] for x in projected], weights, self._states.read(number, part.before),
                                               self._wide)
            self._states.write(number, part.after, state)
        return self._linear(mixed, p + "out_proj", step.adapters)

    def _enter(self, tokens: torch.Tensor) -> torch.Tensor:
        """The residual stream before the first layer held here."""
        x = self._embed(tokens)
        # the factor in the dtype of the model, as Gemma was trained: 55.5 for 55.4256 in bfloat16
        return x if self.config.embed_scale == 1 else x * torch.tensor(self.config.embed_scale, dtype=x.dtype, device=x.device)

    def _leave(self, x: torch.Tensor) -> torch.Tensor:
        """The residual stream behind the model's last layer, given that behind the last one held here."""
        return x

    def _gated(self, h: torch.Tensor, module: str, adapters: dict[int, torch.Tensor]) -> torch.Tensor:
        if module.endswith(MLP[True]):
            gate, up = self._linear(h, f"{module}.input_linear", adapters).chunk(2, -1)
            return self._linear(F.silu(gate) * up, f"{module}.output_linear", adapters)
        if self.config.fused_mlp:
            gate, up = self._linear(h, f"{module}.gate_up_proj", adapters).chunk(2, -1)
        else:
            gate, up = (self._linear(h, f"{module}.{name}_proj", adapters) for name in ("gate", "up"))
        clamp = None if self.config.mixture is None else self.config.mixture.clamp
        if clamp is not None:
            gate, up = gate.clamp(max=clamp[1]), up.clamp(-clamp[1], clamp[1])
            gated = gate * (gate * clamp[0]).sigmoid() * (up + 1)
        else:
            gated = _ACTIVATIONS[self.config.activation](gate) * up
        if self.config.sub_norms:
            gated = self._norm(gated, f"{module}.ffn_sub_norm.weight")
        return self._linear(gated, f"{module}.down_proj", adapters)

    def _mixture(self, h: torch.Tensor, module: str) -> torch.Tensor:
        """h [T, H] -> [T, H]: each token through the experts that the router chooses, weighed by their scores."""
        m = self.config.mixture
        assert m is not None
        share, chosen = self._route(h, module)
        out = torch.zeros_like(h)
        for expert in chosen.unique().tolist():
            token, slot = (chosen == expert).nonzero(as_tuple=True)
            y = self._gated(h[token], f"{module}.experts.{expert}", {})
            out.index_add_(0, token, y * share[token, slot, None].to(h.dtype))
        if m.shared_width and m.shared_gate:
            gate = self._linear(h, f"{module}.shared_expert_gate", {}).sigmoid()
            out = out + gate * self._gated(h, f"{module}.shared_expert", {})
        elif m.shared_width:
            out = out + self._gated(h, f"{module}.shared_experts", {})
        return out

    def _route(self, h: torch.Tensor, module: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Shares and experts [T, per_token] of each token."""
        m = self.config.mixture
        assert m is not None
        router = f"{module}.{m.router}"
        logits = F.linear(h.to(self._wide), self._weight(f"{router}.weight", self._wide))
        if m.biased:
            logits = logits + self._weight(f"{router}.bias", self._wide)
        score = logits.sigmoid() if m.sigmoid else logits.softmax(-1)
        rank = score + self._weight(f"{router}.{CORRECTION}", self._wide) if m.corrected else score
        if m.groups > 1:
            best = rank.unflatten(-1, (m.groups, -1)).topk(m.group_best, -1).values.sum(-1).topk(m.groups_kept, -1).indices
            kept = torch.zeros(len(h), m.groups, dtype=torch.bool, device=h.device).scatter_(-1, best, True)
            rank = rank.masked_fill(~kept.repeat_interleave(m.experts // m.groups, -1), float("-inf"))
        chosen = rank.topk(m.per_token, -1).indices
        share = score.gather(-1, chosen)
        if m.normalized:
            share = share / (share.sum(-1, keepdim=True) + m.share_eps).clamp_min(m.share_min)
        return share * m.scaling, chosen

    def _linear(self, x: torch.Tensor, module: str, adapters: dict[int, torch.Tensor]) -> torch.Tensor:
        """x [T, in] -> [T, out], with what each row's adapter adds."""
        bias = self._weights.get(f"{module}.bias")
        y = F.linear(self._as_input(x, module), self._weight(f"{module}.weight", self.dtype))
        for slot, rows in adapters.items():
            lora = self._adapter(slot, module)
            if lora is not None:
                new = y[rows] + lora.scale * F.linear(F.linear(x[rows], lora.a), lora.b)
                y[rows] = new if lora.row_scale is None else new * lora.row_scale
        assert not isinstance(bias, QTensor)
        return y if bias is None else y + bias

    def _norm(self, x: torch.Tensor, name: str, eps: float | None = None) -> torch.Tensor:
        """RMS norm over the last dimension, of centred rows where the model has it so, in fp32; eps: None is the config's."""
        weight = self._weights[name]
        assert isinstance(weight, torch.Tensor)
        wide, eps = x.to(self._wide), self.config.norm_eps if eps is None else eps
        if self.config.centred:
            wide = wide - wide.mean(-1, keepdim=True)
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        if self.config.norm_offset or self.config.centred:
            return (normed * (weight.to(self._wide) + self.config.norm_offset)).to(self.dtype)
        return weight * normed.to(self.dtype)

    def _weight(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A weight in `dtype`, dequantized where it is codes."""
        w = self._weights[name]
        return w.dequantize(dtype) if isinstance(w, QTensor) else w.to(dtype)

    def _as_input(self, x: torch.Tensor, module: str) -> torch.Tensor:
        """x as a linear takes it: rounded to int8 per row where the grid of its weight says so."""
        w = self._weights[f"{module}.weight"]
        return on_int8_rows(x) if isinstance(w, QTensor) and w.spec.activation_bits == 8 else x

    def _adapter(self, slot: int, module: str) -> LoraWeights | None:
        """What the adapter in `slot` adds to a linear."""
        return self._adapters[slot].get(module)

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        w = self._weights["model.embed_tokens.weight"]
        if not isinstance(w, QTensor):
            return w[tokens]
        if w.extra or w.scale.shape[0] == 1 or w.scale.shape[0] != w.codes.shape[0]:
            return w.dequantize(self.dtype)[tokens]
        picked = replace(w, codes=w.codes[tokens], scale=w.scale[tokens], zero=None if w.zero is None else w.zero[tokens],
                         shape=(len(tokens), self.config.hidden_size))
        return picked.dequantize(self.dtype)

    # -- reading the batch

    def _check_slots(self, slots: torch.Tensor) -> None:
        missing = [slot for slot in slots.tolist() if slot >= 0 and slot not in self._adapters]
        if missing:
            raise KaruiError(f"adapter slot {missing[0]} is empty; load the adapter before sending requests to it.")

    def _adapter_rows(self, batch: StepBatch) -> dict[int, torch.Tensor]:
        if batch.adapters is None:
            return {}
        starts = batch.query_starts.tolist()
        self._check_slots(batch.adapters)
        rows: dict[int, list[int]] = {}
        for s, slot in enumerate(batch.adapters.tolist()):
            if slot >= 0:
                rows.setdefault(slot, []).extend(range(starts[s], starts[s + 1]))
        return {slot: torch.tensor(at, device=self.device) for slot, at in rows.items()}
