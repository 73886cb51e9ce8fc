"""IBM's models: Granite with its scaled activations, and Bamba; layers without attention are Mamba-2."""

from __future__ import annotations

from karui.configs.errors import UnsupportedError
from karui.inference.models.config import special_floats
from karui.inference.models.families.common import Config, Fields, every_layer, head_dim, layers_of
from karui.inference.models.recurrent.mamba2 import Mamba2


def granite(config: Config) -> Fields:
    return _scales(config)


def granitemoe(config: Config) -> Fields:
    return {**_scales(config), "mixture": every_layer(config, config["num_local_experts"], config["intermediate_size"])}


def granitemoeshared(config: Config) -> Fields:
    """A feed-forward layer for every token beside the experts."""
    width = config.get("shared_intermediate_size") or 0
    return {**granitemoe(config), "shared_mlp": width > 0, "intermediate_size": width}


def granitemoehybrid(config: Config) -> Fields:
    """A feed-forward layer in every layer, beside the experts where there are some."""
    experts = config.get("num_local_experts")
    return {**_scales(config), **_mamba2(config), "shared_mlp": True, "intermediate_size": config["shared_intermediate_size"],
            "mixture": every_layer(config, experts, config["intermediate_size"]) if experts else None,
            "rotary_dim": None if config.get("position_embedding_type") == "rope" else 0}


def bamba(config: Config) -> Fields:
    return {**_mamba2(config), "rotary_dim": head_dim(config) // 2}


def _scales(config: Config) -> Fields:
    """Factors on embeddings, scores, what layers add, and (a divisor) logits."""
    found = {"embed_scale": config.get("embedding_multiplier"), "residual_scale": config.get("residual_multiplier"),
             "logit_scale": config.get("logits_scaling"),
             "query_scale": (config.get("attention_multiplier") or 1.0) * head_dim(config) ** 0.5}
    return {name: float(value) for name, value in found.items() if value is not None}


def _mamba2(config: Config) -> Fields:
    attention = config.get("attn_layer_indices") or ()
    kinds = config.get("layers_block_type") or config.get("layer_types") or [
        "full_attention" if i in attention else "linear_attention" for i in range(config["num_hidden_layers"])]
    old = {"mamba": "linear_attention", "attention": "full_attention"}  # what files called them at first
    layers = layers_of("linear_attention", [old.get(k, k) for k in kinds], config)
    inner, heads = config["mamba_expand"] * config["hidden_size"], config["mamba_n_heads"]
    dim, groups = config["mamba_d_head"], config["mamba_n_groups"]
    dim = inner // heads if dim == "auto" else dim
    if dim * heads != inner or heads % groups:
        raise UnsupportedError(f"{config['model_type']}: {heads} heads of {dim} in {groups} groups do not make an inner width of "
                               f"{inner}.")
    low, high = (float(x) for x in special_floats(config.get("time_step_limit")) or (0.0, "inf"))
    made = Mamba2(layers=layers, heads=heads, head_dim=dim, groups=groups, state=config["mamba_d_state"],
                  taps=config["mamba_d_conv"], eps=config.get("rms_norm_eps", 1e-6), limits=(low, high),
                  conv_bias=bool(config.get("mamba_conv_bias", True)), bias=bool(config.get("mamba_proj_bias", False)))
    return {"recurrent": made if any(layers) else None}
