"""Peak memory of a stretch of work, and bytes on disk."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Peak:
    """Filled when the stretch ends: highest resident set of the process in bytes, and of the GPU, None without one.

    `since_start` is False where the system cannot reset its high-water mark: then host_bytes is the whole process's peak.
    """

    host_bytes: int = 0
    gpu_bytes: int | None = None
    since_start: bool = False


@contextmanager
def peak_memory() -> Iterator[Peak]:
    """Measure the peak between entering and leaving."""
    peak = Peak(since_start=_reset())
    torch = sys.modules.get("torch")
    gpu = torch is not None and torch.cuda.is_initialized()
    if gpu:
        assert torch is not None
        torch.cuda.reset_peak_memory_stats()
    try:
        yield peak
    finally:
        peak.host_bytes = high_water()
        if gpu:
            assert torch is not None
            peak.gpu_bytes = int(torch.cuda.max_memory_allocated())


def _reset() -> bool:
    """Linux resets VmHWM when 5 is written to clear_refs (proc(5))."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def high_water() -> int:
    """The most bytes this process has held. Not getrusage's figure where there is another: on Linux that starts at the peak of
    the process that launched this one."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource

    # Linux counts in KiB, macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def disk_bytes(path: Path, weights_only: bool = False) -> int:
    """Bytes of the files in a folder (followed through links, as a model cache keeps them), or of one file."""
    files = [path] if path.is_file() else [f for f in path.rglob("*") if f.is_file()]
    return sum(f.stat().st_size for f in files if not weights_only or f.suffix in (".safetensors", ".gguf", ".bin"))
