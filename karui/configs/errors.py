"""One exception type for everything a user can cause and mend.

Rule: a user's mistake raises `KaruiError` (a `ValueError`) that says what was given, what was expected and what to do;
`assert` is kept for invariants that only a bug in karui can break.
"""

import difflib
from collections.abc import Iterable


class KaruiError(ValueError):
    """A user-facing error: the message alone is enough to act on; the CLI prints it without a traceback."""


class UnsupportedError(KaruiError):
    """The request is well-formed, but this build, model or machine cannot serve it."""


class CorruptError(KaruiError):
    """A file that was read is not what its manifest or hash says it is."""


def nearest(word: str, choices: Iterable[str]) -> str:
    """`did you mean X?` when a close spelling exists, else an empty string."""
    found = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return f" Did you mean {found[0]!r}?" if found else ""
