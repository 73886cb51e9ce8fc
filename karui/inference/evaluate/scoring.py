"""Losses over fixed text: perplexity by one stated protocol, and the held-out loss of supervised samples.

A `Scorer` is anything that returns the log-probability of every token after the first. `engine_scorer` makes one of an engine,
`model_scorer` of a transformers-like module; both give the model's own distribution (temperature 1, nothing filtered).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from karui.configs.errors import KaruiError

Scorer = Callable[[Sequence[int]], Sequence[float]]
"""[n] token ids -> [n - 1] log-probabilities of tokens 1 .. n - 1, each given all before it, natural log."""


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """exp(mean_nll) over `tokens` scored tokens in `windows` windows; `protocol` says exactly how, to be printed beside it."""

    perplexity: float
    mean_nll: float
    tokens: int
    windows: int
    protocol: str


def perplexity(scorer: Scorer, text: str | Path, tokenizer: Any, window: int = 1024, windows: int | None = None,
               progress: Callable[[int, int], None] | None = None) -> Perplexity:
    """The text as one string, no special tokens, non-overlapping windows; every token but each window's first is scored.

    Args:
        scorer: see `Scorer`.
        text: the text itself, or a file of it.
        tokenizer: a transformers tokenizer.
        window: tokens per window; the last, shorter window counts when it holds at least two tokens.
        windows: only the first so many.
        progress: called with (windows done, windows in all).
    Raises:
        KaruiError: the file cannot be read as UTF-8, the text is too short to score, or a loss is not finite.
    """
    name = "text"
    if isinstance(text, Path):
        name, text = text.name, read_text(text)
    if window < 2 or (windows is not None and windows < 1):
        raise KaruiError(f"perplexity: a window of {window} tokens and {windows} windows cannot be scored; "
                         "use a window of at least 2 and at least 1 window.")
    ids = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    parts = [ids[at:at + window] for at in range(0, len(ids), window)]
    parts = [part for part in parts if len(part) > 1][:windows]
    if not parts:
        raise KaruiError(f"perplexity: {name} holds {len(ids)} tokens; at least 2 are needed.")
    total, count = 0.0, 0
    for done, part in enumerate(parts, 1):
        total -= math.fsum(scorer(part))
        count += len(part) - 1
        if progress is not None:
            progress(done, len(parts))
    mean = total / count
    if not math.isfinite(mean):
        raise KaruiError(f"perplexity: the mean loss over {name} is {mean}; the weights or the activations are not finite.")
    which = f"first {windows} of the " if windows is not None else ""
    protocol = (f"{name} as one string, no special tokens, {which}non-overlapping windows of {window} tokens, "
                f"all but each window's first token scored ({count} tokens), exp of the mean loss")
    return Perplexity(perplexity=math.exp(mean), mean_nll=mean, tokens=count, windows=len(parts), protocol=protocol)


@dataclass(frozen=True, kw_only=True)
class HeldOutLoss:
    """Mean loss per supervised token, the token count, and the samples that held none or were too long (left out)."""

    loss: float
    tokens: int
    samples: int
    left_out: int


def held_out_loss(scorer: Scorer, samples: Iterable[tuple[Sequence[int], Sequence[int]]],
                  max_tokens: int | None = None) -> HeldOutLoss:
    """Loss over the supervised tokens of encoded samples.

    Args:
        samples: (token ids, mask) per sample, mask 1 where the token is supervised; a sample's first token is never scored.
        max_tokens: longer samples are left out and counted.
    Raises:
        KaruiError: nothing was supervised, or the loss is not finite.
    """
    total, tokens, count, left_out = 0.0, 0, 0, 0
    for ids, mask in samples:
        if len(ids) != len(mask):
            raise KaruiError(f"held-out loss: a sample has {len(ids)} tokens and a mask of {len(mask)}.")
        if (max_tokens is not None and len(ids) > max_tokens) or not any(mask[1:]):
            left_out += 1
            continue
        wanted = [value for value, on in zip(scorer(ids), mask[1:], strict=True) if on]
        total -= math.fsum(wanted)
        tokens += len(wanted)
        count += 1
    if not tokens:
        raise KaruiError(f"held-out loss: none of the {left_out} samples has a supervised token within the limit.")
    if not math.isfinite(total):
        raise KaruiError(f"held-out loss: the loss over {count} samples is {total}; the weights or activations are not finite.")
    return HeldOutLoss(loss=total / tokens, tokens=tokens, samples=count, left_out=left_out)


def encode_completions(rows: Iterable[dict[str, Any]], tokenizer: Any) -> list[tuple[list[int], list[int]]]:
    """prompt/completion rows -> (ids, mask): the completion and an end token are supervised, nothing else.

    With a chat template the prompt becomes the user's turn, else it is used as it is. Raises `KaruiError` for a missing field.
    """
    samples = []
    for number, row in enumerate(rows):
        if not isinstance(row.get("prompt"), str) or not isinstance(row.get("completion"), str):
            raise KaruiError(f"held-out row {number}: expected texts under 'prompt' and 'completion', found keys {sorted(row)}.")
        prompt = row["prompt"]
        chat = bool(getattr(tokenizer, "chat_template", None))
        if chat:
            turn = [{"role": "user", "content": prompt}]
            prompt = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        head = list(tokenizer(prompt, add_special_tokens=not chat)["input_ids"])
        tail = list(tokenizer(row["completion"], add_special_tokens=False)["input_ids"])
        if tokenizer.eos_token_id is not None:
            tail.append(tokenizer.eos_token_id)
        samples.append((head + tail, [0] * len(head) + [1] * len(tail)))
    return samples


def read_text(path: Path) -> str:
    """A UTF-8 file's text. Raises `KaruiError` naming the file."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise KaruiError(f"{path} does not exist.") from None
    except OSError as error:
        raise KaruiError(f"{path} cannot be read: {error.strerror}; give a text file.") from None
    except UnicodeDecodeError as error:
        raise KaruiError(f"{path} is not UTF-8 text (byte {error.start}); convert it, e.g. with iconv.") from None


def engine_scorer(engine: Any) -> Scorer:
    """A scorer over an engine's own `score`: what is measured is what is served."""
    return lambda ids: engine.score([ids])[0].tolist()


def model_scorer(model: Any) -> Scorer:
    """A scorer over a transformers causal LM: one forward per call, log-softmax in fp32."""
    import torch

    @torch.inference_mode()
    def score(ids: Sequence[int]) -> list[float]:
        tokens = torch.tensor([list(ids)], device=next(model.parameters()).device)
        logits = model(input_ids=tokens, use_cache=False).logits[0, :-1].float()
        return (-torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="none")).tolist()

    return score
