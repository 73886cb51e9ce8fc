"""Which of an op's paths runs: Triton on a GPU, torch everywhere, and why not the other. Imports no Triton.

    backend "torch"    the plain path
    backend "triton"   the kernel, or an error that says what stands in the way
    backend "auto"     the kernel on a GPU that can run it, else torch; on a GPU the reason is logged once

On a CPU the kernels run only under Triton's interpreter (TRITON_INTERPRET=1 before Triton is first imported): slow, and meant
for tests.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib.util
import logging
import os
from collections.abc import Iterator
from typing import Any, Literal, get_args

import torch

from karui.configs.errors import KaruiError, UnsupportedError

Backend = Literal["auto", "triton", "torch"]
log = logging.getLogger(__name__)


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


@functools.cache
def capability(device: torch.device) -> int:
    """Compute capability of a CUDA device as one number: 80, 89, 90, 100, 120."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@functools.cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of a device; 4 in the interpreter, so that persistent loops run more than once."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """`device` as the current one: Triton launches there, wherever the tensors lie."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def obstacle(device: torch.device, needs: int = 80) -> str:
    """What keeps kernels from running on `device`, or an empty string; `needs` is the least compute capability."""
    if not has_triton():
        return "Triton is not installed (pip install 'karui[triton]')"
    if device.type == "cuda":
        found = capability(device)
        return "" if found >= needs else f"it needs compute capability {needs}, this GPU has {found}"
    if device.type == "cpu" and interpreting():
        return ""
    return f"Triton kernels run on CUDA tensors (on a CPU only under TRITON_INTERPRET=1), these are on {device.type}"


def use_triton(backend: str, device: torch.device, op: str, *, needs: int = 80, refused: str = "") -> bool:
    """Whether `op` takes its Triton path on `device`.

    Args:
        needs: the least compute capability that has the format or instruction.
        refused: why this call's shapes or dtypes cannot be served, empty if they can.

    Raises:
        KaruiError: an unknown backend.
        UnsupportedError: backend "triton" that cannot serve the call.
    """
    if backend not in get_args(Backend):
        raise KaruiError(f"{op}: backend {backend!r} is not known; use one of {', '.join(get_args(Backend))}.")
    if backend == "torch" or (backend == "auto" and device.type != "cuda"):
        return False
    reason = obstacle(device, needs) or refused
    if not reason:
        return True
    if backend == "triton":
        raise UnsupportedError(f"{op}: backend triton cannot serve this call: {reason}; use backend 'torch' or 'auto'.")
    if not _unsaid.get():
        _say_once(op, reason)
    return False


@contextlib.contextmanager
def unsaid() -> Iterator[None]:
    """What runs in plain torch in here is not logged, so that a probe does not take the one message of a real call."""
    before = _unsaid.set(True)
    try:
        yield
    finally:
        _unsaid.reset(before)


_unsaid = contextvars.ContextVar("unsaid", default=False)


@functools.cache
def _say_once(op: str, reason: str) -> None:
    log.warning("%s runs in plain torch on this GPU: %s", op, reason)
