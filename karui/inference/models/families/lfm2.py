"""LFM2 and its mixture: short convolutions in most layers (LFM2 technical report, arXiv 2511.23404)."""

from __future__ import annotations

from karui.inference.models.config import Mixture
from karui.inference.models.families.common import Config, Fields, layers_of, rope_theta
from karui.inference.models.recurrent.short_conv import ShortConv


def lfm2(config: Config) -> Fields:
    return {**_convolved(config), "intermediate_size": _width(config)}


def lfm2_moe(config: Config) -> Fields:
    dense = config.get("num_dense_layers", 2)
    mixture = Mixture(
        config["num_experts"], config["num_experts_per_tok"], config["moe_intermediate_size"],
        bool(config.get("norm_topk_prob", True)), 0, tuple(i >= dense for i in range(config["num_hidden_layers"])), sigmoid=True,
        corrected=bool(config.get("use_expert_bias", True)), share_eps=1e-6,
        scaling=float(config.get("routed_scaling_factor") or 1.0))
    return {**_convolved(config), "mixture": mixture}


def _convolved(config: Config) -> Fields:
    attention = config.get("full_attn_idxs")
    kinds = config.get("layer_types") or ["full_attention" if attention is None or i in attention else "conv"
                                          for i in range(config["num_hidden_layers"])]
    layers = layers_of("conv", kinds, config)
    made = ShortConv(layers=layers, inner=config["hidden_size"], taps=config.get("conv_L_cache", 3),
                     bias=bool(config.get("conv_bias", False)))
    return {"recurrent": made if any(layers) else None, "qk_norm": True, "norm_eps": config.get("norm_eps", 1e-5),
            "rope_theta": rope_theta(config, 1_000_000.0),
            "tied": config.get("tie_embedding", config.get("tie_word_embeddings", True))}


def _width(config: Config) -> int:
    """Files name the width before it is cut to two thirds."""
    width = int(config.get("block_ff_dim") or config["intermediate_size"])
    if not config.get("block_auto_adjust_ff_dim", True):
        return width
    width = 2 * width // 3
    multiplier, multiple = config.get("block_ffn_dim_multiplier", 1.0), config.get("block_multiple_of") or 256
    return width if multiplier is None else multiple * -(-int(multiplier * width) // multiple)
