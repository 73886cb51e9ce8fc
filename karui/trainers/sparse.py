"""Sparse attention (DSA) in training: transformers' attention with an indexer needs a mask of the whole row and runs the indexer
without a gradient; here it goes document by document, and gives the indexer's loss when it is asked for it.

What an indexer reads is detached from the model, and its choice has no gradient: the model learns by its own loss alone, the
indexer by the divergence from what the model attends to (arXiv 2512.02556, section 2.1.1).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from karui.configs.errors import UnsupportedError
from karui.kernels.document_attention import document_attention, rotate
from karui.kernels.sparse_attention import Chosen, choose, indexer_loss, largest, sparse_attention

logger = logging.getLogger(__name__)
_INTERLEAVED = {"deepseek_v32": False, "glm_moe_dsa": True}  # how an indexer's rotation pairs its dimensions


@dataclass(kw_only=True)
class Indexing:
    """What a forward pass is to do for the indexers; goes to the layers as the keyword argument `indexing`.

    Attributes:
        dense: attend to everything, and compare over everything.
        weight: [T], what each row's divergence counts.
        losses: one scalar per indexer, by its layer.
    """

    dense: bool
    weight: torch.Tensor
    losses: dict[int, torch.Tensor] = field(default_factory=dict)

    def mean(self) -> torch.Tensor:
        """Over the indexers."""
        return torch.stack(list(self.losses.values())).mean()


class FirstOfEquals(TorchFunctionMode):
    """A context in which transformers' own indexers choose the first of equal scores, of which many are 0, as all others do here;
    else any of them, so that a model and its bundle would read different keys. Only the method `topk` is meant: routers use the
    function."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.topk or kwargs != {"dim": -1}:
            return func(*args, **(kwargs or {}))
        scores, top = args
        index = largest(scores, top)
        return torch.return_types.topk((scores.gather(-1, index), index))


def indexers(model: nn.Module) -> list[nn.Module]:
    """The model's indexers, layer by layer."""
    return [m for name, m in model.named_modules() if name.endswith(".self_attn.indexer")]


def install_sparse_attention(model: nn.Module) -> None:
    """Swap the attention of a model with indexers, in place; a model without stays as it is.

    Raises:
        UnsupportedError: an architecture whose indexer is not known.
    """
    config: Any = model.config
    found = [m for m in model.modules() if hasattr(m, "indexer")]
    if found and config.model_type not in _INTERLEAVED:
        raise UnsupportedError(f"model type {config.model_type}: its sparse attention is not supported in training; supported "
                               f"are {', '.join(_INTERLEAVED)}.")
    for module in found:
        if not isinstance(module.forward, LeanSparse):
            module.forward = LeanSparse(module)


class LeanSparse:
    """Latent attention over the keys that the indexer chooses; with a mask or a cache the module's own forward."""

    def __init__(self, module: Any) -> None:
        self.module, self.own = module, module.forward
        self.interleaved, self.shares = _INTERLEAVED[module.config.model_type], module.config.model_type == "glm_moe_dsa"

    def __call__(self, hidden_states: torch.Tensor, position_embeddings: Any = None, attention_mask: Any = None,
                 cache: Any = None, prev_topk_indices: Chosen | None = None, **kwargs: Any) -> tuple[Any, ...]:
        m = self.module
        if attention_mask is not None or cache is not None:
            shared = {"prev_topk_indices": prev_topk_indices} if self.shares else {}
            return self.own(hidden_states, position_embeddings=position_embeddings, attention_mask=attention_mask, cache=cache,
                            **shared, **kwargs)
        if hidden_states.shape[0] != 1:
            raise UnsupportedError(f"sparse attention in training takes one ragged row, got a batch of {hidden_states.shape[0]}.")
        if kwargs.get("context_rows") is not None:
            raise UnsupportedError("run.context_parallel has no sparse attention; leave it out for this model.")
        if m.training and m.attention_dropout:
            raise UnsupportedError("attention dropout is not supported; set attention_dropout to 0 in the model's config.")
        documents = kwargs.get("cu_seqlens")
        documents = torch.tensor([0, hidden_states.shape[1]]) if documents is None else documents
        turn = position_embeddings[0][0], position_embeddings[1][0]
        residual = m.q_a_layernorm(m.q_a_proj(hidden_states))
        q, k, v = self._projected(hidden_states, residual, turn)
        chosen: Chosen | None = prev_topk_indices
        indexing: Indexing | None = kwargs.get("indexing")
        if m.indexer is not None:
            with torch.set_grad_enabled(indexing is not None):
                parts = self._index(hidden_states[0].detach(), residual[0].detach(), turn)
            dense = indexing is not None and indexing.dense
            chosen = [None] * (len(documents) - 1) if dense else choose(*parts, documents, m.indexer.index_topk)
            if indexing is not None:
                with torch.enable_grad():
                    loss = indexer_loss(*parts, q, k, documents, m.scaling, indexing.weight, chosen)
                indexing.losses.setdefault(m.layer_idx, loss)  # a layer may be run again for the backward pass
        if chosen is None:
            raise UnsupportedError(f"layer {m.layer_idx} has no indexer, and no layer before it chose keys.")
        out = (document_attention(q, k, v, documents, m.scaling) if all(keys is None for keys in chosen)
               else sparse_attention(q, k, v, documents, m.scaling, chosen))
        out = m.o_proj(out.reshape(*hidden_states.shape[:-1], -1))
        return (out, None, chosen) if self.shares else (out, None)

    def _projected(self, x: torch.Tensor, residual: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor],
                   ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k [1, A, T, D] rotated, v [1, A, T, Dv]."""
        m = self.module
        nope, rope, value = m.qk_nope_head_dim, m.qk_rope_head_dim, m.v_head_dim
        q = m.q_b_proj(residual).unflatten(-1, (-1, nope + rope)).transpose(1, 2)
        latent, key = m.kv_a_proj_with_mqa(x).split([m.kv_lora_rank, rope], -1)
        made = m.kv_b_proj(m.kv_a_layernorm(latent)).unflatten(-1, (-1, nope + value)).transpose(1, 2)
        key = _turned(key[:, None], turn, True).expand(-1, made.shape[1], -1, -1)
        return (torch.cat([q[..., :nope], _turned(q[..., nope:], turn, True)], -1), torch.cat([made[..., :nope], key], -1),
                made[..., nope:])

    def _index(self, x: torch.Tensor, residual: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor],
               ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The index's queries [T, I, D], keys [T, D] and weights [T, I] in fp32, as transformers computes them."""
        n, rope = self.module.indexer, self.module.qk_rope_head_dim
        q = n.wq_b(residual).unflatten(-1, (n.n_heads, n.head_dim)).transpose(0, 1)
        k = n.k_norm(n.wk(x))[None]
        q, k = (torch.cat([_turned(part[..., :rope], turn, self.interleaved), part[..., rope:]], -1).float() for part in (q, k))
        weights = n.weights_proj(x.to(n.weights_proj.weight.dtype)).float() * n.n_heads**-0.5
        return q.transpose(0, 1), k[0], weights


def _turned(x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor], interleaved: bool) -> torch.Tensor:
    """Rotated x [..., T, D], half-split whatever it was: query and key are laid out alike, so their product is the same."""
    return rotate(torch.cat([x[..., 0::2], x[..., 1::2]], -1) if interleaved else x, *turn)
