"""Cohere's Command models: LayerNorm without a bias, attention and feed-forward layer side by side, scaled logits."""

from __future__ import annotations

from karui.configs.errors import UnsupportedError
from karui.inference.models.families.common import Config, Fields, rope_theta, tied, windows


def cohere(config: Config) -> Fields:
    if config.get("use_qk_norm"):
        raise UnsupportedError("cohere with use_qk_norm is not supported: it has norms with a weight per head.")
    return {**tied(config), "norms": ("input_layernorm", None, None, None), "centred": True, "parallel": True,
            "interleaved": True, "norm_eps": config.get("layer_norm_eps", 1e-5), "rope_theta": rope_theta(config, 500_000.0),
            "logit_scale": 1 / config.get("logit_scale", 0.0625), "mlp_bias": False}


def cohere2(config: Config) -> Fields:
    """Layers with a window rotate, the others do not."""
    own = windows(config, every=4)
    rotated = tuple(w is not None for w in own.get("sliding_window", (None,) * config["num_hidden_layers"]))
    return {**cohere(config), **own, "rotated": rotated, "rope_theta": rope_theta(config)}
