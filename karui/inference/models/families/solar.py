"""Solar Open: a llama whose layers have DeepSeek-V3's mixture."""

from __future__ import annotations

from karui.inference.models.families.common import Config, Fields, head_dim, rope_theta, routed


def solar_open(config: Config) -> Fields:
    config = {"n_shared_experts": 1, "head_dim": 128, **config, "first_k_dense_replace": 0}
    return {"mixture": routed(config), "head_dim": head_dim(config), "o_bias": False,
            "rope_theta": rope_theta(config, 1_000_000.0), "norm_eps": config.get("rms_norm_eps", 1e-5)}
