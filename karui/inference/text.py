"""Tokens to text while they arrive: whole characters only, stop texts found across token borders."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from karui.catalogue.byte_level import BYTE_ALPHABET
from karui.configs.errors import KaruiError, UnsupportedError


class Detokenizer:
    """One continuation's text. `feed` a token, get the text that is settled by it.

    Text is held back while it ends in half a UTF-8 character, or in something that may become a stop text. With a `stop` found,
    `stopped` names it and all later text is dropped.
    """

    def __init__(self, backend: Any, stop: Sequence[str] = ()) -> None:
        from tokenizers.decoders import DecodeStream

        self._backend, self._stop = backend, tuple(stop)
        self._stream = DecodeStream(skip_special_tokens=True)
        self._held = ""
        self.stopped: str | None = None

    def feed(self, token: int) -> str:
        piece = self._stream.step(self._backend, token)
        if piece is None:
            return ""
        if not self._stop:
            return piece
        self._held += piece
        found = [(at, -len(s), s) for s in self._stop if (at := self._held.find(s)) >= 0]
        if found:
            at, _, self.stopped = min(found)
            text, self._held = self._held[:at], ""
            return text
        keep = max((n for s in self._stop for n in range(1, len(s)) if self._held.endswith(s[:n])), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text

    def flush(self) -> str:
        """What was held back for a stop text that did not come; half a character is dropped."""
        text, self._held = self._held, ""
        return "" if self.stopped is not None else text


def token_text(backend: Any, token: int) -> str:
    """A token as it is within a text: with the space in front that decoders drop at a text's beginning."""
    ids = [token]
    once, twice = (str(backend.decode(ids * n, skip_special_tokens=False)) for n in (1, 2))
    return twice[len(once):]


def token_bytes(backend: Any, token: int) -> bytes:
    """The same in UTF-8. Of half a character, there U+FFFD, its bytes, by GPT-2's byte alphabet or a name such as <0xE6>."""
    text = token_text(backend, token)
    if "\ufffd" in text:
        piece = backend.id_to_token(token)
        if named := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece):
            return bytes([int(named[1], 16)])
        if all(c in BYTE_ALPHABET for c in piece):
            return bytes(BYTE_ALPHABET[c] for c in piece)
    return text.encode("utf-8", "replace")


def backend_of(tokenizer: Any) -> Any:
    """The `tokenizers` object under a transformers tokenizer. Raises `UnsupportedError` when there is none."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UnsupportedError(
            f"{type(tokenizer).__name__} has no fast tokenizer under it; save the folder with a tokenizer.json.")
    return backend


def encode_prompt(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a plain text by the tokenizer's own rule, with one BOS at most. Raises `KaruiError` for invalid Unicode."""
    _check_unicode("prompt", text)
    bos = tokenizer.bos_token
    return list(tokenizer(text, add_special_tokens=not (bos and text.startswith(bos)))["input_ids"])


def encode_chat(tokenizer: Any, messages: Sequence[dict[str, Any]], **options: Any) -> list[int]:
    """Token ids of a conversation through the chat template, which writes its own special tokens; the answer's opening is added.

    Raises `KaruiError` when the tokenizer has no template, the template refuses the messages, or for invalid Unicode.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise KaruiError("this model has no chat template; send a plain prompt, or add chat_template.jinja to its folder.")
    try:
        text = tokenizer.apply_chat_template(list(messages), **{"add_generation_prompt": True, **options, "tokenize": False})
    except Exception as error:  # jinja raises its own types, a bad role or a missing key among them
        raise KaruiError(f"the chat template refused the messages: {error}") from error
    _check_unicode("conversation", text)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _check_unicode(what: str, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise KaruiError(f"the {what} is not valid UTF-8: character {error.start} is a lone surrogate "
                         f"({text[error.start]!r}); decode the input with errors='replace' or repair it.") from None
