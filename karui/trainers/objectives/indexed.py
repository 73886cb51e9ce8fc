"""`objective.indexer`: the indexers of a sparse attention, trained beside the model's own loss (DeepSeek-V3.2, arXiv 2512.02556,
section 2.1.1).

    warm-up    attention is dense and the model stands still: loss = KL(attention || indexer) over all keys        (eq. 3)
    sparse     the model's own loss over the chosen keys, and for the indexers the divergence over those           (eq. 4)

The divergence is the mean over indexers, and over the tokens of a document; a document counts by its supervised tokens, so that
all terms share one divisor (docs/design.md, rule 3). Held-out loss is the labels', with sparse attention as it will be served.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from karui.configs.errors import KaruiError
from karui.configs.objectives import IndexerSection
from karui.trainers.data import IGNORE, documents_of_tokens
from karui.trainers.model import LossSum
from karui.trainers.objectives.distil import Distil
from karui.trainers.sparse import Indexing, indexers

if TYPE_CHECKING:
    from karui.trainers.run import Setup

logger = logging.getLogger(__name__)


class Indexed(LossSum):
    """In front of another objective's class: adds the indexers' loss to what that one gives while training."""

    def index_with(self, section: IndexerSection) -> None:
        """Set up; called once, after the objective is made."""
        self.indexing_section = section
        self.own = {id(p) for m in indexers(self.model) for p in m.parameters()}
        self.warming, self.divergence, self.index_count = section.warm_up > 0, 0.0, 0

    def before_step(self, step: int, total: int) -> None:
        super().before_step(step, total)
        self.warming = step < round(self.indexing_section.warm_up * total)
        self.divergence, self.index_count = 0.0, 0

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, cu_seqlens: torch.Tensor,
                targets: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(tokens, positions, cu_seqlens, targets)
        indexing = Indexing(dense=self.warming, weight=_weights(cu_seqlens, targets))
        self.extra = {"indexing": indexing}
        try:
            if self.warming:
                self.model.eval()  # as it stands; nor is there a layer to run again
                with torch.no_grad():
                    self.hidden(tokens, positions, cu_seqlens)
                self.model.train()
                loss = tokens.new_zeros((), dtype=torch.float32)
            else:
                loss = super().forward(tokens, positions, cu_seqlens, targets)
        finally:
            self.extra = {}
        mine = indexing.mean()
        self.divergence += float(mine.detach())
        self.index_count += int((targets != IGNORE).sum())
        if self.warming and torch.distributed.is_initialized():  # DDP waits for every parameter; see `after_backward`
            loss = loss + 0.0 * torch.stack([p.flatten()[0].float() for p in self._resting()]).sum()
        return loss + mine

    def after_backward(self) -> None:
        if self.warming:  # without a gradient neither weight decay nor the optimizer's moments touch the model
            for parameter in self._resting():
                parameter.grad = None

    def unstarted(self) -> set[str]:
        return {n for n, p in self.named_parameters() if id(p) not in self.own} if self.indexing_section.warm_up else set()

    def param_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        split = []
        for group in groups:
            ours = [p for p in group["params"] if id(p) in self.own]
            rest = [p for p in group["params"] if id(p) not in self.own]
            split += [{**group, "params": rest}] if rest else []
            split += [{**group, "params": ours, "lr_scale": group["lr_scale"] * self.indexing_section.lr_scale}] if ours else []
        return split

    def metrics(self) -> dict[str, float]:
        return {**super().metrics(), "loss_indexer": self.divergence / max(1, self.index_count)}

    def _resting(self) -> list[torch.Tensor]:
        return [p for p in self.parameters() if p.requires_grad and id(p) not in self.own]


class IndexedSft(Indexed):
    pass


class IndexedDistil(Indexed, Distil):
    pass


def _weights(cu_seqlens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """[T]: each document's supervised tokens, spread over all of its tokens."""
    document, lengths, supervised = documents_of_tokens(cu_seqlens, targets)
    return (supervised / lengths.clamp_min(1))[document]


def make(setup: Setup) -> Indexed:
    """The objective of a prepared run whose recipe has `objective.indexer`.

    Raises:
        KaruiError: an adapter, beside which it is not trained; a warm-up of a model whose routers move.
    """
    from karui.trainers.objectives import distil

    recipe = setup.recipe
    section: Any = recipe.objective
    if setup.is_adapter:
        raise KaruiError("objective.indexer trains weights of the model, which an adapter leaves as they are; leave one out.")
    if recipe.moe.balance == "bias" and section.indexer.warm_up:
        raise KaruiError("objective.indexer.warm_up leaves the model as it is, moe.balance: bias moves its routers; warm up in a "
                         "run of its own.")
    made: Indexed
    if section.kind == "distil":
        made = distil.make(setup, IndexedDistil)  # type: ignore[assignment]
    else:
        made = IndexedSft(setup.model, section.chunk_tokens)
    made.index_with(section.indexer)
    return made


def leave_alone(model: torch.nn.Module) -> None:
    """Freeze indexers that no objective trains: their choice has no gradient."""
    found = [p for m in indexers(model) for p in m.parameters() if p.requires_grad]
    for parameter in found:
        parameter.requires_grad_(False)
    if found:
        logger.warning("the indexers of sparse attention stay as they are; objective.indexer trains them")
