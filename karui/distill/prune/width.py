"""Width: drop FFN neurons, KV groups of attention heads and hidden channels by what they carry (Minitron, Muralidharan et al.,
arXiv 2407.14679, section 2.2).

Importance is the mean over tokens of: |activation| entering down_proj per neuron; the L2 norm of a head's part of what enters
o_proj, added up over its KV group; |output| of all RMSNorms per hidden channel. A KV head is dropped with its query heads, so
that the ratio of the two stays what it was. Where channels go, the norms still divide by the root mean square over what is left.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from karui.configs.errors import KaruiError, UnsupportedError
from karui.distill.prune import Pruned, decoder, forward

_NEEDED = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
           "mlp.down_proj", "input_layernorm", "post_attention_layernorm")


def prune_width(model: nn.Module, rows: Sequence[torch.Tensor], *, intermediate: int | None = None, kv_heads: int | None = None,
                hidden: int | None = None, scores: Mapping[str, torch.Tensor] | None = None) -> Pruned:
    """Leave the most important `intermediate` neurons and `kv_heads` groups of each layer and `hidden` channels of the stream.

    Args:
        scores: importances in place of the rows', with the names and shapes of `importance`.

    Raises:
        UnsupportedError: layers that are not built like llama's.
        KaruiError: a size that is larger than the model's.
    """
    config: Any = model.config
    body = decoder(model)
    _check_layout(body.layers)
    planned, line = plan(config, intermediate=intermediate, kv_heads=kv_heads, hidden=hidden)
    head_dim = body.layers[0].self_attn.q_proj.out_features // config.num_attention_heads
    seen = dict(scores) if scores is not None else importance(model, rows, head_dim)
    group = config.num_attention_heads // config.num_key_value_heads
    for i, layer in enumerate(body.layers):
        if intermediate is not None:
            kept = _top(seen[f"{i}.neurons"], intermediate)
            for name in ("gate_proj", "up_proj"):
                _rows(getattr(layer.mlp, name), kept)
            _columns(layer.mlp.down_proj, kept)
        if kv_heads is not None:
            kept = _top(seen[f"{i}.heads"].view(-1, group).sum(-1), kv_heads)
            queries = (kept[:, None] * group + torch.arange(group)).flatten()
            _rows(layer.self_attn.q_proj, _spread(queries, head_dim))
            _rows(layer.self_attn.k_proj, _spread(kept, head_dim))
            _rows(layer.self_attn.v_proj, _spread(kept, head_dim))
            _columns(layer.self_attn.o_proj, _spread(queries, head_dim))
    if hidden is not None:
        _drop_channels(model, _top(seen["channels"], hidden))
    for name in ("intermediate_size", "num_key_value_heads", "num_attention_heads", "hidden_size"):
        setattr(config, name, getattr(planned, name))
    config.head_dim = head_dim
    return Pruned(kept_layers=tuple(range(len(body.layers))), lines=(line,))


def plan(config: Any, *, intermediate: int | None = None, kv_heads: int | None = None,
         hidden: int | None = None) -> tuple[Any, str]:  # fmt: skip
    """A copy of a model's configuration as `prune_width` leaves it, and a line about it; the same errors."""
    if hidden is not None and str(config.model_type).startswith("gemma"):
        raise UnsupportedError("prune: hidden channels of a gemma are not dropped: its embeddings are scaled by the root of "
                               "their number. Drop layers or neurons instead.")
    sizes = {"intermediate": (intermediate, config.intermediate_size), "kv_heads": (kv_heads, config.num_key_value_heads),
             "hidden": (hidden, config.hidden_size)}
    wanted = {name: value for name, (value, _) in sizes.items() if value is not None}
    if not wanted:
        raise KaruiError(f"prune: width needs at least one of {', '.join(sizes)}.")
    for name, (value, have) in sizes.items():
        if value is not None and not 1 <= value <= have:
            raise KaruiError(f"prune: {name} is {value}; expected 1 to {have}, what the model has.")
    planned = copy.deepcopy(config)
    planned.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if intermediate is not None:
        planned.intermediate_size = intermediate
    if kv_heads is not None:
        planned.num_attention_heads = kv_heads * (config.num_attention_heads // config.num_key_value_heads)
        planned.num_key_value_heads = kv_heads
    if hidden is not None:
        planned.hidden_size = hidden
    return planned, f"width: {', '.join(f'{n} {sizes[n][1]} -> {v}' for n, v in wanted.items())}"


@torch.no_grad()
def importance(model: nn.Module, rows: Sequence[torch.Tensor], head_dim: int) -> dict[str, torch.Tensor]:
    """Sums over tokens: `i.neurons` [F], `i.heads` [heads] per layer, `channels` [H]."""
    body = decoder(model)
    seen: dict[str, torch.Tensor] = {}
    handles = []

    def add(key: str, value: torch.Tensor) -> None:
        value = value.double().cpu()
        seen[key] = seen[key] + value if key in seen else value

    def before(key: str, measure: Any) -> Any:
        return lambda module, args: add(key, measure(args[0].reshape(-1, args[0].shape[-1])))

    def after(key: str, measure: Any) -> Any:
        return lambda module, args, out: add(key, measure(out.reshape(-1, out.shape[-1])))

    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.view(len(x), -1, head_dim).norm(dim=-1).sum(0)

    def amount(x: torch.Tensor) -> torch.Tensor:
        return x.abs().sum(0)

    for i, layer in enumerate(body.layers):
        handles.append(layer.mlp.down_proj.register_forward_pre_hook(before(f"{i}.neurons", amount)))
        handles.append(layer.self_attn.o_proj.register_forward_pre_hook(before(f"{i}.heads", heads)))
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            handles.append(norm.register_forward_hook(after("channels", amount)))
    try:
        forward(model, rows)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _drop_channels(model: nn.Module, kept: torch.Tensor) -> None:
    body = decoder(model)
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    embedding = body.embed_tokens
    tied = head.weight is embedding.weight
    embedding.weight = nn.Parameter(embedding.weight.detach()[:, kept.to(embedding.weight.device)].contiguous())
    embedding.embedding_dim = len(kept)
    if tied:
        head.weight = embedding.weight
        head.in_features = len(kept)
    else:
        _columns(head, kept)
    norms = [body.norm]
    for layer in body.layers:
        norms += [layer.input_layernorm, layer.post_attention_layernorm]
        for module in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj, layer.mlp.gate_proj,
                       layer.mlp.up_proj):
            _columns(module, kept)
        for module in (layer.self_attn.o_proj, layer.mlp.down_proj):
            _rows(module, kept)
    for norm in norms:
        norm.weight = nn.Parameter(norm.weight.detach()[kept.to(norm.weight.device)].clone())


def _top(importance_: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the `count` largest, ascending; ties go to the lower index."""
    return torch.argsort(importance_, descending=True, stable=True)[:count].sort().values


def _spread(heads: torch.Tensor, head_dim: int) -> torch.Tensor:
    return (heads[:, None] * head_dim + torch.arange(head_dim)).flatten()


def _rows(linear: Any, kept: torch.Tensor) -> None:
    kept = kept.to(linear.weight.device)
    linear.weight = nn.Parameter(linear.weight.detach()[kept].contiguous())
    if linear.bias is not None:
        linear.bias = nn.Parameter(linear.bias.detach()[kept].clone())
    linear.out_features = len(kept)


def _columns(linear: Any, kept: torch.Tensor) -> None:
    linear.weight = nn.Parameter(linear.weight.detach()[:, kept.to(linear.weight.device)].contiguous())
    linear.in_features = len(kept)


def _check_layout(layers: nn.ModuleList) -> None:
    for i, layer in enumerate(layers):
        names = dict(layer.named_modules())
        missing = [n for n in _NEEDED if n not in names]
        extra = [n for n, m in names.items() if isinstance(m, nn.Linear) and n not in _NEEDED]
        head = getattr(names.get("self_attn"), "head_dim", None)
        for name, module in names.items():  # norms behind the layers, or over all heads together
            weight = getattr(module, "weight", None)
            if isinstance(weight, nn.Parameter) and weight.ndim == 1 and name not in _NEEDED and (
                    name not in ("self_attn.q_norm", "self_attn.k_norm") or len(weight) != head):
                extra.append(name)
        if missing or extra:
            raise UnsupportedError(f"layer {i} is not built like llama's (missing {missing}, unknown {extra}); width pruning "
                                   "would cut it wrongly. Drop layers instead.")
