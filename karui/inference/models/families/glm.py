"""GLM-4, GLM-4.5 and GLM-5."""

from __future__ import annotations

from karui.inference.models.config import Mixture, Norms
from karui.inference.models.families.common import Config, Fields, rotary_dim, routed
from karui.inference.models.families.deepseek import deepseek_v3, indexer, latent

NORMS: Norms = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


def glm(config: Config) -> Fields:
    """Half of a head is rotated, in the pairs (2i, 2i + 1)."""
    dim = config.get("head_dim") or 128
    return {"fused_mlp": True, "interleaved": True, "rotary_dim": rotary_dim({**config, "head_dim": dim}, 0.5),
            "qkv_bias": bool(config.get("attention_bias", True)), "o_bias": False, "head_dim": dim,
            "norm_eps": config.get("rms_norm_eps", 1.5625e-7)}


def glm4(config: Config) -> Fields:
    """Norms on both sides of both layers."""
    return {**glm(config), "norms": NORMS}


def glm4_moe(config: Config) -> Fields:
    """GLM-4.5: DeepSeek's mixture behind ordinary attention; half of a head is rotated."""
    return {"mixture": _routed(config), "qk_norm": bool(config.get("use_qk_norm", False)), "o_bias": False, "mlp_bias": False,
            "rotary_dim": rotary_dim(config, 0.5), "norm_eps": config.get("rms_norm_eps", 1e-5)}


def glm4_moe_lite(config: Config) -> Fields:
    """GLM-4.7-Flash: DeepSeek-V3 in all."""
    mixture = _routed({"routed_scaling_factor": 1.8, **config})
    return {**deepseek_v3(config), "mixture": mixture, "norm_eps": config.get("rms_norm_eps", 1e-5)}


def glm_moe_dsa(config: Config) -> Fields:
    """DeepSeek's sparse attention. Which layers have an indexer: listed, spelled as F and S, or every `index_topk_freq`-th."""
    layers = config["num_hidden_layers"]
    if kinds := config.get("indexer_types") or config.get("index_topk_pattern"):
        own = tuple(k in ("F", "full") for k in kinds)[:layers]
    else:
        every, offset = max(config.get("index_topk_freq") or 1, 1), config.get("index_skip_topk_offset", 2)
        own = tuple(max(i - offset + 1, 0) % every == 0 for i in range(layers))
    return {**deepseek_v3(config), **latent(config, indexer(config, own, interleaved=True))}


def _routed(config: Config) -> Mixture | None:
    return routed({"n_shared_experts": 1, "first_k_dense_replace": 1, **config})
