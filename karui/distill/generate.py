"""Text written by a teacher: hard targets for a student (sequence-level distillation, arXiv 1606.07947), if a checker agrees.

Rejection sampling draws several continuations of a prompt and keeps those that a checker accepts, as reasoning models are
distilled (DeepSeek-R1, arXiv 2501.12948, section 2.4). Data-free generation (LLM-QAT, arXiv 2305.17888, section 3.1) starts from
a random token, takes the likeliest tokens for the first few and draws the rest, so that a model yields its own training text.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from karui.configs.errors import KaruiError, nearest

logger = logging.getLogger(__name__)
Checker = Callable[[str, Mapping[str, Any]], bool]
"""(what was written, the row it answers) -> whether to keep it."""
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


class Writer(Protocol):
    """Continues prompts; deterministic in (prompt, seed)."""

    def __call__(self, prompts: Sequence[str], seeds: Sequence[int]) -> list[tuple[str, bool]]:
        """Each prompt's continuation, and whether it came to its own end."""


def rejection_sample(
    writer: Writer, rows: Sequence[Mapping[str, Any]], prompts: Sequence[str], *, checker: Checker | None = None,
    draws: int = 1, keep: int = 1, seed: int = 0, unfinished: bool = False, batch: int = 64,
) -> Iterator[dict[str, Any]]:
    """Yield {"prompt", "completion", "row"} for up to `keep` accepted continuations of each prompt out of at most `draws`.

    Args:
        rows: what the checker compares with; prompts: the texts to continue, one per row.
        unfinished: keep what was cut off by the writer's limit.

    Raises:
        KaruiError: nothing at all was accepted.
    """
    accepted = [0] * len(rows)
    drawn = cut = rejected = 0
    for turn in range(draws):
        open_ = [i for i in range(len(rows)) if accepted[i] < keep]
        for start in range(0, len(open_), batch):
            part = open_[start : start + batch]
            texts = writer([prompts[i] for i in part], [seed + turn * len(rows) + i for i in part])
            for i, (text, finished) in zip(part, texts, strict=True):
                drawn += 1
                if not finished and not unfinished:
                    cut += 1
                elif checker is not None and not checker(text, rows[i]):
                    rejected += 1
                else:
                    accepted[i] += 1
                    yield {"prompt": prompts[i], "completion": text, "row": i}
    kept = sum(accepted)
    logger.info("teacher text: %d drawn, %d kept, %d rejected by the checker, %d without an end; %d of %d prompts answered",
                drawn, kept, rejected, cut, sum(a > 0 for a in accepted), len(rows))
    if not kept:
        raise KaruiError(f"none of {drawn} continuations was kept ({rejected} rejected by the checker, "
                         f"{cut} without an end). Check that the checker reads what the teacher writes, draw more (draws) or "
                         "let it write longer (max_tokens).")


def checker(spelling: str) -> Checker:
    """`answer`: the last number written is the last number of the row's `answer` or `completion`; `contains:TEXT`;
    `regex:PATTERN`.

    Raises:
        KaruiError: another spelling, or a pattern that does not compile.
    """
    kind, _, rest = spelling.partition(":")
    if kind == "answer" and not rest:
        return _same_number
    if kind == "contains" and rest:
        return lambda text, row: rest in text
    if kind == "regex" and rest:
        try:
            pattern = re.compile(rest)
        except re.error as error:
            raise KaruiError(f"checker {spelling!r}: the pattern does not compile: {error}.") from error
        return lambda text, row: pattern.search(text) is not None
    names = ("answer", "contains:TEXT", "regex:PATTERN")
    raise KaruiError(f"checker {spelling!r} is not known; valid: {', '.join(names)}.{nearest(kind, names)}")


def _same_number(text: str, row: Mapping[str, Any]) -> bool:
    wanted = last_number(str(row.get("answer") or row.get("completion") or ""))
    return wanted is not None and last_number(text) == wanted


def last_number(text: str) -> float | None:
    """The last number of a text, thousands separators removed."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None
