"""Medusa heads (Cai et al., arXiv 2401.10774): head i reads the last hidden state and guesses the token i + 2 ahead.

The hidden state that produced the root also feeds the heads, so a whole tree of candidates costs a few matrix products and
no extra forward of the target. Verification is the lossless walk; typical acceptance is the engine's choice and lossy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from karui.configs.errors import CorruptError, KaruiError
from karui.inference.speculative.base import NOTHING, Context, Draft, Observation
from karui.inference.speculative.tree import tree_of_choices

# A chain of the best tokens with the likeliest side branches, 24 nodes over four heads.
DEFAULT_CHOICES: tuple[tuple[int, ...], ...] = (
    (0,), (1,), (2,), (3,), (4,), (0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (2, 0), (3, 0),
    (0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 2, 0), (1, 0, 0), (2, 0, 0),
    (0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 1, 0), (0, 1, 0, 0))


def likeliest(choices: Sequence[tuple[int, ...]], count: int) -> tuple[tuple[int, ...], ...]:
    """The `count` choices most likely to be accepted, if a head's guess of rank r is right with chance 1 / (2 (r + 1)^1.5).

    A choice is never likelier than its parent, so what is kept is a tree.
    """
    chances = {c: math.prod(0.5 * (rank + 1) ** -1.5 for rank in c) for c in choices}
    return tuple(sorted(choices, key=lambda c: -chances[c])[:count])


class ResBlock(nn.Module):
    """x + SiLU(W x + b), [.., H] -> [.., H]. W starts at zero, so an untrained head is the base's own lm_head."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)
        nn.init.zeros_(self.linear.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.silu(self.linear(x))


class MedusaHeads(nn.Module):
    """`num_heads` times ResBlock then a vocabulary projection. Weight names are Medusa's: `i.0.linear.weight`, `i.1.weight`."""

    def __init__(self, num_heads: int, hidden: int, vocab: int) -> None:
        super().__init__()
        self.hidden_size, self.vocab_size = hidden, vocab
        self.heads = nn.ModuleList(
            nn.Sequential(ResBlock(hidden), nn.Linear(hidden, vocab, bias=False)) for _ in range(num_heads))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [.., H] -> logits [num_heads, .., V]."""
        return torch.stack([head(hidden) for head in self.heads])

    def tensors(self) -> dict[str, torch.Tensor]:
        """Weights by Medusa's names, ready for safetensors."""
        return {name.removeprefix("heads."): value.detach().contiguous() for name, value in self.state_dict().items()}

    @staticmethod
    def from_tensors(tensors: Mapping[str, torch.Tensor]) -> MedusaHeads:
        """Build from weights by Medusa's names. Raises `CorruptError` when heads are missing or shapes disagree."""
        count = len({name.split(".")[0] for name in tensors})
        try:
            vocab, hidden = tensors["0.1.weight"].shape
            heads = MedusaHeads(count, hidden, vocab)
            heads.load_state_dict({f"heads.{name}": value.float() for name, value in tensors.items()})
        except (KeyError, RuntimeError, ValueError) as error:
            raise CorruptError(f"medusa heads: expected i.0.linear.weight, i.0.linear.bias and i.1.weight for heads 0 .. "
                               f"{max(count - 1, 0)}; {error}") from error
        return heads.eval()


class MedusaProposer:
    """Fills a fixed tree with the heads' best tokens."""

    needs_hidden = True
    aux_layers: tuple[int, ...] = ()

    def __init__(self, heads: MedusaHeads, choices: Sequence[Sequence[int]] = DEFAULT_CHOICES) -> None:
        self.heads = heads
        num_heads = len(heads.heads)
        kept = [c for c in choices if len(c) <= num_heads]
        self.parents, self.nodes = tree_of_choices(kept)
        if not self.nodes:
            raise KaruiError("medusa: the tree topology is empty.")
        self.width = max(rank for _, rank in self.nodes) + 1
        self.reset()

    def reset(self) -> None:
        self.hidden: torch.Tensor | None = None

    def observe(self, seen: Observation) -> None:
        self.hidden = seen.hidden if seen.emitted else None

    @torch.no_grad()
    def propose(self, context: Context) -> Draft:
        # Topology order is by depth and puts parents first, so any prefix of it is a tree.
        count = min(sum(depth < context.depth for depth, _ in self.nodes), context.limit)
        if self.hidden is None or count < 1:
            return NOTHING
        ranked = self.heads(self.hidden.float()).topk(self.width, dim=-1).indices.tolist()
        tokens = [ranked[depth][rank] for depth, rank in self.nodes[:count]]
        return Draft(tokens=tokens, parents=self.parents[:count])
