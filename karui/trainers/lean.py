"""Lean forms of a transformers model's parts: the same values, less kept for the backward pass and fewer passes over memory.

    RMSNorm     keeps its input and one value per row
    gated MLP   keeps gate and up; with an adapter on down_proj not even their product
    experts     on a GPU rows sorted by expert, one product for all of them; frozen ones keep no rows
    attention   takes q, k, v as projected and rotates them on the way; over chosen keys see `karui.trainers.sparse`
    last layer  after its attention only the rows that carry loss go on: nothing else looks at them
    linear      in bf16 where `run.matmul` asks for it

A module is swapped when it computes the same values on a probe, not because of its name, so an architecture with another
definition (a norm that adds 1 to its weight, partial rotary embedding, post-norms) keeps its own.
"""

from __future__ import annotations

import inspect
import logging
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from karui.kernels.document_attention import document_attention, rotate
from karui.kernels.gemm_grouped import Groups, gemm_grouped
from karui.kernels.linear import linear
from karui.kernels.mixture import mixture
from karui.kernels.rms_norm import rms_norm
from karui.kernels.swiglu import swiglu
from karui.kernels.triton_support import unsaid
from karui.trainers.context import context_attention
from karui.trainers.sparse import install_sparse_attention

logger = logging.getLogger(__name__)


def install_lean_ops(model: nn.Module) -> dict[str, int]:
    """Swap what can be swapped, in place; returns how many of each kind. Once the model has the form it is trained in."""
    done = dict.fromkeys(_KINDS, 0)
    whole: Any = model
    inner: Any = whole.get_base_model() if hasattr(model, "get_base_model") else whole
    install_sparse_attention(inner)
    layers = getattr(inner.get_decoder(), "layers", []) if hasattr(inner, "get_decoder") else []
    last = layers[-1] if len(layers) else None
    config = getattr(inner, "config", None)
    for module in model.modules():
        for kind, fits in _KINDS.items():
            if (kind != "last_layer" or module is last) and fits(module, config):
                module.forward = _FORMS[kind](module)
                done[kind] += 1
                break
    logger.info("lean operations: %s", ", ".join(f"{n} {kind}" for kind, n in done.items()))
    return done


class LeanNorm:
    def __init__(self, norm: nn.Module) -> None:
        self.norm = norm

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_states, self.norm.weight, self.norm.variance_epsilon)  # type: ignore[arg-type]


class LeanGate:
    def __init__(self, mlp: Any) -> None:
        self.mlp = mlp

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up, down = self.mlp.gate_proj(x), self.mlp.up_proj(x), self.mlp.down_proj
        return down.gated(gate, up) if hasattr(down, "gated") else down(swiglu(gate, up))


class LeanExperts:
    """Fused experts in bf16 or fp16 on a GPU by karui's grouped product; elsewhere the module's own forward."""

    def __init__(self, module: Any) -> None:
        self.module, self.own = module, module.forward

    def __call__(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        device, m = hidden_states.device.type, self.module
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_states.dtype
        if device != "cuda" or dtype not in (torch.bfloat16, torch.float16):
            return self.own(hidden_states, top_k_index, top_k_weights)
        with torch.autocast(device, enabled=False):
            gate_up, down = (partial(_grouped, weight=w.to(dtype)) for w in (m.gate_up_proj, m.down_proj))
            y = mixture(hidden_states.to(dtype), top_k_index, top_k_weights, m.num_experts, gate_up, _halves_gated, down)
        return y.to(hidden_states.dtype)


def _grouped(rows: torch.Tensor, groups: Groups, weight: torch.Tensor) -> torch.Tensor:
    return gemm_grouped(rows, weight, groups)


def _halves_gated(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return swiglu(gate, up)


class LeanLinear:
    def __init__(self, module: nn.Linear) -> None:
        self.module = module

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.module.weight, self.module.bias)


class LeanAttention:
    """q, k, v projections -> rotation and attention in one -> output projection; other calls go to the module's own forward."""

    def __init__(self, module: Any) -> None:
        self.module, self.own = module, module.forward

    def __call__(self, hidden_states: torch.Tensor, position_embeddings: Any = None, attention_mask: Any = None,
                 past_key_values: Any = None, **kwargs: Any) -> tuple[torch.Tensor, None]:
        m, documents = self.module, kwargs.get("cu_seqlens")
        if past_key_values is not None or attention_mask is not None or documents is None or position_embeddings is None:
            return self.own(hidden_states, position_embeddings=position_embeddings, attention_mask=attention_mask,
                            past_key_values=past_key_values, **kwargs)
        window = window_of(m)
        own: dict[str, Any] = {"sinks": getattr(m, "sinks", None), "softcap": getattr(m, "attn_logit_softcapping", None)}
        shape = (*hidden_states.shape[:-1], -1, m.head_dim)
        q, k, v = (p(hidden_states).view(shape) for p in (m.q_proj, m.k_proj, m.v_proj))
        if hasattr(m, "q_norm"):
            q, k = m.q_norm(q), m.k_norm(k)
        cosine, sine = position_embeddings
        if (context := kwargs.get("context_rows")) is not None:
            check_context(documents, window, **own)
            q, k = (rotate(x.transpose(1, 2), cosine, sine) for x in (q, k))
            out = context_attention(q, k, v.transpose(1, 2), documents, m.scaling, context)
        else:
            out = document_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), documents, m.scaling,
                                     shared=kwargs.get("shared_prefix", False), rotary=(cosine[0], sine[0]), window=window, **own)
        out = out.reshape(*hidden_states.shape[:-1], -1)
        rows = kwargs.get("attended_rows")
        return m.o_proj(out if rows is None else out.index_select(1, rows)), None


class LeanLastLayer:
    """The last decoder layer on the rows that carry loss, when it is told them (`loss_rows`)."""

    def __init__(self, layer: Any) -> None:
        self.layer, self.own = layer, layer.forward

    def __call__(self, hidden_states: torch.Tensor, *args: Any, loss_rows: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if loss_rows is None or args:
            return self.own(hidden_states, *args, **kwargs)
        layer = self.layer
        if layer.training and torch.is_grad_enabled() and getattr(layer, "gradient_checkpointing", False):
            # transformers recomputes in the class's forward, which this one stands in front of
            return layer._gradient_checkpointing_func(partial(self._rows, loss_rows=loss_rows, **kwargs), hidden_states)
        return self._rows(hidden_states, loss_rows=loss_rows, **kwargs)

    def _rows(self, hidden_states: torch.Tensor, *, loss_rows: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        layer = self.layer
        attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), attended_rows=loss_rows, **kwargs)
        hidden = hidden_states.index_select(1, loss_rows) + attended
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))


def keeps_rows(model: Any) -> bool:
    """Whether the model's last layer takes `loss_rows`."""
    layers = getattr(model.get_decoder(), "layers", [])
    return len(layers) > 0 and isinstance(layers[-1].forward, LeanLastLayer)


def window_of(attention: Any) -> int | None:
    """The sliding window of an attention module: its own, or the configuration's where that has one for all layers. EXAONE's
    modules all have one, and say which of them use it."""
    if getattr(attention, "is_sliding", True) is False:
        return None
    config = getattr(attention, "config", None)
    given = None if getattr(config, "layer_types", None) else getattr(config, "sliding_window", None)
    return getattr(attention, "sliding_window", given) or None


def check_context(cu_seqlens: torch.Tensor, window: int | None, sinks: torch.Tensor | None, softcap: float | None) -> None:
    """Raise `UnsupportedError` for what attention over several ranks lacks: sinks, soft caps, documents longer than a window."""
    from karui.configs.errors import UnsupportedError

    if sinks is not None or softcap is not None:
        raise UnsupportedError("run.context_parallel has no attention sinks and no soft caps; leave it out for this model.")
    if window is None:  # on a GPU to look is to wait, in every layer
        return
    if (longest := int((cu_seqlens[1:] - cu_seqlens[:-1]).max())) > window:
        raise UnsupportedError(
            f"a document of {longest} tokens is longer than the model's sliding window of {window}, which run.context_parallel "
            f"does not serve; set data.max_length to {window} or run.context_parallel to 1."
        )


def _norm_fits(module: Any, config: Any) -> bool:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.ndim != 1 or not hasattr(module, "variance_epsilon"):
        return False
    if len(inspect.signature(module.forward).parameters) != 1:  # a gated norm, of recurrent layers
        return False
    probe = torch.linspace(-3, 2, 2 * weight.numel(), device=weight.device, dtype=weight.dtype).view(2, -1)
    return _same(module(probe), LeanNorm(module)(probe))


def _gate_fits(module: Any, config: Any) -> bool:
    parts = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    activation = getattr(module, "act_fn", None)
    if not all(isinstance(p, nn.Module) for p in parts) or not isinstance(activation, nn.Module):
        return False
    probe = torch.linspace(-6, 6, 97)
    return _same(activation(probe), torch.nn.functional.silu(probe))


def _experts_fit(module: Any, config: Any) -> bool:
    """Two plain matrices an expert, [gate; up] and down, behind SiLU; all experts here."""
    weights = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    if not all(isinstance(w, nn.Parameter) and w.ndim == 3 for w in weights) or not hasattr(module, "_apply_gate"):
        return False
    odd = ("has_bias", "is_transposed", "has_post_expert_norm", "_is_expert_parallel")
    if any(getattr(module, flag, False) for flag in odd):
        return False
    if not all(getattr(module, flag, True) for flag in ("has_gate", "is_concatenated")):
        return False
    probe = torch.linspace(-6, 6, 98).view(7, 14)
    return _same(module._apply_gate(probe), _halves_gated(probe))


def _attention_fits(module: Any, config: Any) -> bool:
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "head_dim", "scaling")
    if not all(hasattr(module, n) for n in names) or config is None or bool(getattr(module, "attention_dropout", 0)):
        return False
    hidden, rotary, documents = _probe(module, config)
    lean = LeanAttention(module)
    return _agree(module, lambda form: form(hidden_states=hidden, position_embeddings=rotary, attention_mask=None,
                                            cu_seqlens=documents)[0], module.forward, lean)


def _layer_fits(module: Any, config: Any) -> bool:
    if not all(hasattr(module, n) for n in ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")):
        return False
    attention = module.self_attn.forward
    if not (isinstance(attention, LeanAttention) or _attention_fits(module.self_attn, config)):
        return False
    hidden, rotary, documents = _probe(module.self_attn, config)
    module.self_attn.forward = attention if isinstance(attention, LeanAttention) else LeanAttention(module.self_attn)
    common = {"position_embeddings": rotary, "attention_mask": None, "cu_seqlens": documents}
    rows = torch.tensor([1, 2], device=hidden.device)
    lean = LeanLastLayer(module)

    def run(form: Any) -> torch.Tensor:
        out = form(hidden, **common, **({"loss_rows": rows} if form is lean else {}))
        return (out[0] if isinstance(out, tuple) else out)[:, -2:]

    fits = _agree(module, run, module.forward, lean)
    module.self_attn.forward = attention
    return fits


def _linear_fits(module: Any, config: Any) -> bool:
    return type(module) is nn.Linear and module.weight.dtype == torch.float32


def _probe(attention: Any, config: Any) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Hidden states [1, 3, H], a rotation, and one document's borders."""
    like = next(chain(attention.parameters(), attention.buffers()))  # on a grid its linears hold buffers only
    dtype = like.dtype if like.is_floating_point() else torch.float32
    width = config.get_text_config().hidden_size
    hidden = torch.linspace(-1, 1, 3 * width, device=like.device).sin().view(1, 3, width).to(dtype)
    share = (getattr(config.get_text_config(), "rope_parameters", None) or {}).get("partial_rotary_factor") or 1.0
    half = torch.outer(torch.arange(3.0), torch.linspace(1, 0.1, int(attention.head_dim * share) // 2))
    angle = torch.cat((half, half), -1)[None].to(like.device)
    return hidden, (angle.cos().to(dtype), angle.sin().to(dtype)), torch.tensor([0, 3])


def _agree(module: nn.Module, run: Any, own: Any, lean: Any) -> bool:
    """Whether both forms give the same on a probe, dropout off. A form that cannot run at all does not fit."""
    was = {m: m.training for m in module.modules()}
    module.eval()
    try:
        with torch.no_grad(), unsaid():
            return _same(run(own), run(lean))
    except (TypeError, RuntimeError, ValueError, AttributeError, KeyError):
        return False
    finally:
        for m, training in was.items():
            m.training = training


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    tolerance = 1e-5 if a.dtype in (torch.float32, torch.float64) else 2e-2
    return a.shape == b.shape and a.dtype == b.dtype and bool(torch.allclose(a, b, rtol=tolerance, atol=tolerance))


_KINDS: dict[str, Any] = {"rms_norm": _norm_fits, "swiglu": _gate_fits, "attention": _attention_fits, "last_layer": _layer_fits,
                          "experts": _experts_fit, "linear": _linear_fits}
_FORMS: dict[str, Any] = {"rms_norm": LeanNorm, "swiglu": LeanGate, "attention": LeanAttention, "last_layer": LeanLastLayer,
                          "experts": LeanExperts, "linear": LeanLinear}
