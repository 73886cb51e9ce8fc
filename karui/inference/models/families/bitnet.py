"""BitNet b1.58 2B4T (arXiv 2504.12285)."""

from __future__ import annotations

from karui.inference.models.families.common import Config, Fields


def bitnet(config: Config) -> Fields:
    """Norms in front of o_proj and down_proj, squared ReLU."""
    return {"sub_norms": True, "activation": config.get("hidden_act") or "relu2"}
