"""Seed-OSS: a llama with biases of q, k and v."""

from __future__ import annotations

from karui.inference.models.families.common import Config, Fields


def seed_oss(config: Config) -> Fields:
    return {"qkv_bias": bool(config.get("attention_bias", True)), "o_bias": bool(config.get("attention_out_bias", False)),
            "head_dim": config.get("head_dim") or 128}
