"""Text with supervised character ranges to tokens with a supervised mask.

A token belongs to the supervised side when the model has to write it. Usually the borders of the ranges are borders of
tokens, and then the tokens are those of the whole text. Where a merge would cross a border (a prompt that ends in a newline,
a completion that begins with one), the text is cut there: at inference the prompt is tokenized alone, so the merged token
could never be asked for. Such turns are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from karui.trainers.data.templates import Rendered


@dataclass(frozen=True)
class Tokens:
    """[n] int32 ids, [n] bool mask, and how many borders had a token across them."""

    ids: np.ndarray
    mask: np.ndarray
    merged: int


class Encoder:
    """A tokenizer without its automatic special tokens: templates write theirs, `frame` says what raw text needs."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        tokenizer("")  # turns off the truncation and padding that a tokenizer's file may ask for
        self.bare: Any = getattr(tokenizer, "backend_tokenizer", None)
        plain, wrapped = self([" a"])[0], list(tokenizer(" a", add_special_tokens=True)["input_ids"])
        at = next((i for i in range(len(wrapped) - len(plain) + 1) if wrapped[i : i + len(plain)] == plain), 0)
        self.prefix = wrapped[:at]  # BOS, where the tokenizer puts one
        self.eos: int | None = tokenizer.eos_token_id

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        if self.bare is not None:  # makes no offsets, which nothing here asks for
            return [found.ids for found in self.bare.encode_batch_fast(list(texts), add_special_tokens=False)]
        found = self.tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
        return list(found["input_ids"])

    def frame(self, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """What a text without a template needs before and behind it: the tokenizer's own prefix (BOS, where it puts one) and
        the end token, each only where the text does not have it already."""
        before = [] if list(ids[: len(self.prefix)]) == self.prefix else self.prefix
        return before, [] if self.eos is None or (len(ids) and ids[-1] == self.eos) else [self.eos]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def encode_masked(encode: Encoder, documents: Sequence[Rendered]) -> list[Tokens]:
    """Tokens and masks of rendered documents, many at a time (fast tokenizers use all cores for a batch)."""
    wholes = encode([d.text for d in documents])
    pieces = [_pieces(d) for d in documents]
    flat = iter(encode([text for parts in pieces for text, _ in parts]))
    out = []
    for document, whole, parts in zip(documents, wholes, pieces):
        encoded = [(next(flat), supervised) for _, supervised in parts]
        out.append(_join(encode, document, whole, encoded))
    return out


def _pieces(document: Rendered) -> list[tuple[str, bool]]:
    """The text cut at the borders of its spans."""
    cuts, out, at = document.spans, [], 0
    for start, end in cuts:
        out += [(document.text[at:start], False), (document.text[start:end], True)]
        at = end
    out.append((document.text[at:], False))
    return [(text, supervised) for text, supervised in out if text]


def _join(encode: Encoder, document: Rendered, whole: list[int], pieces: list[tuple[list[int], bool]]) -> Tokens:
    ids = [i for part, _ in pieces for i in part]
    mask = np.repeat(np.array([s for _, s in pieces], bool), [len(part) for part, _ in pieces])
    merged = 0
    if ids != whole:
        mask, merged = _mask_by_prefixes(encode, document, whole)
        # Tokenizers that put a space before every text cannot encode pieces; there the token across the border stays.
        if merged and encode.decode(ids) == encode.decode(whole):
            mask = np.repeat(np.array([s for _, s in pieces], bool), [len(part) for part, _ in pieces])
        else:
            ids = whole
    if len(mask):
        mask[0] = False  # nothing predicts the first token
    return Tokens(np.array(ids, np.int32), mask, merged)


def _mask_by_prefixes(encode: Encoder, document: Rendered, whole: list[int]) -> tuple[np.ndarray, int]:
    """The mask on the whole text's tokens: a border is where the tokens of the text before it end.

    Where they end inside a token, that token is supervised, on either side of the span.
    """
    mask, merged = np.zeros(len(whole), bool), 0
    borders = [b for span in document.spans for b in span]
    prefixes = encode([document.text[:b] for b in borders])
    at = []
    for side, prefix in enumerate(prefixes):
        common = next((i for i, (a, b) in enumerate(zip(prefix, whole)) if a != b), min(len(prefix), len(whole)))
        crossed = common < len(prefix)
        merged += crossed
        at.append(common + (1 if crossed and side % 2 else 0))
    for start, end in zip(at[::2], at[1::2]):
        mask[start:end] = True
    return mask, merged
