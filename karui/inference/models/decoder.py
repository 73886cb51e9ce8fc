"""The reference runner: all of `config.SUPPORTED` as one decoder over a dictionary of weights, in plain torch.

Legend for shapes: T tokens in the step, H hidden.

Quantized weights stay codes in memory and are dequantized in each linear; the native runner multiplies with the codes.
`bit_exact=True` runs the step token by token: every token then goes through the same one-row program over the same keys,
so its bits cannot depend on the batch around it, on chunking, on a warm cache or on speculation. It is slow and meant for tests
and for debugging; the native runner has the property at full speed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from karui.configs.errors import KaruiError, UnsupportedError
from karui.inference.batch import StepBatch, StepOutput
from karui.inference.cache.kivi import KiviStore
from karui.inference.cache.kv import STAGED, KVStore, bytes_per_token, check_dtype, staged_bytes_per_token
from karui.inference.models.attention import attend
from karui.inference.models.config import ModelConfig
from karui.inference.models.rope import cos_sin, inverse_frequencies, rotate
from karui.inference.models.step import Step
from karui.inference.models.weights import Weights, check_weights, nbytes
from karui.kernels.gemm_weight import on_int8_rows
from karui.kernels.qtensor import QTensor


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

    def __init__(self, config: ModelConfig, weights: Weights, device: torch.device | str = "cpu",
                 dtype: torch.dtype = torch.float32, bit_exact: bool = False) -> None:
        self.config, self.device, self.dtype, self.bit_exact = config, torch.device(device), dtype, bit_exact
        self._wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.default_kv_dtype = str(dtype).removeprefix("torch.").replace("float64", "float32")
        self._adapters: dict[int, dict[str, LoraWeights]] = {}
        f, factor = inverse_frequencies(config)
        self._frequencies = (f.to(self.device), factor)
        self.load_weights(weights)

    # -- Runner protocol

    def allocate(self, num_blocks: int, block_size: int, kv_dtype: str, num_staged: int | None = None) -> None:
        c = self.config
        self._kv: KVStore | KiviStore | None = None
        if check_dtype(kv_dtype) in STAGED:
            self._kv = KiviStore(c.num_layers, num_blocks, block_size, c.num_kv_heads, c.head_dim, kv_dtype, self.device,
                                 num_staged)
        else:
            self._kv = KVStore(c.num_layers, num_blocks * block_size, c.num_kv_heads, c.head_dim, kv_dtype, self.device)
        self._block_size = block_size

    def settle(self, blocks: Iterable[int]) -> None:
        if isinstance(self._kv, KiviStore):
            self._kv.settle(blocks)

    def kv_bytes_per_token(self, kv_dtype: str) -> int:
        return bytes_per_token(self.config.num_layers, self.config.num_kv_heads, self.config.head_dim, kv_dtype)

    def kv_staged_bytes_per_token(self, kv_dtype: str) -> int:
        return staged_bytes_per_token(self.config.num_layers, self.config.num_kv_heads, self.config.head_dim, kv_dtype)

    def weight_bytes(self) -> int:
        return sum(nbytes(w) for w in self._weights.values())

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
        return StepOutput(logits.float() if self._wide == torch.float32 else logits,
                          hidden.float() if batch.want_hidden else None, None if aux is None else aux.float())

    # -- weights and adapters

    def load_weights(self, weights: Weights, partial: bool = False) -> None:
        """Replace all weights, or with `partial` those that are named. Nothing changes when the check fails."""
        checked = check_weights(self.config, {**self._weights, **weights} if partial else weights)
        self._weights: dict[str, QTensor | torch.Tensor] = {
            name: w.to(self.device) if isinstance(w, QTensor) else w.to(self.device, self.dtype) for name, w in checked.items()}

    def set_adapter(self, slot: int, layers: Mapping[str, LoraWeights] | None) -> None:
        """Put an adapter (module name -> `LoraWeights`) into `slot`, or empty it with None."""
        expert = next((name for name in layers or {} if "expert" in name or name.endswith(".mlp.gate")), None)
        if expert is not None:
            raise UnsupportedError(f"adapter module {expert!r}: adapters of experts and their router are not run; adapt the "
                                   "attention only.")
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
        step.cos, step.sin = (t.to(self._wide)[:, None] for t in cos_sin(c, step.positions, self._frequencies))
        aux = []
        for i in range(c.num_layers):
            if i in aux_layers:
                aux.append(x)
            p = f"model.layers.{i}."
            x = x + self._mix(i, self._norm(x, p + "input_layernorm.weight"), step)
            h = self._norm(x, p + "post_attention_layernorm.weight")
            is_mixture = c.mixture is not None and c.mixture.layers[i]
            x = x + (self._mixture(h, p + "mlp") if is_mixture else self._gated(h, p + "mlp", step.adapters))
        return self._leave(x), torch.cat(aux, -1) if aux else None

    def _mix(self, layer: int, h: torch.Tensor, step: Step) -> torch.Tensor:
        """h [T, H] -> [T, H]: what one layer mixes among the tokens of a sequence."""
        c, p = self.config, f"model.layers.{layer}.self_attn."
        q = self._linear(h, p + "q_proj", step.adapters).unflatten(-1, (c.num_heads, c.head_dim))
        k = self._linear(h, p + "k_proj", step.adapters).unflatten(-1, (c.num_kv_heads, c.head_dim))
        v = self._linear(h, p + "v_proj", step.adapters).unflatten(-1, (c.num_kv_heads, c.head_dim))
        if c.qk_norm:
            q, k = self._norm(q, p + "q_norm.weight"), self._norm(k, p + "k_norm.weight")
        q, k = rotate(q, step.cos, step.sin), rotate(k, step.cos, step.sin)
        assert self._kv is not None, "allocate() first"
        self._kv.write(layer, step.slots, k, v)
        mixed = attend(self._kv, layer, q, step, c.sliding_window[layer] if c.sliding_window else None).flatten(-2)
        if c.sub_norms:
            mixed = self._norm(mixed, p + "attn_sub_norm.weight")
        return self._linear(mixed, p + "o_proj", step.adapters)

    def _enter(self, tokens: torch.Tensor) -> torch.Tensor:
        """The residual stream before the first layer held here."""
        return self._embed(tokens)

    def _leave(self, x: torch.Tensor) -> torch.Tensor:
        """The residual stream behind the model's last layer, given that behind the last one held here."""
        return x

    def _gated(self, h: torch.Tensor, module: str, adapters: dict[int, torch.Tensor]) -> torch.Tensor:
        gate = self._linear(h, f"{module}.gate_proj", adapters)
        gate = F.relu(gate).square() if self.config.activation == "relu2" else F.silu(gate)
        gated = gate * self._linear(h, f"{module}.up_proj", adapters)
        if self.config.sub_norms:
            gated = self._norm(gated, f"{module}.ffn_sub_norm.weight")
        return self._linear(gated, f"{module}.down_proj", adapters)

    def _mixture(self, h: torch.Tensor, module: str) -> torch.Tensor:
        """h [T, H] -> [T, H]: each token through its likeliest experts, weighed by the router's softmax over all of them."""
        m = self.config.mixture
        assert m is not None
        share, chosen = self._linear(h, f"{module}.gate", {}).to(self._wide).softmax(-1).topk(m.per_token, -1)
        if m.normalized:
            share = share / share.sum(-1, keepdim=True)
        out = torch.zeros_like(h)
        for expert in chosen.unique().tolist():
            token, slot = (chosen == expert).nonzero(as_tuple=True)
            y = self._gated(h[token], f"{module}.experts.{expert}", {})
            out.index_add_(0, token, y * share[token, slot, None].to(h.dtype))
        if m.shared_width:
            gate = self._linear(h, f"{module}.shared_expert_gate", {}).sigmoid()
            out = out + gate * self._gated(h, f"{module}.shared_expert", {})
        return out

    def _linear(self, x: torch.Tensor, module: str, adapters: dict[int, torch.Tensor]) -> torch.Tensor:
        w = self._weights[f"{module}.weight"]
        bias = self._weights.get(f"{module}.bias")
        if isinstance(w, QTensor):
            x_in = on_int8_rows(x) if w.spec.activation_bits == 8 else x
            y = F.linear(x_in, w.dequantize(self.dtype))
        else:
            y = F.linear(x, w)
        for slot, rows in adapters.items():
            lora = self._adapters[slot].get(module)
            if lora is not None:
                new = y[rows] + lora.scale * F.linear(F.linear(x[rows], lora.a), lora.b)
                y[rows] = new if lora.row_scale is None else new * lora.row_scale
        assert not isinstance(bias, QTensor)
        return y if bias is None else y + bias

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self._weights[name]
        assert isinstance(weight, torch.Tensor)
        wide = x.to(self._wide)
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.config.norm_eps)).to(self.dtype)

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

    def _adapter_rows(self, batch: StepBatch) -> dict[int, torch.Tensor]:
        if batch.adapters is None:
            return {}
        starts = batch.query_starts.tolist()
        rows: dict[int, list[int]] = {}
        for s, slot in enumerate(batch.adapters.tolist()):
            if slot < 0:
                continue
            if slot not in self._adapters:
                raise KaruiError(f"adapter slot {slot} is empty; load the adapter before sending requests to it.")
            rows.setdefault(slot, []).extend(range(starts[s], starts[s + 1]))
        return {slot: torch.tensor(at, device=self.device) for slot, at in rows.items()}
