"""`objective: draft-eagle3` and `draft-medusa`: train a draft on the frozen model's hidden states, recorded as they are computed.

What is trained is the draft alone; `final/` holds the model as it was and the draft's file beside it, and an export packs the
draft into the bundle, where `speculation: eagle3` or `medusa` finds it. The held-out loss is the draft's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from karui.catalogue.helpers import has_recurrent_layers
from karui.catalogue.logits import logit_scale
from karui.configs.errors import KaruiError, UnsupportedError
from karui.configs.objectives import Eagle3Objective, MedusaObjective
from karui.distill import capture
from karui.distill.drafts.eagle3 import acceptance_length, eagle3_loss
from karui.distill.drafts.medusa import medusa_loss
from karui.distill.drafts.start import calibrate, scale_fusion, start_copying
from karui.trainers.data import IGNORE, PackedBatch, SampleSet, collate
from karui.trainers.model import LossSum, base_model
from karui.trainers.objectives.cached import packed_documents
from karui.trainers.objectives.engine_states import EngineStates

if TYPE_CHECKING:
    from karui.inference.bundle import Opened
    from karui.inference.speculative.target import TargetIdentity
    from karui.trainers.run import Setup

logger = logging.getLogger(__name__)
START_DOCUMENTS = 40
"""Documents on which the start of an EAGLE-3 draft is fitted."""


class Draft(LossSum):
    """Shared: the model is frozen and stays in eval mode; the draft is this module's only trained part."""

    draft: Any

    def __init__(self, model: nn.Module, chunk: int, keep_states: bool, tokenizer: Any) -> None:
        if has_recurrent_layers(base_model(model).config):
            raise UnsupportedError("a draft for a model with recurrent layers is not trained: the engine verifies no trees of "
                                   "drafts there. Serve it with ngram drafts.")
        super().__init__(model, chunk)
        if self.softcap is not None or logit_scale(base_model(model).config) != 1.0:
            raise UnsupportedError("a draft for a model whose logits are scaled or capped is not trained: a draft's are not. "
                                   "Serve it with ngram drafts.")
        self.tokenizer = tokenizer
        self._kept: dict[bytes, tuple[torch.Tensor, ...]] | None = {} if keep_states else None
        if hasattr(model, "get_base_model"):
            raise UnsupportedError("a draft is trained for a model as it is served; merge the adapter first (an exported run), "
                                   "then train the draft on that.")
        model.requires_grad_(False)
        self.figures: list[list[float]] = []

    def before_step(self, step: int, total: int) -> None:
        self.figures = []

    def note(self, at: int, *values: float) -> None:
        while len(self.figures) <= at:
            self.figures.append([0.0] * len(values))
        self.figures[at] = [a + b for a, b in zip(self.figures[at], values)]

    def recorded(
        self, tokens: torch.Tensor, positions: torch.Tensor, cu_seqlens: torch.Tensor, targets: torch.Tensor
    ) -> Iterator[tuple[slice, tuple[torch.Tensor, ...]]]:
        """Each supervised document of a packed row, and its states as `record` gives them.

        A document runs alone, so that its states are the same bits in whatever row it comes, and a resumed run that computes them
        anew goes on exactly.
        """
        for (key, _, supervised), a, b in zip(packed_documents(tokens, cu_seqlens, targets), cu_seqlens[:-1].tolist(),
                                              cu_seqlens[1:].tolist()):
            if b - a < 3 or not supervised.any():
                continue
            found = None if self._kept is None else self._kept.get(key)
            if found is None:
                with torch.no_grad():
                    found = self.record(tokens[a:b], positions[a:b])
                if self._kept is not None:
                    self._kept[key] = found = tuple(_half(x) for x in found)
            yield slice(a, b), found

    def record(self, tokens: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What the draft learns from of one document, [n, ...] each."""
        raise NotImplementedError

    def state(self) -> dict[str, torch.Tensor]:
        return dict(self.draft.state_dict())

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        self.draft.load_state_dict(dict(state))

    def target(self, folder: Path) -> TargetIdentity:
        """The model that the draft was trained for, as it was just written to `folder`."""
        from karui.inference.bundle import open_model
        from karui.inference.speculative.target import TargetIdentity

        return TargetIdentity.of(open_model(folder), self.tokenizer)

    def of(self, batch: PackedBatch) -> torch.Tensor:
        figures = [list(f) for f in self.figures]
        loss: torch.Tensor = self(batch.tokens, batch.positions, batch.cu_seqlens, batch.targets)
        self.figures = figures
        return loss


class Eagle3Draft(Draft):
    """See `karui.distill.drafts.eagle3`.

    Args:
        codes: the model's weights that are on a grid, by name (for `states: engine`).
    """

    def __init__(
        self, model: nn.Module, section: Eagle3Objective, samples: SampleSet, codes: Mapping[str, Any], tokenizer: Any
    ) -> None:
        from dataclasses import replace

        from karui.inference.models.config import from_hf
        from karui.inference.speculative.eagle3 import Eagle3, Eagle3Config

        super().__init__(model, section.chunk_tokens, section.keep_states, tokenizer)
        self.section = section
        target = from_hf(base_model(model).config.to_dict())  # type: ignore[union-attr,operator]
        ids = frequent_tokens(samples, section.vocabulary, target.vocab_size)
        config = Eagle3Config.of(target, len(ids))
        config = replace(config, intermediate_size=section.intermediate or config.intermediate_size,
                         num_kv_heads=section.kv_heads or config.num_kv_heads)
        if config.num_heads % config.num_kv_heads:
            raise KaruiError(f"objective.kv_heads: {config.num_heads} heads cannot share {config.num_kv_heads} key-value heads.")
        self.draft = Eagle3(config, ids)
        self.ids: torch.Tensor
        self.head: torch.Tensor
        self.register_buffer("ids", ids, persistent=False)
        head = base_model(model).get_output_embeddings().weight.detach()  # type: ignore[operator]
        with torch.no_grad():
            self.draft.lm_head.weight.copy_(head[ids])
        self.register_buffer("head", head[ids].float().clone(), persistent=False)
        self.engine = EngineStates(model, codes, self.chunk) if section.states == "engine" else None
        self._start(samples)

    @torch.no_grad()
    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        """[n, H] fp32, as the engine's drafts read them: without the factor that some models put on embeddings (Gemma)."""
        table: Any = base_model(self.model).get_input_embeddings()  # type: ignore[operator]
        return nn.functional.embedding(tokens, table.weight).float()

    def _start(self, samples: SampleSet) -> None:
        """See `karui.distill.drafts.start`, on the first documents."""
        aux, embeddings = [], []
        batches = [collate([samples[i]]) for i in range(min(START_DOCUMENTS, len(samples)))]
        for batch in batches:
            for at, (streams, *_) in self.recorded(batch.tokens, batch.positions, batch.cu_seqlens, batch.targets):
                aux.append(streams.float())
                embeddings.append(self._embedded(batch.tokens[at]))
        if not aux:
            raise KaruiError("draft-eagle3: none of the first samples has a supervised token; see the preflight's report.")
        scale_fusion(self.draft, aux[0])
        if self.section.start == "copy":
            found = start_copying(self.draft, aux, embeddings)
            scale = calibrate(self.draft, lambda: sum(float(self.of(batch)) for batch in batches[:8]))
            logger.info("the draft starts as an induction head; its streams show their token with R^2 %.2f, logits times %.2f",
                        found, scale)

    def metrics(self) -> dict[str, float]:
        """The last micro-batches' means by pass, and the acceptance length they promise for a greedy chain."""
        passes = [(loss, int(rows), int(right)) for loss, rows, right in self.figures]
        out = {f"right_{i}": right / max(1, rows) for i, (_, rows, right) in enumerate(passes)}
        return {**out, "acceptance_length": acceptance_length(passes)}

    def record(self, tokens: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(aux [n, L * H], last hidden state [n, H], the model's likeliest next tokens [n])."""
        from karui.trainers.objectives.on_policy import likeliest

        model = base_model(self.model)
        layers = self.draft.config.aux_layers
        if self.engine is not None:
            return self.engine(tokens, layers)
        with capture.depths(model.get_decoder().layers, layers) as states:  # type: ignore[operator]
            hidden = self.hidden(tokens, positions, torch.tensor([0, len(tokens)], dtype=torch.int32)).float()
            best = likeliest(hidden, model.get_output_embeddings().weight, self.chunk)  # type: ignore[operator]
        return torch.cat([states[d].float() for d in layers], -1), hidden, best

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, cu_seqlens: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        section = self.section
        total = torch.zeros((), device=tokens.device)
        for at, (aux, hidden, best) in self.recorded(tokens, positions, cu_seqlens, targets):
            found = eagle3_loss(
                self.draft, aux=aux.float(), embeddings=self._embedded(tokens[at]), hidden=hidden.float(), head=self.head,
                ids=self.ids, best=best, supervised=targets[at] != IGNORE, steps=section.steps, decay=section.decay,
                soft=section.soft, chunk=self.chunk)
            total = total + found.loss_sum
            for i, figures in enumerate(found.by_pass):
                self.note(i, *figures)
        return _reaching(total, self.draft)

    def save(self, folder: Path) -> None:
        from karui.inference.speculative.factory import save_eagle3

        save_eagle3(self.draft, folder, self.target(folder))


class MedusaDraft(Draft):
    """See `karui.distill.drafts.medusa`. A vocabulary projection of a head's own starts as the model's head.

    Args:
        codes: the model's weights that are on a grid, by name (for `states: engine`).
    """

    def __init__(
        self, model: nn.Module, section: MedusaObjective, samples: SampleSet, codes: Mapping[str, Any], tokenizer: Any
    ) -> None:
        from karui.inference.speculative.medusa import MedusaHeads

        super().__init__(model, section.chunk_tokens, section.keep_states, tokenizer)
        self.section = section
        head = base_model(model).get_output_embeddings().weight.detach().float()  # type: ignore[operator]
        ids = None if section.vocabulary is None else frequent_tokens(samples, section.vocabulary, head.shape[0])
        shared = section.projection == "shared"
        self.draft = MedusaHeads(section.heads, head.shape[1], head.shape[0], section.num_layers, shared=shared, ids=ids)
        if shared:
            self.draft.bind(head)
        with torch.no_grad():
            for part in [] if shared else self.draft.heads:
                part[-1].weight.copy_(head)
        self.engine = EngineStates(model, codes, self.chunk) if section.states == "engine" else None

    def metrics(self) -> dict[str, float]:
        """By head: the last micro-batches' mean loss, and the share of supervised rows whose likeliest token is right."""
        out = {f"loss_head_{i}": loss / max(1, rows) for i, (loss, rows, _, _) in enumerate(self.figures)}
        return {**out, **{f"right_{i}": right / max(1, every) for i, (_, _, right, every) in enumerate(self.figures)}}

    def record(self, tokens: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(last hidden state [n, H],)."""
        if self.engine is not None:
            return self.engine(tokens, ())[1:2]
        return (self.hidden(tokens, positions, torch.tensor([0, len(tokens)], dtype=torch.int32)).float(),)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, cu_seqlens: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        total = torch.zeros((), device=tokens.device)
        for at, (hidden,) in self.recorded(tokens, positions, cu_seqlens, targets):
            part, figures = medusa_loss(self.draft, hidden=hidden.float(), targets=targets[at], supervised=targets[at] != IGNORE,
                                        decay=self.section.decay, ids=self.draft.ids, chunk=self.chunk)
            total = total + part
            for i, values in enumerate(figures):
                self.note(i, *values)
        return _reaching(total, self.draft)

    def save(self, folder: Path) -> None:
        from karui.inference.speculative.factory import save_medusa

        save_medusa(self.draft, folder, target=self.target(folder))


def _half(x: torch.Tensor) -> torch.Tensor:
    """Floats in half the bytes, unless a value does not fit."""
    half = x.half() if x.is_floating_point() else x
    return half if torch.isfinite(half).all() else x


def _reaching(total: torch.Tensor, draft: nn.Module) -> torch.Tensor:
    """Without a usable row the graph must still reach every parameter (DDP waits for all of them)."""
    return total if total.requires_grad else total + 0.0 * sum(p.sum() for p in draft.parameters())


def frequent_tokens(samples: SampleSet, count: int, vocabulary: int) -> torch.Tensor:
    """[min(count, V)] ascending ids of the supervised tokens seen most; ties and the rest by id."""
    seen = np.bincount(np.asarray(samples.ids)[np.asarray(samples.loss_mask)], minlength=vocabulary)
    order = np.argsort(-seen, kind="stable")[: min(count, vocabulary)]
    return torch.from_numpy(np.sort(order).astype(np.int64))


def pack_drafts(source: Path, bundle: Path, *, any_target: bool = False) -> list[str]:
    """Copy the draft files of a run's final/ into a bundle of the same model, marked as made for it; returns their names.

    The same model is one that was exported from `source`, or whose stored weights are those the draft was trained on.

    Args:
        any_target: the shape alone has to fit: for a bundle of a fine-tuned model, or of another quantization of the same one.

    Raises:
        KaruiError: the draft was trained for another model, of another shape or of other weights.
    """
    from karui.inference.bundle import open_model
    from karui.inference.loading import load_tokenizer
    from karui.inference.models.config import from_hf
    from karui.inference.speculative.factory import FILES, copy_draft, draft_target, load_eagle3, load_medusa
    from karui.inference.speculative.target import TargetIdentity

    packed = []
    opened = open_model(bundle)
    target, identity = from_hf(opened.config), TargetIdentity.of(opened, load_tokenizer(opened.tokenizer_path))
    for method, name in FILES.items():
        if not (source / name).is_file():
            continue
        if method == "eagle3":
            c = load_eagle3(source).config
            fits = (c.hidden_size, c.vocab_size) == (target.hidden_size, target.vocab_size)
            fits &= max(c.aux_layers) < target.num_layers
        else:
            heads, _ = load_medusa(source)
            fits = (heads.hidden_size, heads.vocab_size) == (target.hidden_size, target.vocab_size)
        if not fits:
            raise KaruiError(f"{source / name} is a draft for another model than {bundle} (hidden size {target.hidden_size}, "
                             f"{target.vocab_size} tokens, {target.num_layers} layers); train one for it.")
        made_for = draft_target(source, method)
        if made_for is None and not any_target:
            logger.warning("%s does not say which model it was trained for, nor will its copy", source / name)
        elif not (any_target or made_for == identity or _exported_from(opened, source, made_for)):
            raise KaruiError(f"{source / name} is a draft for another model than {bundle}: the shapes are the same, the weights "
                             "are not. Export the run that trained it, or train one for this model; any_target=True packs it "
                             "anyway.")
        copy_draft(method, source, bundle, identity if made_for or any_target else None)
        packed.append(name)
    return packed


def _exported_from(opened: Opened, source: Path, made_for: TargetIdentity | None) -> bool:
    """Whether `source` holds the model that a draft was trained for, and `opened` is a bundle made of it."""
    from karui.inference.bundle import open_model
    from karui.inference.bundle.export import base_sha256
    from karui.inference.loading import load_tokenizer
    from karui.inference.speculative.target import TargetIdentity

    if opened.manifest is None or opened.manifest.provenance.base_sha256 != base_sha256(source):
        return False
    return made_for == TargetIdentity.of(open_model(source), load_tokenizer(source))


def make(setup: Setup) -> Draft:
    """The draft objective of a prepared run."""
    section = setup.recipe.objective
    assert isinstance(section, Eagle3Objective | MedusaObjective)
    grids = [stage for stage in setup.stages if stage.is_on_grid and section.states == "engine"]
    codes = {name: q for stage in grids for name, q in stage.convert(setup.model).items()}
    if isinstance(section, Eagle3Objective):
        return Eagle3Draft(setup.model, section, setup.samples, codes, setup.tokenizer)
    return MedusaDraft(setup.model, section, setup.samples, codes, setup.tokenizer)
