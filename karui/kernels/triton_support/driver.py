"""The NVIDIA driver beside what was built against it: why there is no GPU, and what an error of the driver's means.

A driver serves programs of its own CUDA version's major number and of older ones (CUDA's minor-version compatibility). torch
brings one toolkit, Triton's compiler another.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Iterator

import torch

from karui.configs.errors import UnsupportedError


def driver_version() -> tuple[int, int] | None:
    """The CUDA version that the installed driver serves, such as (12, 4); None without a driver."""
    for name in ("libcuda.so.1", "nvcuda.dll"):
        try:
            number = ctypes.c_int()
            if ctypes.CDLL(name).cuDriverGetVersion(ctypes.byref(number)) == 0 and number.value:
                return number.value // 1000, number.value % 1000 // 10
        except (OSError, AttributeError):
            continue
    return None


def no_gpu() -> str:
    """Why torch sees no GPU on this machine, in a sentence with a remedy."""
    toolkit, driver = torch.version.cuda, driver_version()
    if toolkit is None:
        return f"this torch ({torch.__version__}) is built without CUDA; install a build with CUDA, or use device='cpu'."
    if driver is None:
        return f"this torch is built for CUDA {toolkit} and finds no NVIDIA driver; look at nvidia-smi, or use device='cpu'."
    if driver[0] < int(toolkit.split(".")[0]):
        return (f"the NVIDIA driver serves CUDA up to {driver[0]}.{driver[1]}, this torch is built for CUDA {toolkit}: update "
                f"the driver, or install a torch built for CUDA {driver[0]}; device='cpu' works as it is.")  # fmt: skip
    return (f"torch is built for CUDA {toolkit}, the driver serves {driver[0]}.{driver[1]}, and yet no GPU is visible; look at "
            "nvidia-smi and CUDA_VISIBLE_DEVICES, or use device='cpu'.")  # fmt: skip


@contextlib.contextmanager
def explained(remedy: str) -> Iterator[None]:
    """Errors of Triton's compiler and launcher as `UnsupportedError`s that name the versions at odds and `remedy`."""
    try:
        yield
    except Exception as error:
        told = str(error)
        # by name, not by type: this module does not import Triton
        if type(error).__name__ == "OutOfResources":
            raise UnsupportedError(f"a kernel asks for more than this GPU has ({told}); {remedy}.") from error
        if type(error).__name__ != "PTXASError" and "Triton Error [CUDA]" not in told and "no kernel image" not in told:
            raise
        if "out of memory" in told:
            raise torch.OutOfMemoryError(told) from error
        raise UnsupportedError(
            f"the GPU did not take a kernel ({_first_line(told)}): Triton's compiler is of CUDA {_compiler_version()}, the "
            f"driver serves CUDA up to {_spelled(driver_version())}; update the driver, or {remedy}."
        ) from error


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0][:200] if text.strip() else "no message"


def _compiler_version() -> str:
    try:
        from triton.backends.nvidia.compiler import get_ptxas_version

        found = re.search(r"release (\d+\.\d+)", get_ptxas_version(80))
    except Exception:  # a mocked or rebuilt Triton; the message stands without the number
        found = None
    return found[1] if found else "unknown version"


def _spelled(version: tuple[int, int] | None) -> str:
    return "unknown version" if version is None else f"{version[0]}.{version[1]}"
