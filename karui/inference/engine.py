"""The engine: schedule, run, settle. One loop for serving, evaluation and rollouts.

    engine = Engine.load("bundle-or-model-folder")
    for output in engine.generate(["The capital of Japan is"], SamplingParams(max_tokens=16)):
        print(output.text)

A step takes new requests in, asks the scheduler for a plan, hands it to the runner as one ragged batch, and settles what came
back: tokens are drawn, drafts verified, text detokenized, finished sequences removed. `add` and `abort` may be called from any
thread; steps run one at a time, in whichever thread calls `step`, `generate`, `stream` or `score`.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from karui.configs.errors import KaruiError, UnsupportedError, nearest
from karui.inference import handoff
from karui.inference import memory as kv_memory
from karui.inference.assemble import Assembler, ints
from karui.inference.batch import Ahead, Runner, StepOutput
from karui.inference.beam import BeamSearch, Branch
from karui.inference.cache.kv import default_block_size
from karui.inference.cache.pool import BlockPool
from karui.inference.cache.prefix import HashedIndex
from karui.inference.cache.states import StatePool
from karui.inference.live import Beams, Group, Live, Score
from karui.inference.lora import read_adapter
from karui.inference.models.decoder import TorchRunner
from karui.inference.models.rope import context_limit
from karui.inference.models.weights import Weights, expected_shapes
from karui.inference.requests import GREEDY, Delta, FinishReason, Output, Request, SamplingParams, TokenLogprob
from karui.inference.rows import Rows
from karui.inference.sampling import logprobs_of, sample
from karui.inference.scheduler import Plan, Scheduler, Work
from karui.inference.scheduler import Sequence as Tokens
from karui.inference.speculate import Speculation, rows_of
from karui.inference.text import backend_of, encode_chat, encode_prompt

logger = logging.getLogger(__name__)

MAX_FAILURES = 2
"""A sequence whose step failed is run alone; when that fails too, its request ends with an error."""
AHEAD, AHEAD_S = 8, 0.05
"""Greedy decoding runs up to so many steps, and up to so many seconds, between two looks at the queue."""
NOT_NUMBERS = "the model returned logits that are not numbers; its weights or its input are damaged"


@dataclass(frozen=True)
class Stats:
    """Counters since the engine was made, and the state of its memory now."""

    num_steps: int
    num_failed_steps: int
    num_running: int
    num_waiting: int
    num_prompt_tokens: int
    num_cached_prompt_tokens: int
    num_generated_tokens: int
    num_preemptions: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    weight_version: int | str = 0
    num_cached_states: int = 0

    @property
    def acceptance(self) -> float:
        """Accepted share of drafted tokens."""
        return self.num_accepted_tokens / self.num_drafted_tokens if self.num_drafted_tokens else 0.0


class Engine:
    """`load` is the usual way in.

    Args:
        runner: the model.
        tokenizer: a transformers tokenizer, or None to work on token ids only.
        eos_token_ids: tokens that end a text.
        kv_dtype: format of the KV cache; "auto" is the runner's `default_kv_dtype`.
        memory: bytes for the KV cache, a number or a text such as "2GiB"; None as in `memory.default_budget`.
        max_context: tokens of prompt and output together; None: the model's, or less when memory does not hold that many.
        max_tokens_per_step: rows per step; longer prompts are cut into chunks.
        max_sequences: sequences running at once; more wait.
        block_size: tokens per KV block, 16. The kivi formats need a multiple of 32 (64): so many tokens at most are in full
            precision.
        ahead: steps that greedy decoding may run in one call of a runner that can (native), as far as `AHEAD_S` allows. What a
            step costs beside the model is then paid once for all of them; deltas hold several tokens. 1: one at a time. So it is
            with drafts that the runner can make (prompt lookup, EAGLE-3); no step starts once they gained twice as many tokens.
        speculation: who drafts; None for plain decoding.
        dense_weight: a module's base weight in fp32, for DoRA adapters over a runner that has packed it away.
        model: identity of the bundle that the weights are from, for `import_prefix`; "" where there is none.
    """

    def __init__(self, runner: Runner, tokenizer: Any = None, *, eos_token_ids: Sequence[int] = (), kv_dtype: str = "auto",
                 memory: int | str | None = None, max_context: int | None = None, max_tokens_per_step: int = 512,
                 max_sequences: int = 64, block_size: int | None = None, ahead: int = AHEAD,
                 speculation: Speculation | None = None, dense_weight: Callable[[str], torch.Tensor] | None = None,
                 model: str = "") -> None:
        self.kv_dtype = getattr(runner, "default_kv_dtype", "float16") if kv_dtype == "auto" else kv_dtype
        block_size = default_block_size(self.kv_dtype) if block_size is None else block_size
        for name, value in (("max_tokens_per_step", max_tokens_per_step), ("max_sequences", max_sequences),
                            ("block_size", block_size), ("ahead", ahead)):
            if value < 1:
                raise KaruiError(f"engine: {name} must be at least 1, got {value}.")
        self.runner, self.tokenizer, self.config, self.model = runner, tokenizer, runner.config, model
        self.eos = frozenset(eos_token_ids)
        num_pages, max_sequences, memory = kv_memory.plan_states(
            runner, memory, max_sequences, 0 if speculation is None else speculation.config.length())
        if num_pages and speculation is not None:
            speculation.check_recurrent()
        self.groups = groups = kv_memory.groups(runner, self.kv_dtype)
        num_blocks, self.max_context, num_staged = kv_memory.plan(
            runner, self.kv_dtype, memory, max_context, context_limit(self.config), max_sequences, block_size,
            max_tokens_per_step, groups)
        if num_staged and speculation is not None:
            speculation.check_chains(self.kv_dtype)
        apart: dict[str, Any] = {"groups": groups} if len(groups) > 1 else {}
        runner.allocate(num_blocks, block_size, self.kv_dtype, *([num_staged] if num_staged else []), **apart)
        self._settles = bool(num_staged)
        self.pool = BlockPool(num_blocks, block_size, HashedIndex())
        if num_pages:
            hybrid: Any = runner
            hybrid.allocate_states(num_pages)
        self.scheduler = Scheduler(self.pool, max_tokens_per_step, max_sequences, self.max_context, on_preempt=_forget_drafts,
                                   states=StatePool(num_pages) if num_pages else None, windows=groups.windows)
        self.version: int | str = 0
        self.speculation = speculation
        self._backend = None if tokenizer is None else backend_of(tokenizer)
        self._adapters: dict[str, tuple[int, int]] = {}  # name -> (slot, load count)
        self._groups: dict[str, Group] = {}
        self._inbox: deque[Tokens] = deque()
        self._aborts: deque[str] = deque()
        self._deltas: list[tuple[Group, Delta]] = []
        self._lock = threading.RLock()
        self._arrivals, self._names, self._loads = itertools.count(), itertools.count(), itertools.count()
        self._assembler = Assembler(self.scheduler, len(groups), self._adapter)
        # torch's OpenMP threads spin between the native runner's calls and double its step time.
        self._one_thread = not isinstance(runner, TorchRunner)
        self._dense_weight = dense_weight
        self._agree: Callable[[int], int] = getattr(runner, "agree", lambda value: value)  # ranks of one model draw alike
        self._ahead = ahead if getattr(runner, "decodes_ahead", False) else 1
        self._step_s = 1.0  # seconds of a decoding step, as the last ones took
        self._num_steps = self._num_failed = self._num_prompt = self._num_cached = self._num_generated = 0

    @classmethod
    def load(cls, path: str | Path, **options: Any) -> Engine:
        """An engine for a bundle, a model folder or a catalogue name; see `loading.load` for the options."""
        from karui.inference.loading import load

        return load(cls, path, **options)

    # -- requests

    def add(self, request: Request) -> str:
        """Queue a request and return its id. Raises `KaruiError` for what can never run. Thread-safe."""
        prompt, params = self.encode(request.prompt), request.params
        self.check(prompt, params)
        limit = min(self.max_context, self._capacity) - len(prompt)
        seed = params.seed if params.seed is not None else self._agree(int.from_bytes(os.urandom(7), "little"))
        request_id = request.id if request.id is not None else f"request-{next(self._names)}"
        with self._lock:
            if request_id in self._groups:
                raise KaruiError(f"request id {request_id!r} is in use; ids must be unique among unfinished requests.")
            group = Group(request, request_id, prompt, seed, min(params.max_tokens or limit, limit))
            live = Live(group, 0, self._backend, self.eos)
            order = (request.priority, next(self._arrivals), 0)
            live.sequence = Tokens(list(prompt), order, self._namespace(request.adapter, request.cache_salt), live)
            if params.beams > 1:
                group.beams = Beams(BeamSearch(params.beams, live.ends, group.max_tokens, params.length_penalty), live)
            elif self.speculation is not None:
                self.speculation.attach(live)
            group.lives.append(live)
            self._groups[request_id] = group
            self._inbox.append(live.sequence)
        return request_id

    def abort(self, request_id: str) -> None:
        """Cancel a request at the next step; unknown and finished ids are ignored. Thread-safe."""
        self._aborts.append(request_id)

    def knows(self, request_id: str) -> bool:
        """Whether a request of this id is unfinished."""
        return request_id in self._groups

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a prompt; text goes by the tokenizer's own rule (one BOS at most)."""
        if not isinstance(prompt, str):
            return [int(t) for t in prompt]
        return encode_prompt(self._need_tokenizer("a text prompt"), prompt)

    def encode_chat(self, messages: Sequence[dict[str, Any]], **options: Any) -> list[int]:
        """Token ids of a conversation (`role`, `content`) through the chat template, opened for the answer."""
        return encode_chat(self._need_tokenizer("a conversation"), messages, **options)

    def generate(self, requests: Request | str | Sequence[Request | str | Sequence[int]],
                 params: SamplingParams = GREEDY) -> list[Output]:
        """Run requests to their end; outputs in the order given. Plain prompts (text or token ids) use `params`.

        Raises `KaruiError` for an impossible request before any of them runs. A request that fails while running has
        `finish_reason` "error" and says why.
        """
        listed = [requests] if isinstance(requests, str | Request) else list(requests)
        groups: list[Group] = []
        try:
            for r in listed:
                groups.append(self._groups[self.add(r if isinstance(r, Request) else Request(prompt=r, params=params))])
            while not all(group.finished for group in groups):
                self.step()
        except BaseException:
            self._cancel(groups)
            raise
        return [group.output() for group in groups]

    def stream(self, request: Request) -> Iterator[Delta]:
        """Yield what each step adds, as it comes. Closing the iterator cancels the request."""
        arrived: deque[Delta] = deque()
        outer = request.on_delta

        def collect(delta: Delta) -> Any:
            arrived.append(delta)
            return outer(delta) if outer else None

        group = self._groups[self.add(Request(**{**vars(request), "on_delta": collect}))]
        try:
            while True:
                while arrived:
                    yield arrived.popleft()
                if group.finished:
                    return
                self.step()
        finally:
            self._cancel([group])

    def score(self, texts: Sequence[Sequence[int]], adapter: str | None = None) -> list[torch.Tensor]:
        """Logprobs of each text's own tokens given those before: fp32 [n - 1] per text of n tokens.

        Texts run as prompt chunks beside whatever else runs; logits exist for a few hundred rows at a time.
        """
        limit = min(self.max_context, self._capacity)
        for text in texts:
            if not 1 <= len(text) <= limit:
                raise KaruiError(f"a text to score has {len(text):,} tokens; expected 1 to {limit:,}: cut it into windows.")
            self._check_vocabulary(text)
        scores = [Score(len(text)) for text in texts]
        with self._lock:
            for text, score in zip(texts, scores, strict=True):
                order = (0, next(self._arrivals), 0)
                self._inbox.append(Tokens([int(t) for t in text], order, self._namespace(adapter, ""), score, recompute=True))
        while not all(score.done for score in scores):
            self.step()
        failed = next((score.error for score in scores if score.error), None)
        if failed:
            raise RuntimeError(f"scoring failed: {failed}")
        return [score.logprobs for score in scores]

    # -- the prefix cache

    def export_prefix(self, prompt: str | Sequence[int], cache_salt: str = "") -> handoff.Prefix:
        """The keys and values of a prompt's full blocks out of the prefix cache, for another engine; see `handoff`.

        Raises:
            KaruiError: none is there. The prompt is run first, with max_tokens=1 where another engine decodes.
        """
        tokens = self.encode(prompt)
        handoff.check_plain(self.config)
        with self._lock:
            count, data, scale, starts = handoff.read(self.pool, self.runner, self.groups, tokens,
                                                      self._namespace(None, cache_salt))
            return handoff.Prefix(tokens=tuple(tokens[:count]), data=data, scale=scale, kv_dtype=self.kv_dtype, model=self.model,
                                  version=str(self.version), cache_salt=cache_salt, block_size=self.pool.block_size,
                                  starts=starts)

    def import_prefix(self, prefix: handoff.Prefix) -> int:
        """Put what another engine exported into the prefix cache; returns how many of its tokens are there then. Requests that
        begin with them find them as if this engine had computed them.

        Raises:
            KaruiError: of another model, other weights, or another kv_dtype.
        """
        self._check_vocabulary(prefix.tokens)
        handoff.check_plain(self.config)
        with self._lock:
            prefix.check(self.config, self.kv_dtype, self.model, str(self.version), self.pool.block_size)
            return handoff.write(self.pool, self.runner, self.groups, prefix, self._namespace(None, prefix.cache_salt))

    # -- weights

    def update_weights(self, weights: Weights, version: int | str | None = None) -> int | str:
        """Swap the weights between two steps; returns the new version (None: the old one + 1).

        The torch runner keeps tensors that are not named, the native one wants them all. What was computed with the old weights
        is forgotten: running sequences keep their tokens and compute their keys anew, and the prefix cache does not match across
        versions.
        """
        if not hasattr(self.runner, "load_weights"):
            raise UnsupportedError(f"{type(self.runner).__name__} cannot swap weights; load the engine with runner='torch'.")
        with self._lock:
            if getattr(self.runner, "supports_partial_weights", False):
                self.runner.load_weights(weights, partial=True)
            else:
                self.runner.load_weights(weights)
                self._dense_weight = None
            self.version = version if version is not None else (self.version + 1 if isinstance(self.version, int) else 1)
            self._invalidate(lambda space: (self.version, *space[1:]))
            return self.version

    def load_adapter(self, name: str, folder: str | Path) -> None:
        """Make a peft LoRA folder available to requests as `name`; a loaded one of that name is replaced."""
        if not getattr(self.runner, "supports_adapters", False):
            raise UnsupportedError(f"{type(self.runner).__name__} serves no adapters; load the engine with runner='torch', or "
                                   "merge the adapter into the model.")
        runner: Any = self.runner
        layers = read_adapter(folder, expected_shapes(self.config), getattr(runner, "dense_weight", self._dense_weight))
        with self._lock:
            known = self._adapters.get(name)
            used = {slot for slot, _ in self._adapters.values()}
            slot = known[0] if known else next(i for i in itertools.count() if i not in used)
            runner.set_adapter(slot, layers)
            self._adapters[name] = (slot, next(self._loads))
            if known:
                key = (name, self._adapters[name][1])
                self._invalidate(lambda space: (space[0], key, space[2]) if space[1] and space[1][0] == name else space)

    def unload_adapter(self, name: str) -> None:
        """Remove an adapter. Raises `KaruiError` while requests use it."""
        with self._lock:
            self._namespace(name, "")
            everyone = [*self.scheduler.running, *self.scheduler.waiting, *self._inbox]
            if any(s.namespace[1] and s.namespace[1][0] == name for s in everyone):
                raise KaruiError(f"adapter {name!r} is in use; wait for its requests or abort them.")
            runner: Any = self.runner
            runner.set_adapter(self._adapters.pop(name)[0], None)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the loaded adapters."""
        return tuple(self._adapters)

    def _invalidate(self, rename: Callable[[Any], Any]) -> None:
        self.scheduler.preempt_all()
        self.pool.forget_all()
        for s in (*self.scheduler.waiting, *self._inbox):
            s.namespace = rename(s.namespace)

    def _namespace(self, adapter: str | None, salt: str) -> tuple[Any, ...]:
        """What a cached block depends on besides its tokens: (weight version, adapter and its load count, salt)."""
        if adapter is not None and adapter not in self._adapters:
            raise KaruiError(f"adapter {adapter!r} is not loaded; loaded: {', '.join(self._adapters) or 'none'}."
                             f"{nearest(adapter, self._adapters)}")
        return self.version, None if adapter is None else (adapter, self._adapters[adapter][1]), salt

    def _adapter(self, s: Tokens) -> int:
        """The slot of a sequence's adapter, -1 for the base."""
        return -1 if s.namespace[1] is None else self._adapters[s.namespace[1][0]][0]

    # -- the loop

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._inbox or self._aborts or self.scheduler.has_work)

    def step(self) -> list[Delta]:
        """One step over everything that runs. Returns what it added, request by request; empty when there is no work.

        Raises `EngineStuckError` when work waits and none of it can run.
        """
        with self._lock:
            threads = torch.get_num_threads()
            if self._one_thread and threads != 1:
                torch.set_num_threads(1)
            try:
                self._take_in()
                if self.scheduler.has_work:
                    self._run()
                return self._deliver()
            finally:
                if self._one_thread and threads != 1:
                    torch.set_num_threads(threads)

    def _run(self) -> None:
        started = time.perf_counter()
        ahead = self._steps_ahead(self.scheduler.running)
        if self.speculation is not None and ahead < 2:
            self.speculation.propose(self.scheduler, self.max_context)
        plan = self.scheduler.schedule()
        ahead = min(ahead, self._steps_ahead([work.sequence for work in plan.works]))
        alone = self._plan_ahead(plan, ahead) if ahead > 1 else []
        try:
            self._copy(plan.copies)
        except Exception as error:  # shared blocks were replaced and not filled: compute them anew
            for work in plan.works:
                self.scheduler.preempt(work.sequence)
            self._failed(plan, error)
            return
        if self._settles:  # behind the copies, which may read what is nobody's by now
            runner: Any = self.runner
            runner.settle(self.pool.settled)
        self.pool.settled.clear()
        try:
            if alone and self._run_ahead(plan, alone, ahead):
                return
            output = self.runner.forward(self._assembler.batch(plan, self.speculation))
        except Exception as error:
            self._failed(plan, error)
            return
        verdicts = self._settle(plan, output)
        self._num_steps += 1
        seconds, prompts = time.perf_counter() - started, any(w.count > 1 for w in plan.works)
        if not prompts:
            self._step_s = seconds
        if self.speculation is not None:
            self.speculation.timed(0 if prompts else len(plan.works), verdicts, seconds)

    def _steps_ahead(self, sequences: Sequence[Tokens]) -> int:
        """Steps that these sequences may decode unattended: 1 unless all are greedy, and what drafts is the runner or rests."""
        drafts = self.speculation
        ahead = min(self._ahead, int(AHEAD_S / self._step_s))
        if drafts is not None and drafts.native is None:
            ahead = min(ahead, drafts.plain_steps(len(sequences)))
        if ahead < 2:
            return 1
        alone = all(not s.recompute and not s.held and s.num_pending == 1 and s.draft is None and s.owner.fast
                    and (drafts is None or not drafts.typical(s.owner.params)) for s in sequences)
        return ahead if alone else 1

    @property
    def _native_drafts(self) -> dict[str, Any] | None:
        """What the runner must know to draft by itself; None where nothing drafts, or where it cannot."""
        return None if self.speculation is None else self.speculation.native

    def _plan_ahead(self, plan: Plan, rounds: int) -> list[Ahead]:
        """The plan's sequences with blocks for what they may gain and a draft; none when there are too few blocks for all."""
        drafts = self._native_drafts
        most = _gain(rounds, drafts) + (drafts["nodes"] if drafts else 0)
        counts = [min(most, self.max_context - work.sequence.num_computed) for work in plan.works]
        if not self.scheduler.reserve(plan, counts):
            return []
        out = []
        for work, count in zip(plan.works, counts, strict=True):
            s, live = work.sequence, work.sequence.owner
            left = live.group.max_tokens - len(live.completion.token_ids)
            proposer = live.proposer if drafts else None
            out.append(Ahead(s.tokens, left, s.num_computed + count, live.ends, self._adapter(s), proposer))
        return out

    def _run_ahead(self, plan: Plan, alone: list[Ahead], rounds: int) -> bool:
        """Decode all sequences for up to `rounds` steps in one call; False when already the first step had no numbers."""
        started = time.perf_counter()
        runner: Any = self.runner
        drafts = self._native_drafts
        aux_layers: tuple[int, ...] = ()
        if self.speculation is not None and drafts is not None:
            drafts = drafts | {"adapt": self.speculation.config.adaptive}
            aux_layers = self.speculation.aux_layers
            room = self.scheduler.max_tokens // len(alone) - 1 if self.speculation.drafts(len(alone)) else 0
            drafts["nodes"] = min(drafts["nodes"], room)
        size = self.pool.block_size
        rows, width = [work.sequence.table_row for work in plan.works], max(-(-a.reach // size) for a in alone)
        tables = np.ascontiguousarray(self.scheduler.tables[:, rows, :width])
        gained = runner.decode(alone, tables, rounds, _gain(rounds, drafts), aux_layers, drafts)
        if not gained.rounds:
            return False
        self._step_s = (time.perf_counter() - started) / len(gained.rounds)
        self._num_steps += len(gained.rounds)
        if self.speculation is not None:
            for seconds, verdicts in gained.rounds:
                self.speculation.timed(len(alone), [verdict for verdict in verdicts if verdict[0]], seconds)
        for work, tokens in zip(plan.works, gained.tokens, strict=True):
            s = work.sequence
            self._count_prompt(s.owner, s.num_computed)
            s.tokens += tokens
            first = s.num_computed
            self.scheduler.computed(s, len(tokens))
            self.scheduler.trim(s)
            if self.speculation is not None and drafts is None:  # nobody saw these rows' states
                self.speculation.observe(s.owner, first, s.tokens[first:s.num_computed], tokens, None, None, None, None)
            self._emit(s.owner, tokens, None)
        return True

    def _count_prompt(self, live: Live, num_cached: int) -> None:
        if live.group.num_cached is None:
            live.group.num_cached = num_cached
            self._num_prompt, self._num_cached = self._num_prompt + live.sequence.num_prompt, self._num_cached + num_cached

    def _take_in(self) -> None:
        while self._inbox:
            self.scheduler.add(self._inbox.popleft())
        while self._aborts:
            group = self._groups.get(self._aborts.popleft())
            if group is not None:
                self._end_group(group, "abort", None)

    def _settle(self, plan: Plan, output: StepOutput) -> list[tuple[int, int]]:
        """Draw, verify and emit for every sequence of the step. Returns (depth, accepted) of each draft."""
        rows = Rows(output)
        self._draw(plan, rows)
        at = row = 0  # row of the step, row of the logits
        verdicts: list[tuple[int, int]] = []
        moves: list[tuple[int, int]] = []
        for work in plan.works:
            s, count, first = work.sequence, work.count, work.sequence.num_computed
            if s.recompute:
                s.owner.rows(s.tokens, first, output.logits[row:row + count])
                at, row = at + count, row + count
                self.scheduler.computed(s, count)
                if s.num_pending == 0:
                    s.owner.done = True
                    self.scheduler.remove(s)
                continue
            live: Live = s.owner
            self._count_prompt(live, first)
            if work.drafted:
                verdicts.append(self._settle_draft(work, live, rows, row, at, moves))
                at, row = at + 1 + work.num_drafted, row + 1 + work.num_drafted
                continue
            self.scheduler.computed(s, count)
            emitted: list[int] = []
            if s.num_pending == 0:
                emitted = self._settle_row(live, rows, row)
                row += 1
            if live.proposer is not None:
                self.speculation.observe(  # type: ignore[union-attr]
                    live, first, s.tokens[first:first + count], emitted, None, None,
                    output.hidden[row - 1] if emitted and output.hidden is not None else None,
                    None if output.aux is None else output.aux[at:at + count])
            at += count
        self._copy(moves)
        return verdicts

    def _draw(self, plan: Plan, rows: Rows) -> None:
        """Draw the tokens of all plainly sampled rows at once: one by one they would cost more than the step of a small model."""
        row, found, draws = 0, [], []
        for work in plan.works:
            s, live = work.sequence, work.sequence.owner
            if s.recompute or work.drafted:
                row += work.count + work.num_drafted
                continue
            if s.num_computed + work.count < len(s.tokens):
                continue
            if not live.fast and not live.params.penalized and live.group.beams is None:
                found.append(row)
                draws.append((live.params, live.seed, len(s.tokens)))
            row += 1
        if found:
            rows.draw(found, draws)

    def _settle_row(self, live: Live, rows: Rows, row: int) -> list[int]:
        """The next token of one continuation; more continuations or beams where the request wants them."""
        s, params, group = live.sequence, live.params, live.group
        if rows.bad(row):
            self._end_group(group, "error", NOT_NUMBERS)
            return []
        forks = params.n > 1 and len(group.lives) == 1  # the prompt is computed: the others share its blocks
        known = rows.logprobs.get(row) if params.logprobs == 0 else None
        if live.fast or (row in rows.drawn and not forks and (params.logprobs is None or known is not None)):
            token = rows.best[row] if live.fast else rows.drawn[row][0]
            s.tokens.append(token)
            self._emit(live, [token], None if known is None else [known])
            return [token]
        logits = rows.numpy(row)
        if group.beams is not None:
            if group.beams.row(live, logits):
                self._advance_beams(group, group.beams)
            return []
        siblings = [live]
        if forks:
            siblings += [self._fork(live, index, s.tokens) for index in range(1, params.n)]
        first = 0
        for sibling in siblings:
            output = sibling.output_tokens if params.penalized else ()
            if sibling is live and row in rows.drawn:
                token, p = rows.drawn[row]
            else:
                token, p = sample(logits, params, sibling.seed, len(sibling.sequence.tokens), group.prompt, output)
            sibling.sequence.tokens.append(token)
            self._emit(sibling, [token], None if params.logprobs is None else [logprobs_of(logits, token, p, params.logprobs)])
            first = first if sibling is not live else token
        return [first]

    def _settle_draft(self, work: Work, live: Live, rows: Rows, row: int, at: int,
                      moves: list[tuple[int, int]]) -> tuple[int, int]:
        """Verify a draft: keep the accepted path's keys, emit its tokens and one of the target's own."""
        s, draft, speculation, size = work.sequence, work.sequence.draft, self.speculation, self.pool.block_size
        assert speculation is not None
        span, first, depth = slice(row, row + 1 + len(draft)), s.num_computed, max(draft.tree().depths)
        if min(rows.best[span]) < 0:
            self._end_group(live.group, "error", NOT_NUMBERS)
            return depth, 0
        logits = None if live.fast and not speculation.typical(live.params) else rows.many(span)
        verdict, row_tokens, chances = speculation.verify(live, draft, logits, rows.best[span])
        taken = rows_of(verdict)
        for own in s.blocks:
            slot = [own[p // size] * size + p % size for p in range(first, first + 1 + len(draft))]
            moves += [(slot[r], slot[i]) for i, r in enumerate(taken) if r != i]
        s.tokens += verdict.tokens
        s.draft = None
        self.scheduler.computed(s, len(taken))
        self.scheduler.trim(s)
        aux = rows.output.aux
        speculation.observe(live, first, s.tokens[first:s.num_computed], verdict.tokens, draft, row_tokens,
                            None if rows.output.hidden is None else rows.output.hidden[row + taken[-1]],
                            None if aux is None else aux[[at + r for r in taken]])
        top = live.params.logprobs
        self._emit(live, verdict.tokens, None if top is None or logits is None else [
            logprobs_of(logits[r], t, p, top) for r, t, p in zip(taken, verdict.tokens, chances, strict=True)])
        return depth, verdict.num_accepted

    def _fork(self, parent: Live, index: int, tokens: list[int]) -> Live:
        """Another continuation of `tokens`, which `parent` has computed."""
        s, group = parent.sequence, parent.group
        live = Live(group, index, self._backend, self.eos)
        live.sequence = Tokens(list(tokens), (*s.order[:2], index), s.namespace, live)
        live.sequence.num_prompt = s.num_prompt
        if group.beams is None:
            group.lives.append(live)
            if self.speculation is not None:
                self.speculation.attach(live)
        self.scheduler.fork(s, live.sequence)
        return live

    def _advance_beams(self, group: Group, beams: Beams) -> None:
        """All beams of the round are run: branch, drop, go on or end."""
        generated = [live.output_tokens for live in beams.lives]
        branches = beams.search.advance(generated, [beams.found[live] for live in beams.lives])
        beams.found = {}
        if group.first_s is None:
            group.first_s = time.monotonic()
        by_parent: dict[int, list[Branch]] = {}
        for branch in branches:
            by_parent.setdefault(branch.parent, []).append(branch)
        heirs: dict[Branch, Live] = {}
        for p, parent in enumerate(beams.lives):
            parent.sequence.held = False
            for branch in by_parent.get(p, [])[1:]:
                heirs[branch] = self._fork(parent, beams.next_index, parent.sequence.tokens)
                beams.next_index += 1
            if p in by_parent:
                heirs[by_parent[p][0]] = parent
            else:
                self.scheduler.remove(parent.sequence)
        beams.lives = [heirs[branch] for branch in branches]
        for branch in branches:
            heirs[branch].sequence.tokens.append(branch.token)
        if not branches:
            self._end_beams(group, beams)

    def _end_beams(self, group: Group, beams: Beams) -> None:
        group.lives = []
        for index, found in enumerate(beams.search.hypotheses[:group.request.params.n]):
            live = Live(group, index, self._backend, self.eos)
            live.sequence = Tokens([], (0, 0, 0), None, live)
            live.completion.score = found.score
            group.lives.append(live)
        for live, found in zip(tuple(group.lives), beams.search.hypotheses, strict=False):
            self._emit(live, found.tokens, None)
            if live.completion.finish_reason is None:  # the length penalty's last word came from context or memory
                self._finish(live, "length", None)

    # -- what leaves the engine

    def _emit(self, live: Live, tokens: list[int], logprobs: list[TokenLogprob] | None) -> None:
        """Tokens of one continuation, up to where a stop or the limit ends it."""
        completion, group, detokenizer = live.completion, live.group, live.detokenizer
        if group.first_s is None:
            group.first_s = time.monotonic()
        reason: FinishReason | None = None
        text, count = "", 0
        for token in tokens:
            count += 1
            completion.token_ids.append(token)
            if token in live.ends:
                reason, completion.stop_reason = "stop", token
            elif detokenizer is not None:
                text += detokenizer.feed(token)
                if detokenizer.stopped is not None:
                    reason, completion.stop_reason = "stop", detokenizer.stopped
            if reason is None and len(completion.token_ids) >= group.max_tokens:
                reason = "length"
            if reason is not None:
                break
        self._num_generated += count
        if logprobs is not None and completion.logprobs is not None:
            completion.logprobs += logprobs[:count]
        completion.text += text
        delta = Delta(group.id, live.index, text, tokens[:count], None if logprobs is None else logprobs[:count])
        self._deltas.append((group, delta))
        if reason is not None:
            self._close(live, reason, None, delta)

    def _finish(self, live: Live, reason: FinishReason, error: str | None) -> None:
        """End a continuation from outside its own tokens."""
        if live.completion.finish_reason is None:
            delta = Delta(live.group.id, live.index, "", [])
            self._deltas.append((live.group, delta))
            self._close(live, reason, error, delta)

    def _end_group(self, group: Group, reason: FinishReason, error: str | None) -> None:
        if group.beams is not None:
            for live in group.beams.lives:
                self.scheduler.remove(live.sequence)
        for live in group.lives:
            self._finish(live, reason, error)

    def _close(self, live: Live, reason: FinishReason, error: str | None, delta: Delta) -> None:
        if live.detokenizer is not None:
            rest = live.detokenizer.flush()
            live.completion.text += rest
            delta.text += rest
        live.completion.finish_reason = delta.finish_reason = reason
        live.completion.error = delta.error = error
        self.scheduler.remove(live.sequence)
        _forget_drafts(live.sequence)
        group = live.group
        complete = len(group.lives) >= (1 if group.beams else group.request.params.n) or reason in ("abort", "error")
        if complete and all(other.completion.finish_reason is not None for other in group.lives):
            group.finished_s = time.monotonic()
            self._groups.pop(group.id, None)

    def _deliver(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        for group, delta in deltas:
            if group.request.on_delta is None:
                continue
            try:
                wanted = group.request.on_delta(delta)
            except Exception:
                logger.exception("the on_delta callback of %s raised; the request is cancelled", group.id)
                wanted = False
            if wanted is False:
                self.abort(group.id)
        return [delta for _, delta in deltas]

    def _failed(self, plan: Plan, error: Exception) -> None:
        """The runner raised: nothing was settled. Everyone tries again alone, and who fails alone is ended."""
        self._num_failed += 1
        logger.warning("a step over %d sequences failed: %s: %s", len(plan.works), type(error).__name__, error)
        for work in plan.works:
            s = work.sequence
            s.failures, s.draft = s.failures + 1, None
            if s.failures < MAX_FAILURES:
                continue
            told = f"{type(error).__name__}: {error}"
            if s.recompute:
                s.owner.done, s.owner.error = True, told
                self.scheduler.remove(s)
            else:
                self._end_group(s.owner.group, "error", told)

    # -- small things

    def check_integrity(self) -> None:
        """Assert the scheduler's invariants, and when idle that every block came back."""
        with self._lock:
            self.scheduler.check_integrity()
            if not self.has_work:
                assert self.pool.num_free == self.pool.num_blocks, f"{self.pool.num_blocks - self.pool.num_free} blocks leaked"
                assert not self._groups, f"unfinished requests without work: {list(self._groups)[:8]}"

    @property
    def stats(self) -> Stats:
        drafts = self.speculation.statistics if self.speculation else None
        waiting = len(self.scheduler.waiting) + len(self._inbox)
        return Stats(self._num_steps, self._num_failed, len(self.scheduler.running), waiting, self._num_prompt, self._num_cached,
                     self._num_generated, self.scheduler.num_preemptions,
                     self.pool.num_blocks, self.pool.num_free, self.pool.num_cached,
                     drafts.drafted if drafts else 0, drafts.accepted if drafts else 0, self.version,
                     self.scheduler.states.num_cached if self.scheduler.states is not None else 0)

    @property
    def _capacity(self) -> int:
        """Tokens of the longest sequence that the blocks hold."""
        count, size = self.pool.num_blocks, self.pool.block_size
        return self.groups.capacity(count, self.scheduler.max_tokens, size, max(self.max_context, count * size))

    def _cancel(self, groups: list[Group]) -> None:
        with self._lock:
            for group in groups:
                if not group.finished:
                    self.abort(group.id)
            self._take_in()
            self._deliver()

    def _copy(self, pairs: list[tuple[int, int]]) -> None:
        if pairs:
            source, target = zip(*pairs, strict=True)
            self.runner.copy_slots(ints(source), ints(target))

    def _need_tokenizer(self, what: str) -> Any:
        if self.tokenizer is None:
            raise KaruiError(f"{what} needs a tokenizer; this engine was made without one: give token ids.")
        return self.tokenizer

    def _check_vocabulary(self, tokens: Sequence[int]) -> None:
        outside = [t for t in tokens if not 0 <= t < self.config.vocab_size]
        if outside:
            raise KaruiError(f"token {outside[0]} is outside the vocabulary of {self.config.vocab_size}; "
                             "was the prompt made with another model's tokenizer?")

    def check(self, prompt: list[int], params: SamplingParams) -> None:
        """Raise `KaruiError` for what can never run."""
        if not prompt:
            raise KaruiError("the prompt is empty; give at least one token.")
        self._check_vocabulary((*prompt, *params.stop_token_ids))
        if len(prompt) >= self.max_context:
            raise KaruiError(f"the prompt has {len(prompt):,} tokens; the context holds {self.max_context:,} and one must be "
                             "left for the answer. Shorten the prompt or raise max_context.")
        if params.stop and (self._backend is None or params.beams > 1):
            raise KaruiError("stop texts need a tokenizer and do not go with beam search; use stop_token_ids.")
        if params.typical_acceptance and (self.speculation is None or self.speculation.config.method not in ("medusa", "eagle3")):
            raise KaruiError("typical_acceptance is a rule for drafts of medusa or eagle3 heads; this engine has none. "
                             "Leave it out, or load the bundle with speculation='medusa' or 'eagle3'.")
        asked = min(len(prompt) + (params.max_tokens or 1), self.max_context)
        if asked > self._capacity:
            raise KaruiError(f"the request asks for {asked:,} tokens of KV memory ({len(prompt):,} of prompt); "
                             f"{self._capacity:,} exist and {self.pool.num_free * self.pool.block_size:,} are free now, "
                             "so it can never fit. Lower max_tokens or raise memory.")


def _gain(rounds: int, drafts: dict[str, Any] | None) -> int:
    """Tokens with which a sequence ends a call of so many rounds."""
    return rounds * (2 if drafts else 1)


def _forget_drafts(s: Tokens) -> None:
    proposer = getattr(s.owner, "proposer", None)
    if proposer is not None:
        proposer.reset()
