"""Which tensors a decoder needs, under which names and shapes, and the check that a set of them is complete and sane."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import replace
from typing import TypeVar

import torch

from karui.configs.errors import CorruptError
from karui.inference.models.config import Latent, ModelConfig
from karui.kernels.qtensor import QTensor

Weights = Mapping[str, QTensor | torch.Tensor]
W = TypeVar("W", torch.Tensor, QTensor | torch.Tensor)

CORRECTION = "e_score_correction_bias"
"""What is added to the experts' scores where they are chosen; kept in fp32."""
# Mixtral's files name an expert's linears as the paper does.
_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_GRANITE_NAMES = {"block_sparse_moe.router.layer.": "block_sparse_moe.router.",
                  "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.gate_up_proj",
                  "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj"}
_GRANITE = re.compile("|".join(map(re.escape, _GRANITE_NAMES)))
_STORED_NAMES = {  # MiniMax, ERNIE
    "block_sparse_moe.e_score": "mlp.e_score", "mlp.moe_statics.": "mlp.gate.moe_statics."}
_HYBRID_NAMES = {  # LFM2, Bamba, Granite, Hunyuan, ERNIE, MiniMax
    "operator_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "pre_ff_layernorm": "post_attention_layernorm",
    "self_attn.out_proj": "self_attn.o_proj", "self_attn.q_layernorm": "self_attn.q_norm",
    "self_attn.k_layernorm": "self_attn.k_norm", "model.embedding_norm": "model.norm", "model.final_layernorm": "model.norm",
    **{f"feed_forward.{theirs}": f"mlp.{ours}" for w, ours in _MIXTRAL.items() for theirs in (w, ours)},
    "feed_forward.gate": "mlp.gate", "feed_forward.experts": "mlp.experts", "feed_forward.expert_bias": f"mlp.gate.{CORRECTION}",
    "block_sparse_moe.router": "mlp.gate", "block_sparse_moe.experts": "mlp.experts",
    "self_attn.query_layernorm": "self_attn.q_norm", "self_attn.key_layernorm": "self_attn.k_norm",
    "mlp.gate.moe_statics": "mlp.gate", f"mlp.{CORRECTION}": f"mlp.gate.{CORRECTION}",
}
_HYBRID = re.compile(r"\b(" + "|".join(map(re.escape, _HYBRID_NAMES)) + r")((?:\..*)?)$")
WIDE = ("A_log", "dt_bias", "D")
"""What decides how fast a recurrent state decays; kept in fp32."""
# Old checkpoints store what the config already determines.
_DERIVED = re.compile(r".*\.rotary_emb\.inv_freq")


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor the decoder of `config` reads, by its Hugging Face name, with its shape ([out, in] for a linear)."""
    h, d = config.hidden_size, config.head_dim
    q, f = config.num_heads * d, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, h), "model.norm.weight": (h,)}
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab_size, h)
    for i in range(config.num_layers):
        layer = f"model.layers.{i}."
        recurrent = config.recurrent is not None and config.recurrent.layers[i]
        for name, out, into, bias in (*(() if recurrent else _attention(config, i)), *_feed_forward(config, i)):
            shapes[f"{layer}{name}.weight"] = (out, into)
            if bias:
                shapes[f"{layer}{name}.bias"] = (out,)
        for name in filter(None, config.norms):
            shapes[f"{layer}{name}.weight"] = (h,)
        if config.mixture is not None and config.mixture.corrected and config.mixture.layers[i]:
            shapes[f"{layer}mlp.gate.{CORRECTION}"] = (config.mixture.experts,)
        if config.recurrent is not None and recurrent:
            shapes |= {f"{layer}{config.recurrent.module}.{name}": shape for name, shape in config.recurrent.shapes(h).items()}
            continue
        if config.qk_norm:
            for x, heads in (("q", config.num_heads), ("k", config.num_kv_heads)):
                shapes[f"{layer}self_attn.{x}_norm.weight"] = (heads * d if config.row_norm else d,)
        if config.sinks:
            shapes[f"{layer}self_attn.sinks"] = (config.num_heads,)
        if config.sub_norms:
            shapes[f"{layer}self_attn.attn_sub_norm.weight"] = (q,)
            shapes[f"{layer}mlp.ffn_sub_norm.weight"] = (f,)
        if config.latent is not None:
            shapes |= {f"{layer}self_attn.{name}": (n,) for name, n in _latent_norms(config.latent, i).items()}
    return shapes


def _attention(config: ModelConfig, layer: int) -> list[tuple[str, int, int, bool]]:
    """(name within the layer, out, in, has a bias) of the attention's linears."""
    h, a, m = config.hidden_size, config.num_heads, config.latent
    if m is None:
        q, kv = a * config.head_dim, config.num_kv_heads * config.head_dim
        if config.fused_qkv:
            return [("self_attn.qkv_proj", q + 2 * kv, h, False), ("self_attn.o_proj", h, q, False)]
        return [("self_attn.q_proj", q * (1 + config.attention_gate), h, config.qkv_bias),
                ("self_attn.k_proj", kv, h, config.qkv_bias), ("self_attn.v_proj", kv, h, config.qkv_bias),
                ("self_attn.o_proj", h, q, config.o_bias)]
    q, bias = a * (m.nope + m.rope), config.o_bias
    found = [("q_proj", q, h, False)] if m.query_rank is None else [
        ("q_a_proj", m.query_rank, h, bias), ("q_b_proj", q, m.query_rank, False)]
    found += [("kv_a_proj_with_mqa", m.rank + m.rope, h, bias), ("kv_b_proj", a * (m.nope + m.value), m.rank, False),
              ("o_proj", h, a * m.value, bias)]
    if m.indexer is not None and m.indexer.layers[layer]:
        heads, d = m.indexer.heads, m.indexer.head_dim
        found += [("indexer.wq_b", heads * d, m.query_rank or 0, False), ("indexer.wk", d, h, False),
                  ("indexer.weights_proj", heads, h, False)]
    return [(f"self_attn.{name}", out, into, bias) for name, out, into, bias in found]


def _latent_norms(m: Latent, layer: int) -> dict[str, int]:
    found = {"kv_a_layernorm.weight": m.rank} | ({} if m.query_rank is None else {"q_a_layernorm.weight": m.query_rank})
    if m.indexer is not None and m.indexer.layers[layer]:
        found |= {"indexer.k_norm.weight": m.indexer.head_dim, "indexer.k_norm.bias": m.indexer.head_dim}
    return found


def _feed_forward(config: ModelConfig, layer: int) -> list[tuple[str, int, int, bool]]:
    """(name within the layer, out, in, has a bias) of the linears behind the attention."""
    h, m = config.hidden_size, config.mixture

    def gated(where: str, f: int, bias: bool = False) -> list[tuple[str, int, int, bool]]:
        return [(f"{where}.gate_proj", f, h, bias), (f"{where}.up_proj", f, h, bias), (f"{where}.down_proj", h, f, bias)]

    if config.shared_mlp:
        width = config.intermediate_size
        found = [("shared_mlp.input_linear", 2 * width, h, False), ("shared_mlp.output_linear", h, width, False)]
        return found if m is None else [*found, ("mlp.gate", m.experts, h, False),
                                        *(part for e in range(m.experts) for part in gated(f"mlp.experts.{e}", m.width))]
    if m is None or not m.layers[layer]:
        f = config.intermediate_size
        return [("mlp.gate_up_proj", 2 * f, h, False), ("mlp.down_proj", h, f, False)] if config.fused_mlp else gated(
            "mlp", f, config.mlp_bias)
    found = [(f"mlp.{m.router}", m.experts, h, m.biased),
             *(part for e in range(m.experts) for part in gated(f"mlp.experts.{e}", m.width, m.biased))]
    if m.shared_width and m.shared_gate:
        found += [*gated("mlp.shared_expert", m.shared_width), ("mlp.shared_expert_gate", 1, h, False)]
    elif m.shared_width:
        found += gated("mlp.shared_experts", m.shared_width, config.mlp_bias)
    return found


def transformers_name(name: str) -> str:
    """A stored tensor's name in transformers' model: files of some families name experts and routers otherwise."""
    name = re.sub(r"(block_sparse_moe|feed_forward)\.experts\.(\d+)\.(w\d)\.", lambda m: (
        f"{'mlp' if m[1] == 'block_sparse_moe' else m[1]}.experts.{m[2]}.{_MIXTRAL[m[3]]}."), name)
    name = _GRANITE.sub(lambda m: _GRANITE_NAMES[m[0]], name.replace("block_sparse_moe.gate.", "mlp.gate."))
    if CORRECTION in name and ".gate." not in name:
        for stored, held in _STORED_NAMES.items():
            name = name.replace(stored, held)
    return name


def canonical_name(name: str) -> str:
    """karui's name of a tensor: some families name norms, feed-forward layers or routers otherwise than most."""
    return _HYBRID.sub(lambda m: _HYBRID_NAMES[m[1]] + m[2], transformers_name(name))


def canonical(weights: Weights) -> dict[str, QTensor | torch.Tensor]:
    """The same tensors under karui's names; experts that are held as one tensor are taken apart (as views)."""
    found: dict[str, QTensor | torch.Tensor] = {}
    for name, w in ((canonical_name(n), w) for n, w in weights.items()):
        parent, _, last = name.rpartition(".")
        stem = last.removesuffix("_bias")
        if isinstance(w, torch.Tensor) and w.ndim == 3 - (stem != last) and stem in ("gate_up_proj", "down_proj"):
            alternate = f"{parent}.gate_up_proj_bias" in weights  # gpt-oss: [experts, in, out], gate and up in turn
            if alternate and stem == last:
                w = w.transpose(1, 2)
            parts = {stem: w}
            if stem == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), (w[:, ::2], w[:, 1::2]) if alternate else w.chunk(2, 1)))
            kind = "weight" if stem == last else "bias"
            found |= {f"{parent}.{e}.{part}.{kind}": one for part, all_ in parts.items() for e, one in enumerate(all_)}
        else:
            found[name] = _shaped(name, w)
    return found


def _shaped(name: str, w: QTensor | torch.Tensor) -> QTensor | torch.Tensor:
    return w.flatten() if name.endswith(CORRECTION) and isinstance(w, torch.Tensor) else w  # ERNIE's is [1, experts]


def take_rows(w: W, rows: torch.Tensor) -> W:
    """Some outputs of a weight [out, ..] or bias [out]: the same codes and scales, or dequantized where rows of several places
    share a scale."""
    if isinstance(w, torch.Tensor):
        return w[rows]
    if {*(w.extra or {})} - {"global_scale"} or w.scale.shape[0] not in (1, w.shape[0]):
        return w.dequantize()[rows]
    scale, zero = (t if t is None or t.shape[0] == 1 else t[rows] for t in (w.scale, w.zero))
    assert scale is not None
    return replace(w, codes=w.codes[rows], scale=scale, zero=zero, shape=(len(rows), *w.shape[1:]))


def check_weights(config: ModelConfig, weights: Weights) -> dict[str, QTensor | torch.Tensor]:
    """The tensors of `weights` that `config` asks for, all of them and no others.

    Raises `CorruptError` naming tensors that are missing, not consumed, misshapen or not finite (scales included). A tied
    model may carry an `lm_head.weight`, but only one that equals its embedding.
    """
    shapes = expected_shapes(config)
    given = {name: w for name, w in canonical(weights).items() if _read(config, name)}
    if config.tied and "lm_head.weight" in given:
        _check_tied(given.pop("lm_head.weight"), given.get("model.embed_tokens.weight"))
    _check_names(config, shapes.keys(), given.keys())
    for name, shape in shapes.items():
        check_tensor(name, given[name], shape)
    return {name: given[name] for name in shapes}


def _read(config: ModelConfig, name: str) -> bool:
    """Whether a tensor of this name is not one that files hold beside what a decoder needs."""
    beyond = tuple(f"model.layers.{config.num_layers + i}." for i in range(config.extra_layers))
    return not _DERIVED.fullmatch(name) and not name.startswith(beyond + config.passed_over)


class CheckedWeights(Mapping[str, QTensor | torch.Tensor]):
    """`check_weights` one tensor at a time: names at once, the rest when a tensor is asked for, and nothing is kept. For models
    whose tensors are stored one by one under canonical names or such that `canonical_name` makes canonical."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self._weights, self._shapes = weights, expected_shapes(config)
        self._stored = {canonical_name(name): name for name in weights if _read(config, canonical_name(name))}
        if config.tied and "lm_head.weight" in self._stored:
            _check_tied(weights[self._stored.pop("lm_head.weight")], weights.get(self._stored["model.embed_tokens.weight"]))
        _check_names(config, self._shapes.keys(), self._stored.keys())

    def __getitem__(self, name: str) -> QTensor | torch.Tensor:
        w = _shaped(name, self._weights[self._stored[name]])
        check_tensor(name, w, self._shapes[name])
        return w

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def _check_tied(head: QTensor | torch.Tensor, embedding: QTensor | torch.Tensor | None) -> None:
    if not _same(head, embedding):
        raise CorruptError("lm_head.weight differs from model.embed_tokens.weight, but the config says they are tied "
                           "(tie_word_embeddings); set it to false or drop one of the two.")


def _check_names(config: ModelConfig, wanted: Set[str], given: Set[str]) -> None:
    missing, unused = sorted(wanted - given), sorted(given - wanted)
    if missing or unused:
        told = [f"{len(names)} {what}: {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
                for what, names in (("missing", missing), ("not consumed", unused)) if names]
        raise CorruptError(f"weights do not fit a {config.model_type} of {config.num_layers} layers: {'; '.join(told)}.")


def check_tensor(name: str, w: QTensor | torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise `CorruptError` naming a tensor that has another shape or is not finite."""
    if tuple(w.shape) != shape:
        raise CorruptError(f"{name} has shape {list(w.shape)}, the config asks for {list(shape)}.")
    if not all_finite(w):
        raise CorruptError(f"{name} holds NaN or infinity{' in its scales' if isinstance(w, QTensor) else ''}; "
                           "the file is damaged or was never filled.")


def all_finite(w: QTensor | torch.Tensor) -> bool:
    parts = [w.scale, *(w.extra or {}).values()] if isinstance(w, QTensor) else [w]
    return all(bool(torch.isfinite(p.float() if p.element_size() == 1 else p).all()) for p in parts if p.is_floating_point())


def nbytes(w: QTensor | torch.Tensor) -> int:
    """Bytes as held in memory by torch (codes unpacked)."""
    parts = [w.codes, w.scale, w.zero, *(w.extra or {}).values()] if isinstance(w, QTensor) else [w]
    return sum(p.numel() * p.element_size() for p in parts if p is not None)


def _same(a: QTensor | torch.Tensor, b: QTensor | torch.Tensor | None) -> bool:
    if isinstance(a, QTensor) and isinstance(b, QTensor):
        return a.spec == b.spec and torch.equal(a.codes, b.codes) and torch.equal(a.scale.float(), b.scale.float())
    return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b)
