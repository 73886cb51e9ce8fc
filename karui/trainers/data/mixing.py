"""Several sources as one, row by row in the shares that were asked for.

The next row comes from the source that is furthest behind its share of all characters so far, which is exact at every moment,
needs no random numbers and so is the same in every run. Shares are of characters, not rows, because rows differ in length.
The mix ends when a source does: whatever follows would have other shares. `data.mix[].repeat` lets a small one begin again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from karui.configs.errors import KaruiError
from karui.trainers.data.sources import Row, Source


@dataclass(frozen=True)
class Part:
    """A source, its weight against the others, and how many times it may be read in all."""

    source: Source
    weight: float
    repeat: int = 1


@dataclass
class MixSource:
    """The parts' rows interleaved; `Row.part` says whose a row is, its number counts over the mix."""

    parts: tuple[Part, ...]
    is_text: bool = False
    rows_of: list[int] = field(default_factory=list)
    chars_of: list[int] = field(default_factory=list)
    ended: str | None = None

    def __post_init__(self) -> None:
        if text := [p.source.label for p in self.parts if p.source.is_text]:
            raise KaruiError(f"data.mix: {text[0]!r} is plain text, which has no rows to mix; write it as .jsonl "
                             "with a text column.")

    @property
    def label(self) -> str:
        return " + ".join(f"{p.weight:g} {p.source.label}" for p in self.parts)

    def fingerprint(self) -> str:
        parts = [(p.source.fingerprint(), p.weight, p.repeat) for p in self.parts]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def rows(self) -> Iterator[Row]:
        self.rows_of, self.chars_of, self.ended = [0] * len(self.parts), [0] * len(self.parts), None
        streams = [p.source.rows() for p in self.parts]
        passes = [1] * len(self.parts)
        index = 0
        while True:
            at = min(range(len(self.parts)), key=lambda i: (self.chars_of[i] / self.parts[i].weight, i))
            row = next(streams[at], None)
            if row is None and passes[at] < self.parts[at].repeat:
                passes[at] += 1
                streams[at] = self.parts[at].source.rows()
                row = next(streams[at], None)
            if row is None:
                self.ended = self.parts[at].source.label
                return
            self.rows_of[at] += 1
            self.chars_of[at] += max(1, _chars(row.fields))
            yield replace(row, index=index, part=at)
            index += 1

    def note(self) -> str:
        """What the mix came to, for the preflight."""
        total = max(1, sum(self.chars_of))
        shares = ", ".join(f"{p.source.label} {n} rows, {100 * c / total:.1f} % of the characters"
                           for p, n, c in zip(self.parts, self.rows_of, self.chars_of))
        return f"mix: {shares}" + (f"; it ended with {self.ended}, whose repeat is spent" if self.ended else "")


def _chars(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_chars, value.values()))
    return sum(map(_chars, value)) if isinstance(value, (list, tuple)) else 0
