"""A server in front of a model on several ranks: the first takes requests and tells the others, all run the same steps.

    torchrun --nproc_per_node 2 -m karui serve MODEL --parallel tensor

What reaches the first rank between two steps goes to the others as JSON before the next one, so that all have the same queues
and, since a step is a function of them, do the same. Nothing that depends on one rank's clock or clients enters a step otherwise.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections import deque
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist

from karui.configs.errors import KaruiError
from karui.inference.requests import Delta, Request, SamplingParams

KEEP_ALIVE_S = 60.0
"""Between two words to the other ranks, whose waiting would time out else."""


class LeadingEngine:
    """The engine of rank 0 as a server uses it (`server.loop.Steps`); whatever else is asked of it goes to `engine`.

    Args:
        engine: loaded with `parallel=` on every rank of `group`; the others run `follow`.
        group: a group of CPU tensors (gloo); None: a new one, made on all ranks at the same place.
    """

    def __init__(self, engine: Any, group: Any = None) -> None:
        self._engine, self._group = engine, group or control_group()
        self._lock = threading.Lock()
        self._requests: deque[Request] = deque()
        self._aborts: deque[str] = deque()
        self._names = itertools.count()
        self._told = time.monotonic()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def has_work(self) -> bool:
        return bool(self._requests or self._aborts or self._engine.has_work or time.monotonic() - self._told > KEEP_ALIVE_S)

    def add(self, request: Request) -> str:
        """As `Engine.add`; what can never run is refused at once."""
        if request.adapter is not None:
            raise KaruiError(f"adapter {request.adapter!r} is not loaded: a model on several ranks serves no adapters.")
        prompt, params = self._engine.encode(request.prompt), request.params
        self._engine.check(prompt, params)
        if params.seed is None:
            params = replace(params, seed=int.from_bytes(os.urandom(7), "little"))
        with self._lock:
            name = request.id if request.id is not None else f"request-{next(self._names)}"
            if self._engine.knows(name) or any(r.id == name for r in self._requests):
                raise KaruiError(f"request id {name!r} is in use; ids must be unique among unfinished requests.")
            self._requests.append(replace(request, prompt=prompt, params=params, id=name, on_delta=self._listener(request, name)))
        return name

    def abort(self, request_id: str) -> None:
        """As `Engine.abort`."""
        self._aborts.append(request_id)

    def step(self) -> list[Delta]:
        """Tell the others what is new, then run the step that they run."""
        with self._lock:
            requests, aborts = list(self._requests), list(self._aborts)
            self._requests.clear()
            for _ in aborts:
                self._aborts.popleft()
        _tell({"requests": [_plain(r) for r in requests], "aborts": aborts}, self._group)
        self._told = time.monotonic()
        return _step(self._engine, requests, aborts)

    def stop(self) -> None:
        """Let the others go."""
        _tell({"stop": True}, self._group)

    def _listener(self, request: Request, name: str) -> Any:
        """The request's callback; a cancellation by it takes the way of all others."""
        outer = request.on_delta

        def listen(delta: Delta) -> None:
            if outer is not None and outer(delta) is False:
                self.abort(name)

        return listen


def follow(engine: Any, group: Any = None) -> None:
    """Run the steps that rank 0 runs until it stops."""
    group = group or control_group()
    while True:
        said = _told(group)
        if said.get("stop"):
            return
        requests = [Request(prompt=r["prompt"], params=SamplingParams(**r["params"]), priority=r["priority"],
                            cache_salt=r["cache_salt"], id=r["id"]) for r in said["requests"]]
        _step(engine, requests, said["aborts"])


def control_group() -> Any:
    """All ranks, for what is said between steps: on the CPU, whatever the model's tensors go through."""
    return dist.new_group(backend="gloo")


def _step(engine: Any, requests: list[Request], aborts: list[str]) -> list[Delta]:
    for request in requests:
        engine.add(request)
    for name in aborts:
        engine.abort(name)
    return engine.step() if engine.has_work else []


def _plain(request: Request) -> dict[str, Any]:
    return {"prompt": list(request.prompt), "params": asdict(request.params), "priority": request.priority,
            "cache_salt": request.cache_salt, "id": request.id}


def _tell(said: dict[str, Any], group: Any) -> None:
    data = torch.frombuffer(bytearray(json.dumps(said).encode()), dtype=torch.uint8)
    dist.broadcast(torch.tensor(len(data)), group=group, group_src=0)
    dist.broadcast(data, group=group, group_src=0)


def _told(group: Any) -> dict[str, Any]:
    size = torch.tensor(0)
    dist.broadcast(size, group=group, group_src=0)
    data = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, group=group, group_src=0)
    return json.loads(bytes(data.numpy()))
