"""The model side of training: load, swap in the lean operations, and turn a packed batch into a loss sum.

The body runs once on the ragged row [1, T]; attention goes document by document through transformers' attention interface;
the head's logits exist only at supervised positions and only a chunk at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from karui.catalogue.helpers import has_recurrent_layers
from karui.catalogue.logits import logit_scale, logit_softcap, scaled
from karui.configs.errors import UnsupportedError
from karui.kernels.cross_entropy import linear_cross_entropy
from karui.kernels.document_attention import document_attention
from karui.trainers.compact import compact
from karui.trainers.context import ContextGroup, context_attention, split
from karui.trainers.data import IGNORE, PackedBatch
from karui.trainers.lean import check_context, install_lean_ops, keeps_rows, window_of
from karui.trainers.sparse import indexers, install_sparse_attention

if TYPE_CHECKING:
    from karui.configs.recipe import ModelSection
    from karui.trainers.balance import Routers

logger = logging.getLogger(__name__)
ATTENTION = "karui_documents"
__all__ = ["ATTENTION", "LossSum", "base_model", "check_supported", "enable_recompute", "install_lean_ops", "load_model",
           "register_attention", "weights_folder"]


def load_model(section: ModelSection) -> nn.Module:
    """A causal language model from the catalogue in the section's dtype, ready for packed training.

    Raises:
        UnsupportedError: an architecture whose logits or attention need what the packed path does not compute.
        CorruptError: a weight file that cannot be read, or weights that are not there.
    """
    from transformers.utils import logging as transformers_logging

    from karui.catalogue import load_causal_lm, resolve

    folder = resolve(section.name)
    register_attention()
    transformers_logging.disable_progress_bar()
    model: nn.Module = load_causal_lm(folder, dtype=getattr(torch, section.dtype), attn_implementation=ATTENTION)
    check_supported(model)
    install_sparse_attention(model)
    return model


def check_supported(model: nn.Module) -> None:
    """Raise `UnsupportedError` for what would be trained wrongly: a head with a bias."""
    config: Any = model.config
    logit_scale(config)
    if getattr(model.get_output_embeddings(), "bias", None) is not None:  # type: ignore[operator]
        raise UnsupportedError(f"model type {config.model_type}: an output head with a bias is not supported in training.")


def register_attention() -> None:
    """Make `attn_implementation="karui_documents"` known to transformers; calling it again changes nothing."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, _no_mask)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Documents are told apart by `cu_seqlens`; no mask is built."""


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature over `document_attention`; `cu_seqlens` comes through the model's keyword arguments."""
    cu_seqlens = kwargs.get("cu_seqlens")
    if cu_seqlens is None:  # an ordinary call: one document per row
        if query.shape[0] != 1:
            raise UnsupportedError(f"{ATTENTION} takes one ragged row, got a batch of {query.shape[0]}; use sdpa for batches.")
        cu_seqlens = torch.tensor([0, query.shape[2]])
    window = kwargs.get("sliding_window") or window_of(module)
    if kwargs.get("indices") is not None:
        raise UnsupportedError(f"{ATTENTION} has no chosen keys.")
    own: dict[str, Any] = {"sinks": kwargs.get("s_aux"), "softcap": kwargs.get("softcap")}
    if dropout:
        raise UnsupportedError("attention dropout is not supported; set attention_dropout to 0 in the model's config.")
    scaling = scaling or query.shape[-1] ** -0.5
    if (rows := kwargs.get("context_rows")) is not None:
        check_context(cu_seqlens, window, **own)
        return context_attention(query, key, value, cu_seqlens, scaling, rows), None
    shared = kwargs.get("shared_prefix", False)
    return document_attention(query, key, value, cu_seqlens, scaling, shared=shared, window=window, **own), None


class LossSum(nn.Module):
    """(tokens, positions, cu_seqlens, targets) -> sum of the supervised tokens' losses, fp32. What DDP wraps.

    Args:
        model: a causal LM or a peft model around one, loaded with `attn_implementation="karui_documents"`.
        chunk: supervised tokens whose logits exist at one moment.

    Attributes:
        context: the ranks that share a batch, set by a run with `run.context_parallel`; the loss is then of this rank's rows.
        routers: of a mixture of experts, set by `karui.trainers.balance`.
        every_row: in training every row goes through every layer, also those that no loss depends on, which balancing counts.
        extra: keyword arguments of the body's next call.
        softcap: of the logits, None without one.
        sparse: the model has sparse attention.
    """

    context: ContextGroup | None = None
    extra: Mapping[str, Any] = MappingProxyType({})
    routers: Routers | None = None
    every_row = False

    def __init__(self, model: nn.Module, chunk: int) -> None:
        super().__init__()
        self.model = model
        self.chunk = chunk
        self.softcap = logit_softcap(base_model(model).config)
        self.sparse = bool(indexers(model))

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, cu_seqlens: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        if self.context is not None:
            tokens, positions, cu_seqlens, targets, rows = split(self.context, tokens, positions, cu_seqlens, targets)
            return self._loss(tokens, positions, cu_seqlens, targets, {"context_rows": rows})
        if self.sparse or (self.every_row and self.training):  # sparse: keys are chosen document by document
            return self._loss(tokens, positions, cu_seqlens, targets, {})
        row = compact(tokens, positions, cu_seqlens, targets)
        extra = {"shared_prefix": True} if row.shared else {}
        return self._loss(row.tokens, row.positions, row.cu_seqlens, row.targets, extra)

    def _loss(self, tokens: torch.Tensor, positions: torch.Tensor, cu_seqlens: torch.Tensor, targets: torch.Tensor,
              extra: dict[str, Any]) -> torch.Tensor:
        rows = (targets != IGNORE).nonzero().squeeze(-1)
        inner = base_model(self.model)
        if kept := len(rows) > 0 and not (self.every_row and self.training) and keeps_rows(inner):
            extra = {**extra, "loss_rows": rows}
        hidden = self._body(tokens, positions, cu_seqlens, **extra)
        head = inner.get_output_embeddings().weight  # type: ignore[operator]
        picked = hidden if kept else hidden.index_select(0, rows)
        return linear_cross_entropy(picked, head.to(picked.dtype), targets[rows], self.chunk,
                                    softcap=self.softcap)[0]

    def hidden(self, tokens: torch.Tensor, positions: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        """The body's last hidden states [T, H] of a ragged row, times the logits' scale."""
        return self._body(tokens, positions, cu_seqlens)

    def _body(self, tokens: torch.Tensor, positions: torch.Tensor, cu_seqlens: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if "context_rows" in kwargs and has_recurrent_layers(base_model(self.model).config):
            raise UnsupportedError("run.context_parallel cuts documents, over which a recurrent state would have to be handed "
                                   "on; leave it out for this model.")
        body = base_model(self.model).get_decoder()  # type: ignore[operator]
        out = body(input_ids=tokens.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False,
                   **documents_of(body, cu_seqlens), **self.extra, **kwargs)
        return scaled(out.last_hidden_state.squeeze(0), body.config)

    def of(self, batch: PackedBatch) -> torch.Tensor:
        """The held-out loss sum of a batch (without going through a wrapper)."""
        return self(batch.tokens, batch.positions, batch.cu_seqlens, batch.targets)

    # What other objectives add to a run; here nothing.

    def before_step(self, step: int, total: int) -> None:
        """Called before optimizer step `step` (from 0) of `total`: schedules."""

    def batches(self, step: int, plan: Callable[[int], list[PackedBatch]]) -> list[PackedBatch]:
        """This rank's micro-batches of a step; `plan` gives those of the data for any step of the run."""
        return plan(step)

    def after_backward(self) -> None:
        """Called when the step's gradient is there, before it is clipped and used."""

    def unstarted(self) -> set[str]:
        """Names of trained parameters that may have no optimizer state yet in a checkpoint."""
        return set()

    def param_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The optimizer's groups, see `Stage.param_groups`; before the stages'."""
        return groups

    def metrics(self) -> dict[str, float]:
        """Figures of the step on this rank for the log."""
        return {}

    def state(self) -> dict[str, torch.Tensor]:
        """What a checkpoint must hold of the objective beside the model."""
        return {}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """The inverse of `state`."""

    def save(self, folder: Path) -> None:
        """Write what the objective made beside the trained model, into an existing folder."""


def documents_of(body: Any, cu_seqlens: torch.Tensor) -> dict[str, Any]:
    """How a ragged row's documents are told apart: by `cu_seqlens`. A model with recurrent layers takes one document.

    Raises:
        UnsupportedError: several documents for such a model.
    """
    if not has_recurrent_layers(body.config):
        return {"cu_seqlens": cu_seqlens}
    if len(cu_seqlens) > 2:
        raise UnsupportedError(f"a {body.config.model_type} has recurrent layers, whose state would go from one document of a "
                               "packed row into the next; set data.packing: false.")
    return {}


def base_model(model: nn.Module) -> nn.Module:
    """The transformers model inside a peft model, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


def enable_recompute(model: nn.Module) -> None:
    """Keep only each layer's input and run the layer again in the backward pass (arXiv 1604.06174)."""
    inner = base_model(model)
    inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]


def weights_folder(name: str) -> Path:
    """The resolved folder of a model, for files beside the weights (tokenizer, config)."""
    from karui.catalogue import resolve

    return Path(resolve(name))
