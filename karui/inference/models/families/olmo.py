"""OLMo 2 and 3, with norms behind the layers, and OLMoE; q and k are normalized over all heads."""

from __future__ import annotations

from dataclasses import replace

from karui.configs.errors import UnsupportedError
from karui.inference.models.config import POST_NORMS
from karui.inference.models.families.common import Config, Fields, every_layer, local_theta, rope_theta, windows


def olmo2(config: Config) -> Fields:
    return {"norms": POST_NORMS, "qk_norm": True, "row_norm": True, "rope_theta": rope_theta(config, 500_000.0)}


def olmo3(config: Config) -> Fields:
    """Layers with a window rotate without the others' scaling."""
    own = olmo2(config)
    theta = own["rope_theta"]
    return {**own, **windows(config, every=4), "local_theta": local_theta(config, theta, theta)}


def olmoe(config: Config) -> Fields:
    if config.get("clip_qkv") is not None:
        raise UnsupportedError(f"olmoe with clip_qkv {config['clip_qkv']} is not supported; it must be null.")
    mixture = every_layer(config, config["num_experts"], config["intermediate_size"])
    return {"qk_norm": True, "row_norm": True, "norm_eps": config.get("rms_norm_eps", 1e-5),
            "mixture": replace(mixture, normalized=bool(config.get("norm_topk_prob", False)))}
