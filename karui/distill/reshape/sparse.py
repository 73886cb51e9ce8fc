"""Sparse attention over latent attention (DSA; DeepSeek-V3.2, arXiv 2512.02556, section 2.1), from DeepSeek-V3's layout to that
of V3.2: an indexer in every layer picks the `top_k` keys that a token attends to. Nothing else changes: a text of up to `top_k`
tokens is read as before.

The queries' latent. V3.2's layout has one, which the indexer reads. A model without gets it as `mla` gives keys theirs: the
principal directions of what enters the query projection, weighted by what the queries make of them, and one large constant that
the norm divides by. At `query_rank` of the hidden size plus one nothing is lost.

The indexer's start. Absorbed, all heads read one key per token, the latent beside the rotated key, which is what an indexer
does. So with `start: attention` its heads are heads of the attention, spread evenly, over a key of the rotated one and the
directions of the latent in which queries and keys of calibration text meet most: for queries of second moment S and a latent of
covariance C the best bilinear form of a rank has the top eigenvectors B of C^(1/2) S C^(1/2), the query B^T C^(1/2) q and the key
B^T C^(-1/2) c. Entries of the key have root mean square 1, for the indexer's norm divides by their spread. Weights begin alike,
at the linear function of the input that is nearest to a constant. What this leaves out, each token's own scale and the softmax of
each head, is for the training (`objective.indexer`). With `start: random` all is drawn.

Legend: A heads, I index heads, D index_head_dim, R rotated, N unrotated width of a head, r rank of keys, Q of queries, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn

from karui.configs.errors import KaruiError, UnsupportedError
from karui.distill.prune import decoder, forward
from karui.distill.reshape import check_type, rebuild
from karui.distill.reshape.latent import CONSTANT

LIT = 0.5  # nats that one head's score counts in the index's, at the start
RIDGE = 1e-4  # of a mean direction, added to each
Moments = tuple[torch.Tensor, torch.Tensor]
Start = Literal["attention", "random"]


def plan(config: Any, top_k: int, index_heads: int, index_head_dim: int, query_rank: int | None = None) -> Any:
    """The configuration in DeepSeek-V3.2's layout.

    Raises:
        UnsupportedError: a model without latent attention, or with its rotation in halves.
        KaruiError: numbers that do not fit.
    """
    from transformers import AutoConfig

    if config.model_type in ("deepseek_v32", "glm_moe_dsa"):
        raise UnsupportedError(f"sparse-attention: a {config.model_type} has it already.")
    if config.model_type != "deepseek_v3":
        raise UnsupportedError(f"sparse-attention reads latents and knows models of type deepseek_v3; this one is "
                               f"{config.model_type!r}. Put {{method: mla}} before it.")
    check_type(config, "sparse-attention", ("deepseek_v3",))
    if config.rope_interleave is False:
        raise UnsupportedError("sparse-attention: the layout rotates neighbours, this model halves (rope_interleave: false).")
    if config.num_key_value_heads != config.num_attention_heads:
        raise UnsupportedError(f"sparse-attention: {config.num_key_value_heads} key heads for {config.num_attention_heads} "
                               "heads; latent attention has one per head.")
    hidden, rope, longest = config.hidden_size, config.qk_rope_head_dim, config.max_position_embeddings
    if not 1 <= top_k < longest:
        raise KaruiError(f"sparse-attention: top_k is {top_k}; expected 1 to {longest - 1}, as the model reads {longest} tokens.")
    if index_heads < 1:
        raise KaruiError(f"sparse-attention: index_heads is {index_heads}; expected 1 or more.")
    if index_head_dim < rope:
        raise KaruiError(f"sparse-attention: index_head_dim is {index_head_dim}; expected {rope} or more, which are rotated.")
    if config.q_lora_rank is not None and query_rank is not None:
        raise KaruiError(f"sparse-attention: query_rank is {query_rank}, but queries have a latent of {config.q_lora_rank} "
                         "already; leave it out.")
    if config.q_lora_rank is None and not 2 <= (query_rank := query_rank or hidden) <= hidden + 1:
        raise KaruiError(f"sparse-attention: query_rank is {query_rank}; expected 2 to {hidden + 1}, where nothing is lost.")
    known = AutoConfig.for_model("deepseek_v32").to_dict()
    own = ("model_type", "head_dim", "layer_types", "mlp_layer_types", "architectures", "transformers_version")
    values = {key: value for key, value in config.to_dict().items() if key in known and key not in own}
    return AutoConfig.for_model("deepseek_v32", **values | {
        "q_lora_rank": config.q_lora_rank or query_rank, "attention_bias": config.attention_bias or config.q_lora_rank is None,
        "index_topk": top_k, "index_n_heads": index_heads, "index_head_dim": index_head_dim})


@torch.no_grad()
def convert(model: nn.Module, top_k: int, index_heads: int, index_head_dim: int, query_rank: int | None = None,
            start: Start = "attention", seed: int = 0, rows: Sequence[torch.Tensor] = ()) -> nn.Module:
    """The model with sparse attention; `rows` are token tensors [T] that calibrate it, `seed` draws. Raises as `plan` does."""
    old: Any = model.config
    config = plan(old, top_k, index_heads, index_head_dim, query_rank)
    draw = torch.Generator().manual_seed(seed)
    state = dict(model.state_dict())
    calibrated = old.q_lora_rank is None or start == "attention"
    seen = moments(model, rows) if calibrated else [{}] * old.num_hidden_layers
    for i, inner in enumerate(seen):
        at = f"model.layers.{i}.self_attn."
        like = state[f"{at}kv_b_proj.weight"]
        layer = {name: state[f"{at}{name}.weight"].double().cpu()
                 for name in ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")}
        if old.q_lora_rank is None:
            made = _queries(state.pop(f"{at}q_proj.weight").double().cpu(), inner["x"][0], config.q_lora_rank)
            for name in ("kv_a_proj_with_mqa", "o_proj"):
                state.setdefault(f"{at}{name}.bias", torch.zeros_like(state[f"{at}{name}.weight"][:, 0]))
            state |= {at + name: tensor.to(like) for name, tensor in made.items()}
            inner["q"] = _through(made, *inner["x"])
        layer["q_b_proj"] = state[f"{at}q_b_proj.weight"].double().cpu()
        index = _drawn(config, draw)
        if start == "attention":
            _copy_attention(index, layer, inner, config)
        state |= {f"{at}indexer.{name}": tensor.to(like) for name, tensor in index.items()}
    return rebuild(model, config, state)


@torch.no_grad()
def moments(model: nn.Module, rows: Sequence[torch.Tensor]) -> list[dict[str, Moments]]:
    """Per layer E[a a^T] and E[a] in float64 of the attention's input `x` [H], the latent `c` [r] behind its norm, the shared key
    before it turns, `k` [R], and where there is one the queries' latent `q` [Q]."""
    layers = decoder(model).layers
    rank = model.config.kv_lora_rank  # type: ignore[union-attr]
    sums: list[dict[str, torch.Tensor]] = [{} for _ in layers]
    handles = []

    def add(i: int, name: str, a: torch.Tensor) -> None:
        a = a.reshape(-1, a.shape[-1]).double()
        a = torch.cat([a, torch.ones_like(a[:, :1])], 1)
        sums[i][name] = sums[i].get(name, torch.zeros(())) + (a.T @ a).cpu()

    def watch(i: int, attention: Any) -> None:
        def down(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
            add(i, "x", args[0])
            add(i, "k", output[..., rank:])

        handles.append(attention.kv_a_proj_with_mqa.register_forward_hook(down))
        for name, inside in (("c", attention.kv_b_proj), ("q", attention.q_b_proj)):
            if inside is not None:
                handles.append(inside.register_forward_pre_hook(lambda m, args, name=name: add(i, name, args[0])))

    for i, layer in enumerate(layers):
        watch(i, layer.self_attn)
    try:
        forward(model, rows)
    finally:
        for handle in handles:
            handle.remove()
    return [{name: (s[:-1, :-1] / s[-1, -1], s[:-1, -1] / s[-1, -1]) for name, s in found.items()} for found in sums]


def _queries(q: torch.Tensor, moment: torch.Tensor, rank: int) -> dict[str, torch.Tensor]:
    """q [A (N + R), H] through a normalized latent of `rank`, one entry of it constant."""
    inward = _root(moment)
    _, vectors = torch.linalg.eigh(inward @ (q.T @ q) @ inward)
    kept = min(rank - 1, len(moment))
    basis = vectors[:, -kept:].flip(1)
    down, up = torch.linalg.solve(inward, basis).T, inward @ basis  # with all directions up down is one
    if kept == len(moment):
        down, up = torch.eye(kept, dtype=q.dtype), torch.eye(kept, dtype=q.dtype)
    unit = torch.einsum("oh,hi,oi->o", down, moment, down).mean().sqrt().clamp_min(1e-12)
    weight = torch.full((rank,), CONSTANT / rank**0.5, dtype=q.dtype)
    weight[-1] = rank**-0.5
    nothing = q.new_zeros(1)
    return {"q_a_proj.weight": torch.cat([down / unit, q.new_zeros(1, len(moment))]),
            "q_a_proj.bias": torch.cat([nothing.expand(kept), q.new_full((1,), CONSTANT)]), "q_a_layernorm.weight": weight,
            "q_b_proj.weight": torch.cat([q @ up * unit, nothing.expand(len(q), 1)], 1)}


def _through(made: dict[str, torch.Tensor], moment: torch.Tensor, mean: torch.Tensor) -> Moments:
    """Moments of the latent that `_queries` made, its constant 1, of those of the input."""
    down = made["q_a_proj.weight"][:-1]
    inside, centre = down @ moment @ down.T, down @ mean
    one = torch.ones(1, dtype=moment.dtype)
    return torch.cat([torch.cat([inside, centre[:, None]], 1), torch.cat([centre, one])[None]]), torch.cat([centre, one])


def _copy_attention(index: dict[str, torch.Tensor], layer: dict[str, torch.Tensor], inner: dict[str, Moments],
                    config: Any) -> None:
    """Put the attention's heads into an indexer, see the module's head; of more heads than those the rest begin without a say."""
    heads, nope, rope, width = config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim, config.index_head_dim
    q = layer["q_b_proj"].unflatten(0, (heads, nope + rope))
    up = layer["kv_b_proj"].unflatten(0, (heads, -1))[:, :nope]  # [A, N, r]
    down, turned = layer["kv_a_proj_with_mqa"].split([config.kv_lora_rank, rope])
    absorbed = torch.einsum("anr,anq->arq", up, q[:, :nope])
    (x_moment, x_mean), (c_moment, c_mean) = inner["x"], inner["c"]
    covariance = c_moment - torch.outer(c_mean, c_mean)
    root = _root(covariance)
    needed = torch.einsum("arq,qp,asp->rs", absorbed, inner["q"][0], absorbed)
    kept = min(width - rope, config.kv_lora_rank)
    basis = torch.linalg.eigh(root @ needed @ root).eigenvectors[:, -kept:].flip(1) if kept else root[:, :0]
    # the latent as a linear function of the input, as far as it is one: its norm's division is another for every token
    scale = _scale(down, inner) * layer["kv_a_layernorm"].sign()
    inward = _root(x_moment)
    one = torch.linalg.solve(inward, torch.linalg.solve(inward, x_mean))
    key_rest = torch.linalg.solve(root, basis).T @ (scale[:, None] * down)
    key_rest = key_rest - torch.outer(key_rest @ x_mean, one)  # no mean: a score is above zero or it is not
    pairs = torch.cat([torch.arange(0, rope, 2), torch.arange(1, rope, 2)])  # neighbours there, halves here
    energy = inner["k"][0].diagonal().view(-1, 2).mean(1).sqrt().clamp_min(1e-12).repeat(2)
    key = torch.cat([turned[pairs] / energy[:, None], key_rest, turned.new_zeros(width - rope - kept, len(x_mean))])
    queries = torch.cat([q[:, nope:][:, pairs] * energy[:, None], basis.T @ root @ absorbed,
                         q.new_zeros(heads, width - rope - kept, q.shape[2])], 1)
    spread = torch.einsum("oh,hi,oi->o", key, x_moment, key).mean().sqrt()  # what the norm divides by
    copied = min(config.index_n_heads, heads)
    picked = torch.arange(copied) * heads // copied
    factor = ((nope + rope) ** -0.5) * width**0.5 * spread  # a product is now a head's score
    index["wk.weight"] = key
    index["wq_b.weight"][: copied * width] = (queries[picked] * factor).flatten(0, 1)
    index["weights_proj.weight"] = torch.zeros(config.index_n_heads, len(one))
    index["weights_proj.weight"][:copied] = LIT * config.index_n_heads**0.5 * one


def _scale(down: torch.Tensor, inner: dict[str, Moments]) -> torch.Tensor:
    """[r]: what the norm and its weights make of each entry of the latent on average, by their spreads."""
    (x_moment, x_mean), (c_moment, c_mean) = inner["x"], inner["c"]
    before = torch.einsum("oh,hi,oi->o", down, x_moment - torch.outer(x_mean, x_mean), down)
    after = c_moment.diagonal() - c_mean**2
    return (after.clamp_min(0) / before.clamp_min(1e-30)).sqrt() * (before > 1e-30)


def _drawn(config: Any, draw: torch.Generator) -> dict[str, torch.Tensor]:
    """As transformers draws them."""
    heads, width, hidden = config.index_n_heads, config.index_head_dim, config.hidden_size
    shapes = {"wq_b": (heads * width, config.q_lora_rank), "wk": (width, hidden), "weights_proj": (heads, hidden)}
    made = {f"{name}.weight": torch.randn(shape, generator=draw) * config.initializer_range for name, shape in shapes.items()}
    return made | {"k_norm.weight": torch.ones(width), "k_norm.bias": torch.zeros(width)}


def _root(moment: torch.Tensor) -> torch.Tensor:
    """The symmetric square root, with a little of every direction: calibration text does not have all there are."""
    values, vectors = torch.linalg.eigh(moment)
    return (vectors * (values.clamp_min(0) + RIDGE * values.mean()).clamp_min(1e-30).sqrt()) @ vectors.T
