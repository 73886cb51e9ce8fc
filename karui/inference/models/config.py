"""`ModelConfig`: the switches of the one decoder, read from a Hugging Face `config.json`."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any

from karui.configs.errors import CorruptError, KaruiError, UnsupportedError, nearest
from karui.inference.models.recurrent import Recurrent


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts in place of the feed-forward layer.

    Attributes:
        experts: their number; per_token: how many each token goes through; width: an expert's intermediate size.
        normalized: the chosen experts' shares are scaled to sum to 1.
        shared_width: intermediate size of the expert that every token goes through; 0: there is none.
        layers: for each layer whether it has the mixture, else the plain feed-forward layer.
        sigmoid: an expert's score is the sigmoid of its logit, else the softmax over all experts.
        corrected: a bias per expert is added to scores where experts are chosen, not where they are weighed (DeepSeek-V3, arXiv
            2412.19437, eq. 13-16).
        groups: experts are chosen from `groups_kept` of so many groups, those whose `group_best` best experts score highest.
        scaling: factor on the shares.
        shared_gate: the shared expert is behind a sigmoid gate (Qwen), else added as it is (DeepSeek).
        router: its name. biased: router and experts have biases. clamp: (alpha, limit) of experts that return
            (up + 1) gate sigmoid(alpha gate), gate below the limit and up within it on both sides (gpt-oss); None: silu(gate) up.
        share_eps: added to the sum that shares are divided by (LFM2); share_min: what
            that sum is at least (ERNIE).
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
    corrected: bool = False
    share_eps: float = 0.0
    share_min: float = 0.0

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
    """A llama-shaped decoder. One dataclass serves all `FAMILIES`.

    `sub_norms`: a norm in front of o_proj and one in front of down_proj (BitNet). `activation`: silu, or relu2 (relu squared).
    `head_dim`: with a `latent` that of the rotated part. `extra_layers`: layers behind the last that files hold and decoding does
    not read (multi-token prediction). `recurrent`: layers with a state in place of attention (hybrids). `norm_offset`: added to
    the weights of norms. `rotary_dim`: how much of a head is rotated, None: all. `attention_gate`: q_proj makes a sigmoid gate on
    what a head returns beside its query. `shared_mlp`: a feed-forward layer of that name, whose two input linears are one, in
    every layer, beside the experts where there are some. `embed_scale`, `query_scale`, `residual_scale`: factors on embeddings,
    queries, and what a layer adds to the residual stream; `logit_scale`: logits are divided by it (Granite).

    `norms`: names of a layer's norms in front of the attention, behind it, and the same of the feed-forward layer; None: there
    is none. `norm_offset` is added to the weights of all. `fused_qkv`: q, k and v are one linear; `fused_mlp`: gate and up are.
    `row_norm`: q and k are normalized over all heads together instead of head by head. `sinks`: each head has a logit that takes
    a share of its attention and has no value. `attention_cap`, `logit_cap`: scores and logits x become cap tanh(x / cap).
    `local_theta`: RoPE base of the layers with a window, without scaling; None: as in the others. `rotated`: for each layer
    whether its heads are rotated, empty: all are. `interleaved`: RoPE turns the pairs (2i, 2i + 1), else (i, i + D/2).
    `norm_turned`: q and k are normalized behind RoPE. `centred`: norms take the mean off first (LayerNorm without a bias).
    `parallel`: the feed-forward layer reads what the attention reads, and both are added at once. `passed_over`: beginnings of
    names of tensors that files hold and decoding does not read.
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
    fused_qkv: bool = False
    fused_mlp: bool = False
    row_norm: bool = False
    sinks: bool = False
    attention_cap: float | None = None
    logit_cap: float | None = None
    local_theta: float | None = None
    rotated: tuple[bool, ...] = ()
    interleaved: bool = False
    norm_turned: bool = False
    centred: bool = False
    parallel: bool = False
    passed_over: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedError(
                f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads {self.num_kv_heads}."
            )

    @property
    def beyond_llama(self) -> str:
        """What this model has beyond a llama, or an empty string."""
        scales = {self.embed_scale, self.query_scale, self.residual_scale, self.logit_scale}
        parts = {
            "recurrent layers": self.recurrent, "latent attention": self.latent, "mixture of experts": self.mixture,
            "sub-norms": self.sub_norms, self.activation: self.activation != "silu",
            "other norms": self.norms != PRE_NORMS or self.norm_offset or self.row_norm or self.norm_turned or self.centred,
            "parallel layers": self.parallel, "shared feed-forward layer": self.shared_mlp,
            "fused projections": self.fused_qkv or self.fused_mlp,
            "attention sinks": self.sinks, "soft caps": self.attention_cap or self.logit_cap,
            "RoPE of two bases": self.local_theta, "partial RoPE": self.rotary_dim is not None,
            "layers without RoPE": not all(self.rotated), "interleaved RoPE": self.interleaved,
            "scaled activations": scales != {1.0}}
        return ", ".join(name for name, there in parts.items() if there)

    @property
    def keys_differ(self) -> str:
        """Why keys are not those of k_proj (and its norm) turned alike in all layers, or an empty string."""
        ways = {"rotate in two ways": self.local_theta is not None or not all(self.rotated),
                "rotate interleaved": self.interleaved, "are normalized behind the rotation": self.norm_turned}
        return " and ".join(way for way, there in ways.items() if there)

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """(P, G, D) of what a token has in a layer's cache, see `Runner.read_slots`: keys and values, or groups of the latent."""
        if self.latent is None:
            return 2, self.num_kv_heads, self.head_dim
        return 1, self.latent.width // self.latent.group, self.latent.group

    @property
    def spans(self) -> tuple[tuple[int, float], ...]:
        """Tokens that a query sees at most, and the share of a token's cached numbers in such layers; layers that see all are not
        named. Sparse attention reads its indexer's keys of every token."""
        if self.latent is not None and self.latent.indexer is not None:
            kept, indexed = self.num_layers * (self.latent.rank + self.latent.rope), self.latent.indexer
            return ((indexed.top, kept / (kept + sum(indexed.layers) * indexed.head_dim)),)
        windows = [w for w in self.sliding_window if w is not None]
        return tuple((w, windows.count(w) / self.num_kv_layers) for w in sorted({*windows}))

    @functools.cached_property
    def counted(self) -> tuple[int, ...]:
        """Each layer's number among those of its kind, recurrent or attention."""
        kinds = (False,) * self.num_layers if self.recurrent is None else self.recurrent.layers
        return tuple(kinds[:i].count(kind) for i, kind in enumerate(kinds))

    @property
    def num_kv_layers(self) -> int:
        """Layers that cache keys and values."""
        return self.num_layers - (0 if self.recurrent is None else sum(self.recurrent.layers))


MOST_PARTS = 10_000
"""Layers, or experts of a layer, beyond which a config.json is taken for damaged; all of them have names and shapes in memory."""

ACTIVATIONS = ("silu", "relu2", "gelu_pytorch_tanh")


def special_floats(value: Any) -> Any:
    """A parsed config.json, or a part of it, with the numbers that JSON lacks: transformers writes {"__float__": "Infinity"}."""
    if isinstance(value, dict):
        return float(value["__float__"]) if value.keys() == {"__float__"} else {k: special_floats(v) for k, v in value.items()}
    return [special_floats(v) for v in value] if isinstance(value, list | tuple) else value


def from_hf(config: dict[str, Any]) -> ModelConfig:
    """The `ModelConfig` of a parsed config.json: what most families say alike, and what is this one's own.

    Raises:
        UnsupportedError: a model type that karui's decoder lacks, or of a known one something that it does not compute.
        CorruptError: a file without a field that every model has.
    """
    from karui.inference.models.families import FAMILIES, common  # which take this module's dataclasses

    kind = config.get("model_type", "(missing)")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise UnsupportedError(f"model_type {kind!r} is not supported by karui's engine; supported: {', '.join(FAMILIES)}."
                               f"{nearest(str(kind), FAMILIES)}")
    if config.get("use_bidirectional_attention"):
        raise UnsupportedError(f"{kind} with use_bidirectional_attention is not supported: the engine generates.")
    for name, count in config.items():
        if name.endswith(("_layers", "experts")) and isinstance(count, int) and count > MOST_PARTS:
            raise CorruptError(f"config.json of a {kind}: {name} is {count:,}; {MOST_PARTS:,} at most were expected.")
    try:
        found = ModelConfig(**{**common(config), **FAMILIES[kind](config)})
        if found.intermediate_size == 0 and not (found.mixture is not None and all(found.mixture.layers)):
            raise KeyError("intermediate_size")
    except KeyError as missing:
        raise CorruptError(f"config.json of a {kind} has no {missing}.") from None
    except KaruiError:
        raise
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise CorruptError(f"config.json of a {kind} holds what cannot be read: {error}.") from error
    for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "max_context"):
        size = getattr(found, name)
        if not isinstance(size, int) or size < 1:
            raise CorruptError(f"config.json of a {kind}: {name} is {size!r}; a whole number above 0 was expected.")
    for name in ("norm_eps", "rope_theta"):
        value = getattr(found, name)
        if not isinstance(value, int | float) or not 0 < value < 1e30:
            raise CorruptError(f"config.json of a {kind}: {name} is {value!r}; a number above 0 was expected.")
    if found.activation not in ACTIVATIONS:
        raise UnsupportedError(f"hidden_act {found.activation!r} is not supported; karui's decoder has {', '.join(ACTIVATIONS)}.")
    return found
