"""A proposer looks at one sequence and guesses what comes next; the engine verifies, so no guess can change a result.

How an engine drives a proposer (one proposer per request, made by `factory.Speculator`):

    1. After every forward over the request (each prefill chunk and each decode or verify step), call `observe` with the
       rows whose KV became final and the tokens that were emitted.
    2. When the request decodes, call `propose`. An empty draft means a plain step.
    3. Run the root (the last emitted token, whose KV is not written yet) and the draft's nodes as one query of 1 + n rows:
       tokens [root, *draft.tokens], positions root + `draft.tree().depths`, mask `draft.tree().mask` (None for a chain).
    4. Draw the target's token for every row with the request's own sampler, keyed by (seed, position of the row + 1), and
       call `verify.walk`; a draft with `q` goes through `verify.verify_chain` instead, with the processed distributions.
    5. The accepted nodes' KV lie at rows 1 + path[i]; `runner.copy_slots` compacts them behind the root (a chain needs none).

Because step 4 draws what plain decoding would have drawn, a draft without `q` gives token for token the plain output, greedy
and sampled alike. A draft with `q` (draft model, sampled without a seed) keeps the distribution, not the individual tokens.

Where the runner can decode several rounds in one call (`NativeRunner.decode`), a proposer that has `native` (its method and its
fields for kernels/native/rounds.h) hands its state over with `lend` and gets it back with `take_back`: steps 1 to 5 happen there.

A proposer's attributes tell the engine what to collect: `needs_hidden` (StepBatch.want_hidden) and `aux_layers`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
import torch

from karui.inference.speculative.tree import Tree


@dataclass(frozen=True)
class Draft:
    """Guesses behind the last emitted token (the root).

    Attributes:
        tokens: [n] the guessed token of each node.
        parents: [n] index of each node's parent, -1 for the root, always smaller than the node's own index; None for a chain.
        q: [n, V] the distribution each node was drawn from, or None when the guess is deterministic (q = 1).
    """

    tokens: list[int]
    parents: list[int] | None = None
    q: np.ndarray | None = None

    @staticmethod
    def of(tokens: list[int], parents: list[int]) -> Draft:
        """A deterministic draft; what is a chain is marked as one."""
        return Draft(tokens=tokens, parents=None if parents == list(range(-1, len(parents) - 1)) else parents)

    def __len__(self) -> int:
        return len(self.tokens)

    def tree(self) -> Tree:
        """The tree over 1 + n rows, the root being row 0; built once."""
        return self._tree

    @cached_property
    def _tree(self) -> Tree:
        return Tree.of(self.parents if self.parents is not None else list(range(-1, len(self.tokens) - 1)))


NOTHING = Draft(tokens=[])


@dataclass(frozen=True)
class Context:
    """What `propose` may look at.

    Attributes:
        tokens: the whole sequence, prompt and output; the last one is the root. Not to be mutated or kept.
        limit: most nodes the engine will verify in this step (its budget and the context's length considered).
        seed: the request's seed.
        distribution: the request's own sampler as a function from raw logits [V] to probabilities [V] (temperature, top-k,
            top-p); None when the request is greedy or has a seed.
        depth: tokens that can still be accepted before the request's own limit; a deeper draft is wasted work.
    """

    tokens: Sequence[int]
    limit: int
    seed: int = 0
    distribution: Callable[[torch.Tensor], np.ndarray] | None = None
    depth: int = 1 << 30


@dataclass(frozen=True)
class Observation:
    """What one forward settled for a request.

    Attributes:
        start: position in the sequence of `rows[0]`.
        rows: tokens whose KV became final: a prompt chunk, or the root and the accepted nodes.
        emitted: tokens this step appended to the sequence; empty for a prefill chunk that is not the last.
        draft: the draft that was verified, None for a plain step or prefill.
        row_tokens: the target's token after each verified row (root first, then the nodes); None without a draft.
        hidden: [H] final hidden state of `rows[-1]`, when `needs_hidden`.
        aux: [len(rows), len(aux_layers) * H] residual streams, when `aux_layers`.
    """

    start: int
    rows: Sequence[int]
    emitted: Sequence[int]
    draft: Draft | None = None
    row_tokens: Sequence[int] | None = None
    hidden: torch.Tensor | None = None
    aux: torch.Tensor | None = None


class Proposer(Protocol):
    """One request's guesser. Its state is its own; `reset` forgets everything (preemption by recompute, new weights)."""

    needs_hidden: bool
    aux_layers: tuple[int, ...]

    def propose(self, context: Context) -> Draft:
        """Up to `context.limit` nodes; an empty draft when there is nothing worth guessing."""

    def observe(self, seen: Observation) -> None:
        """Learn what was settled."""

    def reset(self) -> None:
        """Forget the sequence and free what it held."""


@dataclass
class Statistics:
    """Counts over verified drafts; mutable, one per request or summed over an engine."""

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    by_depth: list[int] = field(default_factory=list)

    def record(self, drafted: int, accepted: int) -> None:
        """One verification of a draft `drafted` deep of which `accepted` tokens were right."""
        self.drafts += 1
        self.drafted += drafted
        self.accepted += accepted
        self.emitted += accepted + 1
        while len(self.by_depth) < accepted:
            self.by_depth.append(0)
        for depth in range(accepted):
            self.by_depth[depth] += 1

    @property
    def acceptance(self) -> float:
        """Accepted share of drafted tokens; 0 before any draft."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens a verification emitted, the target's own included; 1 before any draft."""
        return self.emitted / self.drafts if self.drafts else 1.0
