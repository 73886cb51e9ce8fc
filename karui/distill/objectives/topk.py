"""The teacher's k likeliest tokens and a tail bucket: a divergence over k + 1 buckets.

Dropping the tail and renormalising is a different loss, blind to how much the student puts elsewhere: for a single token it is
0 always. The student's tail is the log-sum-exp of its other logits, so nothing cancels. A bucket's pull reaches a logit as
w_j = S_j / S_tail * w_tail for tokens of the tail.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from karui.distill.divergences import Divergence
from karui.distill.teacher_rows import TopKRows

FLOOR = -80.0
"""Smallest log-probability of a bucket: exp(-80) is still a normal fp32 number."""


@dataclass(eq=False)
class TopK:
    """teacher: N rows; the loss's temperature is the one its probabilities were made at."""

    teacher: TopKRows
    divergence: Divergence

    def __call__(self, start: int, stop: int, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tau, t = self.teacher.temperature, self.teacher
        ids = t.ids[start:stop]
        log_t = torch.cat([t.logprobs[start:stop], t.tail[start:stop, None]], -1).to(logits.dtype).clamp_(min=FLOOR)
        z = logits / tau
        whole = z.logsumexp(-1, keepdim=True)
        kept = z.gather(1, ids) - whole
        rest = z.scatter_(1, ids, -torch.inf)
        tail = rest.logsumexp(-1, keepdim=True)
        log_s = torch.cat([kept, tail - whole], -1).clamp_(min=FLOOR)
        s = log_s.exp()
        value, pull = self.divergence(log_t, log_s)
        net = pull - s * pull.sum(-1, keepdim=True)  # d loss / d (log-mass of a bucket)
        covered = torch.isinf(tail)  # k covers the vocabulary: no tail to share
        share = rest.sub_(tail.masked_fill(covered, 0.0)).exp_()
        gradient = share.mul_(net[:, -1:]).scatter_(1, ids, net[:, :-1])
        return value * tau**2, gradient.mul_(tau) if tau != 1 else gradient
