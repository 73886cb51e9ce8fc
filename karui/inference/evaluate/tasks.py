"""A small generation task: GSM8K by exact match of the number behind `####` (Cobbe et al., arXiv 2110.14168)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from karui.configs.errors import KaruiError
from karui.inference.evaluate.scoring import read_text

Generate = Callable[[list[str], int], list[str]]
"""(prompts, most tokens) -> one greedy continuation each."""

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True, kw_only=True)
class ExactMatch:
    """correct of total; `answered`: those that wrote a `####` line at all; `protocol` as printed beside the number."""

    correct: int
    answered: int
    total: int
    protocol: str

    @property
    def accuracy(self) -> float:
        return self.correct / self.total


def final_number(answer: str) -> str | None:
    """The number after the last `####`, without thousands separators and trailing zeros; None when there is none."""
    _, mark, tail = answer.rpartition("####")
    found = _NUMBER.search(tail.split("\n")[0]) if mark else None
    if found is None:
        return None
    number = found.group().replace(",", "")
    return number.rstrip("0").rstrip(".") if "." in number else number


def read_questions(path: Path, limit: int | None = None) -> list[dict[str, str]]:
    """Rows {question, answer} of a JSON-lines file. Raises `KaruiError` naming the line."""
    rows: list[dict[str, str]] = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if final_number(row["answer"]) is None:
                raise ValueError("its answer has no '#### number'")
            rows.append({"question": str(row["question"]), "answer": row["answer"]})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise KaruiError(f"{path}, line {number}: expected {{question, answer}} ending in '#### number': {error}") from None
        if limit is not None and len(rows) == limit:
            break
    if not rows:
        raise KaruiError(f"{path} holds no questions.")
    return rows


def gsm8k(generate: Generate, rows: Sequence[dict[str, str]], shots: Sequence[dict[str, str]] = (),
          max_tokens: int = 256) -> ExactMatch:
    """Ask every question greedily and compare final numbers.

    Args:
        generate: see `Generate`; the engine's own stop rules apply, and an answer is cut at the next "Question:".
        rows: what is asked. shots: worked examples put before each question.
    """
    head = "".join(f"Question: {r['question']}\nAnswer: {r['answer']}\n\n" for r in shots)
    answers = generate([f"{head}Question: {r['question']}\nAnswer:" for r in rows], max_tokens)
    given = [final_number(a.split("\nQuestion:")[0]) for a in answers]
    correct = sum(g is not None and g == final_number(r["answer"]) for g, r in zip(given, rows, strict=True))
    return ExactMatch(correct=correct, answered=sum(g is not None for g in given), total=len(rows),
                      protocol=f"gsm8k, {len(rows)} questions, {len(shots)} shots, greedy, number after ####, "
                               f"at most {max_tokens} tokens")
