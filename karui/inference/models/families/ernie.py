"""ERNIE 4.5 and its mixture: RoPE turns the pairs (2i, 2i + 1)."""

from __future__ import annotations

from karui.configs.errors import UnsupportedError
from karui.inference.models.config import Mixture
from karui.inference.models.families.common import Config, Fields, rope_theta, tied


def ernie4_5(config: Config) -> Fields:
    biased = bool(config.get("use_bias", False))
    return {**_both(config), "qkv_bias": biased, "o_bias": biased, "mlp_bias": biased, "head_dim": config.get("head_dim") or 128}


def ernie4_5_moe(config: Config) -> Fields:
    """Experts by softmax, with a correction where they are chosen; MTP blocks of released files are passed over."""
    if config.get("use_bias"):
        raise UnsupportedError("ernie4_5_moe with use_bias is not supported: released models have none.")
    layers, width = config["num_hidden_layers"], config["moe_intermediate_size"]
    first, every = config.get("moe_layer_start_index", 1), config.get("moe_layer_interval", 1)
    last = config.get("moe_layer_end_index", -1)
    last = layers - 1 if last == -1 else last
    mixture = Mixture(
        config.get("moe_num_experts", 64), config.get("moe_k", 6), width, True, width * config.get("moe_num_shared_experts", 2),
        tuple((i + 1) % every == 0 and first <= i <= last for i in range(layers)), corrected=True, shared_gate=False,
        share_min=config.get("moe_norm_min", 1e-12))
    return {**_both(config), "mixture": mixture, "passed_over": ("model.mtp_",)}


def _both(config: Config) -> Fields:
    return {**tied(config), "interleaved": True, "rope_theta": rope_theta(config, 500_000.0),
            "norm_eps": config.get("rms_norm_eps", 1e-5)}
