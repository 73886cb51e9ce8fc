"""Multi-head latent attention from grouped heads (TransMLA, arXiv 2502.07864; the kept frequencies as MHA2MLA's S_uniform,
arXiv 2502.14837), in the layout of DeepSeek-V3 (arXiv 2412.19437, section 2.1.1): per token one latent and one rotated key
are cached, in place of a key and a value per key-value head.

The rotated key. At one frequency all key-value heads turn alike, so any rotation across heads commutes with the embedding
(TransMLA's RoRoPE). Per frequency the principal direction over heads of the keys of calibration text becomes the shared key;
what is left of the keys goes on without a rotation. With `rope_dims` less than a head's size, every (size / rope_dims)-th
frequency is kept, which are the frequencies that DeepSeek's layout has at that width, and the others go on without a rotation.

The latent. What is left of the keys, scaled to the norm of the values, and the values are compressed together: the principal
directions of their activations (TransMLA's balanced joint PCA), here of the activations less their mean.

DeepSeek normalizes the latent, which no product of matrices undoes. One entry of it is therefore constant, through the bias,
and so large (`CONSTANT`) that the norm divides every token by the same number to about 1e-5; it also carries the mean. So at
full rank (`full_rank`) nothing is lost but the rotation of what is not in the shared key, and with one key-value head and all
of its dims rotated nothing at all.

Legend: A heads, G key-value heads, D a head's size, R rope_dims, H hidden, F = D / 2 frequencies; entry f turns with entry f +
F.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from karui.configs.errors import KaruiError, UnsupportedError
from karui.distill.prune import decoder, forward
from karui.distill.reshape import check_type, common, head_dim, rebuild

CONSTANT = 4096.0  # against latents of root mean square 1
_ROPE = ("default", "linear", "llama3")  # what a frequency is does not depend on how many there are


def full_rank(config: Any, rope_dims: int) -> int:
    """The largest rank that is of use: all that is left of keys and values, and the constant."""
    width = config.num_key_value_heads * head_dim(config)
    return min(2 * width - rope_dims, config.hidden_size) + 1


def plan(config: Any, rank: int, rope_dims: int | None = None) -> Any:
    """The configuration in DeepSeek-V3's layout, all layers dense.

    Raises:
        UnsupportedError: an unknown type of model, windows, or a scaling of the rotation that does not carry over.
        KaruiError: a rank or width that does not fit.
    """
    from transformers import AutoConfig

    check_type(config, "mla", ("llama", "mistral", "ministral"))
    if getattr(config, "sliding_window", None):
        raise UnsupportedError("mla: the layout has no windows; convert a model without them.")
    kind = (config.rope_parameters or {}).get("rope_type", "default")
    if kind not in _ROPE:
        raise UnsupportedError(f"mla: rope_type {kind!r} is not supported; supported: {', '.join(_ROPE)}.")
    size = head_dim(config)
    rope = rope_dims or size
    if rope % 2 or size % rope:
        raise KaruiError(f"mla: rope_dims is {rope}; expected an even divisor of a head's size, {size}.")
    if not 2 <= rank <= (full := full_rank(config, rope)):
        raise KaruiError(f"mla: rank is {rank}; expected 2 to {full}, where nothing is left to compress.")
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    values = {k: v for k, v in common(config).items() if k != "head_dim"}
    return AutoConfig.for_model("deepseek_v3", **values | {
        "num_key_value_heads": heads, "q_lora_rank": None, "kv_lora_rank": rank, "qk_rope_head_dim": rope,
        "qk_nope_head_dim": size, "v_head_dim": size, "attention_bias": True, "rope_interleave": True,
        "first_k_dense_replace": layers, "num_mtp_layers": 0})


@torch.no_grad()
def convert(model: nn.Module, rank: int, rope_dims: int | None = None, rows: Sequence[torch.Tensor] = ()) -> nn.Module:
    """The model with latent attention; `rows` are token tensors [T] that calibrate it. Raises as `plan` does."""
    old: Any = model.config
    config = plan(old, rank, rope_dims)
    seen = second_moments(model, rows)
    state = dict(model.state_dict())
    for i, (moment, mean) in enumerate(seen):
        at = f"model.layers.{i}.self_attn."
        q, k, v = (state.pop(f"{at}{name}_proj.weight") for name in ("q", "k", "v"))
        made = _layer(q.double().cpu(), k.double().cpu(), v.double().cpu(), moment, mean, old, config)
        made["o_proj.bias"] = torch.zeros(old.hidden_size)
        state |= {at + name: tensor.to(q) for name, tensor in made.items()}
    return rebuild(model, config, state)


@torch.no_grad()
def second_moments(model: nn.Module, rows: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per layer E[x x^T] [H, H] and E[x] [H] in float64 of what enters the key projection."""
    layers = decoder(model).layers
    sums: list[Any] = [0.0] * len(layers)
    handles = []

    def watch(i: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            x = args[0].reshape(-1, args[0].shape[-1]).float()
            x = torch.cat([x, torch.ones(len(x), 1, device=x.device)], 1)
            sums[i] = sums[i] + (x.T @ x).double().cpu()

        return hook

    for i, layer in enumerate(layers):
        handles.append(layer.self_attn.k_proj.register_forward_pre_hook(watch(i)))
    try:
        forward(model, rows)
    finally:
        for handle in handles:
            handle.remove()
    return [(s[:-1, :-1] / s[-1, -1], s[:-1, -1] / s[-1, -1]) for s in sums]


def _layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, moment: torch.Tensor, mean: torch.Tensor, old: Any,
           config: Any) -> dict[str, torch.Tensor]:
    """The tensors of one layer's attention but o_proj; all in float64."""
    d, groups, heads, r = head_dim(old), old.num_key_value_heads, old.num_attention_heads, config.qk_rope_head_dim
    step, each = d // r, heads // groups
    k_GDH = k.view(groups, d, -1)
    kept = torch.arange(0, d // 2, step)
    pairs = torch.stack([kept, kept + d // 2])  # [2, R/2]
    directions = _principal(k_GDH[:, pairs], moment)  # [R/2, G]
    shared = torch.einsum("fg,gpfh->pfh", directions, k_GDH[:, pairs])
    rest = k_GDH.clone()
    rest[:, pairs] -= torch.einsum("fg,pfh->gpfh", directions, shared)
    queries = q.view(groups, each, d, -1)
    turned = torch.einsum("fg,gepfh->gefph", directions, queries[:, :, pairs])  # pairs side by side, as DeepSeek has them
    factor = ((d + r) / d) ** 0.5  # DeepSeek divides the scores by the root of both widths
    q_new = torch.cat([queries, turned.flatten(2, 3)], 2) * factor
    down, bias, up = _compress(rest.flatten(0, 1), v, moment, mean, config.kv_lora_rank)
    up = torch.stack([part.view(groups, d, -1) for part in up.chunk(2)], 1).flatten(1, 2)  # [G, 2 D, rank]
    return {
        "q_proj.weight": q_new.flatten(0, 2),
        "kv_a_proj_with_mqa.weight": torch.cat([down, shared.transpose(0, 1).flatten(0, 1)]),
        "kv_a_proj_with_mqa.bias": torch.cat([bias, bias.new_zeros(r)]),
        "kv_a_layernorm.weight": _norm_weight(config.kv_lora_rank),
        "kv_b_proj.weight": up.repeat_interleave(each, 0).flatten(0, 1),
    }


def _principal(keys: torch.Tensor, moment: torch.Tensor) -> torch.Tensor:
    """Per frequency [F, G] the unit vector over heads along which keys [G, 2, F, H] carry most."""
    energy = torch.einsum("gpfh,hi,kpfi->fgk", keys, moment, keys)
    return torch.linalg.eigh(energy).eigenvectors[:, :, -1]


def _compress(keys: torch.Tensor, values: torch.Tensor, moment: torch.Tensor, mean: torch.Tensor,
              rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(down [rank, H], bias [rank], up [K + V, rank]): [keys; values] x is near up c, where c is down x + bias but for the last
    entry, which is `CONSTANT` before the norm and 1 after it."""
    spread = moment - torch.outer(mean, mean)
    amount = [torch.einsum("oh,hi,oi->", w, spread, w) for w in (keys, values)]
    scale = torch.ones(len(keys) + len(values), dtype=keys.dtype)
    if amount[0] > 1e-12 * amount[1]:
        scale[: len(keys)] = (amount[1] / amount[0]).sqrt()
    both = torch.cat([keys, values]) * scale[:, None]
    energy, vectors = torch.linalg.eigh(both @ spread @ both.T)
    top = vectors[:, -(rank - 1) :].flip(1)
    unit = energy[-(rank - 1) :].clamp_min(0).mean().sqrt().clamp_min(1e-12)  # the latent's root mean square becomes 1
    down = top.T @ both / unit
    up = top * unit / scale[:, None]
    centre = torch.cat([keys, values]) @ mean
    down = torch.cat([down, down.new_zeros(1, down.shape[1])])
    bias = torch.cat([-(down[:-1] @ mean), down.new_full((1,), CONSTANT)])
    return down, bias, torch.cat([up, centre[:, None]], 1)


def _norm_weight(rank: int) -> torch.Tensor:
    """Weights that undo the division by CONSTANT / sqrt(rank), and make the constant 1."""
    weight = torch.full((rank,), CONSTANT / rank**0.5, dtype=torch.float64)
    weight[-1] = rank**-0.5
    return weight
