"""The engine's own thread. Everything else only queues work and listens."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Protocol

from karui.configs.errors import KaruiError
from karui.inference.requests import Delta, Request

logger = logging.getLogger(__name__)


class Steps(Protocol):
    """What the loop needs of an engine."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""

    def add(self, request: Request) -> str:
        """Queue a request; thread-safe; raises `KaruiError` for what can never run."""

    def abort(self, request_id: str) -> None:
        """Cancel at the next step; thread-safe."""

    def step(self) -> list[Delta]:
        """One step over everything that runs."""


class LoopDead(RuntimeError):
    """The engine's thread has ended; nothing can be served."""


class EngineLoop:
    """Runs `engine.step()` while there is work, sleeps else. `start` and `stop` frame its life.

    Health is a fact, not a hope: a step that raises ends the loop for good, and a step that lasts longer than `hang_s` while work
    waits counts as hung. Both turn `problem()` into a message.
    """

    def __init__(self, engine: Steps, hang_s: float = 120.0) -> None:
        self.engine, self.hang_s = engine, hang_s
        self._wake = threading.Condition()
        self._stopping = False
        self._error: BaseException | None = None
        self._step_began: float | None = None
        self._listeners: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Queue[Delta | None]]] = {}
        self._thread = threading.Thread(target=self._run, name="karui-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """End after the current step; whoever still listens is told that the loop is dead."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def problem(self) -> str | None:
        """None while healthy, else what is wrong."""
        if self._error is not None:
            return f"the engine loop died: {type(self._error).__name__}: {self._error}"
        if not self._thread.is_alive():
            return "the engine loop is not running"
        began = self._step_began
        if began is not None and (lasted := time.monotonic() - began) > self.hang_s:
            return f"the engine's current step has lasted {lasted:.0f} s (limit {self.hang_s:.0f} s); it hangs"
        return None

    async def run(self, request: Request) -> AsyncIterator[Delta]:
        """Submit and yield deltas until every continuation has finished. Closing the iterator early cancels the request.

        Raises `KaruiError` for an impossible request, `LoopDead` when the engine's thread has ended or ends meanwhile.
        """
        if (problem := self.problem()) is not None:
            raise LoopDead(problem)
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[Delta | None] = asyncio.Queue()

        def deliver(delta: Delta | None) -> Any:
            with suppress(RuntimeError):        # the event loop has closed: nobody listens any more
                loop.call_soon_threadsafe(arrived.put_nowait, delta)

        request.on_delta = deliver
        # `add` may wait for the running step and tokenizes long prompts, neither of which the event loop should do.
        adding = asyncio.ensure_future(asyncio.to_thread(self.engine.add, request))
        try:
            request_id = await asyncio.shield(adding)
        except asyncio.CancelledError:
            adding.add_done_callback(lambda done: None if done.cancelled() or done.exception() else self._cancel(done.result()))
            raise
        left = request.params.n
        try:
            with self._wake:
                if self._error is not None or not self._thread.is_alive():
                    raise LoopDead(self.problem() or "the engine loop is not running")
                self._listeners[request_id] = (loop, arrived)
                self._wake.notify()
            while left:
                delta = await arrived.get()
                if delta is None:
                    raise LoopDead(self.problem() or "the engine loop was stopped")
                left -= delta.finish_reason is not None
                yield delta
        finally:
            self._listeners.pop(request_id, None)
            if left:
                self._cancel(request_id)

    def _cancel(self, request_id: str) -> None:
        self.engine.abort(request_id)
        with self._wake:
            self._wake.notify()

    def _run(self) -> None:
        try:
            while not self._stopping:
                if self.engine.has_work:
                    self._step_began = time.monotonic()
                    self.engine.step()
                    self._step_began = None
                    continue
                with self._wake:
                    # Half a second at most, should something have queued work without waking the loop.
                    if not self._stopping and not self.engine.has_work:
                        self._wake.wait(0.5)
        except BaseException as error:
            logger.exception("the engine loop died")
            self._error = error
        finally:
            self._step_began = None
            with self._wake:
                listeners = list(self._listeners.values())
            for loop, arrived in listeners:
                with suppress(RuntimeError):
                    loop.call_soon_threadsafe(arrived.put_nowait, None)


def require_extra() -> None:
    """Raise a `KaruiError` that names the extra when FastAPI or uvicorn is missing."""
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise KaruiError(f"serving needs FastAPI and uvicorn ({error.name} is missing); install them with: "
                         "pip install 'karui[serve]'") from None
