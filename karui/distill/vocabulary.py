"""Teacher and student over the tokens they share: logits of ids that only one of them knows are masked on both sides.

A head often has more rows than the tokenizer has tokens (padding), and one family's models differ in added tokens. As long as
every shared token has the same id the two can be compared directly; when ids differ, the texts must be aligned by bytes
instead (`alignment`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from karui.configs.errors import KaruiError


@dataclass(frozen=True, eq=False)
class SharedVocabulary:
    """ids: [m] ascending ids of the shared tokens, or None when they are 0..size-1."""

    size: int
    ids: torch.Tensor | None = None

    def rows(self, weight: torch.Tensor) -> torch.Tensor:
        """The head's rows of the shared tokens: [V, H] -> [size, H]; a view where that is possible. Differentiable."""
        if self.ids is None:
            return weight[: self.size]
        return weight.index_select(0, self.ids.to(weight.device))

    def covers(self, targets: torch.Tensor) -> torch.Tensor:
        """[N] bool: which token ids are shared; rows with another target have no place in the comparison."""
        return targets < self.size if self.ids is None else torch.isin(targets, self.ids.to(targets.device))

    def local(self, targets: torch.Tensor) -> torch.Tensor:
        """Token ids -> rows of `rows(weight)`."""
        return targets if self.ids is None else torch.searchsorted(self.ids.to(targets.device), targets)


def share(
    student: Mapping[str, int] | None, teacher: Mapping[str, int] | None, student_rows: int, teacher_rows: int
) -> SharedVocabulary:
    """What two models' heads have in common.

    Args:
        student, teacher: token -> id of each tokenizer; None takes them for the same and compares the common rows.
        student_rows, teacher_rows: rows of the heads.

    Raises:
        KaruiError: a shared token has two ids, or less than half of the smaller vocabulary is shared.
    """
    common = min(student_rows, teacher_rows)
    if student is None or teacher is None or student == teacher:
        return SharedVocabulary(common)
    moved = [token for token, i in student.items() if teacher.get(token, i) != i]
    if moved:
        token = moved[0]
        raise KaruiError(
            f"{len(moved)} tokens have different ids in the two vocabularies ({token!r}: {student[token]} in the student's, "
            f"{teacher[token]} in the teacher's), so logits cannot be compared by id. Set objective.align: bytes, or take a "
            "teacher of the student's family."
        )
    ids = sorted(i for token, i in student.items() if token in teacher and i < common)
    if 2 * len(ids) < min(len(student), len(teacher)):
        raise KaruiError(f"the vocabularies share {len(ids)} tokens of {len(student)} and {len(teacher)}; that is too few to "
                         "compare by id. Set objective.align: bytes, or take a teacher of the student's family.")
    if ids == list(range(len(ids))):
        return SharedVocabulary(len(ids))
    return SharedVocabulary(len(ids), torch.tensor(ids))
