"""`ModelConfig`: the switches of the one decoder, read from a Hugging Face `config.json`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from karui.configs.errors import UnsupportedError, nearest


@dataclass(frozen=True)
class ModelConfig:
    """A llama-shaped decoder. One dataclass serves llama, qwen2, qwen3 and mistral."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    max_context: int
    tied: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: tuple[int | None, ...] = ()
    rope_scaling: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedError(
                f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads {self.num_kv_heads}."
            )


SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")


def from_hf(config: dict[str, Any]) -> ModelConfig:
    """The `ModelConfig` of a parsed config.json. Raises `UnsupportedError` for a model type karui's decoder lacks."""
    kind = config.get("model_type", "(missing)")
    if kind not in SUPPORTED:
        raise UnsupportedError(
            f"model_type {kind!r} is not supported by karui's engine; supported: {', '.join(SUPPORTED)}."
            f"{nearest(kind, SUPPORTED)}"
        )
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedError(f"hidden_act {config['hidden_act']!r} is not supported; karui's decoder has silu.")
    heads = config["num_attention_heads"]
    layers = config["num_hidden_layers"]
    # transformers 5 keeps rope_theta inside rope_parameters; older folders have both at the top level.
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(rope.pop("rope_theta", None) or config.get("rope_theta") or 10000.0)
    if (rope.get("rope_type") or rope.get("type") or "default") == "default":
        rope = {}
    return ModelConfig(
        model_type=kind,
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=theta,
        max_context=config["max_position_embeddings"],
        tied=config.get("tie_word_embeddings", False),
        qkv_bias=kind == "qwen2" or bool(config.get("attention_bias", False)),
        o_bias=kind != "qwen2" and bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=kind == "qwen3",
        sliding_window=_windows(config, kind, layers),
        rope_scaling=rope,
    )


def _windows(config: dict[str, Any], kind: str, layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    if not window or kind == "llama" or (kind.startswith("qwen") and not config.get("use_sliding_window", False)):
        return (None,) * layers
    kinds = config.get("layer_types") or ["sliding_attention"] * layers
    return tuple(window if k == "sliding_attention" else None for k in kinds)
