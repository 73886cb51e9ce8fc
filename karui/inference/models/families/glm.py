"""GLM-5: DeepSeek's sparse attention, with indexers in some layers only."""

from __future__ import annotations

from karui.inference.models.families.common import Config, Fields
from karui.inference.models.families.deepseek import deepseek_v3, indexer, latent


def glm_moe_dsa(config: Config) -> Fields:
    """Which layers have an indexer: listed, spelled as F and S, or every `index_topk_freq`-th."""
    layers = config["num_hidden_layers"]
    if kinds := config.get("indexer_types") or config.get("index_topk_pattern"):
        own = tuple(k in ("F", "full") for k in kinds)[:layers]
    else:
        every, offset = max(config.get("index_topk_freq") or 1, 1), config.get("index_skip_topk_offset", 2)
        own = tuple(max(i - offset + 1, 0) % every == 0 for i in range(layers))
    return {**deepseek_v3(config), **latent(config, indexer(config, own, interleaved=True))}
