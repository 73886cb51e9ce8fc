"""EXAONE 4 and its mixture: where some layers have a window, only those rotate."""

from __future__ import annotations

from karui.configs.errors import UnsupportedError
from karui.inference.models.config import POST_NORMS, PRE_NORMS
from karui.inference.models.families.common import Config, Fields, routed, windows


def exaone4(config: Config) -> Fields:
    """Norms behind the layers."""
    pattern, layers = config.get("sliding_window_pattern"), config["num_hidden_layers"]
    if isinstance(pattern, str) and config.get("sliding_window") and not config.get("layer_types"):
        raise UnsupportedError(f"exaone4 with sliding_window_pattern {pattern!r} and no layer_types is not supported: list them.")
    own = windows(config, every=4)
    return {**own, "rotated": tuple(w is not None for w in own.get("sliding_window", (0,) * layers)), "norms": POST_NORMS,
            "qk_norm": True, "qkv_bias": False, "o_bias": False, "mlp_bias": False, "norm_eps": config.get("rms_norm_eps", 1e-5)}


def exaone_moe(config: Config) -> Fields:
    """K-EXAONE: norms in front of the layers, DeepSeek's mixture."""
    named = {"n_routed_experts": config["num_experts"], "n_shared_experts": config.get("num_shared_experts", 1)}
    mixture = routed({"first_k_dense_replace": 1, "routed_scaling_factor": 2.5, **config, **named})
    return {**exaone4(config), "norms": PRE_NORMS, "mixture": mixture, "passed_over": ("mtp.",)}
