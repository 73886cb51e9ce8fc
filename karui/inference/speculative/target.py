"""Which model a draft was made for. One for another model of the same shape would run and hardly ever be right, so it is refused.

The mark lies in the metadata of the draft's own file and goes where the file goes; a bundle's manifest has what it is compared
with. A draft model (`draft:PATH`) needs none: it is a model of its own, and its token ids are compared one by one.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from karui.inference.bundle.reader import Opened
from karui.inference.bundle.writer import sha256_tensor


@dataclass(frozen=True)
class TargetIdentity:
    """A model as it is stored.

    Attributes:
        weights: sha256 over name, grid and digests of every tensor; how they are spread over files does not enter.
        vocabulary: sha256 over the tokenizer's tokens and their ids; None where there is no tokenizer.
    """

    weights: str
    vocabulary: str | None = None

    @staticmethod
    def of(opened: Opened, tokenizer: Any) -> TargetIdentity:
        """Read off a bundle's manifest; a folder without one is hashed, at about a gigabyte a second."""
        digest = hashlib.sha256()
        for name in sorted(opened.names):
            if opened.manifest is not None:
                parts = opened.manifest.tensors[name].parts
            else:
                parts = {part: sha256_tensor(value) for part, value in opened.packed(name).items()}
            digest.update(json.dumps([name, str(opened.spec(name)), sorted(parts.items())]).encode())
        return TargetIdentity(digest.hexdigest(), None if tokenizer is None else vocabulary_digest(tokenizer))

    def difference(self, other: TargetIdentity) -> str:
        """What tells the two apart, in a word; empty when nothing does. A vocabulary that one side lacks is not compared."""
        if None not in (self.vocabulary, other.vocabulary) and self.vocabulary != other.vocabulary:
            return "vocabulary"
        return "" if self.weights == other.weights else "weights"

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def loads(text: str) -> TargetIdentity:
        """The inverse of `dumps`. Raises ValueError or TypeError for anything else."""
        return TargetIdentity(**json.loads(text))


def vocabulary_digest(tokenizer: Any) -> str:
    """Hex sha256 of a tokenizer's tokens and their ids."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()
