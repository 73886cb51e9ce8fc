"""A mixture of experts from a dense model: sparse upcycling (Komatsuzaki et al., arXiv 2212.05055, section 2).

Every expert starts as the feed-forward layer, every router as small random numbers, and the shares of the chosen experts sum to
1: the mixture then computes what the layer did, whichever experts are chosen. They part as they meet different tokens.

With `split` G a copy is cut into G experts, each with a random G-th of its neurons, and what they give is scaled by G:

    top_k = G, 2 G, ...   the G experts of a copy share one row of the router, so that a token goes through whole copies, and the
                          start is again what the layer computed ("virtual groups", He et al., arXiv 2410.07524)
    top_k < G             a token goes through top_k / G of the neurons: fewer active parameters, another function at the start
                          (LLaMA-MoE, arXiv 2406.16554: a random partition, scaled by G / top_k). It has to be healed

llama and mistral become mixtral, qwen3 becomes qwen3_moe, qwen2 becomes qwen2_moe, which always has a shared expert as well: it
starts as one that answers zero. With `correction` all of them become glm4_moe, with such an expert too, whose routers score by
sigmoids and choose by scores and a bias, the one that `moe: {balance: bias}` moves (arXiv 2408.15664); it starts at zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from karui.configs.errors import KaruiError, UnsupportedError
from karui.distill.reshape import MIXTURES, check_type, common, rebuild

_TARGET = {"llama": "mixtral", "mistral": "mixtral", "qwen2": "qwen2_moe", "qwen3": "qwen3_moe"}


def plan(config: Any, experts: int, top_k: int = 2, split: int = 1, correction: bool = False) -> Any:
    """The configuration of the mixture.

    Raises:
        UnsupportedError: a mixture already, or an unknown type of model.
        KaruiError: numbers that do not fit together.
    """
    from transformers import AutoConfig

    if config.model_type in MIXTURES:
        raise UnsupportedError(f"upcycle-moe: a {config.model_type} is a mixture of experts already.")
    check_type(config, "upcycle-moe", tuple(_TARGET))
    width = config.intermediate_size
    if not 1 <= top_k <= experts or experts < 2 or experts % split or (top_k > split and top_k % split):
        raise KaruiError(f"upcycle-moe: {experts} experts, {top_k} per token, {split} to a copy do not fit together; expected "
                         "2 experts or more, a multiple of split, and top_k up to that, a multiple of split or less than it.")
    if width % split:
        raise KaruiError(f"upcycle-moe: split is {split}, which does not divide the {width} neurons of the feed-forward layers.")
    if getattr(config, "layer_types", None) and "sliding_attention" in config.layer_types:
        raise UnsupportedError("upcycle-moe: mixtures have no configuration with local and global layers; take one without.")
    kind = "glm4_moe" if correction else _TARGET[config.model_type]
    values = {**common(config), "num_experts_per_tok": top_k}
    if kind == "glm4_moe":
        if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
            raise UnsupportedError("upcycle-moe: a glm4_moe has no sliding window, this model has one; leave correction out.")
        values |= {"n_routed_experts": experts, "moe_intermediate_size": width // split, "n_shared_experts": 1,
                   "first_k_dense_replace": 0, "num_mtp_layers": 0, "partial_rotary_factor": 1.0,
                   "use_qk_norm": config.model_type == "qwen3", "attention_bias": config.model_type == "qwen2"}
    elif kind == "mixtral":
        values |= {"num_local_experts": experts, "intermediate_size": width // split,
                   "sliding_window": getattr(config, "sliding_window", None)}
    else:
        values |= {"num_experts": experts, "moe_intermediate_size": width // split, "norm_topk_prob": True,
                   "decoder_sparse_step": 1, "mlp_only_layers": []}
    if kind == "qwen2_moe":
        values |= {"shared_expert_intermediate_size": width // split, "qkv_bias": True}
    return AutoConfig.for_model(kind, **values)


@torch.no_grad()
def convert(model: nn.Module, experts: int, top_k: int = 2, split: int = 1, correction: bool = False, router_std: float = 0.02,
            seed: int = 0) -> nn.Module:
    """The model as a mixture; `seed` draws routers and partitions. Raises as `plan` does."""
    old: Any = model.config
    config = plan(old, experts, top_k, split, correction)
    draw = torch.Generator().manual_seed(seed)
    state = dict(model.state_dict())
    for i in range(old.num_hidden_layers):
        at = f"model.layers.{i}.mlp."
        gate, up, down = (state.pop(f"{at}{name}_proj.weight") for name in ("gate", "up", "down"))
        shards = torch.randperm(len(gate), generator=draw).view(split, -1).sort(1).values if split > 1 else None
        neurons = [torch.arange(len(gate))] if shards is None else list(shards)
        rows = torch.stack([torch.cat([gate[n], up[n]]) for n in neurons])
        columns = torch.stack([down[:, n] * split for n in neurons])
        copies = experts // split
        state[f"{at}experts.gate_up_proj"] = rows.repeat(copies, 1, 1)
        state[f"{at}experts.down_proj"] = columns.repeat(copies, 1, 1)
        whole = top_k % split == 0
        router = torch.randn(copies if whole else experts, old.hidden_size, generator=draw) * router_std
        state[f"{at}gate.weight"] = (router.repeat_interleave(split, 0) if whole else router).to(gate)
        if config.model_type in ("qwen2_moe", "glm4_moe"):
            width = old.intermediate_size // split
            shared = {"gate": gate[:width].clone(), "up": up[:width].clone(), "down": torch.zeros_like(down[:, :width])}
            name_of = "shared_expert" if config.model_type == "qwen2_moe" else "shared_experts"
            state |= {f"{at}{name_of}.{name}_proj.weight": w for name, w in shared.items()}
        if config.model_type == "qwen2_moe":
            state[f"{at}shared_expert_gate.weight"] = torch.zeros_like(gate[:1])
        elif config.model_type == "glm4_moe":
            state[f"{at}gate.e_score_correction_bias"] = torch.zeros(experts)
    return rebuild(model, config, state)
