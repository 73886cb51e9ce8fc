"""Phi-3: one linear for q, k and v, one for gate and up; not longrope."""

from __future__ import annotations

from karui.inference.models.families.common import Config, Fields, rotary_dim, windows


def phi3(config: Config) -> Fields:
    return {**windows(config), "fused_qkv": True, "fused_mlp": True, "rotary_dim": rotary_dim(config)}
