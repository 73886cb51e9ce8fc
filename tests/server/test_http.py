"""End to end: the HTTP server over a tiny engine answers like OpenAI's, and refuses what cannot be served with 4xx objects."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest

from karui.configs.errors import KaruiError
from karui.inference.requests import SamplingParams
from karui.inference.server.protocol import ApiError, parse_chat, parse_completion
from tests.evaluate.tiny import engine

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0}
TEXT = {"model": "tiny", "prompt": "hello", "max_tokens": 8, "temperature": 0}


def events(response: Any) -> list[Any]:
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_models_and_page(client: Any) -> None:
    listed = client.get("/v1/models").json()
    assert [m["id"] for m in listed["data"]] == ["tiny"] and listed["data"][0]["max_model_len"] == 256
    assert client.get("/v1/models/tiny").json()["object"] == "model"
    assert client.get("/v1/models/none").status_code == 404
    page = client.get("/")
    assert page.status_code == 200 and "/v1/chat/completions" in page.text
    assert "http://" not in page.text and "https://" not in page.text       # nothing is loaded from elsewhere


def test_chat_equals_the_engine(client: Any) -> None:
    body = client.post("/v1/chat/completions", json=CHAT).json()
    (expected,) = engine().generate([engine().encode_chat(CHAT["messages"])], SamplingParams(max_tokens=8))
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": expected.text} and choice["finish_reason"] == "length"
    assert body["object"] == "chat.completion" and body["model"] == "tiny"
    assert body["usage"] == {"prompt_tokens": len("<user>hello\n<assistant>"), "completion_tokens": 8,
                             "total_tokens": len("<user>hello\n<assistant>") + 8}


def test_streamed_chat_adds_up_to_the_whole(client: Any) -> None:
    whole = client.post("/v1/chat/completions", json=CHAT).json()
    parts = events(client.post("/v1/chat/completions", json=CHAT | {"stream": True, "stream_options": {"include_usage": True}}))
    assert parts[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(p["choices"][0]["delta"].get("content", "") for p in parts[1:-1]) == whole["choices"][0]["message"]["content"]
    assert parts[-2]["choices"][0]["finish_reason"] == "length"
    assert parts[-1]["choices"] == [] and parts[-1]["usage"] == whole["usage"]
    assert {p["object"] for p in parts} == {"chat.completion.chunk"} and len({p["id"] for p in parts}) == 1


def test_completions_of_several_prompts_and_continuations(client: Any) -> None:
    asked = TEXT | {"prompt": ["one", [5, 6, 7]], "n": 2, "temperature": 1.0, "seed": 3}
    body = client.post("/v1/completions", json=asked).json()
    assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
    outputs = engine().generate(["one", [5, 6, 7]], SamplingParams(max_tokens=8, n=2, temperature=1.0, seed=3))
    assert [c["text"] for c in body["choices"]] == [c.text for o in outputs for c in o.completions]
    parts = events(client.post("/v1/completions", json=asked | {"stream": True}))
    texts = ["", "", "", ""]
    for part in parts:
        texts[part["choices"][0]["index"]] += part["choices"][0]["text"]
    assert texts == [c["text"] for c in body["choices"]]


def test_stop_texts_and_logprobs(client: Any) -> None:
    whole = client.post("/v1/completions", json=TEXT | {"logprobs": 2}).json()["choices"][0]
    probs = whole["logprobs"]
    assert len(probs["tokens"]) == len(probs["token_logprobs"]) == 8 and all(v <= 0 for v in probs["token_logprobs"])
    assert all(len(top) <= 2 for top in probs["top_logprobs"]) and probs["text_offset"][0] == 0
    stop = whole["text"][3]
    cut = client.post("/v1/completions", json=TEXT | {"stop": stop}).json()["choices"][0]
    assert cut["text"] == whole["text"][:whole["text"].index(stop)] and cut["finish_reason"] == "stop"
    chat = client.post("/v1/chat/completions", json=CHAT | {"logprobs": True, "top_logprobs": 3}).json()["choices"][0]
    assert len(chat["logprobs"]["content"]) == 8 and len(chat["logprobs"]["content"][0]["top_logprobs"]) == 3
    said = b"".join(bytes(entry["bytes"]) for entry in chat["logprobs"]["content"])  # of split characters, too
    assert any(entry["token"] == "\ufffd" and len(entry["bytes"]) == 1 for entry in chat["logprobs"]["content"])
    assert said.decode("utf-8", "replace").startswith(chat["message"]["content"])


BAD: list[tuple[str, Any, int, str]] = [
    ("completions", TEXT | {"model": "gpt-9"}, 404, "gpt-9"),
    ("completions", {"prompt": "x"}, 400, "model"),
    ("completions", TEXT | {"prompt": "x" * 300}, 400, "context"),
    ("completions", TEXT | {"prompt": ""}, 400, "empty"),
    ("completions", TEXT | {"prompt": []}, 400, "prompt"),
    ("completions", TEXT | {"prompt": {"a": 1}}, 400, "prompt"),
    ("completions", TEXT | {"prompt": [9999]}, 400, "vocabulary"),
    ("completions", TEXT | {"max_tokens": 0}, 400, "at least 1"),
    ("completions", TEXT | {"max_tokens": -3}, 400, "at least 1"),
    ("completions", TEXT | {"max_tokens": 1.5}, 400, "integer"),
    ("completions", TEXT | {"temperature": -1}, 400, "temperature"),
    ("completions", TEXT | {"temperature": float("-1e307")}, 400, "number"),
    ("completions", TEXT | {"temperature": "hot"}, 400, "number"),
    ("completions", TEXT | {"top_p": 0}, 400, "top_p"),
    ("completions", TEXT | {"top_k": 2**31}, 400, "top_k is 2147483648"),
    ("completions", TEXT | {"top_k": 2**63}, 400, "top_k"),
    ("completions", TEXT | {"repetition_penalty": 1e-40}, 400, "within 1e-6"),
    ("completions", TEXT | {"n": 0}, 400, "n is 0"),
    ("completions", TEXT | {"n": True}, 400, "integer"),
    ("completions", TEXT | {"stop": [""]}, 400, "stop"),
    ("completions", TEXT | {"stop": 3}, 400, "stop"),
    ("completions", TEXT | {"logprobs": -1}, 400, "logprobs"),
    ("completions", TEXT | {"seed": "a"}, 400, "seed"),
    ("completions", TEXT | {"best_of": 4}, 400, "best_of"),
    ("completions", TEXT | {"echo": True}, 400, "echo"),
    ("completions", TEXT | {"logit_bias": {"5": 10}}, 400, "logit_bias"),
    ("completions", TEXT | {"temperatur": 1}, 400, "temperature"),
    ("completions", TEXT | {"stream": "yes"}, 400, "true or false"),
    ("completions", TEXT | {"stream_options": {"include_usage": True}}, 400, "stream"),
    ("chat/completions", CHAT | {"messages": []}, 400, "messages"),
    ("chat/completions", CHAT | {"messages": [{"role": "user"}]}, 400, "content"),
    ("chat/completions", CHAT | {"messages": [{"role": "pope", "content": "x"}]}, 400, "pope"),
    ("chat/completions", CHAT | {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "text parts"),
    ("chat/completions", CHAT | {"tools": [{"type": "function"}]}, 400, "tools"),
    ("chat/completions", CHAT | {"response_format": {"type": "json_object"}}, 400, "response_format"),
    ("chat/completions", CHAT | {"top_logprobs": 2}, 400, "logprobs"),
    ("chat/completions", CHAT | {"max_tokens": 0}, 400, "at least 1"),
    ("chat/completions", CHAT | {"stream": True, "messages": [{"role": "user", "content": "x" * 300}]}, 400, "context"),
]


@pytest.mark.parametrize(("route", "body", "status", "message"), BAD, ids=[f"{i}-{b[3]}" for i, b in enumerate(BAD)])
def test_bad_input_is_a_4xx_with_an_error_object(client: Any, route: str, body: Any, status: int, message: str) -> None:
    response = client.post(f"/v1/{route}", json=body)
    error = response.json()["error"]
    assert response.status_code == status and message in error["message"] and error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}
    assert not client.engine.has_work and client.get("/health").status_code == 200


@pytest.mark.parametrize("odd", [
    {"temperature": 1e-300}, {"temperature": 1e-40}, {"temperature": 1e6}, {"top_p": 1e-300}, {"min_p": 0.999999999}, {"seed": -2**63},
    {"seed": 2**63}, {"top_k": 2**31 - 1}, {"priority": 2**63}, {"max_tokens": 2**63}, {"repetition_penalty": 1e6}])
def test_the_ends_of_what_is_allowed(client: Any, odd: dict[str, Any]) -> None:
    body = TEXT | {"prompt": "x" * 240, "temperature": 0.8, "ignore_eos": True} | odd
    first, second = (client.post("/v1/completions", json=body | {"seed": body.get("seed", 1)}) for _ in range(2))
    assert first.status_code == 200 and first.json()["choices"] == second.json()["choices"]
    if odd.get("temperature", 1) < 1e-6:  # the greedy one
        assert first.json()["choices"] == client.post("/v1/completions", json=body | {"temperature": 0}).json()["choices"]
    assert client.get("/health").status_code == 200


def test_one_impossible_prompt_among_several_cancels_the_others(client: Any) -> None:
    response = client.post("/v1/completions", json=TEXT | {"prompt": ["fine", [9999], "also fine"], "max_tokens": 200})
    assert response.status_code == 400 and "vocabulary" in response.json()["error"]["message"]
    end = time.monotonic() + 5
    while client.engine.has_work and time.monotonic() < end:
        time.sleep(0.01)
    client.engine.check_integrity()
    assert not client.engine.has_work and client.engine.stats.num_generated_tokens < 400


def test_one_impossible_prompt_beside_one_that_streams_ends_the_stream_with_an_error(client: Any) -> None:
    """The other's text has begun when it is found out."""
    add, began = client.engine.add, threading.Event()

    def slow(request: Any) -> str:
        if len(request.prompt) > 1:
            return add(request)
        began.wait(5)
        raise KaruiError("it can never fit.")

    client.engine.add = slow
    step = client.engine.step
    client.engine.step = lambda: (step(), client.engine.stats.num_generated_tokens > 2 and began.set())
    response = client.post("/v1/completions", json=TEXT | {"prompt": ["fine", [7]], "max_tokens": 100, "ignore_eos": True, "stream": True})
    lines = [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n") if line]
    assert "choices" in lines[0] and lines[-1]["error"]["message"] == "it can never fit."


@pytest.mark.parametrize(("raw", "code"), [
    (b"{", "invalid_json"), (b"[1]", "invalid_json"), (b'{"model": "\xff"}', "invalid_utf8"), (b"", "invalid_json"),
    (b"[" * 100_000, "invalid_json")])
def test_bodies_that_are_not_json(client: Any, raw: bytes, code: str) -> None:
    response = client.post("/v1/completions", content=raw)
    assert response.status_code == 400 and response.json()["error"]["code"] == code


@pytest.mark.parametrize("body", [TEXT | {"prompt": "a\ud800b"}, CHAT | {"messages": [{"role": "user", "content": "\ud800"}]},
                                  TEXT | {"\ud800": 1}, TEXT | {"stop": "\udfff"}])
def test_a_lone_surrogate_is_refused(client: Any, body: Any) -> None:
    route = "chat/completions" if "messages" in body else "completions"
    response = client.post(f"/v1/{route}", content=json.dumps(body))
    assert response.status_code == 400 and "UTF-8" in response.json()["error"]["message"]
    assert client.post("/v1/completions", content=json.dumps(TEXT | {"prompt": "\U0001f984"})).status_code == 200


@pytest.mark.parametrize("digits", [400, 5000])
def test_numbers_of_many_digits_are_refused(client: Any, digits: int) -> None:
    raw = json.dumps(TEXT | {"temperature": 7}).replace("7", "1" + "0" * digits)
    response = client.post("/v1/completions", content=raw)
    assert response.status_code == 400 and response.json()["error"]["type"] == "invalid_request_error"


def test_unknown_routes_and_methods_have_error_objects(client: Any) -> None:
    assert client.get("/v2").json()["error"]["code"] == "not_found"
    assert client.get("/v1/completions").status_code == 405 and "error" in client.get("/v1/completions").json()


def test_a_large_body_is_refused(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("karui.inference.server.app.MAX_BODY_BYTES", 1000)
    assert client.post("/v1/completions", json=TEXT | {"prompt": "x" * 2000}).status_code == 413


def test_metrics_count(client: Any) -> None:
    client.post("/v1/completions", json=TEXT)
    client.post("/v1/completions", json=TEXT | {"max_tokens": 0})
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    values = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in response.text.splitlines() if line[0] != "#"}
    assert values['karui_requests_total{route="completions",outcome="length"}'] == 1
    assert values['karui_requests_total{route="completions",outcome="400"}'] == 1
    assert values["karui_generated_tokens_total"] == 8 and values["karui_healthy"] == 1
    assert values['karui_time_to_first_token_seconds_bucket{le="+Inf"}'] == values["karui_time_to_first_token_seconds_count"] == 1
    assert values["karui_kv_blocks"] == values["karui_kv_blocks_free"] > 0
    buckets = [v for k, v in values.items() if k.startswith("karui_request_seconds_bucket")]
    assert buckets == sorted(buckets)


def test_an_api_key_guards_the_api_only() -> None:
    from starlette.testclient import TestClient

    from karui.inference.server.app import create_app

    with TestClient(create_app(engine(), "tiny", api_key="secret")) as client:
        assert client.get("/v1/models").status_code == 401
        assert client.get("/v1/models", headers={"Authorization": "Bearer wrong"}).json()["error"]["code"] == "invalid_api_key"
        assert client.get("/v1/models", headers={"Authorization": "Bearer secret"}).status_code == 200
        assert client.get("/health").status_code == 200


def test_parameters_reach_the_engine() -> None:
    call = parse_completion({"model": "m", "prompt": "x", "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 4,
                             "n": 2, "stop": ["a"], "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.2,
                             "ignore_eos": True, "stop_token_ids": [3], "logprobs": 4, "user": "me", "priority": -1,
                             "cache_salt": "s", "typical_acceptance": True})
    assert call.params == SamplingParams(temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=4, n=2, stop=("a",), max_tokens=16,
                                         presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.2, ignore_eos=True,
                                         stop_token_ids=(3,), logprobs=4, typical_acceptance=True)
    assert (call.priority, call.cache_salt) == (-1, "s")
    chat = parse_chat({"model": "m", "messages": [{"role": "developer", "content": [{"type": "text", "text": "a"},
                                                                                    {"type": "text", "text": "b"}]}],
                       "max_completion_tokens": 5, "tools": [], "response_format": {"type": "text"}})
    assert chat.prompts == [[{"role": "system", "content": "ab"}]] and chat.params.max_tokens == 5
    assert parse_chat({"model": "m", "messages": [{"role": "user", "content": "a"}]}).params.max_tokens is None
    with pytest.raises(ApiError, match="Did you mean 'temperature'"):
        parse_completion({"model": "m", "prompt": "x", "temprature": 0.5})


def test_lossy_answers_are_labelled() -> None:
    """Medusa's typical acceptance, asked for in one request, is named in its answer and in no other."""
    from starlette.testclient import TestClient

    from karui.inference.server.app import create_app
    from tests.speculative.conftest import tiny_engine

    body = {"model": "tiny", "prompt": [1, 2, 3, 1, 2, 3], "max_tokens": 6}
    with TestClient(create_app(tiny_engine("medusa"), "tiny")) as client:
        def choices(**more: Any) -> list[Any]:
            return client.post("/v1/completions", json=body | more).json()["choices"]

        assert [c["lossy"] for c in choices(typical_acceptance=True)] == [True]
        assert all("lossy" not in c for c in choices())
        streamed = events(client.post("/v1/completions", json=body | {"typical_acceptance": True, "stream": True}))
        assert streamed[-1]["choices"][0]["lossy"] is True
