"""What the engine hands to a runner for one step, and what comes back.

Legend for shapes: T tokens in the step, S sequences, B block-table width, L rows whose logits are wanted, V vocabulary,
H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from karui.inference.models.config import ModelConfig


@dataclass
class StepBatch:
    """One step over a ragged batch; every index tensor is int32 on the CPU and contiguous.

    Attributes:
        tokens: [T] token ids, sequences one after the other.
        positions: [T] RoPE position of each token.
        slots: [T] where the token's key and value are written: block * block_size + offset.
        query_starts: [S+1] sequence s owns rows query_starts[s] .. query_starts[s+1].
        context_lens: [S] keys each sequence sees after this step, its own new tokens included.
        block_tables: [S, B] block ids; entries past the context are 0 and not read. Those of blocks that no row sees (behind a
            window) are the number of the sequence's first block that is seen.
        logit_rows: [L] rows of the step whose logits are wanted.
        tree_masks: per sequence None (causal) or a bool [q, q] mask among the step's own q rows (tree verification);
            rows always see the whole context before the step.
        adapters: [S] adapter slot of each sequence, -1 for the base; None when no adapter is used.
        want_hidden: also return the final hidden states (after the last norm) of `logit_rows`.
        states: [R, 4] of hybrid models, else None: first row, row after the last, the page of recurrent states before them, the
            page to write behind them. A sequence's runs follow each other; page 0 is the beginning of a text.
        aux_layers: return the residual stream entering these layers for every row (EAGLE-3), empty for none.
        others: slots and block tables of the groups of layers behind the first, see `cache/groups.py`; empty where there is one.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    logit_rows: torch.Tensor
    tree_masks: list[torch.Tensor | None] | None = None
    adapters: torch.Tensor | None = None
    states: torch.Tensor | None = None
    want_hidden: bool = False
    aux_layers: tuple[int, ...] = ()
    others: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)


@dataclass
class StepOutput:
    """logits [L, V] fp32, until the runner's next step; hidden [L, H] fp32 or None; aux [T, len(aux_layers) * H] fp32 or None."""

    logits: torch.Tensor
    hidden: torch.Tensor | None = None
    aux: torch.Tensor | None = None


@dataclass(slots=True)
class Ahead:
    """A sequence that a runner decodes greedily for several rounds in one call (`decode`).

    Attributes:
        tokens: all its tokens; the keys of all but the last are in the cache.
        left: tokens that it may gain.
        reach: tokens that its blocks hold.
        ends: tokens after which it is over.
        adapter: slot, -1 for the base.
        proposer: who drafts for it, with `lend` and `take_back`; None for plain decoding.
    """

    tokens: list[int]
    left: int
    reach: int
    ends: frozenset[int]
    adapter: int = -1
    proposer: Any = None


@dataclass(slots=True)
class Gained:
    """tokens: per sequence. rounds: seconds of each, and of each sequence's draft in it (depth, accepted), depth 0 for none."""

    tokens: list[list[int]]
    rounds: list[tuple[float, list[tuple[int, int]]]]


class Runner(Protocol):
    """A model with its weights and KV memory on one device. The engine owns block ids, the runner owns the bytes.

    A runner of a hybrid model has besides: `state_bytes`, of a page of recurrent states, 0 for other models;
    `allocate_states(n)`, pages 1 to n to be read and written, page 0 is zeros.

    One whose layers have windows can have `kv_groups(kv_dtype)`, the groups of layers whose blocks come and go together; without
    it all blocks are kept. Where there are several it takes them in `allocate(..., groups=)`, and a block is then `groups.size`
    layers; `read_slots` and `write_slots` have that many layers, too.
    """

    config: ModelConfig

    def allocate(self, num_blocks: int, block_size: int, kv_dtype: str) -> None:
        """Reserve KV memory; kv_dtype is one of the runner's (float32, float16, int8, ...). Frees what was reserved before."""

    def kv_bytes_per_token(self, kv_dtype: str) -> int:
        """Bytes of KV memory for one token over all layers.

        A runner with formats that code whole blocks, and keep the tokens of unfinished ones in full precision, has besides:
        `kv_staged_bytes_per_token(kv_dtype)`, what such a token needs more, 0 for other formats; `allocate(..., num_staged)`, how
        many blocks can be unfinished at once; `settle(blocks)`, called before a step with blocks that are full of verified tokens
        or nobody's.
        """

    def forward(self, batch: StepBatch) -> StepOutput:
        """Run one step: write KV for every token, return logits of the wanted rows."""

    def copy_slots(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy KV of token slots source[i] -> target[i] in every layer (copy-on-write, tree compaction)."""

    def read_slots(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """KV of T token slots, on the CPU: [P, layers, T, G, D] in the cache's dtype, and its fp32 scales [P, layers, T, G] or
        None; P, G, D: `ModelConfig.cache_shape`, for keys and values 2, kv_heads, head_dim."""

    def write_slots(self, slots: torch.Tensor, data: torch.Tensor, scale: torch.Tensor | None) -> None:
        """The inverse of `read_slots`."""

    def weight_bytes(self) -> int:
        """Bytes of weights held, as packed."""

    def embedding_bytes(self) -> int:
        """Those of the embedding, of which a token reads a row."""
