"""Speculation inside the engine: who drafts, what the verdict is, what it cost. The guessing itself lives in `speculative/`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from karui.configs.errors import UnsupportedError
from karui.inference.requests import SamplingParams
from karui.inference.sampling import distribution, sample
from karui.inference.scheduler import Scheduler
from karui.inference.scheduler import Sequence as Tokens
from karui.inference.speculative.adaptive import SHARE, Controller
from karui.inference.speculative.base import Context, Draft, Observation, Proposer, Statistics
from karui.inference.speculative.config import SpeculationConfig
from karui.inference.speculative.verify import Verdict, typical_acceptance, verify_chain, verify_tree, walk

if TYPE_CHECKING:
    import torch

    from karui.inference.live import Live


class Speculation:
    """One engine's speculation.

    Args:
        config: method, adaptivity, acceptance rule.
        new_proposer: makes one proposer per continuation.
    """

    def __init__(self, config: SpeculationConfig, new_proposer: Any) -> None:
        self.config, self._new = config, new_proposer
        self.statistics = Statistics()
        self._controllers: dict[int, Controller] = {}
        probe: Proposer = new_proposer()
        self.needs_hidden, self.aux_layers = probe.needs_hidden, tuple(probe.aux_layers)
        self.native: dict[str, Any] | None = getattr(probe, "native", None)
        self._probe = probe  # `native` points into it
        probe.reset()

    @property
    def controllers(self) -> dict[int, Controller]:
        """Per power of two of decoding sequences: whether drafting pays there."""
        return self._controllers

    def check_chains(self, kv_dtype: str) -> None:
        """Raise `UnsupportedError` when drafts may be trees: an accepted branch would have to be moved, and blocks coded anew."""
        c = self.config
        if c.method in ("medusa", "lookahead") or (c.method == "eagle3" and c.width != 1):
            asked = c.method if c.method != "eagle3" else f"eagle3 with width={c.width}"
            raise UnsupportedError(f"kv_dtype {kv_dtype!r} goes with drafts that are chains: ngram, draft, or eagle3 with "
                                   f"width=1, not {asked}.")

    def check_recurrent(self) -> None:
        """Raise `UnsupportedError` when drafts may be trees: rows of a recurrent layer follow one another."""
        if self.config.method not in ("ngram", "draft"):
            raise UnsupportedError(f"speculation {str(self.config)!r} does not go with recurrent layers, whose rows cannot "
                                   "branch; use ngram or draft.")

    def attach(self, live: Live) -> None:
        live.proposer = self._new()
        live.completion.lossy = self.typical(live.params)

    def typical(self, params: SamplingParams) -> bool:
        """Whether drafts of such a request are accepted by the lossy rule."""
        return self.config.typical or params.typical_acceptance

    def propose(self, scheduler: Scheduler, max_context: int) -> None:
        """Give every decoding sequence a draft that fits into the step's budget, or none."""
        ready = [s for s in scheduler.running if _decodes(s)]
        if not ready:
            return
        drafting = self.drafts(len(ready))
        room = scheduler.max_tokens // len(ready) - 1
        for s in ready:
            live: Live = s.owner
            s.draft = None
            if not drafting or live.proposer is None:
                continue
            left = live.group.max_tokens - len(live.completion.token_ids) - 1
            limit = min(room, max_context - len(s.tokens) - 1)
            if limit > 0 and left > 0:
                draft = live.proposer.propose(Context(s.tokens, limit, live.seed, _sampler(live), left))
                s.draft = draft if len(draft) else None

    def drafts(self, sequences: int) -> bool:
        """Whether so many decoding sequences draft in the coming step."""
        return not self.config.adaptive or self._controller(sequences).should_draft()

    def plain_steps(self, sequences: int) -> int:
        """Coming steps in which so many decoding sequences draft nothing for sure."""
        return self._controller(sequences).resting if self.config.adaptive else 0

    def verify(self, live: Live, draft: Draft, logits: np.ndarray | None,
               best: Sequence[int]) -> tuple[Verdict, list[int], list[float]]:
        """What the target says to a draft.

        Args:
            logits: [1 + n, V] rows of the root and the nodes, None when `best`, their argmaxes, are all it takes.
        Returns:
            the verdict, the target's token after each row, and the processed probability of each emitted token.
        """
        params, s, tree = live.params, live.sequence, draft.tree()
        position, depths, parents = len(s.tokens), tree.depths, draft.parents
        if logits is None:
            return walk(draft.tokens, parents, best), list(best), []
        prompt, output = live.group.prompt, live.output_tokens

        def said(row: int) -> list[int]:  # the drafted tokens from the root to this row
            return [draft.tokens[n] for n in tree.path(row - 1)] if params.penalized else []

        typical = self.typical(params)
        if draft.q is None and not typical:
            drawn = [sample(logits[r], params, live.seed, position + depths[r], prompt, [*output, *said(r)]) if params.penalized
                     else sample(logits[r], params, live.seed, position + depths[r]) for r in range(len(logits))]
            row_tokens = [token for token, _ in drawn]
            verdict = walk(draft.tokens, parents, row_tokens)
            return verdict, row_tokens, [drawn[r][1] for r in rows_of(verdict)]
        p = np.stack([distribution(logits[r], params, prompt, [*output, *said(r)]) for r in range(len(logits))])
        row_tokens = [int(t) for t in p.argmax(-1)]
        if typical:
            row_tokens = [sample(logits[r], params, live.seed, position + depths[r], prompt, [*output, *said(r)])[0]
                          for r in range(len(logits))]
            verdict = typical_acceptance(p, draft.tokens, parents, row_tokens)
        elif parents is None:
            verdict = verify_chain(p, draft.tokens, draft.q, live.seed, position)
        else:
            verdict = verify_tree(p, draft.tokens, parents, draft.q, live.seed, position)
        return verdict, row_tokens, [float(p[r, t]) for r, t in zip(rows_of(verdict), verdict.tokens, strict=True)]

    def observe(self, live: Live, start: int, rows: Sequence[int], emitted: Sequence[int], draft: Draft | None,
                row_tokens: Sequence[int] | None, hidden: torch.Tensor | None, aux: torch.Tensor | None) -> None:
        if live.proposer is not None:
            live.proposer.observe(Observation(start, rows, emitted, draft, row_tokens, hidden, aux))

    def timed(self, sequences: int, verdicts: Sequence[tuple[int, int]], seconds: float) -> None:
        """A step over so many sequences took `seconds`; `verdicts` are (depth, accepted) of its drafts.

        sequences: 0 for a step with prompt chunks, whose time tells nothing.
        """
        for depth, accepted in verdicts:
            self.statistics.record(depth, accepted)
        if not sequences:
            return
        controller = self._controller(sequences)
        if not verdicts:
            controller.record_plain(seconds)
        for depth, accepted in verdicts:
            controller.record_verified(depth, accepted, seconds)

    def _controller(self, sequences: int) -> Controller:
        # Native look-ups cost nothing and rounds weigh each by itself, so resting saves little there.
        share = 0.1 if self.native is not None and self.config.method == "ngram" else SHARE
        return self._controllers.setdefault(1 << (sequences - 1).bit_length(), Controller(share=share))


def rows_of(verdict: Verdict) -> list[int]:
    """The rows whose logits decided the emitted tokens: the root's, then each accepted node's."""
    return [0, *(node + 1 for node in verdict.path)]


def _decodes(s: Tokens) -> bool:
    return not s.held and not s.recompute and s.num_pending == 1 and len(s.tokens) > s.num_prompt


def _sampler(live: Live) -> Any:
    """What a draft is drawn with; None: it is the likeliest tokens. So it is where there is a seed, though fewer are accepted:
    whether there was a draft, which timings decide, would else change what the seed brings."""
    if live.params.greedy or live.params.seed is not None:
        return None
    return lambda logits: distribution(np.asarray(logits.cpu()), live.params, live.group.prompt, live.output_tokens)
