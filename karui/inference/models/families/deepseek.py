"""DeepSeek-V2, V3 and V3.2: latent attention (MLA), its sparse form (DSA), and their mixtures. GLM-5 is built alike."""

from __future__ import annotations

import math

from karui.configs.errors import UnsupportedError
from karui.inference.models.config import Indexer, Latent
from karui.inference.models.families.common import Config, Fields, rope_scaling, routed


def deepseek_v2(config: Config) -> Fields:
    method = config.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy") or config.get("norm_topk_prob"):
        raise UnsupportedError(f"deepseek_v2 with topk_method {method!r}, norm_topk_prob {config.get('norm_topk_prob')} is "
                               "not supported; supported are greedy and group_limited_greedy, with false.")
    groups = {} if method == "group_limited_greedy" else {"n_group": 1, "topk_group": 1}
    return {**latent(config), "mixture": routed({**config, **groups}, sigmoid=False)}


def deepseek_v3(config: Config) -> Fields:
    return {**latent(config), "mixture": routed(config), "mlp_bias": False}


def deepseek_v32(config: Config) -> Fields:
    every = (True,) * config["num_hidden_layers"]
    return {**deepseek_v3(config), **latent(config, indexer(config, every, interleaved=False))}


def latent(config: Config, indexed: Indexer | None = None) -> Fields:
    heads, rope = config["num_attention_heads"], rope_scaling(config)
    if (config.get("num_key_value_heads") or heads) != heads:
        raise UnsupportedError(f"{config['model_type']} with {config['num_key_value_heads']} key heads for {heads} heads is not "
                               "supported: latent attention has one per head.")
    scale, all_dim = (config["qk_nope_head_dim"] + config["qk_rope_head_dim"]) ** -0.5, rope.get("mscale_all_dim")
    if all_dim and (factor := rope.get("factor") or 1) > 1:
        scale *= (0.1 * all_dim * math.log(factor) + 1) ** 2
    made = Latent(config.get("q_lora_rank") or None, config["kv_lora_rank"], config["qk_rope_head_dim"],
                  config["qk_nope_head_dim"], config["v_head_dim"], config.get("rope_interleave", True) is not False, scale,
                  indexed)
    return {"latent": made, "head_dim": made.rope}


def indexer(config: Config, layers: tuple[bool, ...], interleaved: bool) -> Indexer:
    if not config.get("q_lora_rank") or not layers[0]:
        raise UnsupportedError(f"{config['model_type']} needs q_lora_rank and an indexer in its first layer.")
    return Indexer(config["index_n_heads"], config["index_head_dim"], config["index_topk"], interleaved, layers)
