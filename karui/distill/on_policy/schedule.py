"""Whose text a sample carries: GKD's lambda (arXiv 2306.13649, algorithm 1), after an off-policy stage if asked (Qwen3,
arXiv 2505.09388, section 4.5: teacher's or data's text first, the student's own after).

A pure function of (seed, step, sample), so a resumed run, another micro-batching and another number of ranks decide alike.
"""

from __future__ import annotations

import hashlib


def is_on_policy(*, seed: int, step: int, total: int, index: int, share: float, off_policy_first: float = 0.0) -> bool:
    """Whether sample `index` is written by the student at `step` of `total`.

    Args:
        share: probability of yes, once the off-policy stage is over.
        off_policy_first: share of the run that stays off-policy.
    """
    if step < off_policy_first * total:
        return False
    if share >= 1:
        return True
    digest = hashlib.blake2b(repr(("on-policy", seed, step, index)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < share * 2**64
