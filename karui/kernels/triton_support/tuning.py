"""A launch configuration per kernel, device and shape class: the first of a few candidates, or the fastest once they were timed.

Timing is asked for (`KARUI_TUNE=1`, or `tune()` in a benchmark), happens once per key, and never while a CUDA graph is captured.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Config:
    """Compile-time arguments by name, warps and pipeline stages."""

    blocks: tuple[tuple[str, int], ...]
    num_warps: int = 4
    num_stages: int = 3

    def __call__(self) -> dict[str, Any]:
        return {**dict(self.blocks), "num_warps": self.num_warps, "num_stages": self.num_stages}

    def __getitem__(self, name: str) -> int:
        return dict(self.blocks)[name]


def config(num_warps: int = 4, num_stages: int = 3, **blocks: int) -> Config:
    return Config(tuple(blocks.items()), num_warps, num_stages)


_CACHE_BYTES = 256 << 20  # more than any GPU's L2 cache holds
_LAUNCH_CYCLES = 1_000_000  # about half a millisecond

_best: dict[tuple[Any, ...], Config] = {}
_tuning = os.environ.get("KARUI_TUNE", "0") == "1"


def tune(on: bool) -> None:
    """Time candidates of keys not seen before."""
    global _tuning
    _tuning = on


def launch(key: tuple[Any, ...], candidates: Sequence[Config], run: Callable[[Config], None], device: torch.device) -> None:
    """`run` with the best known of `candidates`; `run` only writes its outputs, so it may run more than once.

    A candidate that does not compile or fit on this device loses; when all do, the first one's error is raised.
    """
    known = _best.get(key)
    wanted = known is None and _tuning and len(candidates) > 1 and device.type == "cuda"
    if wanted and not torch.cuda.is_current_stream_capturing():
        timed = [(ms, i) for i, c in enumerate(candidates) if (ms := _milliseconds(lambda c=c: run(c))) is not None]  # type: ignore[misc]
        if timed:
            known = _best[key] = candidates[min(timed)[1]]
    run(known or candidates[0])


def chosen() -> dict[tuple[Any, ...], Config]:
    """What timing has chosen so far, by key."""
    return dict(_best)


def _milliseconds(run: Callable[[], None]) -> float | None:
    """The best of a few runs as a step of a model sees them: operands not in the L2 cache, and the launch, which takes the host
    longer than the GPU takes many a kernel, over before the GPU begins."""
    try:
        run()
        torch.cuda.synchronize()
    except Exception:  # out of shared memory, out of registers, an instruction this chip lacks
        return None
    other = torch.empty(_CACHE_BYTES, dtype=torch.int8, device="cuda")
    best = float("inf")
    for _ in range(5):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        other.zero_()
        torch.cuda._sleep(_LAUNCH_CYCLES)
        start.record()
        run()
        stop.record()
        stop.synchronize()
        best = min(best, start.elapsed_time(stop))
    return best
