"""A teacher with another tokenizer: it reads the same text in its own tokens, and rows are compared at common byte borders."""

from __future__ import annotations

from typing import Any

import torch

from karui.configs.errors import KaruiError
from karui.distill.alignment import boundaries, common_rows, token_bytes
from karui.distill.divergences import divergence
from karui.distill.objectives import Sums, Term, head_loss
from karui.distill.objectives.first_byte import FirstByte, first_bytes
from karui.distill.objectives.logits import Logits
from karui.distill.objectives.weighted import Weighted
from karui.trainers.data import IGNORE
from karui.trainers.objectives.teacher import Teacher, tokenizer_of


class Bytewise:
    """The comparison of one pair of models.

    Special tokens have no bytes; the teacher reads the text without them.

    Args:
        tokenizer, rows: the student's tokenizer and its head's rows.
    """

    def __init__(self, tokenizer: Any, rows: int, teacher: Teacher) -> None:
        other = tokenizer_of(teacher.folder)
        if other is None or tokenizer is None:
            raise KaruiError("objective.align: bytes needs a tokenizer on both sides, and one of the models has none.")
        self.tokenizer, self.other, self.teacher = tokenizer, other, teacher
        self.ours, self.theirs = _table(tokenizer, rows), _table(other, teacher.head.shape[0])

    def loss(self, tokens: torch.Tensor, cu_seqlens: torch.Tensor, targets: torch.Tensor, hidden: torch.Tensor,
             head: torch.Tensor, *, weight: float, kind: str, parameter: float | None, chunk: int,
             softcap: float | None) -> Sums | None:
        """Over a packed row: the next byte's divergence, or `sorted_l1`; None when no border is shared.

        A compared row stands for supervised / compared rows of its document, so that documents weigh by their supervised tokens.
        """
        picked, taught, scales = [], [], []
        for a, b in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist()):
            ids = tokens[a:b].tolist()
            text = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            theirs = self.other(text, add_special_tokens=False)["input_ids"]
            at_s, at_t = common_rows(boundaries(ids, self.ours), boundaries(theirs, self.theirs))
            supervised = (targets[a:b] != IGNORE).cpu().numpy()
            keep = supervised[at_s]
            if not keep.any():
                continue
            line = torch.tensor(theirs, device=tokens.device)
            states, _ = self.teacher.hidden(line, torch.arange(len(line), device=line.device), torch.tensor([0, len(line)]))
            picked.append(hidden[a + torch.from_numpy(at_s[keep]).to(hidden.device)])
            taught.append(states[torch.from_numpy(at_t[keep]).to(states.device)])
            scales.append(torch.full((int(keep.sum()),), float(supervised.sum() / keep.sum()), device=hidden.device))
        if not picked:
            return None
        rows = self.teacher.rows(torch.cat(taught))
        which = divergence(kind, parameter)
        term: Term = Logits(rows, which) if kind == "sorted_l1" else FirstByte(
            rows, which, *(first_bytes(t).to(tokens.device) for t in (self.ours, self.theirs)))
        return head_loss(torch.cat(picked), head, {"logits": (weight, Weighted(term, torch.cat(scales)))}, chunk, softcap)


def _table(tokenizer: Any, rows: int) -> list[bytes | None]:
    table = token_bytes(tokenizer.get_vocab(), set(tokenizer.all_special_ids))
    return (table + [None] * rows)[:rows]
