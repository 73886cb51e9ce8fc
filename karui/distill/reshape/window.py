"""Local and global layers: most layers see the last `window` tokens, each `every`-th sees all (Gemma 2, arXiv 2408.00118; Gemma
3, arXiv 2503.19786; windows are Longformer's, arXiv 2004.05150).

Weights stay as they are; only what a layer sees changes: token i sees i - window + 1 to i in a local layer. Global layers are
the `every`-th, the 2 `every`-th and so on, as in Gemma 3. Up to `window` tokens the model is the one it was.

Nothing keeps the first tokens in sight of the local layers (the sinks of StreamingLLM, arXiv 2309.17453): no configuration of
transformers has them. Healing has to move what heads park there, and global layers still see them.

llama and mistral become ministral, which is the same model with a kind per layer; qwen2 and qwen3 have kinds of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from karui.configs.errors import KaruiError, UnsupportedError
from karui.distill.reshape import LLAMA_LIKE, check_type, common, rebuild


def plan(config: Any, window: int, every: int | None = 4) -> Any:
    """The configuration with local layers.

    Raises:
        UnsupportedError: an unknown type of model, or one with windows.
        KaruiError: a window that no text is longer than, or no global layer where one was asked for.
    """
    from transformers import AutoConfig

    check_type(config, "sliding-window", LLAMA_LIKE)
    layers, longest = config.num_hidden_layers, config.max_position_embeddings
    if getattr(config, "sliding_window", None):
        raise UnsupportedError(f"sliding-window: the model has a window of {config.sliding_window} tokens already.")
    if not 1 <= window < longest:
        raise KaruiError(f"sliding-window: window is {window}; expected 1 to {longest - 1}, less than the {longest} tokens that "
                         "the model reads.")
    if every is not None and not 2 <= every <= layers:
        raise KaruiError(f"sliding-window: every is {every}; expected 2 to {layers}, the model's layers, or null for no global "
                         "layer.")
    kinds = ["full_attention" if every and (i + 1) % every == 0 else "sliding_attention" for i in range(layers)]
    values = {**common(config), "sliding_window": window, "layer_types": kinds}
    if config.model_type.startswith("qwen"):
        return type(config).from_dict(config.to_dict() | values | {"use_sliding_window": True, "max_window_layers": 0})
    return AutoConfig.for_model("ministral", **values)


@torch.no_grad()
def convert(model: nn.Module, window: int, every: int | None = 4) -> nn.Module:
    """The model with local layers; its weights are those of `model`. Raises as `plan` does."""
    return rebuild(model, plan(model.config, window, every), dict(model.state_dict()))
