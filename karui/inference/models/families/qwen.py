"""Qwen2, Qwen3 and their mixtures; Qwen3-Next and Qwen3.5, whose other layers are gated delta rules."""

from __future__ import annotations

from karui.inference.models.config import Mixture
from karui.inference.models.families.common import Config, Fields, layers_of, rotary_dim, windows
from karui.inference.models.recurrent.delta_net import DeltaNet


def qwen2(config: Config) -> Fields:
    return {**_windows(config), "qkv_bias": bool(config.get("qkv_bias", True)), "o_bias": False}


def qwen2_moe(config: Config) -> Fields:
    """Experts beside one that every token goes through, behind a gate, and attention as of `qwen2`, whose o_proj has no bias."""
    return {**qwen2(config), "mixture": _mixture(config, shared=True)}


def qwen3(config: Config) -> Fields:
    return {**_windows(config), "qk_norm": True}


def qwen3_moe(config: Config) -> Fields:
    return {**qwen3(config), "mixture": _mixture(config)}


def qwen3_next(config: Config) -> Fields:
    return {**_hybrid(config, joint=True), "mixture": _mixture(config, shared=True)}


def qwen3_5_text(config: Config) -> Fields:
    return _hybrid(config)


def qwen3_5_moe_text(config: Config) -> Fields:
    return {**_hybrid(config), "mixture": _mixture(config, shared=True, normalized=True)}


def _windows(config: Config) -> Fields:
    return windows(config) if config.get("use_sliding_window", False) else {}


def _mixture(config: Config, shared: bool = False, normalized: bool = False) -> Mixture | None:
    experts = config.get("num_experts") or config.get("num_local_experts")
    if not experts:
        return None
    plain, every = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step") or 1
    return Mixture(
        experts, config["num_experts_per_tok"], config["moe_intermediate_size"],
        normalized or bool(config.get("norm_topk_prob", False)), config["shared_expert_intermediate_size"] if shared else 0,
        tuple(i not in plain and (i + 1) % every == 0 for i in range(config["num_hidden_layers"])))


def _hybrid(config: Config, joint: bool = False) -> Fields:
    """A gated delta rule in most layers, gated attention in each fourth; a quarter of a head is rotated, norms weigh by 1 + w."""
    every = config.get("full_attention_interval") or 4
    kinds = config.get("layer_types") or ["linear_attention" if (i + 1) % every else "full_attention"
                                          for i in range(config["num_hidden_layers"])]
    layers = layers_of("linear_attention", kinds, config)
    made = DeltaNet(layers=layers, key_heads=config["linear_num_key_heads"], value_heads=config["linear_num_value_heads"],
                    key_dim=config["linear_key_head_dim"], value_dim=config["linear_value_head_dim"],
                    taps=config["linear_conv_kernel_dim"], eps=config.get("rms_norm_eps", 1e-6), joint=joint)
    return {**qwen3(config), "recurrent": made if any(layers) else None, "rotary_dim": rotary_dim(config, 0.25),
            "norm_offset": 1.0, "attention_gate": True, "passed_over": ("mtp.",)}
