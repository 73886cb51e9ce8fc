"""What families of models share in reading a config.json: the fields that most say alike, and helpers for those that do not.

A family is a function with the name of its model type: from a parsed config.json it makes those fields of `ModelConfig` that are
its own, and `common` makes the others. Its defaults are those of transformers' configuration class, which files may leave out.
"""

from __future__ import annotations

from typing import Any

from karui.configs.errors import UnsupportedError
from karui.inference.models.config import Mixture

Config = dict[str, Any]
"""A parsed config.json."""
Fields = dict[str, Any]
"""Fields of `ModelConfig` by name."""


def common(config: Config) -> Fields:
    """As a llama has it: no windows, all of a head rotated, biases where `attention_bias` and `mlp_bias` say so."""
    heads, layers, biased = config["num_attention_heads"], config["num_hidden_layers"], bool(config.get("attention_bias", False))
    return {
        "model_type": config["model_type"],
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "intermediate_size": config.get("intermediate_size", 0),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": head_dim(config),
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "rope_theta": rope_theta(config),
        "rope_scaling": rope_scaling(config),
        "max_context": config["max_position_embeddings"],
        "tied": bool(config.get("tie_word_embeddings", False)),
        "qkv_bias": biased,
        "o_bias": biased,
        "mlp_bias": bool(config.get("mlp_bias", False)),
        "activation": config.get("hidden_act") or "silu",
        "sliding_window": (None,) * layers,
        "extra_layers": config.get("num_nextn_predict_layers") or config.get("num_mtp_layers") or 0,
    }


def head_dim(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def tied(config: Config) -> Fields:
    """Of families whose head is the embedding where nothing is said."""
    return {"tied": bool(config.get("tie_word_embeddings", True))}


# -- RoPE. transformers 5 keeps its parameters in rope_parameters, for models of two kinds of layers by kind; older folders have
# them in rope_scaling and at the top level.


def _rope(config: Config, layers: str = "full_attention") -> Config:
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return dict(given.get(layers) or {}) if "full_attention" in given or layers != "full_attention" else dict(given)


def rope_theta(config: Config, usual: float = 10_000.0) -> float:
    return float(_rope(config).get("rope_theta") or config.get("rope_theta") or usual)


def rope_scaling(config: Config) -> dict[str, Any]:
    """The scaling's parameters, empty without one."""
    rope = {k: v for k, v in _rope(config).items() if k not in ("rope_theta", "partial_rotary_factor")}
    return {} if (rope.get("rope_type") or rope.get("type") or "default") == "default" else rope


def local_theta(config: Config, usual: float, full: float) -> float | None:
    """RoPE base of layers with a window, `usual` where nothing is said; None: they rotate as the others, whose base is `full`."""
    local = _rope(config, "sliding_attention")
    if (local.get("rope_type") or "default") != "default":
        raise UnsupportedError(f"{config['model_type']}: RoPE scaling in layers with a window ({local['rope_type']}) is not "
                               "supported.")
    theta = float(local.get("rope_theta") or config.get("rope_local_base_freq") or usual)
    return None if theta == full and not rope_scaling(config) else theta


def rotary_dim(config: Config, usual: float = 1.0) -> int | None:
    """How much of a head is rotated, the share `usual` where nothing is said; None: all."""
    share = _rope(config).get("partial_rotary_factor") or config.get("partial_rotary_factor") or usual
    return None if share == 1 else int(head_dim(config) * share)


# -- layers of several kinds


def windows(config: Config, every: int = 0) -> Fields:
    """Windows of the layers that `layer_types` names, else of all but each `every`-th; 0: of all."""
    window, layers = config.get("sliding_window"), config["num_hidden_layers"]
    if not window:
        return {}
    every = config.get("sliding_window_pattern") or every or layers + 1
    kinds = config.get("layer_types") or ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
    return {"sliding_window": tuple(window if k == "sliding_attention" else None for k in kinds)}


def layers_of(recurrent: str, kinds: list[str], config: Config) -> tuple[bool, ...]:
    """For each layer of a hybrid whether it is of the kind `recurrent`, else attention."""
    model_type, layers = config["model_type"], config["num_hidden_layers"]
    unknown = sorted({*kinds} - {recurrent, "full_attention"})
    if len(kinds) != layers or unknown:
        raise UnsupportedError(f"{model_type}: layer_types {unknown or f'of {len(kinds)} layers'}; expected {layers}, each "
                               f"{recurrent} or full_attention.")
    if "full_attention" not in kinds:
        raise UnsupportedError(f"{model_type} without an attention layer is not supported: prefixes are found by blocks of keys.")
    return tuple(k == recurrent for k in kinds)


# -- mixtures of experts


def every_layer(config: Config, experts: int, width: int, **own: Any) -> Mixture:
    """The same mixture in all layers; the chosen experts' softmax is their shares."""
    return Mixture(experts, config["num_experts_per_tok"], width, True, 0, (True,) * config["num_hidden_layers"], **own)


def routed(config: Config, sigmoid: bool = True) -> Mixture | None:
    """DeepSeek's mixture, which others took over: chosen in groups, beside experts for every token, behind some plain layers.

    sigmoid: an expert's score is its corrected sigmoid, as since V3, else the softmax of V2.
    """
    layers, dense = config["num_hidden_layers"], config.get("first_k_dense_replace") or 0
    kinds = config.get("mlp_layer_types") or ["dense" if i < dense else "sparse" for i in range(layers)]
    if not config.get("n_routed_experts") or "sparse" not in kinds[:layers]:
        return None
    if (every := config.get("moe_layer_freq") or 1) != 1:
        raise UnsupportedError(f"moe_layer_freq {every} is not supported: no implementation to agree with has it.")
    scored = "sigmoid" if sigmoid else "softmax"
    if config.get("scoring_func", scored) != scored:
        raise UnsupportedError(f"{config['model_type']} with scoring_func {config['scoring_func']!r} is not supported; its "
                               f"experts are scored by {scored}.")
    width = config["moe_intermediate_size"]
    return Mixture(
        config["n_routed_experts"], config["num_experts_per_tok"], width, sigmoid and config.get("norm_topk_prob", True),
        width * (config.get("n_shared_experts") or 0), tuple(k == "sparse" for k in kinds[:layers]), sigmoid=sigmoid,
        corrected=sigmoid, groups=config.get("n_group") or 1, groups_kept=config.get("topk_group") or 1,
        group_best=2 if sigmoid else 1, scaling=float(config.get("routed_scaling_factor") or 1.0), shared_gate=False)
