"""Behavioural: a client that goes away frees the engine; a loop that died or hangs is not healthy; nobody waits for ever."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from karui.configs.errors import KaruiError
from karui.inference.requests import Delta, Request, SamplingParams
from karui.inference.server.app import create_app
from karui.inference.server.loop import EngineLoop, LoopDead, require_extra
from karui.inference.server.run import serve, serve_model
from tests.evaluate.tiny import engine
from tests.processes import free_port


def wait_for(condition: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return False


@contextmanager
def served(app: Any) -> Iterator[int]:
    """uvicorn on a free port in a thread."""
    import uvicorn

    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert wait_for(lambda: server.started)
    try:
        yield port
    finally:
        server.should_exit = True
        thread.join(15)
        assert not thread.is_alive()


def post(port: int, body: dict[str, Any]) -> socket.socket:
    data = json.dumps(body).encode()
    s = socket.create_connection(("127.0.0.1", port), timeout=10)
    s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
              + f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return s


class Slow:
    """An engine whose steps take a while, so that a request is still running when its client leaves."""

    def __init__(self) -> None:
        self.inner = engine()
        step = self.inner.step

        def slow_step() -> Any:
            time.sleep(0.02)
            return step()
        self.inner.step = slow_step     # type: ignore[method-assign]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_request(stream: bool) -> None:
    slow = Slow().inner
    with served(create_app(slow, "tiny")) as port:
        s = post(port, {"model": "tiny", "prompt": "hello", "max_tokens": 240, "ignore_eos": True, "stream": stream, "n": 2})
        assert wait_for(lambda: slow.stats.num_generated_tokens > 4)
        s.close()
        assert wait_for(lambda: not slow.has_work, 4.0)
        assert slow.stats.num_generated_tokens < 2 * 240
        slow.check_integrity()
        # And the server goes on.
        s = post(port, {"model": "tiny", "prompt": "hello", "max_tokens": 2})
        assert b"200 OK" in s.recv(4096)
        s.close()


def test_many_clients_at_once_get_their_own_answers() -> None:
    from starlette.testclient import TestClient

    served_engine = engine()
    prompts = [f"prompt number {i}" for i in range(12)]
    expected = [o.text for o in engine().generate(prompts, SamplingParams(max_tokens=10))]
    answers: dict[int, str] = {}
    with TestClient(create_app(served_engine, "tiny")) as client:
        def ask(i: int) -> None:
            body = {"model": "tiny", "prompt": prompts[i], "max_tokens": 10, "temperature": 0}
            answers[i] = client.post("/v1/completions", json=body).json()["choices"][0]["text"]

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(12)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(30)
    assert [answers[i] for i in range(12)] == expected
    served_engine.check_integrity()


class Broken:
    """An engine whose step raises, or never returns."""

    adapters: tuple[str, ...] = ()
    tokenizer = None
    max_context = 16

    speculation = None

    def __init__(self, hang: threading.Event | None = None) -> None:
        self.has_work, self.hang = False, hang
        self.stats = engine().stats

    def encode(self, prompt: Any) -> list[int]:
        return [1, 2]

    def add(self, request: Request) -> str:
        self.has_work, self.request = True, request
        return "request-0"

    def abort(self, request_id: str) -> None:
        pass

    def step(self) -> list[Any]:
        if self.hang is not None:
            self.hang.wait(20)
            self.has_work = False
            assert self.request.on_delta is not None
            self.request.on_delta(Delta("request-0", 0, "late", [3], finish_reason="length"))
            return []
        raise RuntimeError("work is waiting and the step is empty")


def test_a_dead_loop_is_reported_and_refuses() -> None:
    from starlette.testclient import TestClient

    with TestClient(create_app(Broken(), "tiny")) as client:
        assert client.get("/health").status_code == 200
        body = {"model": "tiny", "prompt": "x", "max_tokens": 2}
        first = client.post("/v1/completions", json=body)
        assert first.status_code == 503 and "the step is empty" in first.json()["error"]["message"]
        assert first.json()["error"]["type"] == "server_error"
        health = client.get("/health")
        assert health.status_code == 503 and "died" in health.json()["message"]
        assert client.post("/v1/completions", json=body | {"stream": True}).status_code == 503
        assert "karui_healthy 0" in client.get("/metrics").text


def test_a_hung_step_is_reported() -> None:
    from starlette.testclient import TestClient

    release = threading.Event()
    app = create_app(Broken(release), "tiny", hang_s=0.2)
    with TestClient(app) as client:
        try:
            body, answers = {"model": "tiny", "prompt": "x", "max_tokens": 2}, []
            asking = threading.Thread(target=lambda: answers.append(client.post("/v1/completions", json=body)), daemon=True)
            asking.start()
            assert wait_for(lambda: client.get("/health").status_code == 503)
            assert "hangs" in client.get("/health").json()["message"]
        finally:
            release.set()
        assert wait_for(lambda: client.get("/health").status_code == 200)
        asking.join(10)
        assert answers[0].json()["choices"][0]["text"] == "late"


def test_stopping_the_loop_tells_those_who_wait() -> None:
    async def scenario() -> None:
        loop = EngineLoop(Slow().inner)
        loop.start()
        seen = []
        with pytest.raises(LoopDead):
            async for delta in loop.run(Request(prompt=[5, 6], params=SamplingParams(max_tokens=200, ignore_eos=True))):
                seen.append(delta)
                if len(seen) == 3:
                    await asyncio.to_thread(loop.stop)
        assert len(seen) >= 3
        with pytest.raises(LoopDead):
            async for _ in loop.run(Request(prompt=[5])):
                pass

    asyncio.run(scenario())


def test_an_impossible_request_raises_and_leaves_nothing() -> None:
    async def scenario() -> None:
        tiny = engine()
        loop = EngineLoop(tiny)
        loop.start()
        with pytest.raises(KaruiError, match="empty"):
            async for _ in loop.run(Request(prompt=[])):
                pass
        assert not loop._listeners and loop.problem() is None
        loop.stop()

    asyncio.run(scenario())


def test_a_server_that_is_ended_waits_for_running_requests_so_long_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    import uvicorn

    servers: list[Any] = []

    class Kept(uvicorn.Server):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            servers.append(self)

    monkeypatch.setattr(uvicorn, "Server", Kept)
    slow = Slow().inner
    for tokens, drain_s, whole in ((20, 30, True), (240, 1, False)):
        port = free_port()
        thread = threading.Thread(target=serve, args=(slow, "tiny"), kwargs={"port": port, "drain_s": drain_s}, daemon=True)
        thread.start()
        assert wait_for(lambda: bool(servers) and servers[-1].started)
        begun = slow.stats.num_generated_tokens
        s = post(port, {"model": "tiny", "prompt": "hello", "max_tokens": tokens, "ignore_eos": True, "stream": True})
        assert wait_for(lambda begun=begun: slow.stats.num_generated_tokens > begun + 2)
        servers.pop().should_exit = True
        thread.join(30)
        assert not thread.is_alive()
        if not whole and slow.has_work:
            slow.step()  # where the loop had ended, what was aborted leaves with the next step
        assert not slow.has_work
        assert (slow.stats.num_generated_tokens - begun == tokens) == whole
        s.close()
    slow.check_integrity()


def test_missing_extras_and_bad_ports_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KaruiError, match="port 0"):
        serve(engine(), "tiny", port=0)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        with pytest.raises(KaruiError, match="cannot be bound: Address already in use"):
            serve(engine(), "tiny", port=s.getsockname()[1])
        with pytest.raises(KaruiError, match="cannot be bound: Address already in use"):
            serve_model("a model that is not read", port=s.getsockname()[1])
    for host in ("a..b", "x" * 70, "192.0.2.1", "no such host"):
        with pytest.raises(KaruiError, match="cannot be bound: .*Choose others"):
            serve(engine(), "tiny", host=host, port=8123)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    with pytest.raises(KaruiError, match=r"karui\[serve\]"):
        require_extra()
