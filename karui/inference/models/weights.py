"""Which tensors a decoder needs, under which names and shapes, and the check that a set of them is complete and sane."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from karui.configs.errors import CorruptError
from karui.inference.models.config import ModelConfig
from karui.kernels.qtensor import QTensor

Weights = Mapping[str, QTensor | torch.Tensor]

# Mixtral's files name an expert's linears as the paper does.
_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
# Old checkpoints store what the config already determines.
_DERIVED = re.compile(r".*\.rotary_emb\.inv_freq")


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor the decoder of `config` reads, by its Hugging Face name, with its shape ([out, in] for a linear)."""
    h, d = config.hidden_size, config.head_dim
    q, kv, f = config.num_heads * d, config.num_kv_heads * d, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, h), "model.norm.weight": (h,)}
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab_size, h)
    for i in range(config.num_layers):
        layer = f"model.layers.{i}."
        for name, out, into, bias in (
            ("self_attn.q_proj", q, h, config.qkv_bias), ("self_attn.k_proj", kv, h, config.qkv_bias),
            ("self_attn.v_proj", kv, h, config.qkv_bias), ("self_attn.o_proj", h, q, config.o_bias),
            *_feed_forward(config, i),
        ):
            shapes[f"{layer}{name}.weight"] = (out, into)
            if bias:
                shapes[f"{layer}{name}.bias"] = (out,)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}{name}.weight"] = (h,)
        if config.qk_norm:
            shapes[f"{layer}self_attn.q_norm.weight"] = shapes[f"{layer}self_attn.k_norm.weight"] = (d,)
        if config.sub_norms:
            shapes[f"{layer}self_attn.attn_sub_norm.weight"] = (q,)
            shapes[f"{layer}mlp.ffn_sub_norm.weight"] = (f,)
    return shapes


def _feed_forward(config: ModelConfig, layer: int) -> list[tuple[str, int, int, bool]]:
    """(name within the layer, out, in, has a bias) of the linears behind the attention."""
    h, m = config.hidden_size, config.mixture

    def gated(where: str, f: int, bias: bool = False) -> list[tuple[str, int, int, bool]]:
        return [(f"{where}.gate_proj", f, h, bias), (f"{where}.up_proj", f, h, bias), (f"{where}.down_proj", h, f, bias)]

    if m is None or not m.layers[layer]:
        return gated("mlp", config.intermediate_size, config.mlp_bias)
    found = [("mlp.gate", m.experts, h, False), *(part for e in range(m.experts) for part in gated(f"mlp.experts.{e}", m.width))]
    if m.shared_width:
        found += [*gated("mlp.shared_expert", m.shared_width), ("mlp.shared_expert_gate", 1, h, False)]
    return found


def canonical_name(name: str) -> str:
    """karui's name of a tensor: mixtral's files name experts otherwise than the other mixtures of transformers do."""
    name = re.sub(r"block_sparse_moe\.experts\.(\d+)\.(w\d)\.", lambda m: f"mlp.experts.{m[1]}.{_MIXTRAL[m[2]]}.", name)
    return name.replace("block_sparse_moe.gate.", "mlp.gate.")


def canonical(weights: Weights) -> dict[str, QTensor | torch.Tensor]:
    """The same tensors under karui's names; experts that are held as one tensor are taken apart (as views)."""
    found: dict[str, QTensor | torch.Tensor] = {}
    for name, w in ((canonical_name(n), w) for n, w in weights.items()):
        parent, _, last = name.rpartition(".")
        if isinstance(w, torch.Tensor) and w.ndim == 3 and last in ("gate_up_proj", "down_proj"):
            parts = dict(zip(("gate_proj", "up_proj"), w.chunk(2, 1))) if last == "gate_up_proj" else {last: w}
            found |= {f"{parent}.{e}.{part}.weight": one for part, all_ in parts.items() for e, one in enumerate(all_)}
        else:
            found[name] = w
    return found


def check_weights(config: ModelConfig, weights: Weights) -> dict[str, QTensor | torch.Tensor]:
    """The tensors of `weights` that `config` asks for, all of them and no others.

    Raises `CorruptError` naming tensors that are missing, not consumed, misshapen or not finite (scales included). A tied
    model may carry an `lm_head.weight`, but only one that equals its embedding.
    """
    shapes = expected_shapes(config)
    given = {name: w for name, w in canonical(weights).items() if not _DERIVED.fullmatch(name)}
    if config.tied and "lm_head.weight" in given:
        if not _same(given["lm_head.weight"], given.get("model.embed_tokens.weight")):
            raise CorruptError("lm_head.weight differs from model.embed_tokens.weight, but the config says they are tied "
                               "(tie_word_embeddings); set it to false or drop one of the two.")
        del given["lm_head.weight"]
    missing, unused = sorted(shapes.keys() - given.keys()), sorted(given.keys() - shapes.keys())
    if missing or unused:
        told = [f"{len(names)} {what}: {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
                for what, names in (("missing", missing), ("not consumed", unused)) if names]
        raise CorruptError(f"weights do not fit a {config.model_type} of {config.num_layers} layers: {'; '.join(told)}.")
    for name, shape in shapes.items():
        w = given[name]
        if tuple(w.shape) != shape:
            raise CorruptError(f"{name} has shape {list(w.shape)}, the config asks for {list(shape)}.")
        if not all_finite(w):
            raise CorruptError(f"{name} holds NaN or infinity{' in its scales' if isinstance(w, QTensor) else ''}; "
                               "the file is damaged or was never filled.")
    return {name: given[name] for name in shapes}


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
