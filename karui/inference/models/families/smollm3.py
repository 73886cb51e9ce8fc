"""SmolLM3: each fourth layer does not rotate (arXiv 2501.18795)."""

from __future__ import annotations

from karui.inference.models.families.common import Config, Fields, rope_theta, tied, windows


def smollm3(config: Config) -> Fields:
    """Windows, where they are used, are those of the layers that do not rotate."""
    layers, every = config["num_hidden_layers"], config.get("no_rope_layer_interval") or 4
    given = config.get("no_rope_layers") or [(i + 1) % every for i in range(layers)]
    rotated = tuple(bool(turns) for turns in given[:layers])
    kinds = config.get("layer_types") or ["full_attention" if turns else "sliding_attention" for turns in rotated]
    own = windows({**config, "layer_types": kinds}) if config.get("use_sliding_window") else {}
    return {**tied(config), **own, "rotated": rotated, "rope_theta": rope_theta(config, 2_000_000.0)}
