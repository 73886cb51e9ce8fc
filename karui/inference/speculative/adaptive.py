"""Speculation that switches itself off where it does not pay, and looks again later.

A verification of k drafted tokens emits E = (1 - a^(k+1)) / (1 - a) tokens on average when each is accepted with probability a
(Leviathan et al., arXiv 2211.17192, equation 1) and costs 1 + k c plain steps. Here c is measured: it holds the drafting *and*
the dearer forward over k + 1 rows, which on a compute-bound machine is the larger part. Speculation pays while E / (1 + k c) > 1.
It is switched off once it has lost `budget` plain steps since it last was even, which tells bad luck from a bad method (a CUSUM
test; Page, 1954), and stays off until that loss is `share` of the time.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque

logger = logging.getLogger(__name__)


SHARE = 0.02
TIMES = 16


def expected_tokens(acceptance: float, k: int) -> float:
    """E[tokens per verification] = (1 - a^(k+1)) / (1 - a), with the limit k + 1 at a = 1."""
    if acceptance >= 1.0:
        return float(k + 1)
    return (1.0 - acceptance ** (k + 1)) / (1.0 - acceptance)


def speedup(acceptance: float, k: int, cost: float) -> float:
    """Expected speed over plain decoding; below 1 speculation loses. `cost` is c, per drafted token, in plain steps."""
    return expected_tokens(acceptance, k) / (1.0 + k * cost)


class Controller:
    """Decides per step whether to draft. One per engine and batch-size regime.

    Acceptance and depth are exponential means, times the medians of the last `TIMES`: other work on the machine makes single
    steps many times as long.

    Args:
        memory: weight kept of the past per measurement of acceptance and depth.
        budget: plain steps that may be lost before it is switched off.
        share: of the time, what a loss is once it is tried again.
        plain_first: plain steps that are timed before the first draft.
    """

    def __init__(self, memory: float = 0.9, budget: float = 8.0, share: float = SHARE, plain_first: int = 4) -> None:
        self.memory, self.budget, self.share, self.plain_first = memory, budget, share, plain_first
        self.on = True
        self.accepted = self.tested = self.depth = 0.0
        self.plain_s: float | None = None
        self.spec_s: float | None = None
        self._plain, self._spec = deque[float](maxlen=TIMES), deque[float](maxlen=TIMES)
        self.seen = self.gained = 0  # verifications and tokens of theirs since it was even
        self.waited = self.patience = 0

    @property
    def acceptance(self) -> float:
        """Estimated a: accepted tests over tests, where a verification's tests end at its first rejection."""
        return self.accepted / self.tested if self.tested else 1.0

    @property
    def cost(self) -> float:
        """Measured c; 0 until both kinds of step were timed."""
        if self.plain_s is None or self.spec_s is None or self.depth <= 0:
            return 0.0
        return max(self.spec_s / self.plain_s - 1.0, 0.0) / self.depth

    @property
    def speedup(self) -> float:
        return speedup(self.acceptance, max(round(self.depth), 1), self.cost)

    @property
    def lost(self) -> float:
        """Plain steps that verifying took beyond the tokens that it emitted, since it was even."""
        return self.seen * self.spec_s / self.plain_s - self.gained if self.plain_s and self.spec_s else 0.0

    @property
    def resting(self) -> int:
        """Steps from now on that are plain for sure."""
        return 0 if self.on else max(0, self.patience - self.waited)

    def should_draft(self) -> bool:
        """Whether the coming step may speculate."""
        if not self.on and self.waited >= self.patience:
            self.on, self.seen, self.gained = True, 0, 0
        # A verdict needs the cost of a plain step.
        return self.on and len(self._plain) >= self.plain_first

    def record_plain(self, seconds: float) -> None:
        """A step without drafts took `seconds`."""
        self._plain.append(seconds)
        self.plain_s = statistics.median_low(self._plain)
        if not self.on:
            self.waited += 1

    def record_verified(self, depth: int, accepted: int, seconds: float) -> None:
        """A verification of a draft `depth` deep accepted `accepted` tokens; the step, drafting included, took `seconds`."""
        self.accepted = self.memory * self.accepted + accepted
        self.tested = self.memory * self.tested + accepted + (accepted < depth)
        self.depth = float(depth) if self.depth <= 0 else self.memory * self.depth + (1.0 - self.memory) * depth
        self._spec.append(seconds)
        self.spec_s = statistics.median_low(self._spec)
        self.seen, self.gained = self.seen + 1, self.gained + accepted + 1
        if self.lost < 0:
            self.seen = self.gained = 0
        elif self.seen > 1 and self.lost > self.budget:  # a single one may have been disturbed
            self.on, self.waited, self.patience = False, 0, math.ceil(self.lost / self.share)
            logger.info("speculation off: acceptance %.2f, depth %.1f, cost %.2f per token give %.2fx; next try in %d steps",
                        self.acceptance, self.depth, self.cost, self.speedup, self.patience)
