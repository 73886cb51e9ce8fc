"""MiniMax-M2: q and k normalized over all heads, part of a head rotated, experts by corrected sigmoids."""

from __future__ import annotations

from karui.inference.models.families.common import Config, Fields, every_layer, rope_theta, rotary_dim


def minimax_m2(config: Config) -> Fields:
    dim = config.get("head_dim") or 128
    turned = rotary_dim({**config, "head_dim": dim}, (config.get("rotary_dim") or dim) / dim)
    mixture = every_layer(config, config["num_local_experts"], config["intermediate_size"], sigmoid=True, corrected=True)
    return {"mixture": mixture, "qk_norm": True, "row_norm": True, "head_dim": dim, "rope_theta": rope_theta(config, 5_000_000.0),
            "qkv_bias": False, "o_bias": False, "rotary_dim": turned}
