"""The lossless verifier: what the target would have said decides; a draft only decides how much of it is learnt in one forward.

`walk` serves every deterministic draft, chain or tree, greedy or sampled. `verify_chain` and `verify_tree` take the
distributions a draft was sampled from (Leviathan et al., arXiv 2211.17192, algorithm 1; siblings as in SpecInfer,
arXiv 2305.09781, algorithm 2). `typical_acceptance` is Medusa's rule and is LOSSY.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from karui.inference.speculative.random import ACCEPT, RESIDUAL, SAMPLE, draw, uniform
from karui.inference.speculative.tree import Tree


@dataclass(frozen=True)
class Verdict:
    """path: accepted nodes from the root down; tokens: what is emitted, the accepted tokens and one of the target's own."""

    path: list[int]
    tokens: list[int]

    @property
    def num_accepted(self) -> int:
        return len(self.path)


def walk(draft: Sequence[int], parents: Sequence[int] | None, row_tokens: Sequence[int]) -> Verdict:
    """Follow the target's own tokens as deep as the draft holds them; integers only, no work over the vocabulary.

    Args:
        draft: [n] drafted tokens.
        parents: [n] tree, or None for a chain.
        row_tokens: [1 + n] the token the target puts after each row (row 0 is the root): its argmax, or its draw under the
            uniform of that position. Either way the result is what plain decoding would emit.
    """
    if parents is None:
        count = 0
        while count < len(draft) and draft[count] == row_tokens[count]:
            count += 1
        return Verdict(list(range(count)), [*draft[:count], row_tokens[count]])
    # Two nodes may hold the same prefix (a lookahead window beside its n-grams), so every match is followed, not the first.
    best, depth = -1, 0
    matched = {-1: 0}
    for node, parent in enumerate(parents):
        if parent in matched and draft[node] == row_tokens[parent + 1]:
            matched[node] = matched[parent] + 1
            if matched[node] > depth:
                best, depth = node, matched[node]
    path: list[int] = []
    node = best
    while node >= 0:
        path.append(node)
        node = parents[node]
    path.reverse()
    return Verdict(path, [*(draft[n] for n in path), row_tokens[best + 1]])


def verify_chain(p: np.ndarray, draft: Sequence[int], q: np.ndarray | None, seed: int, position: int) -> Verdict:
    """Accept with probability min(1, p/q); at the first rejection draw from norm(max(p - q, 0)); a bonus draw if all pass.

    Args:
        p: [k + 1, V] the target's distributions after temperature, top-k and top-p; row i decides draft[i].
        draft: [k] drafted tokens.
        q: [k, V] what each was drawn from, or None for deterministic drafts (q = 1).
        seed, position: the request's seed and the sequence position of draft[0]; all randomness comes from them.
    """
    if q is None:
        return walk(draft, None, [draw(p[i], uniform(seed, position + i)) for i in range(len(draft) + 1)])
    for i, token in enumerate(draft):
        # u * q < p rather than u < p / q: a drawn token has q > 0, but p / q may overflow.
        if uniform(seed, position + i, ACCEPT) * q[i, token] < p[i, token]:
            continue
        own = draw(_residual(p[i], q[i]), uniform(seed, position + i, RESIDUAL))
        return Verdict(list(range(i)), [*draft[:i], own])
    k = len(draft)
    return Verdict(list(range(k)), [*draft, draw(p[k], uniform(seed, position + k, SAMPLE))])


def verify_tree(p: np.ndarray, draft: Sequence[int], parents: Sequence[int], q: np.ndarray | None,
                seed: int, position: int) -> Verdict:
    """Recursive rejection over siblings that were drawn without replacement; lossless for any tree.

    At each row the siblings are tried in order: one is accepted with probability min(1, p/q); a rejection replaces p by
    norm(max(p - q, 0)) and takes the token out of q. When none is left, the token comes from what remains of p.

    Args:
        p: [1 + n, V] target distributions, row 0 for the root.
        draft, parents: [n] the tree.
        q: [n, V] the parent's draft distribution each node was drawn from (siblings share it, before removal of the earlier
            ones); None for deterministic trees, where drawing from p and looking for the token among the children is the same.
        seed, position: as in `verify_chain`; position is that of the root's children.
    """
    tree = Tree.of(parents)
    if q is None:
        return walk(draft, parents, [draw(p[row], uniform(seed, position + tree.depths[row])) for row in range(len(p))])
    path: list[int] = []
    row = 0
    while True:
        at = position + tree.depths[row]
        target = np.asarray(p[row], dtype=np.float64)
        accepted = -1
        proposal = np.array(q[tree.children[row][0]], dtype=np.float64) if tree.children[row] else None
        for lane, node in enumerate(tree.children[row]):
            assert proposal is not None
            token = draft[node]
            if uniform(seed, at, ACCEPT, lane) * proposal[token] < target[token]:
                accepted = node
                break
            target = _residual(target, proposal)
            proposal[token] = 0.0
            proposal /= max(proposal.sum(), 1e-300)
        if accepted < 0:
            stream = RESIDUAL if tree.children[row] else SAMPLE
            return Verdict(path, [*(draft[n] for n in path), draw(target, uniform(seed, at, stream))])
        path.append(accepted)
        row = accepted + 1


def _residual(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """norm(max(p - q, 0)) in float64; p itself when rounding leaves nothing (p == q, where a rejection has probability 0)."""
    rest = np.maximum(np.asarray(p, dtype=np.float64) - q, 0.0)
    total = rest.sum()
    return rest / total if total > 0 else np.asarray(p, dtype=np.float64)


def typical_acceptance(p: np.ndarray, draft: Sequence[int], parents: Sequence[int] | None, row_tokens: Sequence[int],
                       epsilon: float = 0.09, delta: float = 0.3) -> Verdict:
    """Medusa's typical acceptance (arXiv 2401.10774, section 2.3.1). LOSSY: the output is not distributed as the target's.

    A node is accepted when p(x) > min(epsilon, delta * exp(-H(p))) under its parent's row; the longest accepted path wins, the
    first in draft order on a tie. With a greedy request too, a merely plausible draft replaces the target's argmax.

    Args:
        p: [1 + n, V] target distributions at the request's temperature.
        row_tokens: [1 + n] the target's own token after each row, used behind the accepted path.
    """
    parents = list(range(-1, len(draft) - 1)) if parents is None else parents
    tree = Tree.of(parents)
    p = np.asarray(p, dtype=np.float64)
    entropy = -(p * np.log(np.where(p > 0, p, 1.0))).sum(-1)
    threshold = np.minimum(epsilon, delta * np.exp(-entropy))
    accepted, best = {-1}, -1
    for node, parent in enumerate(parents):
        if parent in accepted and p[parent + 1, draft[node]] > threshold[parent + 1]:
            accepted.add(node)
            if tree.depths[node + 1] > tree.depths[best + 1]:
                best = node
    path = tree.path(best)
    return Verdict(path, [*(draft[n] for n in path), row_tokens[best + 1]])
