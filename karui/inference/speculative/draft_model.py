"""A small model of the same vocabulary drafts, the large one verifies (Leviathan et al., arXiv 2211.17192).

A greedy draft is one call of a runner that decodes ahead (native), not one per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from karui.configs.errors import KaruiError, UnsupportedError
from karui.inference.batch import Ahead, Runner, StepBatch
from karui.inference.memory import default_budget
from karui.inference.speculative.base import NOTHING, Context, Draft, Observation
from karui.inference.speculative.random import DRAFT, draw, uniform


class NoRoomError(KaruiError):
    """A drafter has no KV memory left for a sequence, which then goes on without drafts."""


class Drafter(Protocol):
    """A model that continues sequences; it keeps each sequence's KV between calls."""

    vocab_size: int
    max_context: int

    def open(self) -> int:
        """A new, empty sequence; returns its handle."""

    def extend(self, handle: int, tokens: Sequence[int], start: int) -> torch.Tensor:
        """Drop what lies at `start` and behind, append `tokens` there, return the last one's logits [V] fp32. Raises
        `NoRoomError`, having appended none of them."""

    def continued(self, handle: int, tokens: Sequence[int], start: int, count: int) -> list[int] | None:
        """Of the whole sequence `tokens` the first `start` stay, the rest is appended; returns up to `count` greedy tokens behind
        it, all but the last of them appended too. None, nothing done, where that is no faster than `extend`. Raises
        `NoRoomError`, nothing appended."""

    def close(self, handle: int) -> None:
        """Forget the sequence."""


def check_vocabulary(target: Mapping[str, int] | int, draft: Mapping[str, int] | int) -> None:
    """Raise `KaruiError` unless token ids mean the same to both models.

    Args:
        target, draft: the tokenizers' vocabularies (token -> id), or only the sizes when there is no tokenizer.
    """
    size_t, size_d = (v if isinstance(v, int) else len(v) for v in (target, draft))
    if size_t != size_d:
        raise KaruiError(f"draft model: its vocabulary has {size_d} tokens, the target's {size_t}. "
                         "A draft must share the target's tokenizer; choose a smaller model of the same family.")
    if isinstance(target, int) or isinstance(draft, int):
        return
    differing = [token for token, index in target.items() if draft.get(token) != index]
    if differing:
        raise KaruiError(f"draft model: {len(differing)} of {size_t} tokens have another id than in the target, the first is "
                         f"{differing[0]!r} ({target[differing[0]]} there, {draft.get(differing[0])} here). "
                         "A draft must share the target's tokenizer.")


class DraftModelProposer:
    """Drafts `k` tokens one by one: the drafter's argmax for a request that is greedy or has a seed, draws from its processed
    distribution else."""

    needs_hidden = False
    aux_layers: tuple[int, ...] = ()

    def __init__(self, drafter: Drafter, k: int, vocab_size: int) -> None:
        if k < 1:
            raise KaruiError(f"draft model: k must be at least 1, got {k}.")
        check_vocabulary(vocab_size, drafter.vocab_size)
        self.drafter, self.k = drafter, k
        self.handle: int | None = None
        self.cached: list[int] = []

    def reset(self) -> None:
        if self.handle is not None:
            self.drafter.close(self.handle)
        self.handle, self.cached = None, []

    def observe(self, seen: Observation) -> None:
        """Nothing to do: `propose` rolls its KV back to where the sequence left the draft."""

    def propose(self, context: Context) -> Draft:
        length = len(context.tokens)
        count = min(self.k, context.limit, context.depth, self.drafter.max_context - length + 1)
        if count < 1:
            return NOTHING
        if self.handle is None:
            self.handle = self.drafter.open()
        # Everything up to the first difference is still good; the root's logits are needed, so it is always run.
        keep = 0
        for known, token in zip(self.cached, context.tokens[:-1], strict=False):
            if known != token:
                break
            keep += 1
        if context.distribution is None and (found := self._in_one(context.tokens, keep, count)) is not None:
            return found
        pending, start = list(context.tokens[keep:]), keep
        self.cached = list(context.tokens)
        tokens: list[int] = []
        rows: list[np.ndarray] = []
        while True:
            try:
                logits = self.drafter.extend(self.handle, pending, start)
            except NoRoomError:
                if not tokens:
                    self.reset()
                    return NOTHING
                self.cached.pop()  # what was drafted so far stands, and its keys stay
                break
            start += len(pending)
            if context.distribution is None:
                tokens.append(int(logits.argmax()))
            else:
                rows.append(np.asarray(context.distribution(logits), dtype=np.float64))
                tokens.append(draw(rows[-1], uniform(context.seed, length + len(tokens), DRAFT)))
            if len(tokens) == count:
                break
            pending = tokens[-1:]
            self.cached.append(tokens[-1])
        return Draft(tokens=tokens, q=np.stack(rows) if rows else None)

    def _in_one(self, sequence: Sequence[int], keep: int, count: int) -> Draft | None:
        """A greedy draft in one call; None where the drafter cannot, or has no room for all of it."""
        assert self.handle is not None
        try:
            tokens = self.drafter.continued(self.handle, sequence, keep, count)
        except NoRoomError:
            return None
        if tokens is None:
            return None
        self.cached = [*sequence, *tokens[:-1]]
        return Draft(tokens=tokens)


class RunnerDrafter:
    """A `Drafter` over any `Runner`: each sequence owns a list of blocks, taken from and returned to a pool.

    Args:
        memory: bytes for the pool at most; None: a quarter of what an engine would take, which comes after it and takes the rest.
    """

    def __init__(self, runner: Runner, *, max_context: int, max_sequences: int = 8, block_size: int = 16,
                 memory: int | None = None, chunk: int = 512) -> None:
        if getattr(runner, "state_bytes", 0):
            raise UnsupportedError(f"draft model: a {runner.config.model_type} has recurrent layers, whose states cannot be "
                                   "taken back with a rejected draft; draft with a model of attention layers alone, or by ngram.")
        self.runner, self.block_size, self.chunk = runner, block_size, chunk
        self.vocab_size = runner.config.vocab_size
        self.max_context = min(max_context, runner.config.max_context)
        device = torch.device(getattr(runner, "device", "cpu"))
        kv_dtype = "float32" if device.type == "cpu" else str(getattr(runner, "default_kv_dtype", "float32"))
        budget = default_budget(device) // 4 if memory is None else memory
        affordable = budget // (runner.kv_bytes_per_token(kv_dtype) * block_size)
        blocks = max(1, min(affordable, -(-self.max_context // block_size) * max_sequences))
        runner.allocate(blocks, block_size, kv_dtype)
        self.free = list(range(blocks))[::-1]
        self.tables: dict[int, list[int]] = {}
        self.next_handle = 0

    def open(self) -> int:
        handle, self.next_handle = self.next_handle, self.next_handle + 1
        self.tables[handle] = []
        return handle

    def close(self, handle: int) -> None:
        self.free += self.tables.pop(handle)[::-1]

    def extend(self, handle: int, tokens: Sequence[int], start: int) -> torch.Tensor:
        self._lengthen(handle, start + len(tokens))
        return self._run(handle, tokens, start)

    def continued(self, handle: int, tokens: Sequence[int], start: int, count: int) -> list[int] | None:
        runner: Any = self.runner
        if not getattr(runner, "decodes_ahead", False):
            return None
        reach = len(tokens) + count
        self._lengthen(handle, reach)
        if len(tokens) - start > 1:
            self._run(handle, tokens[start:-1], start, logits=False)
        table = np.array([[self.tables[handle]]], dtype=np.int32)
        sequence = Ahead(list(tokens), count, reach, frozenset())
        return list(runner.decode([sequence], table, count, count).tokens[0])

    def _lengthen(self, handle: int, end: int) -> None:
        table = self.tables[handle]
        missing = -(-end // self.block_size) - len(table)
        if missing > len(self.free):
            raise NoRoomError("draft model: its KV memory is full.")
        for _ in range(missing):
            table.append(self.free.pop())

    def _run(self, handle: int, tokens: Sequence[int], start: int, logits: bool = True) -> torch.Tensor:
        """Append `tokens` at `start`; the last one's logits [V], without `logits` none."""
        table, end, found = self.tables[handle], start + len(tokens), torch.empty(1, 0)
        for at in range(start, end, self.chunk):
            part = list(tokens[at - start:at - start + self.chunk])
            positions = range(at, at + len(part))
            slots = [table[p // self.block_size] * self.block_size + p % self.block_size for p in positions]
            last = logits and at + len(part) == end

            def ints(values: Sequence[int]) -> torch.Tensor:
                return torch.tensor(values, dtype=torch.int32)

            found = self.runner.forward(StepBatch(
                tokens=ints(part), positions=ints(positions), slots=ints(slots), query_starts=ints([0, len(part)]),
                context_lens=ints([at + len(part)]), block_tables=ints(table)[None],
                logit_rows=ints([len(part) - 1] if last else []))).logits
        return found[0] if logits else found
