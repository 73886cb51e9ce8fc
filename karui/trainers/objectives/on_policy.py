"""`objective: on-policy`: at each step the student writes the answers anew, and the teacher judges every token of them.

    divergence        GKD (arXiv 2306.13649): a generalised divergence over the whole distribution at each written token; samples
                      that stay off-policy (share 1 - on_policy) are trained alike on the data's text
    policy-gradient   reverse KL of the drawn tokens (Thinking Machines 2025): advantage log q_teacher - log p_sampler, importance
                      ratio p / p_sampler; off-policy samples are trained with the divergence

The step's samples are the data's; what comes out of `batches` is packed anew from what was written, so the sums are divided by
the tokens that were really trained on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from karui.catalogue.logits import capped
from karui.configs.errors import KaruiError
from karui.configs.objectives import OnPolicyObjective
from karui.configs.recipe import Recipe
from karui.distill.cache import document_key
from karui.distill.divergences import divergence
from karui.distill.objectives import Term, head_loss
from karui.distill.objectives.logits import Logits
from karui.distill.objectives.policy_gradient import PolicyGradient
from karui.distill.objectives.weighted import Weighted
from karui.distill.on_policy.buffer import RolloutBuffer
from karui.distill.on_policy.drift import Drift
from karui.distill.on_policy.rollout import Rollout, write
from karui.distill.on_policy.schedule import is_on_policy
from karui.distill.vocabulary import share
from karui.trainers.data import IGNORE, PackedBatch, Sample, collate, plan_epoch
from karui.trainers.model import LossSum, base_model, weights_folder
from karui.trainers.objectives.cached import packed_documents
from karui.trainers.objectives.engine_sampler import EngineSampler
from karui.trainers.objectives.teacher import Teacher, tokenizer_of

if TYPE_CHECKING:
    from karui.trainers.run import Setup

logger = logging.getLogger(__name__)
DRIFT_TOKENS = 512
"""Drawn tokens whose log-probabilities are compared after each push."""


class OnPolicy(LossSum):
    """See the module's head.

    Args:
        end: the tokens that end a turn.
    """

    def __init__(self, recipe: Recipe, model: nn.Module, tokenizer: Any, end: tuple[int, ...]) -> None:
        section = recipe.objective
        assert isinstance(section, OnPolicyObjective)
        super().__init__(model, section.chunk_tokens)
        if section.top_p < 1:
            logger.warning("objective.top_p is %g: the student is trained on text that is not drawn from its own distribution, "
                           "which biases the gradient; 1 is unbiased", section.top_p)
        self.section, self.recipe, self.end = section, recipe, end
        self.teacher = _Hidden(Teacher(section.teacher, recipe))
        self._check_vocabulary(recipe, tokenizer)
        self.buffer = RolloutBuffer(section.staleness)
        self._sampler: list[EngineSampler] = []
        self._written: dict[bytes, Rollout] = {}
        self._figures: dict[str, float] = {}
        self.step = self.total = 0

    @property
    def sampler(self) -> EngineSampler:
        """Made at the first rollout."""
        if not self._sampler:
            s = self.section
            self._sampler.append(EngineSampler(
                self.model, spec=s.engine, end=self.end, temperature=s.sample_temperature, top_p=s.top_p,
                max_context=self.recipe.data.max_length + s.max_new_tokens + 1))
        return self._sampler[0]

    def before_step(self, step: int, total: int) -> None:
        self.step, self.total = step, total
        self._figures = {}

    def metrics(self) -> dict[str, float]:
        return {k: v for k, v in self._figures.items() if not k.startswith("_")}

    def state(self) -> dict[str, torch.Tensor]:
        return self.buffer.state()

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        self.buffer.load(state)

    def of(self, batch: PackedBatch) -> torch.Tensor:
        return super().forward(batch.tokens, batch.positions, batch.cu_seqlens, batch.targets)

    # -- rollouts

    def batches(self, step: int, plan: Callable[[int], list[PackedBatch]]) -> list[PackedBatch]:
        if step not in self.buffer:
            self._write(step, plan)
        rollouts = self.buffer.take(step)
        kept = [r for r in rollouts if r.finished or self.section.unfinished == "keep"]
        fresh = [r for r in rollouts if r.own]
        if fresh:
            self._figures |= {
                "rollout_tokens": float(sum(r.loss_mask.sum() for r in fresh)),
                "rollout_finished": float(np.mean([r.finished for r in fresh])),
                "staleness": float(step - min(r.version for r in fresh)),
            }
        if not kept:
            raise KaruiError(f"step {step}: none of {len(rollouts)} rollouts came to an end within objective.max_new_tokens="
                             f"{self.section.max_new_tokens}. Raise it, start from a model that ends its answers (an off-policy "
                             "stage teaches that: objective.off_policy_first), or keep cut ones (objective.unfinished: keep).")
        self._written = {document_key(r.ids, np.append(r.loss_mask[1:], False)): r for r in kept}
        samples = [Sample(ids=r.ids, loss_mask=r.loss_mask, source_row=r.index) for r in kept]
        lengths = np.array([len(s) for s in samples], np.int64)
        cut = plan_epoch(lengths, batch=len(samples), micro_tokens=self.recipe.optim.micro_tokens, shuffle=False,
                         packing=self.recipe.data.packing)
        out = [collate([samples[i] for i in micro]) for micro in cut[0]]
        return out + [collate([])] * (_most(len(out)) - len(out))

    def _write(self, step: int, plan: Callable[[int], list[PackedBatch]]) -> None:
        """Push the weights and write for every step until the next push."""
        section, seed = self.section, self.recipe.run.seed
        steps = range(step, min(step + section.staleness + 1, self.total))
        documents: list[tuple[int, int, np.ndarray, np.ndarray]] = []  # step, index, ids, loss mask
        for at in steps:
            for micro in plan(at):
                for key, ids, supervised in packed_documents(micro.tokens, micro.cu_seqlens, micro.targets):
                    if micro.num_samples:
                        mask = np.append(False, supervised[:-1])
                        documents.append((at, int.from_bytes(key[:7], "little"), ids, mask))
        written: dict[int, list[Rollout]] = {at: [] for at in steps}
        chosen = [is_on_policy(seed=seed, step=at, total=self.total, index=index, share=section.on_policy,
                               off_policy_first=section.off_policy_first) for at, index, _, _ in documents]
        if any(chosen):
            if self._sampler:
                self.sampler.push(self.model, step)
            self.sampler.version = step
            tokens, seconds = self.sampler.num_tokens, self.sampler.seconds
            ours = [d for d, yes in zip(documents, chosen) if yes]
            done = write(self.sampler, [d[1:] for d in ours], seed=seed, steps=[d[0] for d in ours],
                         max_tokens=section.max_new_tokens, max_length=self.recipe.data.max_length + section.max_new_tokens)
            for (at, *_), rollout in zip(ours, done):
                written[at].append(rollout)
            self._figures["rollout_tokens_per_s"] = (self.sampler.num_tokens - tokens) / max(1e-9, self.sampler.seconds - seconds)
            self._measure_drift(done)
        for (at, index, ids, mask), yes in zip(documents, chosen):
            if not yes:
                nothing = np.zeros(len(ids), np.float32)
                written[at].append(Rollout(ids.astype(np.int32), mask, nothing, nothing, step, True, index, own=False))
        for at, rollouts in written.items():
            self.buffer.put(at, rollouts)

    @torch.no_grad()
    def _measure_drift(self, rollouts: list[Rollout]) -> None:
        """The trainer's log-probabilities of what was just drawn with its own weights."""
        some, count = [], 0
        for r in rollouts:
            some.append(r)
            count += int(r.loss_mask.sum())
            if count >= DRIFT_TOKENS:
                break
        was_training = self.training
        self.eval()
        device = next(self.model.parameters()).device
        samples = [Sample(ids=r.ids, loss_mask=r.loss_mask.copy(), source_row=0) for r in some]
        head = base_model(self.model).get_output_embeddings().weight  # type: ignore[operator]
        parts = []
        for documents in [samples] if self.recipe.data.packing else [[sample] for sample in samples]:
            batch = collate(documents).to(device)
            hidden = self.hidden(batch.tokens, batch.positions, batch.cu_seqlens)
            rows = batch.targets != IGNORE
            parts.append(chosen_logprobs(hidden[rows], head, batch.targets[rows], self.chunk, self.softcap).cpu())
        ours = torch.cat(parts)
        self.train(was_training)
        theirs = torch.from_numpy(np.concatenate([r.raw[1:][r.loss_mask[1:]] for r in some]))
        drift = Drift.of(ours, theirs)
        self._figures |= {"drift_mean": drift.mean, "drift_max": drift.largest, "drift_kl": drift.kl}
        drift.check(self.section.max_drift)

    # -- the loss

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, cu_seqlens: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        section = self.section
        rows = targets != IGNORE
        picked = self.hidden(tokens, positions, cu_seqlens)[rows]
        head = base_model(self.model).get_output_embeddings().weight.to(picked.dtype)  # type: ignore[operator]
        teacher = self.teacher.it.to(tokens.device)
        taught, _ = teacher.hidden(tokens, positions, cu_seqlens)
        dense = teacher.over(taught[rows], teacher.head[: head.shape[0]])
        head = head[: dense.weight.shape[0]]
        term: Term = Logits(dense, divergence(section.divergence, section.parameter), section.temperature)
        if section.loss == "divergence":
            terms = {"logits": (1.0, term)}
        else:
            sampler = self._drawn(tokens, cu_seqlens, targets).to(tokens.device)
            written = ~torch.isnan(sampler)
            judged = chosen_logprobs(dense.hidden, dense.weight, targets[rows], self.chunk, dense.softcap)
            pg = PolicyGradient(targets[rows], sampler.nan_to_num(), judged, section.max_ratio)
            others = ~written
            terms = {"policy": (1.0, Weighted(pg, written.float())),
                     "logits": (float(others.any()), Weighted(term, others.float()))}
            if bool(written.any()):
                self._add("reverse_kl", float((sampler[written] - judged[written]).mean()))
        return head_loss(picked, head, terms, self.chunk, self.softcap).loss_sum

    def _drawn(self, tokens: torch.Tensor, cu_seqlens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """[rows] log-probability each target was drawn with; NaN where the data wrote it."""
        parts = []
        for key, _, supervised in packed_documents(tokens, cu_seqlens, targets):
            if not supervised.any():
                continue
            r = self._written[key]
            values = r.processed[1:][r.loss_mask[1:]]
            parts.append(torch.from_numpy(values if r.own else np.full(len(values), np.nan, np.float32)))
        return torch.cat(parts) if parts else torch.zeros(0)

    def _add(self, name: str, value: float) -> None:
        """Mean over the step's micro-batches."""
        n = self._figures.get(f"_{name}", 0.0)
        self._figures[name] = (self._figures.get(name, 0.0) * n + value) / (n + 1)
        self._figures[f"_{name}"] = n + 1

    def _check_vocabulary(self, recipe: Recipe, tokenizer: Any) -> None:
        teacher = self.teacher.it
        same = teacher.folder == weights_folder(recipe.model.name)
        other = None if same else tokenizer_of(teacher.folder)
        rows = base_model(self.model).get_output_embeddings().weight.shape[0]  # type: ignore[operator]
        shared = share(tokenizer.get_vocab() if other is not None and tokenizer is not None else None,
                       other.get_vocab() if other is not None else None, rows, teacher.head.shape[0])
        if shared.ids is not None or shared.size < rows:
            raise KaruiError(f"on-policy: the student can write tokens that its teacher does not know ({shared.size} of {rows} "
                             "are shared). Take a teacher of the student's family, or objective: distil, which masks them.")


class _Hidden:
    """Keeps the teacher out of `nn.Module`'s sight, so that it is neither trained, nor wrapped, nor saved."""

    def __init__(self, it: Teacher) -> None:
        self.it = it


@torch.no_grad()
def chosen_logprobs(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, chunk: int, softcap: float | None = None
) -> torch.Tensor:
    """[N] log softmax(hidden @ weight.T)[target] in float32, chunk by chunk; the logits may have a soft cap."""
    out = torch.empty(len(hidden), device=hidden.device)
    for start in range(0, len(hidden), chunk):
        logits = capped((hidden[start : start + chunk] @ weight.to(hidden.dtype).T).float(), softcap)
        at = logits.gather(1, targets[start : start + chunk].unsqueeze(1)).squeeze(1)
        out[start : start + chunk] = at - logits.logsumexp(-1)
    return out


@torch.no_grad()
def likeliest(hidden: torch.Tensor, weight: torch.Tensor, chunk: int) -> torch.Tensor:
    """[N] argmax of hidden @ weight.T, chunk by chunk."""
    weight = weight.to(hidden.dtype)
    parts = [(hidden[a : a + chunk] @ weight.T).argmax(-1) for a in range(0, len(hidden), chunk)]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device=hidden.device)


def _most(count: int) -> int:
    """The largest count over all ranks: every rank runs as many micro-batches."""
    from accelerate import PartialState
    from accelerate.utils import gather_object

    return count if PartialState().num_processes == 1 else max(gather_object([count]))


def make(setup: Setup) -> OnPolicy:
    """The objective of a prepared run; turns end where the model's generation config or tokenizer says."""
    config = getattr(base_model(setup.model), "generation_config", None)
    found = getattr(config, "eos_token_id", None)
    ids = [] if found is None else list(found) if isinstance(found, (list, tuple)) else [int(found)]
    own = getattr(setup.tokenizer, "eos_token_id", None)
    end = tuple(sorted({*ids, *([] if own is None else [own])}))
    if not end:
        raise KaruiError("on-policy: neither the model's generation config nor its tokenizer names an end token, so rollouts "
                         "would never end; add eos_token_id to generation_config.json.")
    return OnPolicy(setup.recipe, setup.model, setup.tokenizer, end)
