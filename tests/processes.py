"""Processes that a test starts at once: forked from a server that has imported what runs need, which takes longer than tiny runs do.

Each runs a script under its own arguments and environment, its output in files. `Ranks` are several that torch.distributed joins,
with the variables that torchrun would set; torchrun itself is for tests of what it does.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.multiprocessing

ROOT = Path(__file__).resolve().parents[1]
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.preloaded"])


def _run(script: str, arguments: list[str], environment: dict[str, str], out: str, err: str) -> None:
    for number, path in ((1, out), (2, err)):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(handle, number)
        os.close(handle)
    sys.stdout, sys.stderr = open(1, "w", buffering=1, closefd=False), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a server ignores it
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


class Forked:
    """As `subprocess.Popen`, with standard output and errors read from files."""

    def __init__(self, script: str | Path, *arguments: object, env: Mapping[str, str] | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="karui-test-")
        self._out, self._err = (f"{self._folder.name}/{name}" for name in ("out", "err"))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
        given = (str(script), [*map(str, arguments)], environment, self._out, self._err)
        self._process = _context.Process(target=_run, args=given, daemon=True)
        with _surroundings():
            self._process.start()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    poll = returncode.fget

    def wait(self, timeout: float) -> None:
        self._process.join(timeout)
        if self.returncode is None:
            self.kill()
            raise subprocess.TimeoutExpired(self.said(), timeout)

    def kill(self) -> None:
        self._process.kill()
        self._process.join(60)

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    @property
    def stdout(self) -> str:
        return _text(self._out)

    @property
    def stderr(self) -> str:
        return _text(self._err)

    def said(self) -> str:
        return self.stdout + self.stderr


@contextlib.contextmanager
def _surroundings():
    """The server, when it is not there yet, starts with one thread and finds the tests; the main module is not imported again."""
    before = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "PYTHONPATH")}
    main = sys.modules["__main__"]
    sys.modules["__main__"] = SimpleNamespace(__spec__=None)  # type: ignore[assignment]
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in (str(ROOT), before["PYTHONPATH"]) if p)
    try:
        forkserver.ensure_running()
        yield
    finally:
        sys.modules["__main__"] = main
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _text(path: str) -> str:
    return Path(path).read_text(errors="replace") if os.path.exists(path) else ""


def called(function: Any, *arguments: object, processes: int = 2) -> None:
    """`function(rank, *arguments)` in so many processes; raises what one of them raised."""
    with _surroundings():
        started = torch.multiprocessing.start_processes(function, arguments, processes, join=False, start_method="forkserver")
    while not started.join():
        pass


def free_port() -> int:
    """A port of this machine that nobody listens on at the moment."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


def ranks(script: str | Path, *arguments: object, processes: int = 2, env: Mapping[str, str] | None = None, timeout: float = 900,
          patience: float = 60) -> SimpleNamespace:
    """Run a script in so many ranks; its `returncode` (the first that is not 0), `stdout` and `stderr`, one rank after the other.

    `patience`: seconds that the others have to end by themselves after one has failed; then they are killed.
    """
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes),
              "GROUP_RANK": "0", **(env or {})}
    started = [Forked(script, *arguments, env={**shared, "RANK": str(i), "LOCAL_RANK": str(i)}) for i in range(processes)]
    end = time.monotonic() + timeout
    while any(p.returncode is None for p in started) and time.monotonic() < end:
        if any(p.returncode for p in started):
            end = min(end, time.monotonic() + patience)
            patience = float("inf")
        time.sleep(0.02)
    late = not any(p.returncode for p in started) and any(p.returncode is None for p in started)
    for p in started:
        p.kill()
    out, err = ("".join(getattr(p, name) for p in started) for name in ("stdout", "stderr"))
    if late:
        raise subprocess.TimeoutExpired(str(script), timeout, out, err)
    return SimpleNamespace(returncode=next((p.returncode for p in started if p.returncode), 0), stdout=out, stderr=err)
