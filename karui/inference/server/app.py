"""The routes: OpenAI's models, completions and chat, health, metrics and a small page."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from karui.configs.errors import KaruiError
from karui.inference.requests import Delta, Request
from karui.inference.server.loop import EngineLoop, LoopDead, require_extra
from karui.inference.server.metrics import CONTENT_TYPE, Metrics
from karui.inference.server.protocol import (
    ApiError,
    Call,
    chat_logprobs,
    completion_logprobs,
    parse_chat,
    parse_completion,
    parse_json,
    usage,
)
from karui.inference.text import backend_of, token_bytes, token_text

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.requests import Request as Http
    from starlette.responses import Response

MAX_BODY_BYTES = 32 << 20


def create_app(engine: Any, name: str, *, api_key: str | None = None, hang_s: float = 120.0) -> FastAPI:
    """The application over `engine`; its loop thread starts and stops with the application's lifespan.

    Args:
        engine: a loaded engine; nothing else may step it meanwhile.
        name: the model's name in the API; loaded adapters are served under their own names.
        api_key: when given, /v1 needs `Authorization: Bearer KEY`.
        hang_s: a step that lasts longer counts as hung in /health.
    """
    require_extra()
    from fastapi import FastAPI
    from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse

    loop = EngineLoop(engine, hang_s)
    service = Service(engine, loop, name)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        loop.start()
        yield
        await asyncio.to_thread(loop.stop)

    app = FastAPI(title="karui", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.loop, app.state.service = loop, service

    def guarded(handler: Callable[[Http], Awaitable[Response]]) -> Callable[[Http], Awaitable[Response]]:
        async def checked(http: Http) -> Response:
            given = http.headers.get("authorization", "")
            if api_key is not None and not hmac.compare_digest(given.encode(), f"Bearer {api_key}".encode()):
                return JSONResponse(ApiError(401, "Wrong or missing API key.", code="invalid_api_key").body(), 401)
            return await handler(http)
        return checked

    @app.exception_handler(500)
    async def broken(_http: Http, error: Exception) -> Response:
        return JSONResponse(ApiError(500, f"{type(error).__name__}: {error}", code="internal_error").body(), 500)

    @app.exception_handler(404)
    async def not_found(http: Http, _error: Exception) -> Response:
        return JSONResponse(ApiError(404, f"There is no {http.method} {http.url.path}.", code="not_found").body(), 404)

    @app.exception_handler(405)
    async def wrong_method(http: Http, _error: Exception) -> Response:
        return JSONResponse(ApiError(405, f"{http.url.path} does not take {http.method}.", code="method_not_allowed").body(), 405)

    async def page(_http: Http) -> Response:
        return HTMLResponse(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))

    async def health(_http: Http) -> Response:
        problem = loop.problem()
        return JSONResponse({"status": "ok"} if problem is None else {"status": "error", "message": problem},
                            200 if problem is None else 503)

    async def metrics(_http: Http) -> Response:
        return PlainTextResponse(service.metrics.text(engine, loop.problem() is None), media_type=CONTENT_TYPE)

    async def models(_http: Http) -> Response:
        return JSONResponse({"object": "list", "data": [service.model(n) for n in service.names()]})

    async def model(http: Http) -> Response:
        wanted = http.path_params["model_id"]
        if wanted not in service.names():
            return JSONResponse(service.unknown(wanted).body(), 404)
        return JSONResponse(service.model(wanted))

    async def completions(http: Http) -> Response:
        return await service.answer(http, "completions")

    async def chat(http: Http) -> Response:
        return await service.answer(http, "chat")

    # Plain Starlette routes: bodies are parsed by protocol.py, so that every mistake has OpenAI's error object.
    for path, handler, method in (("/", page, "GET"), ("/health", health, "GET"), ("/metrics", metrics, "GET"),
                                  ("/v1/models", models, "GET"), ("/v1/models/{model_id:path}", model, "GET"),
                                  ("/v1/completions", completions, "POST"), ("/v1/chat/completions", chat, "POST")):
        app.add_route(path, guarded(handler) if path.startswith("/v1/") else handler, methods=[method])
    return app


class Choice:
    """One continuation as it grows."""

    def __init__(self) -> None:
        self.text, self.logprobs, self.tokens = "", [], 0  # type: str, list[Any], int
        self.finish_reason: str | None = None


class Service:
    """Turns calls into engine requests and deltas into answers."""

    def __init__(self, engine: Any, loop: EngineLoop, name: str) -> None:
        self.engine, self.loop, self.name = engine, loop, name
        self.metrics, self.created = Metrics(), int(time.time())

    def names(self) -> list[str]:
        return [self.name, *getattr(self.engine, "adapters", ())]

    def model(self, name: str) -> dict[str, Any]:
        card = {"id": name, "object": "model", "created": self.created, "owned_by": "karui",
                "max_model_len": getattr(self.engine, "max_context", None)}
        return card if name == self.name else card | {"parent": self.name}

    def unknown(self, name: str) -> ApiError:
        return ApiError(404, f"The model {name!r} does not exist; this server has: {', '.join(self.names())}.",
                        code="model_not_found", param="model")

    async def answer(self, http: Http, route: str) -> Response:
        """Parse, submit, and answer whole or as server-sent events."""
        from starlette.responses import JSONResponse, StreamingResponse

        try:
            call, requests = await self._accept(http, route)
            stream = _Merged(self.loop, requests)
            # The first delta decides the status: an impossible request is a 4xx, also when it was to be streamed.
            first = await self._until_disconnect(http, stream.start())
            if first is None:
                return JSONResponse(ApiError(499, "The client went away.").body(), 499)
            if call.stream:
                return StreamingResponse(self._events(call, route, requests, stream), media_type="text/event-stream",
                                         headers={"Cache-Control": "no-cache"})
            body = await self._until_disconnect(http, self._whole(call, route, requests, stream))
            return JSONResponse(body) if body is not None else JSONResponse(ApiError(499, "The client went away.").body(), 499)
        except (ApiError, KaruiError, LoopDead) as error:
            failure = _failure(error)
            self.metrics.finished(route, str(failure.status))
            return JSONResponse(failure.body(), failure.status)

    async def _accept(self, http: Http, route: str) -> tuple[Call, list[Request]]:
        body = b""
        async for part in http.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                raise ApiError(413, f"The body is larger than {MAX_BODY_BYTES >> 20} MiB.", code="body_too_large")
        value = parse_json(body)
        call = parse_chat(value) if route == "chat" else parse_completion(value)
        if call.model not in self.names():
            raise self.unknown(call.model)
        prompts = call.prompts
        if route == "chat":
            prompts = [await asyncio.to_thread(self.engine.encode_chat, prompts[0])]
        else:
            prompts = [p if isinstance(p, list) else await asyncio.to_thread(self.engine.encode, p) for p in prompts]
        adapter = None if call.model == self.name else call.model
        return call, [Request(prompt=p, params=call.params, priority=call.priority, adapter=adapter, cache_salt=call.cache_salt)
                      for p in prompts]

    async def _until_disconnect(self, http: Http, work: Any) -> Any:
        """Await `work`; None, with the work cancelled, when the client goes away first."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=0.25)
                if not task.done() and await http.is_disconnected():
                    return None
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task

    def _text_of(self, token: int) -> str:
        tokenizer = self.engine.tokenizer
        return token_text(backend_of(tokenizer), token) if tokenizer is not None else str(token)

    def _bytes_of(self, token: int) -> bytes:
        tokenizer = self.engine.tokenizer
        return token_bytes(backend_of(tokenizer), token) if tokenizer is not None else str(token).encode()

    def _logprobs(self, route: str, entries: list[Any], offset: int = 0) -> dict[str, Any]:
        if route == "chat":
            return chat_logprobs(entries, self._text_of, self._bytes_of)
        return completion_logprobs(entries, self._text_of, offset)

    async def _whole(self, call: Call, route: str, requests: list[Request], stream: _Merged) -> dict[str, Any]:
        choices = [Choice() for _ in range(len(requests) * call.params.n)]
        async for number, delta in stream:
            self._grow(choices[number * call.params.n + delta.index], delta)
        self._record(route, choices, stream)
        listed = []
        for index, choice in enumerate(choices):
            if route == "chat":
                entry: dict[str, Any] = {"message": {"role": "assistant", "content": choice.text}}
            else:
                entry = {"text": choice.text}
            probs = self._logprobs(route, choice.logprobs) if call.logprobs is not None else None
            entry |= {"logprobs": probs, "finish_reason": choice.finish_reason}
            listed.append({"index": index, **entry, **self._label(call)})
        return {**self._head(call, route, stream, chunk=False), "choices": listed,
                "usage": usage(sum(len(r.prompt) for r in requests), sum(c.tokens for c in choices))}

    async def _events(self, call: Call, route: str, requests: list[Request], stream: _Merged) -> AsyncIterator[str]:
        """Server-sent events. Starlette closes this generator when the client goes away, which cancels the requests."""
        head = self._head(call, route, stream, chunk=True)
        choices = [Choice() for _ in range(len(requests) * call.params.n)]

        def event(entry: dict[str, Any] | None, **more: Any) -> str:
            listed = [] if entry is None else [entry]
            extra = {"usage": None} if call.include_usage else {}
            return f"data: {json.dumps({**head, 'choices': listed, **extra, **more}, ensure_ascii=False)}\n\n"

        try:
            if route == "chat":
                for index in range(len(choices)):
                    opening = {"role": "assistant", "content": ""}
                    yield event({"index": index, "delta": opening, "logprobs": None, "finish_reason": None})
            async for number, delta in stream:
                index = number * call.params.n + delta.index
                choice = choices[index]
                offset = len(choice.text)
                self._grow(choice, delta)
                probs = self._logprobs(route, delta.logprobs, offset) if delta.logprobs is not None else None
                if not delta.text and probs is None and delta.finish_reason is None:
                    continue
                entry: dict[str, Any] = {"index": index, "logprobs": probs, "finish_reason": delta.finish_reason}
                entry |= {"delta": {"content": delta.text} if delta.text else {}} if route == "chat" else {"text": delta.text}
                if delta.finish_reason is not None:
                    entry |= self._label(call)
                yield event(entry)
            self._record(route, choices, stream)
            if call.include_usage:
                counts = usage(sum(len(r.prompt) for r in requests), sum(c.tokens for c in choices))
                yield event(None, usage=counts)
            yield "data: [DONE]\n\n"
        except (ApiError, KaruiError, LoopDead) as error:
            # The status is sent already; the stream's last event carries the error instead.
            failure = _failure(error)
            self.metrics.finished(route, str(failure.status))
            yield f"data: {json.dumps(failure.body())}\n\n"
        finally:
            await stream.aclose()

    def _label(self, call: Call) -> dict[str, Any]:
        """{"lossy": true} for an answer whose drafts were accepted by a rule that does not keep the model's distribution."""
        speculation = self.engine.speculation
        return {"lossy": True} if speculation is not None and speculation.typical(call.params) else {}

    def _grow(self, choice: Choice, delta: Delta) -> None:
        choice.text += delta.text
        choice.tokens += len(delta.token_ids)
        choice.logprobs += delta.logprobs or []
        if delta.finish_reason in ("error", "abort"):
            raise ApiError(500, delta.error or "The request was cancelled by the engine.", code="engine_error")
        choice.finish_reason = delta.finish_reason or choice.finish_reason

    def _record(self, route: str, choices: list[Choice], stream: _Merged) -> None:
        now = time.monotonic()
        first = None if stream.first_s is None else stream.first_s - stream.began_s
        for choice in choices:
            self.metrics.finished(route, choice.finish_reason or "none", first, now - stream.began_s, choice.tokens)

    def _head(self, call: Call, route: str, stream: _Merged, chunk: bool) -> dict[str, Any]:
        kind = "text_completion" if route == "completions" else "chat.completion.chunk" if chunk else "chat.completion"
        prefix = "cmpl" if route == "completions" else "chatcmpl"
        return {"id": f"{prefix}-{stream.id}", "object": kind, "created": stream.created, "model": call.model}


def _failure(error: ApiError | KaruiError | LoopDead) -> ApiError:
    """What a client is told of it."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, LoopDead):
        return ApiError(503, str(error), code="engine_dead")
    return ApiError(400, str(error), code="context_length_exceeded" if "context" in str(error) else "invalid_value")


class _Merged:
    """The deltas of several requests as (number of the request, delta), in the order of arrival."""

    def __init__(self, loop: EngineLoop, requests: list[Request]) -> None:
        self._loop, self._requests = loop, requests
        self._arrived: asyncio.Queue[tuple[int, Delta | BaseException | None]] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._first: tuple[int, Delta | BaseException | None] | None = None
        self.id, self.created = uuid.uuid4().hex, int(time.time())
        self.began_s, self.first_s = time.monotonic(), None  # type: float, float | None

    async def start(self) -> bool:
        """Submit, and wait for the first delta. Raises what the submission raised, with everything cancelled."""
        self._tasks = [asyncio.create_task(self._pump(i, r)) for i, r in enumerate(self._requests)]
        try:
            self._first = await self._arrived.get()
            if isinstance(self._first[1], BaseException):
                raise self._first[1]
        except BaseException:
            await self.aclose()
            raise
        self.first_s = time.monotonic()
        return True

    async def _pump(self, number: int, request: Request) -> None:
        source = self._loop.run(request)
        try:
            async for delta in source:
                self._arrived.put_nowait((number, delta))
            self._arrived.put_nowait((number, None))
        except Exception as error:
            self._arrived.put_nowait((number, error))
        finally:
            await source.aclose()  # type: ignore[attr-defined]

    async def __aiter__(self) -> AsyncIterator[tuple[int, Delta]]:
        left = len(self._requests)
        try:
            while left:
                number, item = self._first or await self._arrived.get()
                self._first = None
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield number, item
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """Cancel whatever still runs."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
