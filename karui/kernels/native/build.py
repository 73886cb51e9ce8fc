"""Compiling the native kernels once for the machine at hand, and saying why when that is not possible.

The library of one instruction set is `$KARUI_CACHE/native/karui-<isa>-<hash>.so` (default `~/.cache/karui`); the hash covers the
sources, the flags and the compiler, so a stale build is never loaded. A lock keeps concurrent processes from compiling twice, and
the file appears under its name only when complete; its own hash lies beside it, as loading one that a full disk cut short would
end the process.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from karui.configs.errors import KaruiError, UnsupportedError

log = logging.getLogger(__name__)

SOURCES = ("model.cpp", "gemm.cpp", "mixture.h", "rounds.h", "draft.h", "medusa.h", "attention.h", "latent.h", "latent_int8.h",
           "indexer.h", "kivi.h", "ops.h", "sampling.h", "gemm.h", "tiles.h", "simd.h", "neon.h", "weights.h", "threads.h",
           "spill.h")
LOWBIT = ("lowbit.cpp",)
_COMMON = ("-std=c++17", "-O3", "-fPIC", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi")
# Per instruction set: what the CPU must have, see `_cpu`, and the compiler's flags. Best first.
_ISAS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "avx512": (("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "fma", "f16c"),
               ("-DKARUI_AVX512", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mfma", "-mf16c")),
    "avx2": (("avx2", "fma", "f16c"), ("-DKARUI_AVX2", "-mavx2", "-mfma", "-mf16c")),
    "neon": (("asimddp",), ("-DKARUI_NEON", "-march=armv8.2-a+dotprod")),
    "generic": ((), ("-O2",)),  # in the place of -O3, which takes twice as long for code 1.8 times slower
}
# Flags of an instruction set for what only some of its CPUs have, and compilers of some years ago do not know.
_EXTRAS = {"avx512": {"avx512_bf16": "-mavx512bf16", "amx_tile": "-mamx-tile", "amx_bf16": "-mamx-bf16",
                      "amx_int8": "-mamx-int8"},
           "avx2": {"avx_vnni": "-mavxvnni"}}

_AT_HWCAP, _HWCAP_ASIMDDP = 16, 1 << 20  # <elf.h>, <asm/hwcap.h>


@cache
def _cpu() -> frozenset[str]:
    """What the CPU has, in the names of /proc/cpuinfo; of a 64-bit ARM whether it multiplies bytes (`asimddp`)."""
    if platform.machine() in ("aarch64", "arm64"):
        # every Mac of this kind has it
        there = sys.platform == "darwin" or (
            sys.platform == "linux" and ctypes.CDLL(None).getauxval(ctypes.c_ulong(_AT_HWCAP)) & _HWCAP_ASIMDDP)
        return frozenset(("asimddp",) if there else ())
    if platform.machine() in ("x86_64", "AMD64") and Path("/proc/cpuinfo").exists():
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return frozenset(line.split())
    return frozenset()


def isas() -> list[str]:
    """Instruction sets this CPU can run, best first; "generic" always."""
    return [name for name, (needed, _) in _ISAS.items() if _cpu().issuperset(needed)]


def chosen_isa() -> str:
    """`KARUI_ISA` if set, else the best this CPU has. Raises `KaruiError` for one it lacks."""
    asked, have = os.environ.get("KARUI_ISA"), isas()
    if asked and asked not in have:
        raise KaruiError(f"KARUI_ISA={asked!r} cannot run here; this CPU has {', '.join(have)}.")
    return asked or have[0]


def cache_folder() -> Path:
    return Path(os.environ.get("KARUI_CACHE") or Path.home() / ".cache" / "karui") / "native"


def compiler() -> str | None:
    """The C++ compiler: $CXX, g++, clang++ or c++, whichever is found first."""
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if name and shutil.which(name):
            return shutil.which(name)
    return None


def build(isa: str, sources: tuple[str, ...] = SOURCES) -> Path:
    """The compiled library for `isa`, compiled (a minute) when the cache lacks it: the `.cpp` of `sources`, which include
    the rest, each in a process of its own.

    Raises `UnsupportedError` when there is no compiler or it fails, with the first lines of its message.
    """
    extras = tuple(flag for name, flag in _EXTRAS.get(isa, {}).items() if name in _cpu())
    try:
        return _build(isa, sources, extras)
    except KaruiError as error:
        if not extras or compiler() is None:
            raise
        log.info("without %s, which the compiler may not know: %s", " ".join(extras), error)
        return _build(isa, sources, ())


def _build(isa: str, sources: tuple[str, ...], extras: tuple[str, ...]) -> Path:
    here = Path(__file__).parent
    stem = "karui" if sources is SOURCES else Path(sources[0]).stem
    cxx = compiler()
    flags = (*_COMMON, *_ISAS[isa][1], *extras)
    digest = hashlib.sha256(repr((platform.machine(), flags, cxx)).encode())
    for name in sources:
        digest.update((here / name).read_bytes())
    target = cache_folder() / f"{stem}-{isa}-{digest.hexdigest()[:16]}.so"
    if _whole(target):
        return target
    if cxx is None:
        raise UnsupportedError("no C++ compiler found (g++, clang++ or c++, or $CXX); install one for the native kernels.")
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.parent / f"{stem}-{isa}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _whole(target):
            return target
        for left in target.parent.glob(f"{stem}-{isa}-*.tmp"):  # by a process that was killed, as this one has the lock
            shutil.rmtree(left, ignore_errors=True)
        log.info("compiling the native kernels for %s, once, into %s", isa, target)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f"{stem}-{isa}-", suffix=".tmp") as scratch:
            objects = {f"{scratch}/{Path(name).stem}.o": str(here / name) for name in sources if name.endswith(".cpp")}
            _run(*([cxx, *flags, "-c", "-o", made, source] for made, source in objects.items()))
            _run([cxx, "-shared", "-pthread", "-o", f"{scratch}/{target.name}", *objects])
            os.replace(f"{scratch}/{target.name}", target)
        _hash_of(target).write_text(_hash(target))
    return target


def _hash(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()


def _hash_of(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _whole(library: Path) -> bool:
    """Whether a library is there as it was compiled."""
    try:
        return _hash_of(library).read_text() == _hash(library)
    except FileNotFoundError:
        return False


def _run(*commands: list[str]) -> None:
    """Commands of the compiler, all at once."""
    started = [subprocess.Popen(c, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for c in commands]
    said = [process.communicate()[1] for process in started]
    for command, process, errors in zip(commands, started, said):
        if process.returncode:
            raise UnsupportedError(f"{command[0]} could not compile the native kernels: {errors.strip()[:600]}")
