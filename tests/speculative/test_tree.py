"""Unit: tree masks, depths and paths against brute force over ancestors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from karui.configs.errors import KaruiError
from karui.inference.speculative.lookahead import window_parents
from karui.inference.speculative.tree import Tree, tree_of_choices
from tests.speculative.conftest import CHOICES


@given(st.integers(0, 20), st.integers(0, 2**31))
def test_mask_depth_and_paths_by_brute_force(n: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    parents = [int(rng.integers(-1, i)) for i in range(n)]
    tree = Tree.of(parents)

    def ancestors(row: int) -> set[int]:
        return {0} if row == 0 else {row} | ancestors(parents[row - 1] + 1)

    for row in range(n + 1):
        assert {c for c in range(n + 1) if tree.mask[row, c]} == ancestors(row)
        assert tree.depths[row] == len(ancestors(row)) - 1 == int(tree.mask[row].sum()) - 1
    leaves = [i for i in range(n) if i not in parents]
    assert [path[-1] for path in tree.paths()] == leaves
    assert all({0, *(i + 1 for i in path)} == ancestors(path[-1] + 1) for path in tree.paths())
    assert tree.is_chain == (parents == list(range(-1, n - 1)))


def test_a_chain_is_causal() -> None:
    assert Tree.of([-1, 0, 1, 2]).mask.equal(Tree.of([-1, 0, 1, 2]).mask.new_ones(5, 5).tril())


@pytest.mark.parametrize("parents", [[0], [-2], [-1, 1], [-1, 5]])
def test_a_parent_must_come_first(parents: list[int]) -> None:
    with pytest.raises(KaruiError, match="earlier node"):
        Tree.of(parents)


def test_choices_become_a_tree_and_bad_ones_are_refused() -> None:
    parents, nodes = tree_of_choices([[0], [1], [0, 0], [0, 2], [0, 2, 1]])
    assert parents == [-1, -1, 0, 0, 3]
    assert nodes == [(0, 0), (0, 1), (1, 0), (1, 2), (2, 1)]
    for bad in ([[]], [[0], [0]], [[0, 0]]):
        with pytest.raises(KaruiError, match="topology"):
            tree_of_choices(bad)
    assert len(tree_of_choices(CHOICES)[0]) == 24


@pytest.mark.parametrize(("n", "w"), [(3, 2), (4, 3), (5, 7)])
def test_lookahead_window_sees_what_the_paper_says(n: int, w: int) -> None:
    """Row (level j, column i) sees level 0 up to column i and its own column down to level j, nothing else."""
    tree = Tree.of(window_parents(n, w))
    assert len(tree) == (n - 1) * w - 1

    def row(level: int, column: int) -> int:
        return level * w + column

    for level in range(n - 1):
        for column in range(w):
            seen = {row(0, c) for c in range(column + 1)} | {row(j, column) for j in range(level + 1)}
            assert {c for c in range(len(tree) + 1) if tree.mask[row(level, column), c]} == seen
            assert tree.depths[row(level, column)] == level + column
