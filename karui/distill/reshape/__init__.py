"""Changing a model's architecture before it is trained on ("uptraining", Ainslie et al., arXiv 2305.13245):

    kv_heads   fewer key-value heads (MHA -> GQA -> MQA)
    window     local layers between global ones
    upcycle    a mixture of experts from copies of the feed-forward layers
    latent     multi-head latent attention in place of grouped heads
    sparse     an indexer over it that picks the keys a token attends to

Each is two functions: `plan` gives the new configuration from the old one alone, so that a dry run can refuse it or count with
it; `convert` gives the new model. Nothing is trained here: what a change costs is healed by the training that follows. The result
is an ordinary model of transformers, of a type that it and karui's engine load.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from karui.configs.errors import UnsupportedError

LLAMA_LIKE = ("llama", "mistral", "ministral", "qwen2", "qwen3")
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe")
_COMMON = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
           "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps", "use_cache", "pad_token_id",
           "bos_token_id", "eos_token_id", "tie_word_embeddings", "rope_parameters", "attention_dropout", "dtype")


@dataclass(frozen=True, kw_only=True)
class Size:
    """What a configuration costs.

    Attributes:
        parameters: all of them, tied ones once; active: those a token goes through.
        kv: values that a token leaves in the cache, over all layers; local: those of them in layers with a `window`.
    """

    parameters: int
    active: int
    kv: int
    local: int
    window: int

    def kv_bytes(self, tokens: int) -> int:
        """Bytes in fp16 of a sequence, where a runtime drops what no window reaches any more."""
        return 2 * ((self.kv - self.local) * tokens + self.local * min(tokens, self.window))


def common(config: Any) -> dict[str, Any]:
    """The keys that every llama-like configuration has, as values for another class; the head's size is written out."""
    values = config.to_dict()
    return {key: values[key] for key in _COMMON if key in values} | {"head_dim": head_dim(config)}


def head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def check_type(config: Any, method: str, known: tuple[str, ...]) -> None:
    """Raise `UnsupportedError` unless the configuration is of a known model type and its linears are as that type has them."""
    if config.model_type not in known:
        raise UnsupportedError(f"{method} knows models of type {', '.join(known)}; this one is {config.model_type!r}.")
    biased = getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False)
    if config.model_type == "llama" and biased:
        raise UnsupportedError(f"{method}: biases in a model of type {config.model_type!r} are not supported.")


def skeleton(config: Any) -> Any:
    """The model of a configuration without storage."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def rebuild(model: nn.Module, config: Any, state: dict[str, torch.Tensor]) -> nn.Module:
    """The model of `config` with the tensors of `state`; dtype, attention and mode are those of `model`."""
    from transformers import AutoModelForCausalLM

    old: Any = model
    with torch.device("meta"):
        new: Any = AutoModelForCausalLM.from_config(config, attn_implementation=old.config._attn_implementation)
    tied = [n for n in new.state_dict() if n not in state]
    assert all(n == "lm_head.weight" and config.tie_word_embeddings for n in tied), tied
    new.load_state_dict(state, strict=not tied, assign=True)
    new.tie_weights()
    new.model.rotary_emb = type(new.model.rotary_emb)(config=new.config)  # its buffers are in no state
    assert not (empty := [n for n, p in (*new.named_parameters(), *new.named_buffers()) if p.is_meta]), empty
    new.generation_config = old.generation_config
    for parameter in new.parameters():
        parameter.requires_grad_(True)
    return new.train(old.training)


def size_of(config: Any) -> Size:
    """What a configuration of one of the known types costs."""
    model = skeleton(config)
    count = {name: p.numel() for name, p in model.named_parameters()}  # a shared one is listed once
    if config.tie_word_embeddings and "lm_head.weight" in count:
        del count["lm_head.weight"]
    experts = sum(n for name, n in count.items() if ".experts." in name)
    share = config.num_experts_per_tok / config.num_local_experts if experts else 1.0
    layers = config.num_hidden_layers
    latent = getattr(config, "kv_lora_rank", None)
    each = latent + config.qk_rope_head_dim if latent else 2 * config.num_key_value_heads * head_dim(config)
    each += getattr(config, "index_head_dim", 0)  # an indexer's keys
    window = getattr(config, "sliding_window", None) or 0
    kinds = getattr(config, "layer_types", None) or (["sliding_attention" if window else "full_attention"] * layers)
    local = sum(k == "sliding_attention" for k in kinds) if window else 0
    total = sum(count.values())
    return Size(parameters=total, active=round(total - experts * (1 - share)), kv=each * layers, local=each * local,
                window=window)


def describe(before: Any, after: Any) -> str:
    """What a change of configuration changed, in one line."""
    old, new = size_of(before), size_of(after)
    active = "" if new.active == new.parameters else f" ({new.active:,} per token)"
    text = (f"parameters {old.parameters:,} -> {new.parameters:,}{active}, KV cache {2 * old.kv:,} -> {2 * new.kv:,} bytes a "
            "token in fp16")
    if new.local:
        tokens = after.max_position_embeddings
        text += (f"; at {tokens:,} tokens {old.kv_bytes(tokens) / 1e6:.1f} -> {new.kv_bytes(tokens) / 1e6:.1f} MB in a runtime "
                 "that drops what no window reaches (karui's engine keeps it)")
    return text
