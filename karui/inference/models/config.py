"""`ModelConfig`: the switches of the one decoder, read from a Hugging Face `config.json`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from karui.configs.errors import UnsupportedError, nearest


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts in place of the feed-forward layer.

    Attributes:
        experts: their number; per_token: how many each token goes through; width: an expert's intermediate size.
        normalized: the chosen experts' shares are scaled to sum to 1.
        shared_width: intermediate size of the expert that every token goes through, behind a sigmoid gate; 0: there is none.
        layers: for each layer whether it has the mixture, else the plain feed-forward layer.
    """

    experts: int
    per_token: int
    width: int
    normalized: bool
    shared_width: int
    layers: tuple[bool, ...]


@dataclass(frozen=True)
class ModelConfig:
    """A llama-shaped decoder. One dataclass serves all of `SUPPORTED`.

    `sub_norms`: a norm in front of o_proj and one in front of down_proj (BitNet). `activation`: silu, or relu2 (relu squared).
    """

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
    activation: str = "silu"
    sub_norms: bool = False
    mixture: Mixture | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedError(
                f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads {self.num_kv_heads}."
            )

    @property
    def beyond_llama(self) -> str:
        """What of this model only the reference runner computes, or an empty string."""
        parts = {"mixture of experts": self.mixture, "sub-norms": self.sub_norms, self.activation: self.activation != "silu"}
        return ", ".join(name for name, there in parts.items() if there)


SUPPORTED = ("llama", "mistral", "qwen2", "qwen3", "bitnet", "mixtral", "qwen2_moe", "qwen3_moe")
ACTIVATIONS = ("silu", "relu2")


def from_hf(config: dict[str, Any]) -> ModelConfig:
    """The `ModelConfig` of a parsed config.json. Raises `UnsupportedError` for a model type karui's decoder lacks."""
    kind = config.get("model_type", "(missing)")
    if kind not in SUPPORTED:
        raise UnsupportedError(
            f"model_type {kind!r} is not supported by karui's engine; supported: {', '.join(SUPPORTED)}."
            f"{nearest(kind, SUPPORTED)}"
        )
    activation = config.get("hidden_act", "relu2" if kind == "bitnet" else "silu")
    if activation not in ACTIVATIONS:
        raise UnsupportedError(f"hidden_act {activation!r} is not supported; karui's decoder has {', '.join(ACTIVATIONS)}.")
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
        qkv_bias=bool(config.get("qkv_bias", True)) if kind.startswith("qwen2") else bool(config.get("attention_bias", False)),
        o_bias=kind not in ("qwen2", "qwen2_moe") and bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=kind in ("qwen3", "qwen3_moe"),
        sliding_window=_windows(config, kind, layers),
        rope_scaling=rope,
        activation=activation,
        sub_norms=kind == "bitnet",
        mixture=_mixture(config, kind, layers),
    )


def _mixture(config: dict[str, Any], kind: str, layers: int) -> Mixture | None:
    if kind == "mixtral":
        return Mixture(config["num_local_experts"], config["num_experts_per_tok"], config["intermediate_size"], True, 0,
                       (True,) * layers)
    if not kind.endswith("_moe"):
        return None
    experts, every = config.get("num_experts") or config["num_local_experts"], config.get("decoder_sparse_step") or 1
    plain = config.get("mlp_only_layers") or ()
    return Mixture(
        experts, config["num_experts_per_tok"], config["moe_intermediate_size"], bool(config.get("norm_topk_prob", False)),
        config["shared_expert_intermediate_size"] if kind == "qwen2_moe" else 0,
        tuple(i not in plain and (i + 1) % every == 0 for i in range(layers)),
    )


def _windows(config: dict[str, Any], kind: str, layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    if not window or kind == "llama" or (kind.startswith("qwen") and not config.get("use_sliding_window", False)):
        return (None,) * layers
    kinds = config.get("layer_types") or ["sliding_attention"] * layers
    return tuple(window if k == "sliding_attention" else None for k in kinds)
