"""Answering in the terminal: one prompt, or a conversation, streamed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ADAPTER = "adapter"


def answer(
    model: str,
    text: str,
    sampling: dict[str, Any],
    *,
    raw: bool = False,
    adapter: str | Path | None = None,
    runner: str = "auto",
    speculate: str | None = None,
    show_question: bool = False,
    **options: Any,
) -> str:
    """Stream one answer to standard output and return it; a line with the speed goes to standard error. `adapter`: a peft folder
    beside the model; `options`: of `Engine.load`."""
    from karui.inference.requests import SamplingParams

    params = SamplingParams(**sampling)
    engine = _load(model, adapter, runner=runner, speculation=speculate, **options)
    if show_question:
        sys.stdout.write(f"\n> {text}\n")
    chat = not raw and getattr(engine.tokenizer, "chat_template", None)
    prompt = engine.encode_chat([{"role": "user", "content": text}]) if chat else engine.encode(text)
    return _stream(engine, prompt, params)


def conversation(
    model: str, sampling: dict[str, Any], *, system: str | None = None, adapter: str | Path | None = None, runner: str = "auto",
    speculate: str | None = None, **options: Any,
) -> None:  # fmt: skip
    """Read questions from standard input until an empty line or its end; every answer sees what was said before."""
    from karui.inference.requests import SamplingParams

    params = SamplingParams(**sampling)
    engine = _load(model, adapter, runner=runner, speculation=speculate, **options)
    messages = [{"role": "system", "content": system}] if system else []
    sys.stderr.write(f"{model}; an empty line or Ctrl-D ends\n")
    while True:
        try:
            question = input("> ").strip()
        except (EOFError, RuntimeError):  # its end, or closed from the start
            question = ""
        if not question:
            return
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": _stream(engine, engine.encode_chat(messages), params)})


def _load(model: str, adapter: str | Path | None, **options: Any) -> Any:
    from karui.inference.engine import Engine

    engine = Engine.load(model, max_sequences=1, **options)
    if adapter is not None:
        engine.load_adapter(ADAPTER, adapter)
    return engine


def _stream(engine: Any, prompt: list[int], params: Any) -> str:
    import time

    from karui.configs.errors import KaruiError
    from karui.inference.requests import Request

    parts, count, begin, first = [], 0, time.perf_counter(), 0.0
    adapter = next(iter(engine.adapters), None)
    for delta in engine.stream(Request(prompt=prompt, params=params, adapter=adapter)):
        if delta.error:
            raise KaruiError(f"the engine stopped: {delta.error}")
        first = first or time.perf_counter()
        count += len(delta.token_ids)
        parts.append(delta.text)
        sys.stdout.write(delta.text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    after = time.perf_counter() - first
    rate = f", {(count - 1) / after:.0f} tokens/s" if count > 1 and after else ""
    sys.stderr.write(f"[{len(prompt)} prompt tokens in {first - begin:.2f} s, {count} new{rate}]\n")
    return "".join(parts)
