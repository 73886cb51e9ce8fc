"""What this machine allows: bytes read from memory and multiplications per second, measured in a second or two with numpy."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from karui.kernels.cores import usable_cores
from karui.kernels.native.arena import Arena


@dataclass(frozen=True, kw_only=True)
class Machine:
    """bandwidth: bytes/s read by `threads` threads from an array far larger than the caches; flops: fp32 matrix product."""

    threads: int
    bandwidth_bytes_per_s: float
    flops_per_s: float


def measure_machine(threads: int | None = None, size_mib: int = 384, repeats: int = 5) -> Machine:
    """Best of `repeats`, the memory on huge pages as weights are. The fp32 product is a yardstick, not a ceiling: int8 arithmetic
    may pass it."""
    threads = threads or usable_cores()
    array = Arena().zeros(size_mib << 18, torch.float32).fill_(1).numpy()
    parts = np.array_split(array, threads)
    with ThreadPoolExecutor(threads) as pool:
        def once() -> float:
            start = time.perf_counter()
            list(pool.map(np.max, parts))       # reads every byte once, releases the interpreter lock, does next to no arithmetic
            return time.perf_counter() - start
        once()
        read = min(once() for _ in range(repeats))
        side = 768
        blocks = [(np.ones((side, side), np.float32), np.ones((side, side), np.float32)) for _ in range(threads)]

        def product() -> float:
            start = time.perf_counter()
            list(pool.map(lambda pair: pair[0] @ pair[1], blocks))
            return time.perf_counter() - start
        product()
        multiply = min(product() for _ in range(repeats))
    return Machine(threads=threads, bandwidth_bytes_per_s=array.nbytes / read, flops_per_s=threads * 2 * side**3 / multiply)


def decode_limit(bandwidth: float, batch: int, weight_bytes: float, kv_bytes: float) -> float:
    """tokens/s a memory-bound decode cannot pass: batch * bandwidth / (weights + batch * KV bytes that a stream reads)."""
    return batch * bandwidth / (weight_bytes + batch * kv_bytes)


def prefill_limit(flops_per_s: float, weights: int) -> float:
    """Tokens/s a compute-bound prefill cannot pass: one multiplication and one addition per weight and token."""
    return flops_per_s / (2.0 * weights)
