"""`ModelConfig`: the switches of the one decoder, read from a Hugging Face `config.json`."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any

from karui.configs.errors import UnsupportedError, nearest
from karui.inference.models.recurrent import Recurrent
from karui.inference.models.recurrent.delta_net import DeltaNet
from karui.inference.models.recurrent.mamba2 import Mamba2
from karui.inference.models.recurrent.short_conv import ShortConv


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts in place of the feed-forward layer.

    Attributes:
        experts: their number; per_token: how many each token goes through; width: an expert's intermediate size.
        normalized: the chosen experts' shares are scaled to sum to 1.
        shared_width: intermediate size of the expert that every token goes through; 0: there is none.
        layers: for each layer whether it has the mixture, else the plain feed-forward layer.
        sigmoid: an expert's score is the sigmoid of its logit, and a bias per expert is added where experts are chosen, not where
            they are weighed (DeepSeek-V3, arXiv 2412.19437, eq. 13-16); else the softmax over all experts.
        groups: experts are chosen from `groups_kept` of so many groups, those whose `group_best` best experts score highest.
        scaling: factor on the shares.
        shared_gate: the shared expert is behind a sigmoid gate (Qwen), else added as it is (DeepSeek).
        router: its name. biased: router and experts have biases. clamp: (alpha, limit) of experts that return
            (up + 1) gate sigmoid(alpha gate), gate below the limit and up within it on both sides (gpt-oss); None: silu(gate) up.
        corrected: with `sigmoid`, there is that bias. share_eps: added to the sum that shares are divided by (LFM2).
    """

    experts: int
    per_token: int
    width: int
    normalized: bool
    shared_width: int
    layers: tuple[bool, ...]
    sigmoid: bool = False
    groups: int = 1
    groups_kept: int = 1
    group_best: int = 1
    scaling: float = 1.0
    shared_gate: bool = True
    router: str = "gate"
    biased: bool = False
    clamp: tuple[float, float] | None = None
    corrected: bool = True
    share_eps: float = 0.0

    def __post_init__(self) -> None:
        each = self.experts // self.groups
        if self.experts % self.groups or not 1 <= self.groups_kept <= self.groups or self.groups_kept * each < self.per_token or (
                self.groups > 1 and each < self.group_best):
            raise UnsupportedError(f"{self.per_token} of {self.experts} experts cannot be chosen from {self.groups_kept} of "
                                   f"{self.groups} groups.")


@dataclass(frozen=True)
class Indexer:
    """DeepSeek sparse attention: a light scorer picks the keys that each query sees (DeepSeek-V3.2, arXiv 2512.02556, eq. 1-2).

    Attributes:
        heads, head_dim: of its queries; its one key of `head_dim` is cached beside the latent.
        top: keys picked per query.
        interleaved: its rotation turns the pairs (2i, 2i + 1) (GLM), else (i, i + D/2) (DeepSeek).
        layers: for each layer whether it has an indexer, else it uses what the last one picked.
    """

    heads: int
    head_dim: int
    top: int
    interleaved: bool
    layers: tuple[bool, ...]


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: keys and values are made from one cached latent per token (DeepSeek-V2, arXiv 2405.04434).

    Attributes:
        query_rank: width of the queries' own latent, None: they are made from the hidden state.
        rank: width of the cached latent; rope: of the cached rotated key that all heads share.
        nope, value: a head's width of unrotated query and key, and of value.
        interleaved: the rotation turns the pairs (2i, 2i + 1), else (i, i + D/2).
        scale: factor on the scores, YaRN's included.
        indexer: None: every query sees every key before it.
    """

    query_rank: int | None
    rank: int
    rope: int
    nope: int
    value: int
    interleaved: bool
    scale: float
    indexer: Indexer | None = None

    @property
    def group(self) -> int:
        """How many cached numbers share a scale in int8 and fp8, 128 at most, so that none spans the parts of an entry."""
        parts = math.gcd(self.rank, self.rope, self.indexer.head_dim if self.indexer else 0)
        return next(n for n in range(min(parts, 128), 0, -1) if parts % n == 0)

    @property
    def width(self) -> int:
        """Numbers cached per token and layer."""
        return self.rank + self.rope + (self.indexer.head_dim if self.indexer else 0)


Norms = tuple[str | None, str | None, str | None, str | None]
PRE_NORMS: Norms = ("input_layernorm", None, "post_attention_layernorm", None)
POST_NORMS: Norms = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
BOTH_NORMS: Norms = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True)
class ModelConfig:
    """A llama-shaped decoder. One dataclass serves all of `SUPPORTED`.

    `sub_norms`: a norm in front of o_proj and one in front of down_proj (BitNet). `activation`: silu, or relu2 (relu squared).
    `head_dim`: with a `latent` that of the rotated part. `extra_layers`: layers behind the last that files hold and decoding does
    not read (multi-token prediction). `recurrent`: layers with a state in place of attention (hybrids). `norm_offset`: added to
    the weights of norms. `rotary_dim`: how much of a head is rotated, None: all. `attention_gate`: q_proj makes a sigmoid gate on
    what a head returns beside its query. `shared_mlp`: a feed-forward layer of that name, whose two input linears are one, in
    every layer, beside the experts where there are some. `embed_scale`, `query_scale`, `residual_scale`: factors on embeddings,
    queries, and what a layer adds to the residual stream; `logit_scale`: logits are divided by it (Granite).

    `norms`: names of a layer's norms in front of the attention, behind it, and the same of the feed-forward layer; None: there
    is none. `norm_offset` is added to the weights of all. `fused`: q, k and v are one linear, gate and up another.
    `row_norm`: q and k are normalized over all heads together instead of head by head. `sinks`: each head has a logit that takes
    a share of its attention and has no value. `attention_cap`, `logit_cap`: scores and logits x become cap tanh(x / cap).
    `local_theta`: RoPE base of the layers with a window, without scaling; None: as in the others.
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
    latent: Latent | None = None
    extra_layers: int = 0
    recurrent: Recurrent | None = None
    norm_offset: float = 0.0
    rotary_dim: int | None = None
    attention_gate: bool = False
    shared_mlp: bool = False
    embed_scale: float = 1.0
    query_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    norms: Norms = PRE_NORMS
    fused: bool = False
    row_norm: bool = False
    sinks: bool = False
    attention_cap: float | None = None
    logit_cap: float | None = None
    local_theta: float | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedError(
                f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads {self.num_kv_heads}."
            )

    @property
    def beyond_llama(self) -> str:
        """What of this model only the reference runner computes, or an empty string."""
        parts = {"recurrent layers": self.recurrent, "latent attention": self.latent,
                 "mixture of experts": self.mixture, "sub-norms": self.sub_norms,
                 self.activation: self.activation != "silu", "other norms": self.norms != PRE_NORMS or self.norm_offset or
                 self.row_norm, "fused projections": self.fused, "attention sinks": self.sinks,
                 "soft caps": self.attention_cap or self.logit_cap, "RoPE of two bases": self.local_theta,
                 "partial RoPE": self.rotary_dim is not None,
                 "scaled activations": {self.embed_scale, self.query_scale, self.residual_scale, self.logit_scale} != {1.0}}
        return ", ".join(name for name, there in parts.items() if there)

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """(P, G, D) of what a token has in a layer's cache, see `Runner.read_slots`: keys and values, or groups of the latent."""
        if self.latent is None:
            return 2, self.num_kv_heads, self.head_dim
        return 1, self.latent.width // self.latent.group, self.latent.group

    @functools.cached_property
    def counted(self) -> tuple[int, ...]:
        """Each layer's number among those of its kind, recurrent or attention."""
        kinds = (False,) * self.num_layers if self.recurrent is None else self.recurrent.layers
        return tuple(kinds[:i].count(kind) for i, kind in enumerate(kinds))

    @property
    def num_kv_layers(self) -> int:
        """Layers that cache keys and values."""
        return self.num_layers - (0 if self.recurrent is None else sum(self.recurrent.layers))


DELTA = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
LFM2 = ("lfm2", "lfm2_moe")
HYBRID = (*LFM2, "bamba", "granitemoehybrid", *DELTA)
GEMMA = ("gemma", "gemma2", "gemma3_text")
OLMO = ("olmo2", "olmo3")
LATENT = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa")
SUPPORTED = ("llama", "mistral", "ministral", "qwen2", "qwen3", "bitnet", "mixtral", "qwen2_moe", "qwen3_moe", "phi3", "gpt_oss",
             *GEMMA, *OLMO, *LATENT, *HYBRID)
ACTIVATIONS = ("silu", "relu2", "gelu_pytorch_tanh")
_EVERY = {"gemma2": 2, "gemma3_text": 6, "olmo3": 4, "gpt_oss": 2}  # each so many-th layer has no window
_THETAS = {"gemma3_text": 1_000_000.0, "olmo2": 500_000.0, "olmo3": 500_000.0, "gpt_oss": 150_000.0,
           **dict.fromkeys(LFM2, 1_000_000.0)}


def special_floats(value: Any) -> Any:
    """A parsed config.json, or a part of it, with the numbers that JSON lacks: transformers writes {"__float__": "Infinity"}."""
    if isinstance(value, dict):
        return float(value["__float__"]) if value.keys() == {"__float__"} else {k: special_floats(v) for k, v in value.items()}
    return [special_floats(v) for v in value] if isinstance(value, list | tuple) else value


def from_hf(config: dict[str, Any]) -> ModelConfig:
    """The `ModelConfig` of a parsed config.json. Raises `UnsupportedError` for a model type karui's decoder lacks."""
    kind = config.get("model_type", "(missing)")
    if kind not in SUPPORTED:
        raise UnsupportedError(
            f"model_type {kind!r} is not supported by karui's engine; supported: {', '.join(SUPPORTED)}."
            f"{nearest(kind, SUPPORTED)}"
        )
    activation = _activation(config, kind)
    if activation not in ACTIVATIONS:
        raise UnsupportedError(f"hidden_act {activation!r} is not supported; karui's decoder has {', '.join(ACTIVATIONS)}.")
    heads = config["num_attention_heads"]
    layers = config["num_hidden_layers"]
    rope, theta, local_theta, partial = _rope(config, kind)
    if config.get("use_bidirectional_attention"):
        raise UnsupportedError(f"{kind} with use_bidirectional_attention is not supported: the engine generates.")
    if kind == "gemma3_text" and config.get("attn_logit_softcapping"):
        raise UnsupportedError("gemma3_text with attn_logit_softcapping is not supported: implementations differ, transformers "
                               "ignores it.")
    latent = _latent(config, kind, rope) if kind in LATENT else None
    head_dim = latent.rope if latent else config.get("head_dim") or config["hidden_size"] // heads
    rotary_dim = int(head_dim * (partial or 0.25)) if kind in DELTA else head_dim // 2 if kind == "bamba" else None
    if kind == "phi3" and partial not in (None, 1.0):
        rotary_dim = int(head_dim * partial)
    capped, scales = kind in ("gemma2", "gemma3_text"), {}
    if kind in GEMMA:
        scales = {"embed_scale": config["hidden_size"] ** 0.5,
                  "query_scale": (head_dim / config["query_pre_attn_scalar"]) ** 0.5 if capped else 1.0}
    if kind == "granitemoehybrid":
        rotary_dim = None if config.get("position_embedding_type") == "rope" else 0
        scales = {"embed_scale": config.get("embedding_multiplier"), "residual_scale": config.get("residual_multiplier"),
                  "logit_scale": config.get("logits_scaling"),
                  "query_scale": (config.get("attention_multiplier") or 1.0) * head_dim**0.5}
    return ModelConfig(
        model_type=kind,
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=_lfm2_width(config) if kind == "lfm2" else
        config["shared_intermediate_size" if kind == "granitemoehybrid" else "intermediate_size"]
        if kind != "qwen3_5_moe_text" else config.get("intermediate_size", 0),  # its layers are mixtures all
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        norm_eps=config.get("norm_eps", 1e-5) if kind in LFM2 else config.get("rms_norm_eps", 1e-6),
        rope_theta=theta,
        max_context=config["max_position_embeddings"],
        tied=config.get("tie_embedding", config.get("tie_word_embeddings", kind in LFM2)),
        qkv_bias=bool(config.get("qkv_bias", True)) if kind.startswith("qwen2") else
        bool(config.get("attention_bias", kind == "gpt_oss")),
        o_bias=kind not in ("qwen2", "qwen2_moe") and bool(config.get("attention_bias", kind == "gpt_oss")),
        mlp_bias=kind not in LATENT[1:] and bool(config.get("mlp_bias", False)),
        qk_norm=kind in ("qwen3", "qwen3_moe", "gemma3_text", *LFM2, *DELTA, *OLMO),
        sliding_window=_windows(config, kind, layers),
        rope_scaling=rope,
        activation=activation,
        sub_norms=kind == "bitnet",
        mixture=_routed(config, kind, layers) if kind in LATENT else _mixture(config, kind, layers),
        latent=latent,
        extra_layers=config.get("num_nextn_predict_layers") or config.get("num_mtp_layers") or 0,
        recurrent=_recurrent(config, kind, layers) if kind in HYBRID else None,
        norm_offset=1.0 if kind in (*DELTA, *GEMMA) else 0.0,
        rotary_dim=rotary_dim,
        attention_gate=kind in DELTA,
        shared_mlp=kind == "granitemoehybrid",
        norms=BOTH_NORMS if capped else POST_NORMS if kind in OLMO else PRE_NORMS,
        fused=kind == "phi3",
        row_norm=kind in OLMO,
        sinks=kind == "gpt_oss",
        attention_cap=config.get("attn_logit_softcapping") if capped else None,
        logit_cap=config.get("final_logit_softcapping") if capped else None,
        local_theta=local_theta,
        **{name: float(value) for name, value in scales.items() if value is not None},
    )


def _activation(config: dict[str, Any], kind: str) -> str:
    found = config.get("hidden_act")
    if kind in GEMMA:  # gelu in old files means the approximation, which their models were trained with
        found = config.get("hidden_activation") or ("gelu_pytorch_tanh" if found in (None, "gelu") else found)
    return found or ("relu2" if kind == "bitnet" else "silu")


def _rope(config: dict[str, Any], kind: str) -> tuple[dict[str, Any], float, float | None, float | None]:
    """(scaling, base, base of layers with a window where it is another, share of a head that is rotated). transformers 5 keeps
    them in rope_parameters, for models of two kinds of layers by kind; older folders have them at the top level."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope, local = dict(given.get("full_attention", given)), given.get("sliding_attention") or {}
    theta = float(rope.pop("rope_theta", None) or config.get("rope_theta") or _THETAS.get(kind, 10000.0))
    partial = rope.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor")
    if (rope.get("rope_type") or rope.get("type") or "default") == "default":
        rope = {}
    if (local.get("rope_type") or "default") != "default":
        raise UnsupportedError(f"{kind}: RoPE scaling in layers with a window ({local['rope_type']}) is not supported.")
    local_theta = None
    if kind in ("gemma3_text", "olmo3"):
        usual = 10000.0 if kind == "gemma3_text" else theta
        local_theta = float(local.get("rope_theta") or config.get("rope_local_base_freq") or usual)
    return rope, theta, None if local_theta == theta and not rope else local_theta, partial


def _recurrent(config: dict[str, Any], kind: str, layers: int) -> Recurrent | None:
    """The recurrent layers of a hybrid, None where there are none."""
    kinds = config.get("layer_types")
    if kind in LFM2:
        attention = config.get("full_attn_idxs")
        kinds = kinds or ["full_attention" if attention is None or i in attention else "conv" for i in range(layers)]
        is_recurrent = _layers_of("conv", kinds, kind, layers)
        made: Recurrent = ShortConv(layers=is_recurrent, inner=config["hidden_size"], taps=config.get("conv_L_cache", 3),
                                    bias=bool(config.get("conv_bias", False)))
    elif kind in ("bamba", "granitemoehybrid"):
        attention = config.get("attn_layer_indices") or ()
        kinds = config.get("layers_block_type") or kinds or [
            "full_attention" if i in attention else "linear_attention" for i in range(layers)]
        old = {"mamba": "linear_attention", "attention": "full_attention"}  # what files called them at first
        is_recurrent = _layers_of("linear_attention", [old.get(k, k) for k in kinds], kind, layers)
        made = _mamba2(config, is_recurrent)
    else:
        every = config.get("full_attention_interval") or 4
        kinds = kinds or ["linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
        is_recurrent = _layers_of("linear_attention", kinds, kind, layers)
        made = DeltaNet(layers=is_recurrent, key_heads=config["linear_num_key_heads"],
                        value_heads=config["linear_num_value_heads"], key_dim=config["linear_key_head_dim"],
                        value_dim=config["linear_value_head_dim"], taps=config["linear_conv_kernel_dim"],
                        eps=config.get("rms_norm_eps", 1e-6), joint=kind == "qwen3_next")
    return made if any(is_recurrent) else None


def _mamba2(config: dict[str, Any], layers: tuple[bool, ...]) -> Mamba2:
    inner, heads = config["mamba_expand"] * config["hidden_size"], config["mamba_n_heads"]
    dim, groups = config["mamba_d_head"], config["mamba_n_groups"]
    dim = inner // heads if dim == "auto" else dim
    if dim * heads != inner or heads % groups:
        raise UnsupportedError(f"{config['model_type']}: {heads} heads of {dim} in {groups} groups do not make an inner width of "
                               f"{inner}.")
    low, high = (float(x) for x in special_floats(config.get("time_step_limit")) or (0.0, "inf"))
    return Mamba2(layers=layers, heads=heads, head_dim=dim, groups=groups, state=config["mamba_d_state"],
                  taps=config["mamba_d_conv"], eps=config.get("rms_norm_eps", 1e-6), limits=(low, high),
                  conv_bias=bool(config.get("mamba_conv_bias", True)), bias=bool(config.get("mamba_proj_bias", False)))


def _layers_of(recurrent: str, kinds: list[str], model_type: str, layers: int) -> tuple[bool, ...]:
    unknown = sorted({*kinds} - {recurrent, "full_attention"})
    if len(kinds) != layers or unknown:
        raise UnsupportedError(f"{model_type}: layer_types {unknown or f'of {len(kinds)} layers'}; expected {layers}, each "
                               f"{recurrent} or full_attention.")
    if "full_attention" not in kinds:
        raise UnsupportedError(f"{model_type} without an attention layer is not supported: prefixes are found by blocks of keys.")
    return tuple(k == recurrent for k in kinds)


def _lfm2_width(config: dict[str, Any]) -> int:
    """LFM2's files name the width before it is cut to two thirds."""
    width = int(config.get("block_ff_dim") or config["intermediate_size"])
    if not config.get("block_auto_adjust_ff_dim", True):
        return width
    width = 2 * width // 3
    multiplier, multiple = config.get("block_ffn_dim_multiplier", 1.0), config.get("block_multiple_of") or 256
    return width if multiplier is None else multiple * -(-int(multiplier * width) // multiple)


def _mixture(config: dict[str, Any], kind: str, layers: int) -> Mixture | None:
    if kind == "gpt_oss":
        return Mixture(
            config.get("num_local_experts") or config["num_experts"], config["num_experts_per_tok"], config["intermediate_size"],
            True, 0, (True,) * layers, router="router", biased=True,
            clamp=(config.get("swiglu_alpha", 1.702), config.get("swiglu_limit", 7.0)))
    if kind == "lfm2_moe":
        return Mixture(
            config["num_experts"], config["num_experts_per_tok"], config["moe_intermediate_size"],
            bool(config.get("norm_topk_prob", True)), 0, tuple(i >= config.get("num_dense_layers", 2) for i in range(layers)),
            sigmoid=True, corrected=bool(config.get("use_expert_bias", True)), share_eps=1e-6,
            scaling=float(config.get("routed_scaling_factor") or 1.0))
    if kind == "mixtral":
        return Mixture(config["num_local_experts"], config["num_experts_per_tok"], config["intermediate_size"], True, 0,
                       (True,) * layers)
    if kind == "granitemoehybrid":
        experts = config.get("num_local_experts")
        return Mixture(experts, config["num_experts_per_tok"], config["intermediate_size"], True, 0,
                       (True,) * layers) if experts else None
    if not kind.endswith(("_moe", "_next", "_moe_text")) or not config.get("num_experts", config.get("num_local_experts")):
        return None
    experts, every = config.get("num_experts") or config["num_local_experts"], config.get("decoder_sparse_step") or 1
    plain = config.get("mlp_only_layers") or ()
    return Mixture(
        experts, config["num_experts_per_tok"], config["moe_intermediate_size"],
        kind == "qwen3_5_moe_text" or bool(config.get("norm_topk_prob", False)),
        config["shared_expert_intermediate_size"] if kind in ("qwen2_moe", *DELTA) else 0,
        tuple(i not in plain and (i + 1) % every == 0 for i in range(layers)),
    )


def _routed(config: dict[str, Any], kind: str, layers: int) -> Mixture | None:
    """DeepSeek's mixtures."""
    dense, every = config.get("first_k_dense_replace") or 0, config.get("moe_layer_freq") or 1
    kinds = config.get("mlp_layer_types") or ["dense" if i < dense else "sparse" for i in range(layers)]
    if not config.get("n_routed_experts") or "sparse" not in kinds[:layers]:
        return None
    if every != 1:
        raise UnsupportedError(f"moe_layer_freq {every} is not supported: no implementation to agree with has it.")
    scored = "softmax" if kind == "deepseek_v2" else "sigmoid"
    if config.get("scoring_func", scored) != scored:
        raise UnsupportedError(f"{kind} with scoring_func {config['scoring_func']!r} is not supported; its experts are scored by "
                               f"{scored}.")
    grouped = (config.get("n_group") or 1, config.get("topk_group") or 1)
    if kind == "deepseek_v2":
        method = config.get("topk_method") or "greedy"
        if method not in ("greedy", "group_limited_greedy") or config.get("norm_topk_prob"):
            raise UnsupportedError(f"deepseek_v2 with topk_method {method!r}, norm_topk_prob {config.get('norm_topk_prob')} is "
                                   "not supported; supported are greedy and group_limited_greedy, with false.")
        grouped = grouped if method == "group_limited_greedy" else (1, 1)
    width = config["moe_intermediate_size"]
    return Mixture(
        config["n_routed_experts"], config["num_experts_per_tok"], width, kind != "deepseek_v2" and config["norm_topk_prob"],
        width * (config.get("n_shared_experts") or 0), tuple(k == "sparse" for k in kinds[:layers]),
        sigmoid=kind != "deepseek_v2", groups=grouped[0], groups_kept=grouped[1], group_best=1 if kind == "deepseek_v2" else 2,
        scaling=float(config.get("routed_scaling_factor") or 1.0), shared_gate=False)


def _latent(config: dict[str, Any], kind: str, rope: dict[str, Any]) -> Latent:
    heads = config["num_attention_heads"]
    if (config.get("num_key_value_heads") or heads) != heads:
        raise UnsupportedError(f"{kind} with {config['num_key_value_heads']} key heads for {heads} heads is not supported: "
                               "latent attention has one per head.")
    scale, all_dim = (config["qk_nope_head_dim"] + config["qk_rope_head_dim"]) ** -0.5, rope.get("mscale_all_dim")
    if all_dim and (factor := rope.get("factor") or 1) > 1:
        scale *= (0.1 * all_dim * math.log(factor) + 1) ** 2
    indexer, layers = None, config["num_hidden_layers"]
    if kind in ("deepseek_v32", "glm_moe_dsa"):
        full = _indexed(config, layers) if kind == "glm_moe_dsa" else (True,) * layers
        if not config.get("q_lora_rank") or not full[0]:
            raise UnsupportedError(f"{kind} needs q_lora_rank and an indexer in its first layer.")
        indexer = Indexer(config["index_n_heads"], config["index_head_dim"], config["index_topk"], kind == "glm_moe_dsa", full)
    return Latent(config.get("q_lora_rank") or None, config["kv_lora_rank"], config["qk_rope_head_dim"],
                  config["qk_nope_head_dim"], config["v_head_dim"], config.get("rope_interleave", True) is not False, scale,
                  indexer)


def _indexed(config: dict[str, Any], layers: int) -> tuple[bool, ...]:
    """Which layers of a GLM have an indexer: listed, spelled as F and S, or every `index_topk_freq`-th."""
    if kinds := config.get("indexer_types") or config.get("index_topk_pattern"):
        return tuple(k in ("F", "full") for k in kinds)[:layers]
    every, offset = max(config.get("index_topk_freq") or 1, 1), config.get("index_skip_topk_offset", 2)
    return tuple(max(i - offset + 1, 0) % every == 0 for i in range(layers))


def _windows(config: dict[str, Any], kind: str, layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    if not window or kind in ("llama", "gemma", "olmo2", *LATENT) or (
            kind.startswith("qwen") and not config.get("use_sliding_window", False)):
        return (None,) * layers
    every = config.get("sliding_window_pattern") or _EVERY.get(kind, layers + 1)
    kinds = config.get("layer_types") or ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
    return tuple(window if k == "sliding_attention" else None for k in kinds)
