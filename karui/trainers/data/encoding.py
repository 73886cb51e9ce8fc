"""Rows to tokens and masks, a batch at a time: here, or in other processes that give them back in the same order.

The parts of this that take time are Python's (reading, checking, rendering templates) and the tokenizer's, which uses all cores
by itself. `workers` spreads the first over processes; results come in order, so the set is the same with any number of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from karui.trainers.data.formats import Example, Format, read_example
from karui.trainers.data.masks import Encoder, Tokens, encode_masked
from karui.trainers.data.sources import Row
from karui.trainers.data.templates import ChatTemplate, Rendered

if TYPE_CHECKING:
    from karui.configs.recipe import DataSection

BATCH_ROWS = 256
_MAIN: dict[str, RowEncoder] = {}  # of a worker process


@dataclass(frozen=True)
class Encoded:
    """A batch: (row number, place, tokens) of the rows that hold something, how many do not, and turns left open by tags."""

    samples: list[tuple[int, str, Tokens, bool]]
    rows: int
    empty: int
    open_turns: int


class RowEncoder:
    """Checks, renders and tokenizes rows."""

    def __init__(self, section: DataSection, tokenizer: Any) -> None:
        self.section = section
        self.encode = Encoder(tokenizer)
        self.template = ChatTemplate(tokenizer)

    def __call__(self, rows: Sequence[Row], forms: Mapping[int, Format]) -> Encoded:
        out: list[tuple[int, str, Tokens, bool]] = []
        self.template.open_turns = 0
        read = [(read_example(row, forms[row.part], self.section), forms[row.part]) for row in rows]
        present = [(e, f) for e, f in read if e is not None]
        for form in dict.fromkeys(f for _, f in present):
            examples = [e for e, f in present if f == form]
            out += [(e.row, e.place, t, form.kind != "text") for e, t in zip(examples, self._tokens(examples, form))]
        out.sort(key=lambda item: item[0])
        return Encoded(out, len(rows), len(rows) - len(present), self.template.open_turns)

    def framed(self, ids: Sequence[int], mask: np.ndarray, merged: int = 0) -> Tokens:
        """Text without a template, with the tokenizer's own prefix before it (no loss) and a supervised end token behind."""
        before, after = self.encode.frame(ids)
        whole = np.array([*before, *ids, *after], np.int32)
        supervised = np.concatenate([np.zeros(len(before), bool), mask, np.ones(len(after), bool)])
        supervised[:1] = False  # nothing predicts the first token
        return Tokens(whole, supervised, merged)

    def _tokens(self, examples: Sequence[Example], form: Format) -> list[Tokens]:
        if form.kind == "text":
            return [self.framed(ids, np.ones(len(ids), bool)) for ids in self.encode([e.text or "" for e in examples])]
        if form.templated:
            return encode_masked(self.encode, [self.template.render(e, self.section.train_on) for e in examples])
        pairs = [(e.prompt or "", e.completion or "") for e in examples]
        start = [0 if self.section.train_on == "all" else len(p) for p, _ in pairs]
        plain = encode_masked(self.encode, [Rendered(p + c, ((s, len(p + c)),)) for (p, c), s in zip(pairs, start)])
        return [self.framed(t.ids.tolist(), t.mask, t.merged) for t in plain]


def encode_rows(
    rows: Iterable[Row], forms: dict[int, Format], section: DataSection, tokenizer: Any, encoder: RowEncoder
) -> Iterator[Encoded]:
    """Batches in order.

    Args:
        forms: the format of each part; filled in by whoever makes `rows`, before a row of that part comes.
        encoder: used when `section.workers` is 0.
    """
    stream = iter(rows)
    if section.workers == 0:
        while batch := list(islice(stream, BATCH_ROWS)):
            yield encoder(batch, forms)
        return
    from multiprocessing import get_context

    waiting: deque[Future[Encoded]] = deque()
    with ProcessPoolExecutor(section.workers, get_context("spawn"), initializer=_start, initargs=(section, tokenizer)) as pool:
        try:
            while batch := list(islice(stream, BATCH_ROWS)):
                waiting.append(pool.submit(_work, batch, dict(forms)))
                if len(waiting) >= 2 * section.workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _start(section: DataSection, tokenizer: Any) -> None:
    import os

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process is one core here
    _MAIN["encoder"] = RowEncoder(section, tokenizer)


def _work(rows: Sequence[Row], forms: Mapping[int, Format]) -> Encoded:
    return _MAIN["encoder"](rows, forms)
