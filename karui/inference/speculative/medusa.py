"""Medusa heads (Cai et al., arXiv 2401.10774): head i reads the last hidden state and guesses the token i + 2 ahead.

    head i of h = P block_L(.. block_1(h)),    block(x) = x + SiLU(W x + b)

The hidden state that produced the root also feeds the heads, so a whole tree of candidates costs a few matrix products and
no extra forward of the target. P is the head's own vocabulary projection, as in the paper, or the target's head, frozen and
shared by all: then a draft reads it once, and where only some tokens can be drafted (`ids`; FR-Spec, arXiv 2502.14856), only
their rows of it.
The draft is the tree of the paths that are likeliest if the heads are independent, or a fixed one where the file names it.
Verification is the lossless walk; typical acceptance is the engine's choice and lossy.

Legend: M heads, L blocks a head, H hidden size, V the target's vocabulary, D tokens that can be drafted (V without `ids`).
"""

from __future__ import annotations

import ctypes
import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from karui.configs.errors import CorruptError, KaruiError
from karui.configs.quantspec import QuantSpec
from karui.inference.speculative.base import NOTHING, Context, Draft, Observation
from karui.inference.speculative.tree import tree_of_choices
from karui.kernels.native.library import MEDUSA, address

if TYPE_CHECKING:
    from karui.kernels.native.medusa import MedusaLayer


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
    """M times L `ResBlock`s and a vocabulary projection, its own or the target's.

    Weight names are Medusa's: `i.j.linear.weight` and `.bias` of block j, `i.L.weight` of an own projection. A shared one is not
    among them; `bind` brings it. `d2t` [D] are EAGLE-3's: a drafted token's id in the target minus its row.

    Args:
        shared: all heads project by the target's head.
        ids: [D] ascending target ids that can be drafted (shared only); None: all.
    """

    def __init__(self, num_heads: int, hidden: int, vocab: int, num_layers: int = 1, *, shared: bool = False,
                 ids: torch.Tensor | None = None) -> None:
        super().__init__()
        if ids is not None and not shared:
            raise KaruiError("medusa heads: a draft vocabulary goes with a shared projection.")
        self.hidden_size, self.vocab_size, self.num_layers, self.shared = hidden, vocab, num_layers, shared
        self.heads = nn.ModuleList(nn.Sequential(
            *(ResBlock(hidden) for _ in range(num_layers)), *([] if shared else [nn.Linear(hidden, vocab, bias=False)]))
            for _ in range(num_heads))
        self.d2t: torch.Tensor | None
        self.projection: torch.Tensor | None
        self.register_buffer("d2t", None if ids is None else ids - torch.arange(len(ids)))
        self.register_buffer("projection", None, persistent=False)

    @property
    def ids(self) -> torch.Tensor | None:
        """[D] target ids of what can be drafted; None: all."""
        return None if self.d2t is None else self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def bind(self, head: torch.Tensor) -> MedusaHeads:
        """Take the target's head [V, H] as the shared projection, its rows `ids` alone where there are such; returns self."""
        ids = self.ids
        self.projection = (head if ids is None else head[ids.to(head.device)]).detach().float()
        return self

    def state(self, i: int, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [.., H] -> what head i projects, [.., H]."""
        for block in self.heads[i][: self.num_layers]:  # type: ignore[index]
            hidden = block(hidden)
        return hidden

    def rows(self, i: int) -> torch.Tensor:
        """[D, H] head i's projection."""
        if not self.shared:
            return self.heads[i][self.num_layers].weight  # type: ignore[index]
        assert self.projection is not None, "a shared projection was not bound"
        return self.projection

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [.., H] -> logits [M, .., D]."""
        return torch.stack([self.state(i, hidden) @ self.rows(i).T for i in range(len(self.heads))])

    def tensors(self) -> dict[str, torch.Tensor]:
        """Weights by Medusa's names, ready for safetensors."""
        return {name.removeprefix("heads."): value.detach().contiguous() for name, value in self.state_dict().items()}

    @staticmethod
    def from_tensors(tensors: Mapping[str, torch.Tensor], vocab: int | None = None) -> MedusaHeads:
        """Build from weights by Medusa's names.

        Args:
            vocab: the target's, for heads without projections of their own.
        Raises:
            CorruptError: heads are missing, shapes disagree or a draft vocabulary is not one.
        """
        count = len({name.split(".")[0] for name in tensors if name != "d2t"})
        layers = sum(f"0.{j}.linear.weight" in tensors for j in range(len(tensors)))
        shared = f"0.{layers}.weight" not in tensors
        ids = tensors["d2t"].long() + torch.arange(len(tensors["d2t"])) if "d2t" in tensors else None
        try:
            if vocab is None:
                vocab = tensors[f"0.{layers}.weight"].shape[0]
            if ids is not None and not (len(ids) and ids[0] >= 0 and ids[-1] < vocab and bool((ids[1:] > ids[:-1]).all())):
                raise ValueError(f"d2t does not name ascending ids below {vocab}")
            heads = MedusaHeads(count, tensors["0.0.linear.weight"].shape[0], vocab, layers, shared=shared, ids=ids)
            heads.load_state_dict({name if name == "d2t" else f"heads.{name}": value if name == "d2t" else value.float()
                                   for name, value in tensors.items()})
        except (KaruiError, KeyError, RuntimeError, ValueError) as error:
            raise CorruptError("medusa heads: expected i.j.linear.weight and i.j.linear.bias for blocks j = 0, 1, .. of heads "
                               f"i = 0 .. {max(count - 1, 0)}, and i.{layers}.weight unless the target's head is shared; "
                               f"{error}") from error
        return heads.eval()


def likeliest_paths(log_probs: Sequence[Sequence[float]], count: int) -> tuple[list[tuple[int, int]], list[int], list[float]]:
    """The `count` likeliest paths if depths are independent, as a tree: a path's parent is never less likely.

    Args:
        log_probs: [M, K], each depth's candidates, falling.
    Returns:
        (depth, rank) of each node, its parent (-1: the root, parents first) and the log-probability of its path, falling.
    """
    nodes: list[tuple[int, int]] = []
    parents: list[int] = []
    scores: list[float] = []
    offered = [(-log_probs[0][0], 0, -1, 0, 0)]  # order of offering breaks ties, so a parent comes before its child
    order = 1
    while offered and len(nodes) < count:
        score, _, parent, depth, rank = heapq.heappop(offered)
        nodes.append((depth, rank))
        parents.append(parent)
        scores.append(-score)
        if rank + 1 < len(log_probs[depth]):
            above = scores[parent] if parent >= 0 else 0.0
            heapq.heappush(offered, (-(above + log_probs[depth][rank + 1]), order, parent, depth, rank + 1))
            order += 1
        if depth + 1 < len(log_probs):
            heapq.heappush(offered, (score - log_probs[depth + 1][0], order, len(nodes) - 1, depth + 1, 0))
            order += 1
    return nodes, parents, scores


class MedusaProposer:
    """Fills a tree with the heads' best tokens; here in torch, on any device.

    Args:
        heads: with their projection bound.
        choices: a fixed topology; None: the likeliest paths by the heads' own probabilities.
        nodes: most nodes of a draft without `choices`.
        width: candidates of each head.
        least: a draft that promises fewer accepted tokens gives way to a plain step (without `choices`).
    """

    needs_hidden = True
    aux_layers: tuple[int, ...] = ()

    def __init__(self, heads: MedusaHeads, choices: Sequence[Sequence[int]] | None = None, *, nodes: int = 24, width: int = 8,
                 least: float = 0.0) -> None:
        self.heads, self.limit, self.least, self.fixed = heads, nodes, least, choices is not None
        self.parents: list[int] = []
        self.nodes: list[tuple[int, int]] = []
        if choices is not None:
            self.parents, self.nodes = tree_of_choices([c for c in choices if len(c) <= len(heads.heads)])
            if not self.nodes:
                raise KaruiError("medusa: the tree topology is empty.")
            width = max(rank for _, rank in self.nodes) + 1
        if min(nodes, width) < 1:
            raise KaruiError(f"medusa: nodes and width must be at least 1, got {nodes} and {width}.")
        ids = heads.ids
        self.width = min(width, heads.vocab_size if ids is None else len(ids))
        self.reset()

    def reset(self) -> None:
        self.hidden: torch.Tensor | None = None

    def observe(self, seen: Observation) -> None:
        self.hidden = seen.hidden if seen.emitted else None

    def propose(self, context: Context) -> Draft:
        if self.hidden is None or min(context.limit, context.depth) < 1:
            return NOTHING
        return self._filled(context) if self.fixed else self._grown(min(context.limit, self.limit), context.depth)

    @torch.no_grad()
    def _filled(self, context: Context) -> Draft:
        # Topology order is by depth and puts parents first, so any prefix of it is a tree.
        count = min(sum(depth < context.depth for depth, _ in self.nodes), context.limit)
        ranked = self._target(self.heads(self.hidden.float()).topk(self.width, dim=-1).indices)  # type: ignore[union-attr]
        tokens = [ranked[depth][rank] for depth, rank in self.nodes[:count]]
        return Draft(tokens=tokens, parents=self.parents[:count])

    @torch.no_grad()
    def _grown(self, count: int, depth: int) -> Draft:
        best = self.heads(self.hidden.float())[:depth].log_softmax(-1).topk(self.width, dim=-1)  # type: ignore[union-attr]
        nodes, parents, scores = likeliest_paths(best.values.tolist(), count)
        if sum(map(math.exp, scores)) < self.least:
            return NOTHING
        ranked = self._target(best.indices)
        return Draft.of([ranked[d][r] for d, r in nodes], parents)

    def _target(self, rows: torch.Tensor) -> list[list[int]]:
        ids = self.heads.ids
        found: list[list[int]] = (rows if ids is None else ids[rows]).tolist()
        return found


class NativeMedusaProposer(MedusaProposer):
    """The same in native calls (`karui.kernels.native.medusa`, or several rounds at once), the heads on int8."""

    def __init__(self, heads: MedusaHeads, layer: MedusaLayer, head: Callable[[], Any], *, nodes: int = 24, width: int = 8,
                 least: float = 0.0) -> None:
        """layer: `heads`, packed by `pack_heads`; head: the target's packed head as it is now; the rest as in the base."""
        super().__init__(heads, None, nodes=nodes, width=width, least=least)
        self.layer, self.head, self.row = layer, head, torch.empty(layer.hidden)
        self.native = {"method": MEDUSA, "nodes": nodes, "depth": len(heads.heads), "width": self.width, "least": least,
                       "medusa": ctypes.addressof(layer.medusa)}

    def _grown(self, count: int, depth: int) -> Draft:
        assert self.hidden is not None
        tokens, parents, _ = self.layer.draft(self.head(), self.hidden, depth, self.width, count, self.least)
        return Draft.of(tokens, parents)

    def lend(self, tokens: Sequence[int], stream: Any, room: int) -> None:
        """The hidden state that gave the last token, if it was seen."""
        stream.pending, stream.aux = int(self.hidden is not None), address(self.row)
        if self.hidden is not None:
            self.row.copy_(self.hidden)

    def take_back(self, stream: Any) -> None:
        self.hidden = self.row if stream.pending else None


def pack_heads(heads: MedusaHeads, spec: QuantSpec | None = None) -> MedusaLayer:
    """The heads for `NativeMedusaProposer`, their matrices on a grid (None: w8); a whole shared projection stays the target's."""
    from karui.kernels.native.medusa import MedusaLayer

    ids = heads.ids
    return MedusaLayer(heads.tensors(), heads=len(heads.heads), layers=heads.num_layers, ids=ids, vocab=heads.vocab_size,
                       projection=None if ids is None else heads.rows(0), spec=spec or QuantSpec.parse("w8"))
