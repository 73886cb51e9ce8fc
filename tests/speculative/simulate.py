"""A target without a transformer: next-token distributions that depend on the last two tokens, and an engine loop over it.

`decode` drives a proposer exactly as base.py's docstring tells an engine to; `plain` is the loop without one.
"""

from __future__ import annotations

import numpy as np
import torch

from karui.inference.speculative import verify
from karui.inference.speculative.base import Context, Observation, Proposer, Statistics
from karui.inference.speculative.random import draw, uniform


class Markov:
    """p(next | last two tokens), drawn once; `sharp` makes it more predictable."""

    def __init__(self, vocab: int = 12, seed: int = 0, sharp: float = 2.0, hidden: int = 16) -> None:
        rng = np.random.default_rng(seed)
        self.vocab, self.hidden_size = vocab, hidden
        self.logits = sharp * rng.standard_normal((vocab, vocab, vocab))
        self.features = torch.from_numpy(rng.standard_normal((vocab, vocab, hidden)).astype(np.float32))

    def row(self, tokens: list[int]) -> np.ndarray:
        logits = self.logits[tokens[-2] if len(tokens) > 1 else 0, tokens[-1]]
        p = np.exp(logits - logits.max())
        return p / p.sum()

    def hidden(self, tokens: list[int]) -> torch.Tensor:
        return self.features[tokens[-2] if len(tokens) > 1 else 0, tokens[-1]]


def choose(target: Markov, tokens: list[int], seed: int | None) -> int:
    """The target's own token behind `tokens`: argmax when seed is None, else the draw of that position."""
    p = target.row(tokens)
    return int(p.argmax()) if seed is None else draw(p, uniform(seed, len(tokens)))


def plain(target: Markov, prompt: list[int], count: int, seed: int | None = None) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(choose(target, tokens, seed))
    return tokens[len(prompt):]


def decode(target: Markov, proposer: Proposer, prompt: list[int], count: int, seed: int | None = None, limit: int = 64,
           chunk: int | None = None, statistics: Statistics | None = None) -> list[int]:
    """Prefill (in chunks), then propose - verify - observe until `count` tokens are out."""
    def collect(rows: list[list[int]]) -> dict:
        hidden = target.hidden(rows[-1]) if proposer.needs_hidden else None
        aux = torch.stack([target.hidden(r).repeat(len(proposer.aux_layers)) for r in rows]) if proposer.aux_layers else None
        return {"hidden": hidden, "aux": aux}

    tokens = list(prompt)
    chunk = chunk or len(prompt)
    for at in range(0, len(prompt), chunk):
        part = prompt[at:at + chunk]
        last = at + len(part) == len(prompt)
        emitted = [choose(target, tokens, seed)] if last else []
        proposer.observe(Observation(start=at, rows=part, emitted=emitted,
                                     **collect([prompt[:at + i + 1] for i in range(len(part))])))
        tokens += emitted
    while len(tokens) - len(prompt) < count:
        distribution = None if seed is None else lambda logits: np.asarray(logits.double().softmax(-1))
        left = count - (len(tokens) - len(prompt)) - 1
        draft = proposer.propose(Context(tokens=tokens, limit=limit, seed=seed or 0, distribution=distribution, depth=left))
        tree = draft.tree()
        assert len(draft) <= limit and (proposer.__class__.__name__ == "LookaheadProposer" or max(tree.depths) <= max(left, 0))
        paths = [tokens, *([*tokens, *(draft.tokens[n] for n in tree.path(i))] for i in range(len(draft)))]
        row_tokens = [choose(target, path, seed) for path in paths]
        if draft.q is None:
            verdict = verify.walk(draft.tokens, draft.parents, row_tokens)
        else:
            assert seed is not None and draft.parents is None
            verdict = verify.verify_chain(np.stack([target.row(p) for p in paths]), draft.tokens, draft.q, seed, len(tokens))
        if statistics is not None and len(draft):
            statistics.record(max(tree.depths), verdict.num_accepted)
        rows = [tokens[-1], *verdict.tokens[:-1]]
        proposer.observe(Observation(start=len(tokens) - 1, rows=rows, emitted=verdict.tokens,
                                     draft=draft if len(draft) else None, row_tokens=row_tokens if len(draft) else None,
                                     **collect([[*tokens[:-1], *rows[:i + 1]] for i in range(len(rows))])))
        tokens += verdict.tokens
    return tokens[len(prompt):][:count]
