"""Speculation that switches itself off where it does not pay, and looks again later.

A verification of k drafted tokens emits E = (1 - a^(k+1)) / (1 - a) tokens on average when each is accepted with probability a
(Leviathan et al., arXiv 2211.17192, equation 1) and costs 1 + k c plain steps. Here c is measured: it holds the drafting *and*
the dearer forward over k + 1 rows, which on a compute-bound machine is the larger part. Speculation pays while E / (1 + k c) > 1.
What it lost when it is switched off decides how long it stays off, so that a method that never pays costs `SHARE` of the time.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque

logger = logging.getLogger(__name__)


SHARE = 0.02
"""Of the time, what trying again may lose."""
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
        memory: weight kept of the past per measurement.
        warmup: verifications before the first verdict; fewer where two have lost more than `warmup` plain steps already.
        probe_every: plain steps after which a switched-off controller tries `warmup` verifications again; doubles each time
            a probe fails, up to 16 times, and is at least what was lost divided by `SHARE`.
    """

    def __init__(self, memory: float = 0.9, warmup: int = 8, probe_every: int = 64) -> None:
        self.memory, self.warmup, self.probe_every = memory, warmup, probe_every
        self.on = True
        self.accepted = self.tested = self.depth = 0.0
        self.plain_s: float | None = None
        self.spec_s: float | None = None
        self._plain, self._spec = deque[float](maxlen=TIMES), deque[float](maxlen=TIMES)
        self.seen = self.waited = 0
        self.patience = probe_every
        self.fastest, self.gained = math.inf, 0  # since it was switched on: quickest verification, and tokens of all

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
        """Plain steps lost by verifying since it was switched on (below 0: gained), by the quickest, as others were disturbed."""
        return self.seen * self.fastest / self.plain_s - self.gained if self.plain_s and self.seen else 0.0

    @property
    def resting(self) -> int:
        """Steps from now on that are plain for sure."""
        return 0 if self.on else max(0, self.patience - self.waited)

    def should_draft(self) -> bool:
        """Whether the coming step may speculate."""
        if not self.on and self.waited >= self.patience:
            self.on, self.seen, self.waited, self.fastest, self.gained = True, 0, 0, math.inf, 0
        # A verdict needs the cost of a plain step: without one yet, the first steps run plain.
        return self.on and self.plain_s is not None

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
        self.depth = float(depth) if self.depth <= 0 else self._mean(self.depth, depth)
        self._spec.append(seconds)
        self.spec_s = statistics.median_low(self._spec)
        self.seen += 1
        self.fastest, self.gained = min(self.fastest, seconds), self.gained + accepted + 1
        if self.speedup < 1.0 if self.seen >= self.warmup else self.seen > 1 and self.lost > self.warmup:
            patience = min(self.patience * 2, 16 * self.probe_every) if self.seen <= self.warmup else self.probe_every
            self.on, self.waited, self.patience = False, 0, max(patience, math.ceil(self.lost / SHARE))
            logger.info("speculation off: acceptance %.2f, depth %.1f, cost %.2f per token give %.2fx; next try in %d steps",
                        self.acceptance, self.depth, self.cost, self.speedup, self.patience)

    def _mean(self, old: float, new: float) -> float:
        return self.memory * old + (1.0 - self.memory) * new
