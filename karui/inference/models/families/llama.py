"""Meta's models: Llama, of which all is as `common` has it, and CWM."""

from __future__ import annotations

from karui.inference.models.families.common import Config, Fields, rope_scaling, rope_theta, windows


def llama(config: Config) -> Fields:
    return {}


def cwm(config: Config) -> Fields:
    """Windows in all but each fourth layer, the first among these (arXiv 2510.02387)."""
    kinds = config.get("layer_types") or ["sliding_attention" if i % 4 else "full_attention"
                                          for i in range(config["num_hidden_layers"])]
    usual = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
             "original_max_position_embeddings": 8192}
    given = config.get("rope_parameters") or config.get("rope_scaling")
    return {**windows({**config, "layer_types": kinds}), "qkv_bias": False, "o_bias": False,
            "head_dim": config.get("head_dim") or 128, "rope_theta": rope_theta(config, 1_000_000.0),
            "rope_scaling": rope_scaling(config) if given else usual, "norm_eps": config.get("rms_norm_eps", 1e-5)}
