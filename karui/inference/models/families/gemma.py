"""Gemma 1 to 3: norms of 1 + w, scaled embeddings; from the second on soft caps, four norms to a layer, windows."""

from __future__ import annotations

from karui.configs.errors import UnsupportedError
from karui.inference.models.config import BOTH_NORMS
from karui.inference.models.families.common import Config, Fields, head_dim, local_theta, rope_theta, tied, windows


def gemma(config: Config) -> Fields:
    given = config.get("hidden_act")  # gelu in old files means the approximation, which their models were trained with
    return {**tied(config), "norm_offset": 1.0, "embed_scale": config["hidden_size"] ** 0.5,
            "activation": config.get("hidden_activation") or ("gelu_pytorch_tanh" if given in (None, "gelu") else given)}


def gemma2(config: Config) -> Fields:
    return {**gemma(config), **windows(config, every=2), "norms": BOTH_NORMS,
            "query_scale": (head_dim(config) / config["query_pre_attn_scalar"]) ** 0.5,
            "attention_cap": config.get("attn_logit_softcapping"), "logit_cap": config.get("final_logit_softcapping")}


def gemma3_text(config: Config) -> Fields:
    if config.get("attn_logit_softcapping"):
        raise UnsupportedError("gemma3_text with attn_logit_softcapping is not supported: implementations differ, transformers "
                               "ignores it.")
    theta = rope_theta(config, 1_000_000.0)
    return {**gemma2(config), **windows(config, every=6), "qk_norm": True, "rope_theta": theta,
            "local_theta": local_theta(config, 10_000.0, theta)}
