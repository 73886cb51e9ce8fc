"""Write training text with a model: answers to a data set's prompts, or text from nothing.

    python -m karui.trainers.teacher_text smollm2-135m answers.jsonl --data gsm8k-sample --prompt question
    python -m karui.trainers.teacher_text smollm2-135m answers.jsonl --data gsm8k-sample --prompt question --check answer --draws 4 --temperature 0.8
    python -m karui.trainers.teacher_text smollm2-135m own.jsonl --free 256

The file holds {"prompt", "completion"} rows, or {"text"} rows with --free, and goes into a recipe as data.train. Whole or not at
all: it is written under a temporary name and renamed.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from karui.configs.errors import KaruiError
from karui.distill.generate import checker, rejection_sample


def write_answers(
    model: str, output: Path, *, data: str, prompt: str = "prompt", limit: int | None = None, check: str | None = None,
    draws: int = 1, temperature: float = 0.0, top_p: float = 1.0, max_tokens: int = 256, seed: int = 0, unfinished: bool = False,
    engine: Any = None,
) -> int:
    """Let `model` answer the prompts of a data set, through its chat template; returns how many answers were kept.

    Args:
        data: a shipped sample or a file, as a recipe names it; prompt: its column.
        check: see `karui.distill.generate.checker`; None keeps whatever came to its end.
        unfinished: keep answers that were cut off at max_tokens; enough for training a draft.
        engine: one that is loaded already.

    Raises:
        KaruiError: no such column, nothing kept.
    """
    from karui.inference.engine import Engine
    from karui.inference.requests import Request, SamplingParams
    from karui.trainers.data.sources import open_source

    wanted = checker(check) if check else None
    rows = list(open_source(data, default_splits=("train",)).rows())[:limit]
    if not rows or prompt not in rows[0].fields:
        columns = list(rows[0].fields) if rows else []
        raise KaruiError(f"{data}: no column {prompt!r} to take prompts from; it has {', '.join(columns) or 'no rows'}.")
    made = engine or Engine.load(model, max_sequences=64)
    chat = made.tokenizer is not None and getattr(made.tokenizer, "chat_template", None)

    def write(prompts: Sequence[str], seeds: Sequence[int]) -> list[tuple[str, bool]]:
        requests = []
        for text, s in zip(prompts, seeds):
            ids = made.encode_chat([{"role": "user", "content": text}]) if chat else made.encode(text)
            params = SamplingParams(temperature=temperature, top_p=top_p, seed=s, max_tokens=max_tokens)
            requests.append(Request(prompt=ids, params=params))
        return [(out.text, out.completions[0].finish_reason == "stop") for out in made.generate(requests)]

    values = [row.fields for row in rows]
    kept = rejection_sample(write, values, [str(v[prompt]) for v in values], checker=wanted, draws=draws, seed=seed,
                            unfinished=unfinished)
    return _write(output, ({"prompt": k["prompt"], "completion": k["completion"]} for k in kept))


def write_free(model: str, output: Path, *, count: int, greedy: int = 4, max_tokens: int = 256, seed: int = 0,
               engine: Any = None) -> int:
    """LLM-QAT's data-free text: a random first token, `greedy` likeliest ones, then draws from the whole distribution."""
    import numpy as np

    from karui.inference.engine import Engine
    from karui.inference.requests import Request, SamplingParams

    made = engine or Engine.load(model, max_sequences=64)
    rng = np.random.default_rng(seed)
    special = set(getattr(made.tokenizer, "all_special_ids", []))
    ids = [t for t in rng.permutation(made.config.vocab_size).tolist() if t not in special][:count]
    starts = made.generate([Request(prompt=[t], params=SamplingParams(max_tokens=greedy, ignore_eos=True)) for t in ids])
    rest = made.generate([
        Request(prompt=[t, *s.token_ids], params=SamplingParams(temperature=1.0, seed=seed + i, max_tokens=max_tokens))
        for i, (t, s) in enumerate(zip(ids, starts))])
    texts = (made.tokenizer.decode([t, *s.token_ids, *r.token_ids], skip_special_tokens=True)
             for t, s, r in zip(ids, starts, rest))
    return _write(output, ({"text": text} for text in texts if text.strip()))


def _write(path: Path, rows: Any) -> int:
    scratch = path.with_name(f".{path.name}.tmp{os.getpid()}")
    count = 0
    try:
        with scratch.open("w", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                count += 1
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
    return count


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="karui.trainers.teacher_text", description="Write training text with a model.")
    parser.add_argument("model", help="bundle, model folder or catalogue name")
    parser.add_argument("output", type=Path, help="the .jsonl file to write")
    parser.add_argument("--data", default="gsm8k-sample", help="where the prompts are")
    parser.add_argument("--prompt", default="prompt", help="their column")
    parser.add_argument("--limit", type=int, help="only the first rows")
    parser.add_argument("--check", help="answer, contains:TEXT or regex:PATTERN")
    parser.add_argument("--draws", type=int, default=1, help="continuations of a prompt at most")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--unfinished", action="store_true", help="keep answers that were cut off at --max-tokens")
    parser.add_argument("--free", type=int, metavar="N", help="no prompts: N texts from random first tokens")
    a = parser.parse_args(argv)
    try:
        if a.free:
            count = write_free(a.model, a.output, count=a.free, max_tokens=a.max_tokens, seed=a.seed)
        else:
            count = write_answers(a.model, a.output, data=a.data, prompt=a.prompt, limit=a.limit, check=a.check, draws=a.draws,
                                  temperature=a.temperature, top_p=a.top_p, max_tokens=a.max_tokens, seed=a.seed,
                                  unfinished=a.unfinished)
    except KaruiError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(f"{count} rows in {a.output}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
