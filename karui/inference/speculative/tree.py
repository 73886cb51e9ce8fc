"""The shape of a draft: parents -> attention mask, positions, root-to-leaf paths (SpecInfer, arXiv 2305.09781, section 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from karui.configs.errors import KaruiError


@dataclass(frozen=True)
class Tree:
    """A tree over 1 + n rows; row 0 is the root (the last settled token), row i + 1 is node i of the draft.

    Attributes:
        parents: [n] parent node of each node, -1 for the root.
        depths: [1 + n] edges from the root; a row's position in the sequence is the root's plus this.
        children: per row, the nodes that hang from it, in draft order.
    """

    parents: tuple[int, ...]
    depths: tuple[int, ...]
    children: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(parents: Sequence[int]) -> Tree:
        """Build from parents; each must come before its child. Raises `KaruiError` otherwise."""
        depths = [0]
        children: list[list[int]] = [[] for _ in range(len(parents) + 1)]
        for node, parent in enumerate(parents):
            if not -1 <= parent < node:
                raise KaruiError(f"draft tree: node {node} names parent {parent}; a parent must be -1 (root) or an earlier node.")
            depths.append(depths[parent + 1] + 1)
            children[parent + 1].append(node)
        return Tree(tuple(parents), tuple(depths), tuple(map(tuple, children)))

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def is_chain(self) -> bool:
        """Every node hangs from the one before it, so the ordinary causal mask is the tree's mask."""
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    @property
    def mask(self) -> torch.Tensor:
        """[1 + n, 1 + n] bool: row i sees itself and its ancestors. eye; row_i |= row_parent(i)."""
        rows = [[True] + [False] * len(self.parents)]
        for node, parent in enumerate(self.parents):
            rows.append(rows[parent + 1].copy())
            rows[-1][node + 1] = True
        return torch.tensor(rows)

    def path(self, node: int) -> list[int]:
        """Nodes from the root's child down to `node`, both included; empty for -1."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def paths(self) -> list[list[int]]:
        """One root-to-leaf path of nodes per leaf, in draft order."""
        return [self.path(node) for node in range(len(self.parents)) if not self.children[node + 1]]


def tree_of_choices(choices: Sequence[Sequence[int]]) -> tuple[list[int], list[tuple[int, int]]]:
    """A fixed topology in Medusa's spelling: each choice is the ranks taken at depth 0, 1, ... .

    Returns:
        parents [n] and, per node, (depth, rank): the node holds head `depth`'s `rank`-th best token.
    Raises:
        KaruiError: a choice is empty, repeated, or its prefix is not itself a choice.
    """
    ordered = sorted((tuple(c) for c in choices), key=lambda c: (len(c), c))
    index: dict[tuple[int, ...], int] = {}
    parents: list[int] = []
    nodes: list[tuple[int, int]] = []
    for choice in ordered:
        if not choice or choice in index or (len(choice) > 1 and choice[:-1] not in index):
            raise KaruiError(f"tree topology: {list(choice)} is empty, repeated, or its prefix {list(choice[:-1])} is missing.")
        parents.append(index[choice[:-1]] if len(choice) > 1 else -1)
        index[choice] = len(nodes)
        nodes.append((len(choice) - 1, choice[-1]))
    return parents, nodes
