"""gpt-oss: attention sinks, windows in every other layer, clamped experts with biases."""

from __future__ import annotations

from karui.inference.models.families.common import Config, Fields, every_layer, rope_theta, windows


def gpt_oss(config: Config) -> Fields:
    biased = bool(config.get("attention_bias", True))
    mixture = every_layer(config, config.get("num_local_experts") or config["num_experts"], config["intermediate_size"],
                          router="router", biased=True,
                          clamp=(config.get("swiglu_alpha", 1.702), config.get("swiglu_limit", 7.0)))
    return {**windows(config, every=2), "mixture": mixture, "sinks": True, "qkv_bias": biased, "o_bias": biased,
            "rope_theta": rope_theta(config, 150_000.0)}
