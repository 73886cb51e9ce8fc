"""GPT-2's alphabet of bytes, in which byte-level tokenizers spell their vocabulary."""

_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTE_ALPHABET = {chr(b): b for b in _PRINTABLE} | {
    chr(256 + i): b for i, b in enumerate(b for b in range(256) if b not in _PRINTABLE)}
"""The character that stands for each byte: printable ones for themselves, the others from 256 on."""
