"""Fewer key-value heads: each group of them becomes one (GQA, Ainslie et al., arXiv 2305.13245, section 2.1 and figure 4).

Heads i n, ..., (i + 1) n - 1 of the key and the value projection become head i, for n = old / new: their mean, or the first of
them. Queries stay, each now looking at the head that its own went into. One head is multi-query attention (arXiv 1911.02150).

The paper converts T5, whose heads know no positions. With rotary embedding the mean of rotated keys is the rotated mean, so
nothing changes. Norms on keys (qwen3) come after the projection and stay.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from karui.configs.errors import KaruiError
from karui.distill.reshape import LLAMA_LIKE, MIXTURES, check_type, head_dim, rebuild


def plan(config: Any, kv_heads: int) -> Any:
    """The configuration with `kv_heads`.

    Raises:
        UnsupportedError: an unknown type of model.
        KaruiError: not a smaller divisor of what the model has.
    """
    check_type(config, "merge-kv-heads", (*LLAMA_LIKE, *MIXTURES))
    have = config.num_key_value_heads
    if kv_heads >= have or have % kv_heads:
        smaller = [n for n in range(1, have) if have % n == 0]
        raise KaruiError(f"merge-kv-heads: kv_heads is {kv_heads}; the model has {have} key-value heads"
                         + (f", which merge into {', '.join(map(str, smaller))}." if smaller else ": there is nothing to merge."))
    return type(config).from_dict(config.to_dict() | {"num_key_value_heads": kv_heads, "head_dim": head_dim(config)})


@torch.no_grad()
def convert(model: nn.Module, kv_heads: int, pooling: str = "mean") -> nn.Module:
    """The model with `kv_heads` key-value heads; `pooling` is mean or first. Raises as `plan` does."""
    old: Any = model.config
    config = plan(old, kv_heads)
    state = dict(model.state_dict())
    for name, tensor in state.items():
        if name.rpartition(".")[0].endswith(("self_attn.k_proj", "self_attn.v_proj")):
            heads = tensor.view(kv_heads, old.num_key_value_heads // kv_heads, head_dim(old), *tensor.shape[1:])
            merged = heads.float().mean(1).to(tensor.dtype) if pooling == "mean" else heads[:, 0]
            state[name] = merged.flatten(0, 1).contiguous()
    return rebuild(model, config, state)
