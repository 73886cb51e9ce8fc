"""When one rank fails the others end too, with its error and not with that of a connection that was closed.

A rank that fails says why in the store that the process group was made through, before its connections close. The others see
their next collective fail, look there, and log that. A rank that was killed says nothing, which is told; one that hangs is
waited for `run.timeout` seconds. Ending the processes is the launcher's: torchrun and accelerate end all when one has ended.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from karui.configs.recipe import Recipe

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger(__name__)
_TOLD, _HEARD = "karui/failed", "karui/heard"
_OF_THE_NETWORK = ("connection closed", "connection reset", "connection refused", "timed out", "timeout", "broken pipe",
                   "remote process exited", "network error")  # fmt: skip


@contextmanager
def together(recipe: Recipe, accelerator: Accelerator) -> Iterator[None]:
    """Around a run: its failure is told to the other ranks; what they told, or that they ended without a word, is logged here."""
    try:
        yield
    except Exception as error:
        if accelerator.num_processes == 1:
            raise
        with suppress(Exception):  # the store may be gone with the first rank
            _compare(recipe, accelerator, error)
        raise


def _compare(recipe: Recipe, accelerator: Accelerator, error: Exception) -> None:
    """Tell the others of `error`, or log what another told. At once: the launcher may end this process at any moment."""
    from torch.distributed import destroy_process_group, distributed_c10d, get_backend

    store, own = distributed_c10d._get_default_store(), f"rank {accelerator.process_index}"
    foreign = isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _OF_THE_NETWORK)
    if (told := _told(store, wait=5.0 if foreign else 0.0)) is not None:
        store.add(_HEARD, 1)
        logger.error("%s ends because another rank failed, %s", own, told)
    elif foreign:
        logger.error("%s ends because another rank ended without a word (killed, or out of memory), or did not answer within "
                     "run.timeout=%d seconds: %s", own, recipe.run.timeout, str(error).splitlines()[0][:300])
    else:
        text = f"{own}: {type(error).__name__}: {error}"
        logger.error("%s", text)
        store.set(_TOLD, text[:4000])
        if get_backend() == "gloo":  # the others notice when the connections close; those of NCCL when the process ends
            destroy_process_group()
            _until(lambda: store.add(_HEARD, 0) >= accelerator.num_processes - 1, 5.0)


def _told(store: Any, wait: float) -> str | None:
    """What a failing rank left, waited for up to `wait` seconds."""
    return str(store.get(_TOLD).decode()) if _until(lambda: store.check([_TOLD]), wait) else None


def _until(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not (held := condition()) and time.monotonic() < end:
        time.sleep(0.1)
    return held
