"""Hunyuan's dense models: q and k are normalized behind RoPE."""

from __future__ import annotations

from karui.inference.models.families.common import Config, Fields, head_dim, rope_scaling, rope_theta


def hunyuan_v1_dense(config: Config) -> Fields:
    """Of "dynamic" scaling with an `alpha` only alpha counts: the base is theta alpha^(D / (D - 2)), whatever the length."""
    own = {"qk_norm": True, "norm_turned": True, "mlp_bias": False, "norm_eps": config.get("rms_norm_eps", 1e-5)}
    scaling, dim = rope_scaling(config), head_dim(config)
    if (scaling.get("rope_type") or scaling.get("type")) == "dynamic" and scaling.get("alpha"):
        own |= {"rope_theta": rope_theta(config) * scaling["alpha"] ** (dim / (dim - 2)), "rope_scaling": {}}
    return own
