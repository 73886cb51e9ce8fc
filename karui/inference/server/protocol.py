"""OpenAI's bodies in, engine requests out; engine deltas in, OpenAI's objects out.

A parameter that changes the answer and is not supported is refused, never dropped; those that change nothing are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from karui.configs.errors import KaruiError, nearest
from karui.inference.requests import SamplingParams, TokenLogprob


class ApiError(Exception):
    """Becomes an HTTP status and OpenAI's error object."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


_IGNORED = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
                      "parallel_tool_calls"})
_SAMPLING = frozenset({"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
                       "seed", "n", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "typical_acceptance"})
_COMMON = frozenset({"model", "stream", "stream_options", "priority", "cache_salt"}) | _SAMPLING | _IGNORED
_COMPLETION = _COMMON | {"prompt", "logprobs", "echo", "best_of", "suffix", "logit_bias"}
_CHAT = _COMMON | {"messages", "max_completion_tokens", "logprobs", "top_logprobs", "logit_bias", "tools", "tool_choice",
                   "functions", "function_call", "response_format", "modalities", "audio"}
# Accepted only with the value that means "off".
_OFF: dict[str, tuple[Any, ...]] = {
    "echo": (None, False), "suffix": (None, ""), "logit_bias": (None, {}), "tools": (None, []), "functions": (None, []),
    "tool_choice": (None, "none", "auto"), "function_call": (None, "none", "auto"), "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]), "audio": (None,)}


@dataclass(frozen=True, kw_only=True)
class Call:
    """One parsed request body.

    Attributes:
        model: the name asked for.
        prompts: texts or token id lists (completions), or one list of messages (chat).
        params: sampling; seed None draws a fresh one.
        logprobs: alternatives to report per token, None for none.
        stream, include_usage: server-sent events, with a last one of token counts.
    """

    model: str
    prompts: list[Any]
    params: SamplingParams
    stream: bool
    include_usage: bool
    priority: int = 0
    cache_salt: str = ""

    @property
    def logprobs(self) -> int | None:
        return self.params.logprobs


def parse_json(body: bytes) -> dict[str, Any]:
    """The body as a JSON object. Raises `ApiError` 400 for invalid UTF-8, also by an escape, invalid JSON or another type."""
    try:
        value = json.loads(body.decode("utf-8"))
        if b"\\ud" in body.lower():  # half of a pair of escapes is a character that no text may hold
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise ApiError(400, f"The body is not valid UTF-8 (byte {error.start}).", code="invalid_utf8") from None
    except UnicodeEncodeError as error:
        raise ApiError(400, f"The body is not valid UTF-8: it holds a lone surrogate ({error.object[error.start]!r}).",
                       code="invalid_utf8") from None
    except (ValueError, RecursionError) as error:  # of numbers, too, that have too many digits
        raise ApiError(400, f"The body is not valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "The body must be a JSON object.", code="invalid_json")
    return value


def parse_completion(body: dict[str, Any], default_max_tokens: int = 16) -> Call:
    """A /v1/completions body."""
    _check_keys(body, _COMPLETION)
    prompt = body.get("prompt")
    if isinstance(prompt, str) or _is_ids(prompt):
        prompts = [prompt]
    elif isinstance(prompt, list) and prompt and all(isinstance(p, str) or _is_ids(p) for p in prompt):
        prompts = prompt
    else:
        raise ApiError(400, "prompt must be a text, a list of token ids, or a non-empty list of either.", param="prompt")
    logprobs = _integer(body, "logprobs", 0, 1000)
    params = _sampling(body, logprobs, _integer(body, "max_tokens", 1), default_max_tokens)
    if _integer(body, "best_of", 1) not in (None, params.n):
        raise ApiError(400, "best_of other than n is not supported.", param="best_of")
    return _call(body, prompts, params)


def parse_chat(body: dict[str, Any]) -> Call:
    """A /v1/chat/completions body; without a limit the answer may fill the context."""
    _check_keys(body, _CHAT)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages must be a non-empty list.", param="messages")
    cleaned = [_message(m, i) for i, m in enumerate(messages)]
    logprobs = None
    if _boolean(body, "logprobs"):
        logprobs = _integer(body, "top_logprobs", 0, 20) or 0
    elif body.get("top_logprobs") is not None:
        raise ApiError(400, "top_logprobs needs logprobs: true.", param="top_logprobs")
    limits = [_integer(body, key, 1) for key in ("max_completion_tokens", "max_tokens")]
    params = _sampling(body, logprobs, limits[0] if limits[0] is not None else limits[1], None)
    return _call(body, [cleaned], params)


def _call(body: dict[str, Any], prompts: list[Any], params: SamplingParams) -> Call:
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise ApiError(400, "model must name the model to use; GET /v1/models lists them.", param="model")
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise ApiError(400, "stream_options must be an object.", param="stream_options")
    stream = _boolean(body, "stream")
    if options and not stream:
        raise ApiError(400, "stream_options needs stream: true.", param="stream_options")
    salt = body.get("cache_salt") or ""
    if not isinstance(salt, str):
        raise ApiError(400, "cache_salt must be a text.", param="cache_salt")
    return Call(model=model, prompts=prompts, params=params, stream=stream, include_usage=bool(options.get("include_usage")),
                priority=_integer(body, "priority") or 0, cache_salt=salt)


def _check_keys(body: dict[str, Any], known: frozenset[str]) -> None:
    for key in body:
        if key not in known:
            raise ApiError(400, f"Unknown parameter {key!r}.{nearest(key, known)}", param=key, code="unknown_parameter")
    for key, off in _OFF.items():
        if key in body and body[key] not in off:
            raise ApiError(400, f"{key} is not supported by this server; leave it out.", param=key, code="unsupported_parameter")


def _sampling(body: dict[str, Any], logprobs: int | None, max_tokens: int | None,
              default_max_tokens: int | None) -> SamplingParams:
    stop = body.get("stop") or ()
    stop = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stop, list | tuple) or not all(isinstance(s, str) for s in stop):
        raise ApiError(400, "stop must be a text or a list of texts.", param="stop")
    ids = body.get("stop_token_ids") or []
    if not _is_ids(ids) and ids != []:
        raise ApiError(400, "stop_token_ids must be a list of token ids.", param="stop_token_ids")
    try:
        return SamplingParams(
            temperature=_number(body, "temperature", 1.0), top_p=_number(body, "top_p", 1.0), top_k=_integer(body, "top_k") or 0,
            min_p=_number(body, "min_p", 0.0), repetition_penalty=_number(body, "repetition_penalty", 1.0),
            presence_penalty=_number(body, "presence_penalty", 0.0), frequency_penalty=_number(body, "frequency_penalty", 0.0),
            seed=_integer(body, "seed"), n=_given(_integer(body, "n"), 1), stop=tuple(stop), stop_token_ids=tuple(ids),
            ignore_eos=_boolean(body, "ignore_eos"), typical_acceptance=_boolean(body, "typical_acceptance"),
            logprobs=logprobs, max_tokens=_given(max_tokens, default_max_tokens))
    except KaruiError as error:
        raise ApiError(400, str(error), code="invalid_value") from None


def _given(value: Any, default: Any) -> Any:
    return default if value is None else value


def _number(body: dict[str, Any], key: str, default: float) -> float:
    value = body.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1e300 < value < 1e300:
        raise ApiError(400, f"{key} must be a number, got {value!r}.", param=key)
    return float(value)


def _integer(body: dict[str, Any], key: str, least: int | None = None, most: int | None = None) -> int | None:
    value = body.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > 2**63:
        raise ApiError(400, f"{key} must be an integer, got {value!r}.", param=key)
    if (least is not None and value < least) or (most is not None and value > most):
        span = f"at least {least}" if most is None else f"{least} to {most}"
        raise ApiError(400, f"{key} must be {span}, got {value}.", param=key, code="invalid_value")
    return value


def _boolean(body: dict[str, Any], key: str) -> bool:
    value = body.get(key)
    if value is not None and not isinstance(value, bool):
        raise ApiError(400, f"{key} must be true or false, got {value!r}.", param=key)
    return bool(value)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(t, int) and not isinstance(t, bool) for t in value)


def _message(message: Any, index: int) -> dict[str, str]:
    where = f"messages[{index}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ApiError(400, f"{where} must be an object with role and content.", param=where)
    content = message.get("content")
    if isinstance(content, list):
        parts = content
        if not all(isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in parts):
            raise ApiError(400, f"{where}: only text parts are supported.", param=where, code="unsupported_content")
        content = "".join(p["text"] for p in parts)
    if not isinstance(content, str):
        raise ApiError(400, f"{where}.content must be a text.", param=where)
    if message["role"] not in ("system", "developer", "user", "assistant", "tool"):
        raise ApiError(400, f"{where}.role {message['role']!r} is not one of system, user, assistant.", param=where)
    role = "system" if message["role"] == "developer" else message["role"]
    return {"role": role, "content": content}


def chat_logprobs(entries: Sequence[TokenLogprob], text_of: Any, bytes_of: Any) -> dict[str, Any]:
    """Chat's `logprobs` object; `text_of` and `bytes_of` map a token id to its text and to its bytes."""
    def item(token: int, value: float) -> dict[str, Any]:
        return {"token": text_of(token), "logprob": max(value, -9999.0), "bytes": list(bytes_of(token))}

    return {"content": [{**item(e.token, e.raw), "top_logprobs": [item(t, v) for t, v in e.top]} for e in entries]}


def completion_logprobs(entries: Sequence[TokenLogprob], text_of: Any, offset: int = 0) -> dict[str, Any]:
    """Completions' `logprobs` object; `offset` is where the first token's text begins in the answer."""
    tokens = [text_of(e.token) for e in entries]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {"tokens": tokens, "token_logprobs": [max(e.raw, -9999.0) for e in entries], "text_offset": offsets,
            "top_logprobs": [{text_of(t): v for t, v in e.top} for e in entries]}


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None = None) -> dict[str, Any]:
    counts: dict[str, Any] = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens,
                              "total_tokens": prompt_tokens + completion_tokens}
    if cached_tokens is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    return counts
