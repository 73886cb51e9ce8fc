"""When one rank fails the others end too, with its error and not with that of a connection that was closed.

A rank that fails says why in the store that the process group was made through, before its connections close. The others see
their next collective fail, look there, and raise that. A rank that was killed says nothing, which is told; one that hangs is
waited for `run.timeout` seconds. Ending the processes is the launcher's: torchrun and accelerate end all when one has ended.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from karui.configs.errors import KaruiError
from karui.configs.recipe import Recipe

if TYPE_CHECKING:
    from accelerate import Accelerator

_KEY = "karui/failed"
_OF_THE_NETWORK = ("connection closed", "connection reset", "connection refused", "timed out", "timeout", "broken pipe", "gloo",
                   "nccl", "heartbeat")  # fmt: skip


@contextmanager
def together(recipe: Recipe, accelerator: Accelerator) -> Iterator[None]:
    """Around a run: its failure is told to the other ranks, and theirs raised here.

    Raises:
        KaruiError: another rank failed (with its words), ended without a word, or did not come within `run.timeout`.
    """
    try:
        yield
    except Exception as error:
        if accelerator.num_processes == 1:
            raise
        foreign = isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _OF_THE_NETWORK)
        told = _told(wait=5.0 if foreign else 0.0)
        if told is not None and not told.startswith(f"rank {accelerator.process_index}:"):
            raise KaruiError(f"another rank failed, {told}") from error
        if not foreign:
            _tell(f"rank {accelerator.process_index}: {type(error).__name__}: {error}")
            raise
        raise KaruiError(f"another rank ended without a word (killed, or out of memory), or did not answer within "
                         f"run.timeout={recipe.run.timeout} seconds: {str(error).splitlines()[0][:300]}") from error


def _store() -> Any:
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def _tell(text: str) -> None:
    with suppress(Exception):  # the store may be gone with the first rank
        _store().set(_KEY, text[:4000])


def _told(wait: float) -> str | None:
    """What a failing rank left, waited for up to `wait` seconds."""
    end = time.monotonic() + wait
    with suppress(Exception):
        store = _store()
        while True:
            if store.check([_KEY]):
                return str(store.get(_KEY).decode())
            if time.monotonic() >= end:
                return None
            time.sleep(0.1)
    return None
