"""`objective: distil`: the teacher's distribution, features and relations beside the labels, on the data's own text.

Per supervised token, summed over tokens and divided once by the step (docs/design.md, rule 3):

    label * CE + logits * D(teacher, student) + sum of feature terms + sum of relation terms

Features and relations look at every token of a document; their mean over it counts once per supervised token, so that all terms
share one divisor. While evaluating, the loss is the labels' cross entropy, so that runs of different objectives are compared by
one number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from karui.configs.objectives import DistilObjective, Weight
from karui.configs.recipe import Recipe
from karui.distill import capture
from karui.distill.cache import SparseRows, TeacherCache
from karui.distill.divergences import divergence
from karui.distill.features import FeatureLoss, layer_map
from karui.distill.objectives import Sums, Term, head_loss
from karui.distill.objectives.labels import Labels
from karui.distill.objectives.logits import Logits
from karui.distill.objectives.sampled import Sampled
from karui.distill.objectives.topk import TopK
from karui.distill.objectives.weighted import Weighted
from karui.distill.relations import relation_sum
from karui.distill.teacher_rows import TopKRows, concat, cut
from karui.distill.vocabulary import SharedVocabulary, share
from karui.trainers.data import IGNORE, PackedBatch
from karui.trainers.model import LossSum, base_model, weights_folder
from karui.trainers.objectives.bytewise import Bytewise
from karui.trainers.objectives.cached import fill_cache, packed_documents, read_rows, seed_of
from karui.trainers.objectives.teacher import Teacher, tokenizer_of

if TYPE_CHECKING:
    from karui.trainers.run import Setup


class Distil(LossSum):
    """See the module's head. Its learned projections are its own parameters; the teacher is not part of it.

    Args:
        tokenizer: the student's, None for none.
        kept_layers: teacher layer of each student layer, for the layer map `kept`.
    """

    def __init__(self, recipe: Recipe, model: nn.Module, tokenizer: Any, kept_layers: tuple[int, ...] = ()) -> None:
        section = recipe.objective
        assert isinstance(section, DistilObjective)
        super().__init__(model, section.chunk_tokens)
        self.section = section
        self.fraction, self.count = 0.0, 0
        self.sums: dict[str, float] = {}
        self._teacher: list[Teacher] = [Teacher(section.teacher, recipe)]  # in a list, so that nn.Module does not take it in
        self._cache: TeacherCache | None = None
        teacher, student = self._teacher[0], base_model(model)
        rows = student.get_output_embeddings().weight.shape[0]  # type: ignore[operator]
        self._bytewise = Bytewise(tokenizer, rows, teacher) if section.align == "bytes" else None
        self.shared = self._share(recipe, tokenizer, teacher, rows)
        depth_s, depth_t = len(_layers(student)), len(teacher.layers)
        configs: Any = (student.config, base_model(teacher.model).config)
        maps = [layer_map(f.layers, depth_s, depth_t, kept_layers) if isinstance(f.layers, str) else f.layers
                for f in section.features]
        self.features = nn.ModuleList(FeatureLoss(pairs, configs[0].hidden_size, configs[1].hidden_size, f.loss)
                                      for pairs, f in zip(maps, section.features))
        related = any(r.relation != "value" for r in section.relations)
        self.depths_s = {s for pairs in maps for s, _ in pairs} | ({depth_s} if related else set())
        self.depths_t = {t for pairs in maps for _, t in pairs} | ({depth_t} if related else set())
        self.last = (depth_s, depth_t)

    def before_step(self, step: int, total: int) -> None:
        self.fraction = step / max(1, total - 1)
        self.sums, self.count = {}, 0

    def metrics(self) -> dict[str, float]:
        """Unweighted means of the step's terms per supervised token of this rank."""
        return {f"loss_{name}": value / max(1, self.count) for name, value in self.sums.items()}

    def state(self) -> dict[str, torch.Tensor]:
        return dict(self.features.state_dict())

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        self.features.load_state_dict(dict(state))

    def use_cache(self, cache: TeacherCache) -> None:
        """Read the teacher's rows from here on; the teacher itself is let go."""
        self._cache = cache
        self._teacher.clear()

    def of(self, batch: PackedBatch) -> torch.Tensor:
        return super().forward(batch.tokens, batch.positions, batch.cu_seqlens, batch.targets)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, cu_seqlens: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        section, student = self.section, base_model(self.model)
        rows = (targets != IGNORE).nonzero().squeeze(-1)
        self.count += len(rows)
        with capture.depths(_layers(student), self.depths_s) as states, self._values(student) as values:
            hidden = self.hidden(tokens, positions, cu_seqlens)
        picked = hidden.index_select(0, rows)
        head = student.get_output_embeddings().weight.to(picked.dtype)  # type: ignore[operator]
        terms: dict[str, tuple[float, Term]] = {}
        if label := self._now(section.label):
            terms["label"] = (label, Labels(targets[rows]))
        parts: list[Sums | None] = []
        weight = self._now(section.logits)
        if self._bytewise is not None:
            self._bytewise.teacher.to(tokens.device)
            parts.append(self._bytewise.loss(tokens, cu_seqlens, targets, hidden, head, weight=weight, kind=section.divergence,
                                             parameter=section.parameter, chunk=self.chunk, softcap=self.softcap))
        else:
            theirs: dict[int, torch.Tensor] = {}
            their_values: dict[str, torch.Tensor] = {}
            term: Term | None
            if self._cache is not None:
                found = read_rows(self._cache, tokens, cu_seqlens, targets)
                term = None if found is None else self._sparse(found)
            else:
                teacher = self._teacher[0].to(tokens.device)
                with self._values(base_model(teacher.model)) as their_values:
                    taught, theirs = teacher.hidden(tokens, positions, cu_seqlens, self.depths_t)
                term = self._term(taught, tokens, cu_seqlens, targets)
            if term is not None and self.shared.size == head.shape[0]:
                terms["logits"] = (weight, term)
            elif term is not None:  # over a part of the vocabulary only: a pass of its own
                kept = self.shared.covers(targets[rows]).to(torch.float32)
                parts.append(head_loss(picked, self.shared.rows(head), {"logits": (weight, Weighted(term, kept))}, self.chunk,
                                       self.softcap))
        parts.append(head_loss(picked, head, terms, self.chunk, self.softcap))
        loss = picked.new_zeros((), dtype=torch.float32)
        for part in parts:
            if part is not None:
                loss = loss + part.loss_sum
                self._note(part.terms)
        for item, feature in zip(section.features, self.features):
            value = self._documents(lambda a, b, f=feature: f(
                {d: x[a:b].float() for d, x in states.items()}, {d: x[a:b] for d, x in theirs.items()}), cu_seqlens, targets)
            self._note({"features": float(value.detach())})
            loss = loss + self._now(item.weight) * value
        for relation in section.relations:
            pair = ([next(iter(v.values())) for v in (values, their_values)] if relation.relation == "value"
                    else [states[self.last[0]], theirs[self.last[1]]])
            value = self._documents(lambda a, b, p=pair, r=relation: relation_sum(
                r.relation, p[0][a:b].float(), p[1][a:b].float(), torch.tensor([0, b - a]), heads=r.heads, most=r.most),
                cu_seqlens, targets)
            self._note({"relations": float(value.detach())})
            loss = loss + self._now(relation.weight) * value
        return loss

    def _term(self, taught: torch.Tensor, tokens: torch.Tensor, cu_seqlens: torch.Tensor, targets: torch.Tensor) -> Term | None:
        """The logit term of a teacher at work, from its hidden states [T, H]."""
        section, teacher = self.section, self._teacher[0]
        weight = self.shared.rows(teacher.head)
        supervised = targets != IGNORE
        if section.rows == "full":
            return Logits(teacher.over(taught[supervised], weight), divergence(section.divergence, section.parameter),
                          section.temperature)
        parts, at = [], 0
        for key, ids, mask in packed_documents(tokens, cu_seqlens, targets):
            if mask.any():
                dense = teacher.over(taught[at : at + len(ids)][supervised[at : at + len(ids)]], weight)
                parts.append(cut(dense, section.rows, section.k, section.temperature, seed=seed_of(key), chunk=self.chunk))
            at += len(ids)
        return self._sparse(concat(parts)) if parts else None

    def _sparse(self, rows: SparseRows) -> Term:
        if isinstance(rows, TopKRows):
            return TopK(rows, divergence(self.section.divergence, self.section.parameter))
        return Sampled(rows)

    def _documents(self, loss: Any, cu_seqlens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Sum over documents of loss(from, to), itself a sum over tokens, times their supervised share."""
        total = torch.zeros((), device=targets.device)
        for a, b in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist()):
            supervised = int((targets[a:b] != IGNORE).sum())
            if supervised:
                total = total + loss(a, b) * (supervised / (b - a))
        return total

    def _now(self, weight: Weight) -> float:
        """A weight at this step; one that moves does so linearly over the run."""
        return weight[0] + (weight[1] - weight[0]) * self.fraction if isinstance(weight, tuple) else weight

    def _values(self, model: nn.Module) -> Any:
        """Records the last layer's value vectors when a relation asks for them."""
        wanted = any(r.relation == "value" for r in self.section.relations)
        return capture.outputs(_layers(model)[-1], ["self_attn.v_proj"] if wanted else [])

    def _note(self, sums: Mapping[str, float]) -> None:
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value

    def _share(self, recipe: Recipe, tokenizer: Any, teacher: Teacher, rows: int) -> SharedVocabulary:
        if self._bytewise is not None or self.section.divergence == "sorted_l1":
            return SharedVocabulary(rows)
        same = teacher.folder == weights_folder(recipe.model.name)
        other = None if same else tokenizer_of(teacher.folder)
        ours = None if other is None or tokenizer is None else tokenizer.get_vocab()
        return share(ours, None if other is None else other.get_vocab(), rows, teacher.head.shape[0])


def _layers(model: nn.Module) -> nn.ModuleList:
    return model.get_decoder().layers  # type: ignore[operator]


def make(setup: Setup, kind: type[Distil] = Distil) -> Distil:
    """The objective of a prepared run, its cache filled; on several ranks the first fills it and the others read."""
    from accelerate import PartialState

    kept = next((tuple(stage.kept_layers) for stage in setup.stages if hasattr(stage, "kept_layers")), ())
    made = kind(setup.recipe, setup.model, setup.tokenizer, kept)
    if made.section.cache is not None:
        state = PartialState()
        with state.main_process_first():
            teacher = made._teacher[0].to(state.device)
            made.use_cache(fill_cache(made.section, setup.samples, teacher, setup.tokenizer, made.shared))
    return made
