"""Where two tokenizations of one text share a byte boundary, so that teacher and student can be compared there.

After a common boundary both models predict the continuation of the same bytes (GOLD's merge by offsets, Patiño et al. 2025; ULD,
arXiv 2402.12030). Tokens become bytes by their vocabulary's own convention: byte-level BPE (GPT-2's byte-to-character table) or
SentencePiece (U+2581 for a space, <0xNN> for a byte).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from karui.catalogue.byte_level import BYTE_ALPHABET
from karui.configs.errors import KaruiError

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_bytes(vocabulary: Mapping[str, int], special: Collection[int] = ()) -> list[bytes | None]:
    """Bytes of every token by id; None for special tokens and ids without a token.

    Args:
        vocabulary: token text -> id, as `tokenizer.get_vocab()` gives it.
        special: ids of tokens that stand for no text.

    Raises:
        KaruiError: neither convention is recognised.
    """
    texts: list[str | None] = [None] * (max(vocabulary.values(), default=-1) + 1)
    for text, i in vocabulary.items():
        texts[i] = None if i in special else text
    if any("\u2581" in (t or "") for t in texts) and not any("\u0120" in (t or "") for t in texts):
        return [None if t is None else bytes([int(m[1], 16)]) if (m := _BYTE.fullmatch(t))
                else t.replace("\u2581", " ").encode() for t in texts]
    if sum(t is not None and all(c in BYTE_ALPHABET for c in t) for t in texts) * 2 < sum(t is not None for t in texts):
        raise KaruiError("the vocabulary is neither byte-level BPE nor SentencePiece, so its tokens have no known bytes; "
                         "distil from a teacher with the student's own tokenizer.")
    return [None if t is None else bytes(BYTE_ALPHABET[c] for c in t) if all(c in BYTE_ALPHABET for c in t) else t.encode()
            for t in texts]


def boundaries(tokens: Sequence[int], byte_table: Sequence[bytes | None]) -> np.ndarray:
    """[n + 1] byte offset before each token and after the last; special tokens have no width."""
    widths = [len(byte_table[t] or b"") if t < len(byte_table) else 0 for t in tokens]
    return np.concatenate([[0], np.cumsum(widths, dtype=np.int64)]).astype(np.int64)


def common_rows(student: np.ndarray, teacher: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows whose next-token predictions follow the same bytes.

    Args:
        student, teacher: `boundaries` of the two tokenizations of one text.

    Returns:
        (student rows, teacher rows), ascending and of equal length: row i has read tokens 0..i, and the byte offsets after
        token i agree. The last token's row is left out: nothing follows it.

    Raises:
        KaruiError: the two do not cover the same number of bytes.
    """
    if student[-1] != teacher[-1]:
        raise KaruiError(f"the two tokenizations cover {int(student[-1])} and {int(teacher[-1])} bytes; they are not of the same "
                         "text. Render the sample with one template and tokenize the same text twice.")
    ends_s, ends_t = student[1:-1], teacher[1:-1]
    # of several rows at one offset (special tokens) the last has read most
    offsets_s, first_s = np.unique(ends_s[::-1], return_index=True)
    offsets_t, first_t = np.unique(ends_t[::-1], return_index=True)
    _, at_s, at_t = np.intersect1d(offsets_s, offsets_t, assume_unique=True, return_indices=True)
    return len(ends_s) - 1 - first_s[at_s], len(ends_t) - 1 - first_t[at_t]
