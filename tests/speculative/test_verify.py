"""Unit and statistical: the verifier leaves the target's distribution untouched; greedy is equality; seeds are fixed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from karui.inference.speculative.adaptive import expected_tokens
from karui.inference.speculative.random import DRAFT, draw, uniform
from karui.inference.speculative.tree import Tree
from karui.inference.speculative.verify import typical_acceptance, verify_chain, verify_tree, walk


def distributions(rows: int, vocab: int, seed: int, sharp: float = 1.0) -> np.ndarray:
    logits = sharp * np.random.default_rng(seed).standard_normal((rows, vocab))
    p = np.exp(logits)
    return p / p.sum(-1, keepdims=True)


def chi_square(counts: np.ndarray, p: np.ndarray) -> float:
    """Chi-square per degree of freedom; cells that expect fewer than 5 are pooled."""
    expected = counts.sum() * p
    small = expected < 5
    observed = np.append(counts[~small], counts[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    keep = expected > 0
    return float((((observed - expected) ** 2)[keep] / expected[keep]).sum() / max(keep.sum() - 1, 1))


def test_uniforms_are_uniform_and_keyed_by_position_and_stream() -> None:
    numbers = np.array([uniform(3, i) for i in range(20_000)])
    assert numbers.min() >= 0.0 and numbers.max() < 1.0
    assert chi_square(np.histogram(numbers, 50, (0, 1))[0].astype(float), np.full(50, 1 / 50)) < 1.6
    pairs = np.histogram2d(numbers[:-1], numbers[1:], 10, ((0, 1), (0, 1)))[0].ravel()
    assert chi_square(pairs, np.full(100, 0.01)) < 1.5
    assert uniform(3, 5) == uniform(3, 5)
    assert len({uniform(s, p, k) for s, p, k in itertools.product(range(9), range(9), range(4))}) == 9 * 9 * 4


@given(st.integers(1, 30), st.integers(0, 10_000), st.floats(0, 1, exclude_max=True))
def test_draw_never_returns_an_impossible_token(vocab: int, seed: int, u: float) -> None:
    p = distributions(1, vocab, seed)[0]
    p[np.random.default_rng(seed).random(vocab) < 0.5] = 0.0
    if p.sum() == 0:
        p[seed % vocab] = 0.25
    assert p[draw(p, u)] > 0
    assert p[draw(p, 1.0)] > 0


@pytest.mark.parametrize("sharp", [0.3, 3.0])
@pytest.mark.parametrize("vocab", [3, 17])
def test_chain_keeps_the_joint_distribution(vocab: int, sharp: float) -> None:
    """Two drafted tokens: the first token, and the second given the first, are distributed as the target's (memoryless) rows."""
    p, q = distributions(3, vocab, 1, sharp), distributions(2, vocab, 2, sharp)
    first, second = np.zeros(vocab), np.zeros(vocab)
    runs = 20_000
    for seed in range(runs):
        draft = [draw(q[i], uniform(seed, 100 + i, DRAFT)) for i in range(2)]
        tokens = verify_chain(p, draft, q, seed, 100).tokens
        first[tokens[0]] += 1
        if len(tokens) > 1:
            second[tokens[1]] += 1
    assert chi_square(first, p[0]) < 2.3
    assert chi_square(second, p[1]) < 2.3
    assert 0.5 * np.abs(first / runs - p[0]).sum() < 0.015      # total variation; 1/sqrt(runs) scale
    # The proposals themselves are far from p, so a verifier that accepted all would fail the bound.
    assert 0.5 * np.abs(q[0] - p[0]).sum() > 0.05


def test_chain_acceptance_is_one_minus_total_variation_and_tokens_follow_the_formula() -> None:
    k, runs = 4, 20_000
    p, q = distributions(1, 8, 5)[0], distributions(1, 8, 6)[0]
    a = float(np.minimum(p, q).sum())
    target, proposal = np.tile(p, (k + 1, 1)), np.tile(q, (k, 1))
    emitted = 0
    for seed in range(runs):
        draft = [draw(q, uniform(seed, i, DRAFT)) for i in range(k)]
        emitted += len(verify_chain(target, draft, proposal, seed, 0).tokens)
    assert emitted / runs == pytest.approx(expected_tokens(a, k), rel=0.02)
    assert expected_tokens(1.0, k) == k + 1 and expected_tokens(0.0, k) == 1


def test_same_distributions_accept_everything() -> None:
    p = distributions(4, 9, 7)
    for seed in range(500):
        draft = [draw(p[i], uniform(seed, i, DRAFT)) for i in range(3)]
        assert verify_chain(p, draft, p[:3], seed, 0).tokens[:3] == draft


@pytest.mark.parametrize("chain", [True, False])
def test_deterministic_drafts_give_the_plain_draws(chain: bool) -> None:
    """q = 1: not only the distribution but each token is what the position's own uniform gives."""
    p = distributions(4, 6, 8)
    for seed in range(300):
        own = [draw(p[i], uniform(seed, 40 + i)) for i in range(4)]
        draft = [int(t) for t in np.random.default_rng(seed).integers(0, 6, 3)]
        verdict = verify_chain(p, draft, None, seed, 40) if chain else verify_tree(p, draft, [-1, 0, 1], None, seed, 40)
        assert verdict.tokens == own[:len(verdict.tokens)]
        assert verdict.num_accepted == 3 or draft[verdict.num_accepted] != own[verdict.num_accepted]


def without_replacement(q: np.ndarray, count: int, seed: int, key: int) -> list[int]:
    q, out = q.copy(), []
    for lane in range(count):
        out.append(draw(q, uniform(seed, key, DRAFT, lane)))
        q[out[-1]] = 0.0
    return out


@pytest.mark.parametrize("siblings", [1, 2, 3])
def test_tree_keeps_the_distribution_with_sampled_siblings(siblings: int) -> None:
    vocab, runs = 5, 12_000
    p_root, q_root = distributions(1, vocab, 10, 1.5)[0], distributions(1, vocab, 11, 1.5)[0]
    p_by_token, q_by_token = distributions(vocab, vocab, 12, 1.5), distributions(vocab, vocab, 13, 1.5)
    joint, accepted = np.zeros((vocab, vocab)), 0
    for seed in range(runs):
        first = without_replacement(q_root, siblings, seed, 0)
        tokens, parents, q = list(first), [-1] * siblings, [q_root] * siblings
        for node, token in enumerate(first):
            for child in without_replacement(q_by_token[token], 2, seed, 1000 + node):
                tokens.append(child), parents.append(node), q.append(q_by_token[token])
        p = np.stack([p_root, *(p_by_token[t] for t in tokens)])
        verdict = verify_tree(p, tokens, parents, np.stack(q), seed, 7)
        accepted += verdict.num_accepted
        out = verdict.tokens
        if len(out) == 1:       # what plain decoding would do next, so that the joint can be compared
            out = [*out, draw(p_by_token[out[0]], uniform(seed, 8, 9))]
        joint[out[0], out[1]] += 1
    expected = p_root[:, None] * p_by_token
    assert chi_square(joint.ravel(), expected.ravel()) < 1.8
    assert accepted > runs * 0.5       # it does accept


def random_tree(rng: np.random.Generator, n: int, vocab: int) -> tuple[list[int], list[int]]:
    parents = [int(rng.integers(-1, i)) for i in range(n)]
    return [int(t) for t in rng.integers(0, vocab, n)], parents


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 12), st.integers(1, 3), st.integers(0, 2**31))
def test_walk_is_the_longest_matching_path(n: int, vocab: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens, parents = random_tree(rng, n, vocab)
    rows = [int(t) for t in rng.integers(0, vocab, n + 1)]
    verdict = walk(tokens, parents, rows)
    tree = Tree.of(parents)

    def agrees(path: list[int]) -> bool:
        return all(tokens[node] == rows[parents[node] + 1] for node in path)

    longest = max((len(tree.path(i)) for i in range(n) if agrees(tree.path(i))), default=0)
    assert verdict.num_accepted == longest and agrees(verdict.path)
    assert verdict.tokens[:-1] == [tokens[i] for i in verdict.path]
    assert verdict.tokens[-1] == rows[verdict.path[-1] + 1 if verdict.path else 0]


@given(st.lists(st.integers(0, 2), max_size=8), st.integers(0, 2**31))
def test_walk_of_a_chain_equals_walk_of_its_tree(draft: list[int], seed: int) -> None:
    rows = [int(t) for t in np.random.default_rng(seed).integers(0, 3, len(draft) + 1)]
    assert walk(draft, None, rows) == walk(draft, list(range(-1, len(draft) - 1)), rows)


def test_typical_acceptance_follows_its_threshold_and_is_not_greedy() -> None:
    p = np.array([[0.55, 0.40, 0.05], [0.1, 0.1, 0.8], [0.34, 0.33, 0.33]])
    entropy = -(p * np.log(p)).sum(-1)
    threshold = np.minimum(0.09, 0.3 * np.exp(-entropy))
    assert p[0, 1] > threshold[0] and p[0, 2] < threshold[0]
    # Token 1 is not the argmax, and it is accepted: that is the loss the docstring speaks of.
    assert typical_acceptance(p, [1, 2], None, [0, 2, 0]).tokens == [1, 2, 0]
    assert typical_acceptance(p, [2, 2], None, [0, 2, 0]).tokens == [0]
    assert walk([1, 2], None, [0, 2, 0]).tokens == [0]
