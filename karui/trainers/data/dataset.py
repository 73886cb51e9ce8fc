"""From a recipe's data section to a `SampleSet`, kept on disk under a key of everything that decides its tokens.

Rows are read, checked, rendered and tokenized in batches. What the length policy and the masks leave out is counted; nothing
disappears without a number, and a set with nothing to learn from is an error before training starts.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, Literal

import numpy as np

from karui.configs.errors import KaruiError
from karui.configs.recipe import DataSection
from karui.trainers.data.cache import cache_key, read_cache, write_cache
from karui.trainers.data.formats import Example, Format, decide_format, read_example
from karui.trainers.data.masks import Encoder, Tokens, encode_masked
from karui.trainers.data.sources import Row, Source, open_source
from karui.trainers.data.templates import ChatTemplate, Rendered
from karui.trainers.data.types import Counts, Sample, SampleSet

log = logging.getLogger(__name__)
Split = Literal["train", "eval"]
_BATCH_ROWS = 256
_BLOCK_CHARS = 1 << 20  # of a text file tokenized at once


def load_samples(section: DataSection, tokenizer: Any, split: Split, *, cache: bool = True,
                 progress: Callable[[int], None] | None = None) -> SampleSet:
    """All samples of a split, from the cache when nothing that decides them has changed.

    Splits: `train` is `section.train` without its last `holdout` rows, cut to the first `limit`. `eval` is `section.eval`, or
    those last `holdout` rows of train, or, when the recipe names neither, a set without samples. A text file counts windows
    of `max_length` tokens as its rows.

    Args:
        tokenizer: a transformers tokenizer.
        cache: False: neither read nor write the cache (`$KARUI_CACHE/data`).
        progress: called with the number of rows done.

    Raises:
        KaruiError: anything wrong with the source or a row (names file and line or row), or nothing left to train on.
    """
    if split == "eval" and section.eval is None and section.holdout == 0:
        return SampleSet.of([], source="none")
    own = split == "eval" and section.eval is not None
    name = str(section.eval) if own else section.train
    source = open_source(name, default_splits=("test", "validation") if own else ("train",))
    key = cache_key(section, tokenizer, source, split) if cache else ""
    found = read_cache(key) if cache else None
    if found is None:
        found = _Builder(section, tokenizer, source).build(split if not own else "all", progress)
        if cache:
            write_cache(key, found)
    c = found.counts
    log.info("data %s (%s): %d rows, %d used, %d tokens, %d supervised; dropped: %d overlong, %d unsupervised, %d empty; "
             "%d truncated", name, split, c.rows, c.used, c.tokens, c.supervised_tokens, c.dropped_overlong, c.unsupervised,
             c.empty, c.truncated)
    return found


class _Builder:
    """One pass over a source; holds the counts while it runs."""

    def __init__(self, section: DataSection, tokenizer: Any, source: Source) -> None:
        self.section, self.source, self.tokenizer = section, source, tokenizer
        self.encode = Encoder(tokenizer)
        self.template = ChatTemplate(tokenizer)
        self.tally: Counter[str] = Counter()
        self.longest = 0
        self.notes: list[str] = []

    def build(self, part: str, progress: Callable[[int], None] | None) -> SampleSet:
        rows = self.source.rows()
        first = next(rows, None)
        if first is None:
            raise KaruiError(f"data {self.source.label!r}: the data set is empty; name one with rows.")
        form = decide_format(self.section, first, ChatTemplate.exists(self.tokenizer))
        self.notes.append(f"format {form.kind}: {form.why}")
        if form.kind == "prompt" and not form.templated:
            self.notes.append("the tokenizer has no chat template: completion follows prompt as written, then the end token")
        if self.source.is_text:
            samples = self._windows(chain([first], rows), part)
        else:
            samples = list(self._samples(self._part(chain([first], rows), part), form, progress))
        return self._finish(samples, form)

    def _part(self, rows: Iterator[Row], part: str) -> Iterator[Row]:
        """The rows that belong to the split; see `load_samples`."""
        holdout = self.section.holdout
        if part == "all":
            return rows
        if part == "train" and (holdout == 0 or self.section.eval is not None):
            return islice(rows, self.section.limit)
        total = sum(1 for _ in self.source.rows())
        self._holdout_fits(total, "rows")
        if part == "eval":
            return islice(rows, total - holdout, None)
        return islice(rows, min(total - holdout, self.section.limit or total))

    def _holdout_fits(self, total: int, unit: str) -> None:
        if self.section.holdout >= total:
            raise KaruiError(f"data {self.source.label!r}: data.holdout is {self.section.holdout}, but there are only {total} "
                             f"{unit}; nothing would be left to train on.")

    def _samples(self, rows: Iterator[Row], form: Format, progress: Callable[[int], None] | None) -> Iterator[Sample]:
        seen: set[int] = set()
        while batch := list(islice(rows, _BATCH_ROWS)):
            self.tally["rows"] += len(batch)
            examples = [e for e in (read_example(row, form, self.section) for row in batch) if e is not None]
            self.tally["empty"] += len(batch) - len(examples)
            for example, tokens in zip(examples, self._tokens(examples, form)):
                sample = self._fit(example, tokens, trim=form.kind != "text")
                if sample is not None:
                    fingerprint = hash(sample.ids.tobytes())
                    self.tally["duplicates"] += fingerprint in seen
                    seen.add(fingerprint)
                    yield sample
            if progress is not None:
                progress(self.tally["rows"])

    def _tokens(self, examples: Sequence[Example], form: Format) -> list[Tokens]:
        if form.kind == "text":
            return [self._framed(ids, np.ones(len(ids), bool)) for ids in self.encode([e.text or "" for e in examples])]
        if form.templated:
            return encode_masked(self.encode, [self.template.render(e, self.section.train_on) for e in examples])
        pairs = [(e.prompt or "", e.completion or "") for e in examples]
        start = [0 if self.section.train_on == "all" else len(p) for p, _ in pairs]
        plain = encode_masked(self.encode, [Rendered(p + c, ((s, len(p + c)),)) for (p, c), s in zip(pairs, start)])
        return [self._framed(t.ids.tolist(), t.mask, t.merged) for t in plain]

    def _framed(self, ids: Sequence[int], mask: np.ndarray, merged: int = 0) -> Tokens:
        """Text without a template, with the tokenizer's own prefix before it (no loss) and a supervised end token behind."""
        before, after = self.encode.frame(ids)
        whole = np.array([*before, *ids, *after], np.int32)
        supervised = np.concatenate([np.zeros(len(before), bool), mask, np.ones(len(after), bool)])
        supervised[:1] = False  # nothing predicts the first token
        return Tokens(whole, supervised, merged)

    def _fit(self, example: Example, tokens: Tokens, trim: bool) -> Sample | None:
        """Apply trimming and the length policy; None when the sample is left out, which is then counted."""
        ids, mask = tokens.ids, tokens.mask
        self.tally["merged_boundaries"] += tokens.merged
        limit = self.section.max_length
        supervised = np.flatnonzero(mask)
        if trim and len(supervised):
            end = int(supervised[-1]) + 1
            self.tally["trimmed_tokens"] += len(ids) - end
            ids, mask = ids[:end], mask[:end]
        self.longest = max(self.longest, len(ids))
        if len(ids) > limit:
            if self.section.overlong == "error":
                raise KaruiError(f"{example.place}: {len(ids)} tokens, more than data.max_length={limit}; raise it, shorten the "
                                 "row, or set data.overlong to drop or truncate.")
            if self.section.overlong == "drop":
                self.tally["dropped_overlong"] += 1
                return None
            self.tally["truncated"] += 1
            ids, mask = ids[:limit], mask[:limit]
        if not mask.any():
            self.tally["unsupervised"] += 1
            return None
        return Sample(ids=ids, loss_mask=mask, source_row=example.row)

    def _windows(self, rows: Iterator[Row], part: str) -> list[Sample]:
        """Text files: every file is one document, cut into windows of `max_length` tokens, nothing left out."""
        size = self.section.max_length
        windows: list[np.ndarray] = []
        for row in rows:
            text = [i for block in _blocks(row.fields["text"]) for i in self.encode([block])[0]]
            ids = self._framed(text, np.ones(len(text), bool)).ids
            windows += [ids[at : at + size] for at in range(0, len(ids), size)]
        windows = [w for w in windows if len(w) > 1]
        self.notes.append(f"text files are cut into consecutive windows of {size} tokens; each counts as a row, and the first "
                          "token of a window carries no loss")
        total, holdout = len(windows), self.section.holdout
        if part != "all" and holdout and (part == "eval" or self.section.eval is None):
            self._holdout_fits(total, "windows")
            windows = windows[total - holdout :] if part == "eval" else windows[: total - holdout]
        if part == "train":
            windows = windows[: self.section.limit]
        self.tally["rows"] = len(windows)
        self.longest = max((len(w) for w in windows), default=0)
        return [Sample(ids=w, loss_mask=np.arange(len(w)) > 0, source_row=i) for i, w in enumerate(windows)]

    def _finish(self, samples: list[Sample], form: Format) -> SampleSet:
        counts = Counts(**self.tally, longest=self.longest)
        if not samples:
            raise KaruiError(self._nothing_left(counts))
        if self.template.open_turns:
            self.notes.append(f"the template's {{% generation %}} tags leave the end-of-turn token out of "
                              f"{self.template.open_turns} turns; the model does not learn to end them")
        if counts.merged_boundaries:
            self.notes.append(f"{counts.merged_boundaries} borders of supervised text lie inside a token; the text was cut there")
        return SampleSet.of(samples, counts, source=self.source.label, format=form.kind, notes=tuple(self.notes))

    def _nothing_left(self, counts: Counts) -> str:
        label, limit = self.source.label, self.section.max_length
        if counts.rows == counts.empty:
            return f"data {label!r}: all {counts.rows} rows are empty text; nothing to train on."
        if counts.dropped_overlong + counts.empty == counts.rows:
            return (f"data {label!r}: every sample is longer than data.max_length={limit} (the longest has {counts.longest} "
                    "tokens); raise it, or set data.overlong=truncate.")
        return (f"data {label!r}: no sample has a supervised token ({counts.rows} rows: {counts.unsupervised} without assistant "
                f"tokens in the first {limit}, of which {counts.truncated} after truncation; {counts.dropped_overlong} overlong; "
                f"{counts.empty} empty). Check that the assistant's turns are there, raise data.max_length, or set "
                "data.train_on=all.")


def _blocks(text: str) -> Iterator[str]:
    """Pieces of about a million characters, so that memory stays flat.

    Cut between a newline and a character that is not white space: pre-tokenizers of byte-level BPE never join the two, so
    the tokens are those of the whole text.
    """
    at = 0
    border = re.compile(r"\n(?=\S)")
    while at < len(text):
        found = border.search(text, at + _BLOCK_CHARS)
        end = found.end() if found else len(text)
        yield text[at:end]
        at = end


def describe(samples: SampleSet) -> dict[str, Any]:
    """Counts, source, format and notes, for reports and trackers."""
    return {"source": samples.source, "format": samples.format, "notes": list(samples.notes),
            **dataclasses.asdict(samples.counts)}
