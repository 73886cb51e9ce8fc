"""OLMo 2 and 3: norms behind the layers, q and k normalized over all heads."""

from __future__ import annotations

from karui.inference.models.config import POST_NORMS
from karui.inference.models.families.common import Config, Fields, local_theta, rope_theta, windows


def olmo2(config: Config) -> Fields:
    return {"norms": POST_NORMS, "qk_norm": True, "row_norm": True, "rope_theta": rope_theta(config, 500_000.0)}


def olmo3(config: Config) -> Fields:
    """Layers with a window rotate without the others' scaling."""
    own = olmo2(config)
    theta = own["rope_theta"]
    return {**own, **windows(config, every=4), "local_theta": local_theta(config, theta, theta)}
