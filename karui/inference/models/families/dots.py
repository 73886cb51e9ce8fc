"""dots.llm1: Qwen3's attention, DeepSeek-V3's mixture (arXiv 2506.05767)."""

from __future__ import annotations

from karui.inference.models.families.common import Config, Fields, routed, windows


def dots1(config: Config) -> Fields:
    """Layers from `max_window_layers` on have a window."""
    first = config.get("max_window_layers", 62)
    kinds = config.get("layer_types") or ["sliding_attention" if i >= first else "full_attention"
                                          for i in range(config["num_hidden_layers"])]
    return {**windows({**config, "layer_types": kinds}), "qk_norm": True, "mlp_bias": False,
            "mixture": routed({"norm_topk_prob": False, **config})}
