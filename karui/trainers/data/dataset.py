"""From a recipe's data section to a `SampleSet`, kept on disk under a key of everything that decides its tokens.

Rows are streamed: read, checked, rendered and tokenized in batches, and past some size written to disk as they come, so that
memory does not grow with the data. What is trained on is mapped from that file and can be asked for in any order, which is what
makes shuffling global and resuming exact. What the length policy and the masks leave out is counted; nothing disappears without
a number, and a set with nothing to learn from is an error before training starts.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from karui.configs.errors import KaruiError
from karui.trainers.data.cache import building, cache_key, cache_path, describe_cached, read_cache, write_cache
from karui.trainers.data.encoding import RowEncoder, encode_rows
from karui.trainers.data.formats import Format, decide_format
from karui.trainers.data.masks import Tokens
from karui.trainers.data.mixing import MixSource, Part
from karui.trainers.data.seen import Seen
from karui.trainers.data.sources import Row, Source, open_source
from karui.trainers.data.spool import Spool
from karui.trainers.data.templates import ChatTemplate
from karui.trainers.data.types import Counts, Sample, SampleSet

if TYPE_CHECKING:
    from karui.configs.recipe import DataSection

log = logging.getLogger(__name__)
Split = Literal["train", "eval"]
T = TypeVar("T")
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
    if section.mix and not own:
        parts = [Part(source, section.weight, section.repeat)]
        parts += [Part(open_source(m.source), m.weight, m.repeat) for m in section.mix]
        source = MixSource(tuple(parts))
    part = "all" if own else split
    found: SampleSet | None
    if not cache:
        found = _Builder(section, tokenizer, source, None).build(part, progress)
    else:
        key = cache_key(section, tokenizer, source, split)
        found = read_cache(key)
        if found is None:
            with building(key):
                found = read_cache(key) or _Builder(section, tokenizer, source, key).build(part, progress)
    c = found.counts
    log.info("data %s (%s): %d rows, %d used, %d tokens, %d supervised; dropped: %d overlong, %d unsupervised, %d empty; "
             "%d truncated", name, split, c.rows, c.used, c.tokens, c.supervised_tokens, c.dropped_overlong, c.unsupervised,
             c.empty, c.truncated)
    return found


def read_data(section: DataSection, folder: Path) -> tuple[Any, SampleSet, SampleSet]:
    """(tokenizer, training samples, evaluation samples) for the model in `folder`."""
    from karui.catalogue import load_tokenizer

    tokenizer = load_tokenizer(folder)
    return tokenizer, load_samples(section, tokenizer, "train"), load_samples(section, tokenizer, "eval")


class _Builder:
    """One pass over a source; holds the counts while it runs.

    Args:
        key: where the set goes in the cache; None: it stays in memory.
    """

    def __init__(self, section: DataSection, tokenizer: Any, source: Source, key: str | None) -> None:
        self.section, self.source, self.tokenizer, self.key = section, source, tokenizer, key
        self.encoder = RowEncoder(section, tokenizer)
        path = cache_path(key) if key else None
        self.spool, self.seen = Spool(path), Seen(path.parent if path else None)
        self.forms: dict[int, Format] = {}
        self.tally: Counter[str] = Counter()
        self.longest = self.open_turns = 0
        self.notes: list[str] = []

    def build(self, part: str, progress: Callable[[int], None] | None) -> SampleSet:
        try:
            if self.source.is_text:
                self._text(part)
            else:
                self._rows(part, progress)
            return self._finish()
        except BaseException:
            self.spool.discard()
            raise

    def _rows(self, part: str, progress: Callable[[int], None] | None) -> None:
        budget = self.section.tokens if part == "train" else None
        rows = self._part(self._known(self.source.rows()), part, "rows")
        for batch in encode_rows(rows, self.forms, self.section, self.tokenizer, self.encoder):
            self.tally["rows"] += batch.rows
            self.tally["empty"] += batch.empty
            self.open_turns += batch.open_turns
            for row, place, tokens, trim in batch.samples:
                for sample in self._fit(row, place, tokens, trim):
                    if self._is_new(sample):
                        self.spool.add(sample)
                if budget is not None and self.spool.tokens >= budget:
                    break
            if progress is not None:
                progress(self.tally["rows"])
            if budget is not None and self.spool.tokens >= budget:
                self.notes.append(f"stopped at data.tokens={budget}: later rows are not used")
                return

    def _known(self, rows: Iterator[Row]) -> Iterator[Row]:
        """The rows, the format of each part decided by its first."""
        for row in rows:
            if row.part not in self.forms:
                form = self.forms[row.part] = decide_format(self.section, row, ChatTemplate.exists(self.tokenizer))
                of = f" of {row.place.partition(' ')[0]}" if isinstance(self.source, MixSource) else ""
                self.notes.append(f"format {form.kind}{of}: {form.why}")
                if form.kind == "prompt" and not form.templated:
                    self.notes.append("the tokenizer has no chat template: completion follows prompt as written, then the end "
                                      "token")
            yield row

    def _part(self, items: Iterable[T], part: str, unit: str) -> Iterator[T]:
        """What belongs to the split; see `load_samples`. One pass, and no more than `holdout` of them in memory."""
        holdout = self.section.holdout
        if part == "all":
            yield from items
        elif part == "eval":
            last, total = deque(maxlen=holdout), 0  # type: ignore[var-annotated]
            for item in items:
                last.append(item)
                total += 1
            self._holdout_fits(total, unit)
            yield from last
        elif holdout == 0 or self.section.eval is not None:
            yield from islice(items, self.section.limit)
        else:
            late: deque[T] = deque()
            total = given = 0
            for item in items:
                late.append(item)
                total += 1
                if len(late) > holdout:
                    if self.section.limit is not None and given >= self.section.limit:
                        return
                    given += 1
                    yield late.popleft()
            self._holdout_fits(total, unit)

    def _holdout_fits(self, total: int, unit: str) -> None:
        if 0 < total <= self.section.holdout:
            raise KaruiError(f"data {self.source.label!r}: data.holdout is {self.section.holdout}, but there are only {total} "
                             f"{unit}; nothing would be left to train on.")

    def _is_new(self, sample: Sample) -> bool:
        if not self.seen.add(sample.ids.tobytes()):
            return True
        self.tally["duplicates"] += 1
        return not self.section.dedup

    def _fit(self, row: int, place: str, tokens: Tokens, trim: bool) -> Iterator[Sample]:
        """Apply trimming and the length policy; nothing when the sample is left out, which is then counted."""
        ids, mask = tokens.ids, tokens.mask
        self.tally["merged_boundaries"] += tokens.merged
        limit = self.section.max_length
        supervised = np.flatnonzero(mask)
        if trim and len(supervised):
            end = int(supervised[-1]) + 1
            self.tally["trimmed_tokens"] += len(ids) - end
            ids, mask = ids[:end], mask[:end]
        self.longest = max(self.longest, len(ids))
        pieces = [(ids, mask)]
        if len(ids) > limit:
            if self.section.overlong == "error":
                raise KaruiError(f"{place}: {len(ids)} tokens, more than data.max_length={limit}; raise it, shorten the "
                                 "row, or set data.overlong to drop or truncate.")
            if self.section.overlong == "split":
                if trim:
                    raise KaruiError(f"{place}: {len(ids)} tokens, and data.overlong=split is for raw text: pieces of a "
                                     "conversation would lose what they answer to. Use drop or truncate.")
                self.tally["split"] += 1
                pieces = [(ids[at : at + limit], mask[at : at + limit].copy()) for at in range(0, len(ids), limit)]
                for _, piece in pieces:
                    piece[0] = False  # nothing predicts the first token
            elif self.section.overlong == "drop":
                self.tally["dropped_overlong"] += 1
                return
            else:
                self.tally["truncated"] += 1
                pieces = [(ids[:limit], mask[:limit])]
        for ids, mask in pieces:
            if mask.any():
                yield Sample(ids=ids, loss_mask=mask, source_row=row)
            elif len(pieces) == 1:
                self.tally["unsupervised"] += 1

    def _text(self, part: str) -> None:
        """Text files: every file is one document, cut into windows of `max_length` tokens, nothing left out."""
        size = self.section.max_length
        self.notes.append("format text: text files")
        self.notes.append(f"text files are cut into consecutive windows of {size} tokens; each counts as a row, and the first "
                          "token of a window carries no loss")
        budget = self.section.tokens if part == "train" else None
        for index, ids in enumerate(self._part(self._windows(size), part, "windows")):
            self.tally["rows"] += 1
            self.longest = max(self.longest, len(ids))
            self.spool.add(Sample(ids=ids, loss_mask=np.arange(len(ids)) > 0, source_row=index))
            if budget is not None and self.spool.tokens >= budget:
                self.notes.append(f"stopped at data.tokens={budget}: later windows are not used")
                return

    def _windows(self, size: int) -> Iterator[np.ndarray]:
        for row in self.source.rows():
            held: list[int] = []
            begun = False
            for block in _blocks(row.fields["text"]):
                ids = self.encoder.encode([block])[0]
                if not begun:
                    held, begun = self.encoder.encode.frame(ids)[0][:], True
                held += ids
                while len(held) > size:  # one token stays back, which may be the end token's place
                    yield np.array(held[:size], np.int32)
                    held = held[size:]
            held += self.encoder.encode.frame(held)[1]
            for at in range(0, len(held), size):
                if len(window := held[at : at + size]) > 1:
                    yield np.array(window, np.int32)

    def _finish(self) -> SampleSet:
        counts = Counts(**self.tally, longest=self.longest)
        if not self.spool.used:
            raise KaruiError(self._nothing_left(counts))
        if self.open_turns:
            self.notes.append(f"the template's {{% generation %}} tags leave the end-of-turn token out of "
                              f"{self.open_turns} turns; the model does not learn to end them")
        if counts.merged_boundaries:
            self.notes.append(f"{counts.merged_boundaries} borders of supervised text lie inside a token; the text was cut there")
        if isinstance(self.source, MixSource):
            self.notes.append(self.source.note())
        kinds = sorted({form.kind for form in self.forms.values()}) or ["text"]
        about: dict[str, Any] = {"source": self.source.label, "format": " + ".join(kinds), "notes": tuple(self.notes)}
        spool = self.spool
        counts = dataclasses.replace(counts, used=spool.used, tokens=spool.tokens, supervised_tokens=spool.supervised)
        found = self.spool.finish(counts, about, describe_cached(self.key or "", counts, about))
        if found is None:  # it went to disk
            assert self.key is not None
            found = read_cache(self.key)
            assert found is not None
        elif self.key is not None:
            write_cache(self.key, found)
        return found

    def _nothing_left(self, counts: Counts) -> str:
        label, limit = self.source.label, self.section.max_length
        if counts.rows == 0:
            return f"data {label!r}: the data set is empty; name one with rows."
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
