"""EAGLE-3 (Li et al., arXiv 2503.01840): one decoder layer that reads the target's own residual streams and drafts a tree.

    g_t = fc[low_t; mid_t; high_t]                       the target's streams at position t, 3H -> H
    a_t = layer([norm(embedding of x_{t+1}); norm(g_t)])    and from the second drafted token on a_{t-1} takes g_t's place
    draft of x_{t+2} = d2t[argmax lm_head(norm(a_t))]    over a draft vocabulary of the most frequent tokens

The layer keeps a KV of its own: rows of verified positions (from true streams) stay, drafted ones go after each proposal.
The tree grows as in EAGLE-2: at each depth the likeliest nodes are expanded, at the end the `nodes` likeliest are kept; a child
is never likelier than its parent, so what is kept is a tree. Weight names are the published checkpoints'.

Legend: n rows, H target hidden size, D draft vocabulary, P settled rows.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

from karui.configs.errors import CorruptError, KaruiError
from karui.configs.quantspec import QuantSpec
from karui.inference.models.config import ModelConfig
from karui.inference.speculative.base import NOTHING, Context, Draft, Observation
from karui.kernels.native.library import EAGLE3, address

if TYPE_CHECKING:
    from karui.kernels.native.draft import DraftLayer


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """Layers whose incoming residual stream is read: 2, L // 2, L - 3 (arXiv 2503.01840's low, middle and high).

    Ascending and distinct, so a model of fewer than six layers has fewer than three.
    """
    return tuple(sorted({min(2, num_layers - 1), num_layers // 2, max(num_layers - 3, 0)}))


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """Shape of the drafting layer; `of` copies the target's."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        if not self.aux_layers or list(self.aux_layers) != sorted(set(self.aux_layers)) or self.aux_layers[0] < 0:
            raise KaruiError(f"eagle3: aux_layers {self.aux_layers} must be ascending and distinct layer indices.")

    @staticmethod
    def of(target: ModelConfig, draft_vocab_size: int | None = None) -> Eagle3Config:
        return Eagle3Config(
            hidden_size=target.hidden_size, intermediate_size=target.intermediate_size, num_heads=target.num_heads,
            num_kv_heads=target.num_kv_heads, head_dim=target.head_dim, vocab_size=target.vocab_size,
            draft_vocab_size=draft_vocab_size or target.vocab_size, aux_layers=default_aux_layers(target.num_layers),
            norm_eps=target.norm_eps, rope_theta=target.rope_theta)


class _Attention(nn.Module):
    def __init__(self, c: Eagle3Config) -> None:
        super().__init__()
        self.c = c
        self.q_proj = nn.Linear(2 * c.hidden_size, c.num_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * c.hidden_size, c.num_kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * c.hidden_size, c.num_kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_heads * c.head_dim, c.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, past: KV, mask: torch.Tensor) -> tuple[torch.Tensor, KV]:
        """x [n, 2H], mask [n, P + n] bool -> [n, H] and the past with n rows more."""
        n, c = len(x), self.c
        q = _rope(self.q_proj(x).view(n, c.num_heads, c.head_dim), positions, c.rope_theta)
        k = torch.cat([past[0], _rope(self.k_proj(x).view(n, c.num_kv_heads, c.head_dim), positions, c.rope_theta)])
        v = torch.cat([past[1], self.v_proj(x).view(n, c.num_kv_heads, c.head_dim)])
        group = c.num_heads // c.num_kv_heads
        scores = torch.einsum("ngrd,pgd->grnp", q.view(n, c.num_kv_heads, group, c.head_dim), k) / math.sqrt(c.head_dim)
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        out = torch.einsum("grnp,pgd->ngrd", weights, v).reshape(n, -1)
        return self.o_proj(out), (k, v)


KV = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of the drafting layer, each [P, kv_heads, head_dim]."""


class _Mlp(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    def __init__(self, c: Eagle3Config) -> None:
        super().__init__()
        self.hidden_norm = nn.RMSNorm(c.hidden_size, eps=c.norm_eps)
        self.input_layernorm = nn.RMSNorm(c.hidden_size, eps=c.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden_size, eps=c.norm_eps)
        self.self_attn = _Attention(c)
        self.mlp = _Mlp(c.hidden_size, c.intermediate_size)


class Eagle3(nn.Module):
    """The drafting layer with its fusion, vocabulary head and maps.

    `d2t` [D] int64 holds offsets, target id = draft id + d2t[draft id]; `t2d` [V] bool marks the target tokens that the draft
    vocabulary holds.
    """

    d2t: torch.Tensor
    t2d: torch.Tensor

    def __init__(self, config: Eagle3Config, vocabulary: torch.Tensor | None = None) -> None:
        """vocabulary: [D] ascending target ids of the draft vocabulary; the first D ids when None."""
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.aux_layers) * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = _Layer(config)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        ids = torch.arange(config.draft_vocab_size) if vocabulary is None else vocabulary.long()
        if len(ids) != config.draft_vocab_size or (len(ids) and int(ids.max()) >= config.vocab_size):
            raise KaruiError(f"eagle3: the draft vocabulary needs {config.draft_vocab_size} ids below {config.vocab_size}.")
        self.register_buffer("d2t", ids - torch.arange(len(ids)))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, ids, True))

    def empty_kv(self) -> KV:
        shape = (0, self.config.num_kv_heads, self.config.head_dim)
        return torch.empty(shape), torch.empty(shape)

    def fuse(self, aux: torch.Tensor) -> torch.Tensor:
        """aux [n, layers * H] -> g [n, H]."""
        return self.fc(aux.float())

    def forward(self, embedding: torch.Tensor, stream: torch.Tensor, positions: torch.Tensor, past: KV,
                mask: torch.Tensor) -> tuple[torch.Tensor, KV]:
        """One pass of the layer.

        Args:
            embedding: [n, H] of the token *after* each row's position; stream: [n, H], g or the previous row's output.
            positions: [n]; past: P settled rows; mask: [n, P + n] bool, True where a row may look.
        Returns:
            a [n, H], fed back for the next drafted token, and past with n rows more.
        """
        layer = self.midlayer
        x = torch.cat([layer.input_layernorm(embedding), layer.hidden_norm(stream)], dim=-1)
        attended, kv = layer.self_attn(x, positions, past, mask)
        a = stream + attended
        return a + layer.mlp(layer.post_attention_layernorm(a)), kv

    def log_probs(self, a: torch.Tensor) -> torch.Tensor:
        """[n, H] -> log-probabilities [n, D] over the draft vocabulary."""
        return self.lm_head(self.norm(a)).log_softmax(-1)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Weights by the published names, ready for safetensors."""
        return {name: value.detach().contiguous() for name, value in self.state_dict().items()}

    @staticmethod
    def from_tensors(config: Eagle3Config, tensors: Mapping[str, torch.Tensor]) -> Eagle3:
        """Build from weights by the published names. Raises `CorruptError` when one is missing, extra or of another shape."""
        model = Eagle3(config)
        try:
            model.load_state_dict({k: v if v.dtype in (torch.bool, torch.int64) else v.float() for k, v in tensors.items()})
        except RuntimeError as error:
            raise CorruptError(f"eagle3 head: its weights do not fit the configuration {config}: {error}") from error
        return model.eval()


def _rope(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotate halves: x [n, heads, head_dim], positions [n]."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = positions.float()[:, None, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Eagle3Proposer:
    """Drafts the likeliest `nodes` of a tree that is `depth` deep; see the module's head. Here in torch, on any device.

    At each depth `expand` nodes go on and each offers its `width` likeliest children: EAGLE-2 expands `width` of them; with one
    the draft is the chain of the likeliest tokens, and what it doubts may take a side leaf instead of a deeper node.
    """

    needs_hidden = False

    def __init__(self, model: Eagle3, embed: Callable[[torch.Tensor], torch.Tensor], depth: int = 5, width: int = 4,
                 nodes: int = 24, expand: int | None = None, least: float = 0.0) -> None:
        """embed: the target's embedding lookup, ids [n] -> [n, H]; expand: None for `width`; least: tokens a draft promises."""
        if min(depth, width, nodes, width if expand is None else expand) < 1:
            raise KaruiError(f"eagle3: depth, width, nodes, expand must be at least 1, got {depth}, {width}, {nodes}, {expand}.")
        self.model, self.embed = model, embed
        self.depth, self.width, self.nodes = depth, min(width, model.config.draft_vocab_size), nodes
        self.expand, self.least = self.width if expand is None else expand, least
        self.aux_layers: tuple[int, ...] = model.config.aux_layers
        self.reset()

    def reset(self) -> None:
        self.kv = self.model.empty_kv()
        # Rows seen but not yet run through the layer: their streams, the tokens behind them, their positions.
        self.streams: list[torch.Tensor] = []
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.expected = 0

    def observe(self, seen: Observation) -> None:
        """Queue the settled rows; a prefill chunk's last row waits for the next chunk to learn the token behind it."""
        if seen.aux is None or not len(seen.rows):
            return
        if seen.start < self.expected:
            self.reset()        # the sequence was rolled back behind settled rows
        if len(self.tokens) < len(self.positions):
            if seen.start == self.expected:
                self.tokens.append(seen.rows[0])
            else:               # rows in between went unobserved; the layer attends over the gap
                self.positions.pop()
                self.streams[-1] = self.streams[-1][:-1]
        self.expected = seen.start + len(seen.rows)
        self.streams.append(seen.aux)
        self.positions += range(seen.start, seen.start + len(seen.rows))
        self.tokens += [*seen.rows[1:], *seen.emitted[-1:]]

    def propose(self, context: Context) -> Draft:
        limit, depth = self._bounds(context)
        if limit < 1 or depth < 1:
            return NOTHING
        tokens, parents, scores = self._grow(depth)
        self._drop_pending()
        # Stable order: on equal scores the earlier node, hence the parent, comes first.
        kept = sorted(sorted(range(len(tokens)), key=lambda i: -scores[i])[:limit])
        # By the layer's own belief each node is accepted with its likelihood; a plain step is cheaper than a hopeless draft.
        if sum(math.exp(scores[i]) for i in kept) < self.least:
            return NOTHING
        index = {-1: -1} | {node: i for i, node in enumerate(kept)}
        return Draft.of([tokens[i] for i in kept], [index[parents[i]] for i in kept])

    def _bounds(self, context: Context) -> tuple[int, int]:
        """Most nodes and depths; 0 while there is nothing to draft from."""
        if not self.streams or len(self.tokens) < len(self.positions):
            return 0, 0
        return min(self.nodes, context.limit), min(self.depth, context.depth)

    def _drop_pending(self) -> None:
        self.streams, self.tokens, self.positions = [], [], []

    @torch.no_grad()
    def _grow(self, deepest: int) -> tuple[list[int], list[int], list[float]]:
        """Settle the queued rows, then all candidates: token, parent (-1: the root) and log-probability, parents first."""
        past, n = len(self.kv[0]), len(self.tokens)
        mask = torch.ones(n, past + n, dtype=torch.bool).tril(past)
        a, self.kv = self.model(self.embed(torch.tensor(self.tokens)).float(), self.model.fuse(torch.cat(self.streams)),
                                torch.tensor(self.positions), self.kv, mask)
        position, settled, kv = self.positions[-1], len(self.kv[0]), self.kv
        parents: list[int] = []
        tokens: list[int] = []
        scores: list[float] = []
        beam, beam_scores, streams = [-1], torch.zeros(1), a[-1:]      # nodes to expand, their log-probability, their output
        sees = torch.zeros(1, 0, dtype=torch.bool)                    # which drafted KV rows each beam node sees
        for depth in range(1, deepest + 1):
            best = self.model.log_probs(streams).topk(self.width, dim=-1)
            total = (beam_scores[:, None] + best.values).flatten()
            ids = (best.indices + self.model.d2t[best.indices]).flatten().tolist()
            first = len(tokens)
            parents += [node for node in beam for _ in range(self.width)]
            tokens += ids
            scores += total.tolist()
            if depth == deepest:
                break
            chosen = total.topk(min(self.expand, len(total))).indices
            which = (chosen // self.width)
            count, drafted = len(chosen), sees.shape[1]
            sees = torch.cat([sees[which], torch.eye(count, dtype=torch.bool)], dim=1)
            mask = torch.cat([torch.ones(count, settled, dtype=torch.bool), sees], dim=1)
            assert len(kv[0]) == settled + drafted
            streams, kv = self.model(self.embed(torch.tensor([ids[i] for i in chosen.tolist()])).float(), streams[which],
                                     torch.full((count,), position + depth), kv, mask)
            beam, beam_scores = [first + i for i in chosen.tolist()], total[chosen]
        return tokens, parents, scores


class NativeEagle3Proposer(Eagle3Proposer):
    """The same with `expand` 1, in native calls (`karui.kernels.native.draft`, or several rounds at once).

    On a CPU every verified row costs: four rows of SmolLM2-135M on int4 take 1.15 times one row's time, eight 1.9 times. Rounds
    therefore verify as many of the `nodes` as are worth it by their likelihoods.
    """

    def __init__(self, model: Eagle3, layer: DraftLayer, embedding: Callable[[], Any], depth: int = 3, width: int = 2,
                 nodes: int = 3, least: float = 0.0) -> None:
        """layer: `model`, packed by `pack_layer`; embedding: the target's packed embedding as it is now; least: see the base."""
        self.layer, self.embedding = layer, embedding
        super().__init__(model, _no_lookup, depth, width, nodes, expand=1, least=least)
        self.native = {"method": EAGLE3, "nodes": nodes, "depth": depth, "width": self.width, "least": least,
                       "drafter": ctypes.addressof(layer.drafter)}

    def reset(self) -> None:
        super().reset()
        self.settled = 0
        self.keys = self.values = torch.empty(0, self.layer.row)
        self.waiting = torch.empty(0, self.layer.drafter.aux)

    def propose(self, context: Context) -> Draft:
        limit, depth = self._bounds(context)
        if limit < 1 or depth < 1:
            return NOTHING
        self._lengthen(depth)
        tokens, above, _ = self.layer.draft(self.embedding(), torch.cat(self.streams), self.tokens, self.positions, self.keys,
                                            self.values, self.settled, depth, self.width, limit, self.least)
        self.settled += len(self.tokens)
        self._drop_pending()
        return Draft.of(tokens, above)

    def _lengthen(self, more: int) -> None:
        needed = self.settled + len(self.tokens) + more
        if needed > len(self.keys):
            self.keys, self.values = _longer(self.keys, 2 * needed), _longer(self.values, 2 * needed)

    def lend(self, tokens: Sequence[int], stream: Any, room: int) -> None:
        """The rows that the layer has not seen, and its keys, with room for more."""
        if len(self.tokens) < len(self.positions):  # the prompt's last token, left over by its chunks, is the first round's row
            self.tokens.append(tokens[self.positions[-1] + 1])
        self._lengthen(room + self.depth)
        n = stream.pending = len(self.positions)
        returned = len(self.streams) == 1 and self.streams[0].data_ptr() == self.waiting.data_ptr()
        if not returned or n + room > len(self.waiting):
            rows = torch.empty(2 * (n + room), self.layer.drafter.aux)
            self.index = torch.empty(2, len(rows), dtype=torch.int32)
            if n:
                torch.cat(self.streams, out=rows[:n])
                self.index[:, :n] = torch.tensor([self.tokens, self.positions])
            self.waiting = rows
        stream.settled, stream.aux = self.settled, address(self.waiting)
        stream.keys, stream.values = address(self.keys), address(self.values)
        stream.after, stream.positions = address(self.index[0]), address(self.index[1])

    def take_back(self, stream: Any) -> None:
        n, self.settled, self.expected = stream.pending, stream.settled, stream.length - 1
        self.streams, (self.tokens, self.positions) = [self.waiting[:n]], self.index[:, :n].tolist()


def pack_layer(model: Eagle3, spec: QuantSpec | None = None) -> DraftLayer:
    """The layer for `NativeEagle3Proposer`, its matrices on a grid; None: w4g64, or w8 where groups of 64 do not fit.

    A wrong guess costs a row and never a token, and the bytes count: the target's weights push the layer's out of the caches.
    """
    from karui.kernels.native.draft import DraftLayer

    c = model.config
    if spec is None:
        whole = all(n % 64 == 0 for n in (c.hidden_size, c.intermediate_size, c.num_heads * c.head_dim))
        spec = QuantSpec.parse("w4g64" if whole else "w8")
    return DraftLayer(model.tensors(), heads=c.num_heads, kv_heads=c.num_kv_heads, head_dim=c.head_dim, eps=c.norm_eps,
                      theta=c.rope_theta, spec=spec)


def _longer(x: torch.Tensor, rows: int) -> torch.Tensor:
    out = x.new_zeros(rows, x.shape[1])
    out[: len(x)] = x
    return out


def _no_lookup(ids: torch.Tensor) -> torch.Tensor:
    raise AssertionError("the native draft reads the packed embedding")
