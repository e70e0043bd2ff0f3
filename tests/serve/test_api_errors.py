"""Every error is an OpenAI error object with the right status, on every route (B33, B34, B42, B73)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from neoserve.api.limits import RequestLimits
from neoserve.engine.fake import FakeFaults
from neoserve.types.options import EngineOptions

from .api_harness import CONTEXT, HI, MODEL, SCRIPT, Call, Server, serving


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error object, after checking its shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)
    assert body["error"]["message"]
    return dict(body["error"])


GENERATING = ["/v1/chat/completions", "/v1/completions"]


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"\xff", b'{"model": Infinity}'])
async def test_bad_json(path: str, raw: bytes) -> None:
    async with serving() as server:
        error = error_of(await server.http.post(path, content=raw), 400)
    assert error["code"] == "invalid_json"
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", GENERATING)
async def test_an_empty_object(path: str) -> None:
    async with serving() as server:
        error = error_of(await server.http.post(path, json={}), 400)
    assert error["param"] == "model"
    assert error["code"] == "missing_required_parameter"


@pytest.mark.parametrize("path", GENERATING)
async def test_wrong_types_are_400_not_422(path: str) -> None:
    async with serving() as server:
        body = {"model": MODEL, "messages": HI, "prompt": "p", "temperature": "hot"}
        error = error_of(await server.http.post(path, json=body), 400)
    assert error["param"] == "temperature"
    assert "hot" in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nope", 404, "unknown_route"),
        ("POST", "/v1/embeddings", 404, "unknown_route"),
        ("GET", "/", 404, "unknown_route"),
        ("GET", "/v1/models/", 404, "model_not_found"),
        ("POST", "/v1/chat/completions/", 404, "unknown_route"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("GET", "/docs", 404, "unknown_route"),
    ],
)
async def test_unknown_routes_and_methods(method: str, path: str, status: int, code: str) -> None:
    async with serving() as server:
        assert error_of(await server.http.request(method, path), status)["code"] == code


async def test_an_unknown_model() -> None:
    async with serving() as server:
        for response in (await server.chat(model="gpt-4"), await server.http.get("/v1/models/../etc/passwd")):
            error = error_of(response, 404)
        error = error_of(await server.chat(model="gpt-4"), 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert MODEL in error["message"]
        assert error_of(await server.http.get("/v1/models/gpt-4"), 404)["code"] == "model_not_found"
        assert (await server.complete(model="org/alias")).json()["model"] == "org/alias"


async def test_a_huge_body_is_413_before_it_is_parsed() -> None:
    async with serving(limits=RequestLimits(body_bytes=1000)) as server:
        error = error_of(await server.chat([{"role": "user", "content": "x" * 2000}]), 413)
        assert error["code"] == "body_too_large"
        assert "1000" in error["message"]

        async def chunks() -> Any:
            for _ in range(20):
                yield b"x" * 100

        assert error_of(await server.http.post("/v1/completions", content=chunks()), 413)["code"] == "body_too_large"


@pytest.mark.parametrize(
    ("prompt", "status"),
    [("x" * (CONTEXT - 1), 200), ("x" * CONTEXT, 400), ("x" * (CONTEXT + 1), 400), ("x" * 100_000, 400)],
    ids=["one left", "full", "over", "far over"],
)
async def test_context_overflow(prompt: str, status: int) -> None:
    """B34, B77: always 400 with numbers, streamed or not, also when refused before tokenising."""
    async with serving() as server:
        for stream in (False, True):
            response = await server.complete(prompt, stream=stream, max_tokens=1)
            if status == 200:
                assert response.status_code == 200
                continue
            error = error_of(response, 400)
            assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
            assert str(CONTEXT) in error["message"]
        chat = await server.chat([{"role": "user", "content": "x" * (2 * CONTEXT)}])
        error = error_of(chat, 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
        assert (await server.complete()).json()["choices"][0]["text"] == SCRIPT


async def test_max_tokens_beyond_the_context_is_cut() -> None:
    """B26: the answer fills the context and ends with length; the next request works."""
    async with serving("y" + "z" * 400) as server:
        choice = (await server.complete("p", max_tokens=10**9, ignore_eos=True)).json()
        assert choice["choices"][0]["finish_reason"] == "length"
        assert choice["usage"]["total_tokens"] == CONTEXT
        assert (await server.complete()).status_code == 200


async def test_the_queue_is_bounded() -> None:
    options = EngineOptions(max_running_requests=1, max_queued_requests=1)
    async with serving("a" * 200, options=options, seconds_per_step=0.1) as server:
        calls = [
            Call(server.app, "/v1/completions", {"model": MODEL, "prompt": "p", "max_tokens": 200, "ignore_eos": True})
            for _ in range(2)
        ]
        await server.running()
        while server.engine.stats().waiting < 1:
            await asyncio.sleep(0.005)
        for stream in (False, True):
            response = await server.complete(stream=stream)
            assert error_of(response, 503)["code"] == "queue_full"
            assert int(response.headers["retry-after"]) >= 1
        for call in calls:
            call.hang_up()
            await call.end()
        await server.idle()
        assert await server.metric("neoserve:num_aborted_requests_total") == 2


async def test_nothing_but_status_while_loading() -> None:
    async with serving(attach=False) as server:
        for path in ("/health", "/v1/models", "/metrics"):
            response = await server.http.get(path)
            assert error_of(response, 503)["code"] == "model_loading"
            assert "retry-after" in response.headers
        assert error_of(await server.chat(), 503)["code"] == "model_loading"
        assert (await server.http.get("/health/live")).json() == {"status": "loading"}
        assert (await server.http.get("/version")).status_code == 200
        server.state.attach(server.model, server.engine)
        assert (await server.http.get("/health")).status_code == 200
        assert (await server.complete()).status_code == 200


async def test_a_failed_step_fails_its_request_only() -> None:
    """B32: nothing was sent yet, so it is a 500; the next request works."""
    faults = FakeFaults(forward_errors=[MemoryError("no room")])
    async with serving(faults=faults) as server:
        for stream in (False, True):
            faults.forward_errors = [MemoryError("no room")]
            error = error_of(await server.complete(stream=stream), 500)
            assert (error["type"], error["code"]) == ("server_error", "engine_error")
            assert "no room" in error["message"]
            assert (await server.complete()).json()["choices"][0]["text"] == SCRIPT
        assert await server.metric('neoserve:num_requests_total{finish_reason="error"}') == 2


@pytest.mark.parametrize(("path", "prompt"), [(GENERATING[0], {"messages": HI}), (GENERATING[1], {"prompt": "p"})])
async def test_a_fault_in_mid_stream_is_an_event(path: str, prompt: dict[str, object]) -> None:
    """B32: no finish reason, no usage, no [DONE]."""
    async with serving(faults=FakeFaults(fail_after_tokens=3)) as server:
        body = {"model": MODEL, **prompt, "stream": True, "stream_options": {"include_usage": True}}
        call = Call(server.app, path, body)
        await call.end()
    assert call.status == 200
    lines = [line.removeprefix("data: ") for line in call.text.split("\n\n") if line]
    chunks = [json.loads(line) for line in lines]
    assert "[DONE]" not in call.text
    assert set(chunks[-1]) == {"error"}
    assert chunks[-1]["error"]["type"] == "server_error"
    assert "fault switch" in chunks[-1]["error"]["message"]
    assert len(chunks) >= 4
    for chunk in chunks[:-1]:
        assert chunk["usage"] is None
        assert chunk["choices"][0]["finish_reason"] is None


async def test_a_dead_engine_is_told() -> None:
    options = EngineOptions(max_failed_steps=1)
    async with serving(faults=FakeFaults(poison_token=ord("!")), options=options) as server:
        error_of(await server.complete("!"), 500)
        for response in (await server.complete(), await server.chat(), await server.http.get("/health")):
            assert error_of(response, 503)["code"] == "engine_dead"
        live = await server.http.get("/health/live")
        assert (live.status_code, live.json()) == (503, {"status": "dead"})
        assert live.headers["retry-after"]
        assert (await server.http.get("/metrics")).status_code == 200


async def test_an_unforeseen_fault_is_500_without_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as server:

        def broken(_: object) -> None:
            raise RuntimeError("/home/someone/secret")

        monkeypatch.setattr(server.engine, "generate", broken)
        error = error_of(await server.complete(), 500)
        assert error["code"] == "internal_error"
        assert "secret" not in error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1_000_000},
        {"n": -1},
        {"logprobs": 10**9},
        {"best_of": 10**6},
        {"prompt": ["x"] * 100_000},
        {"prompt": ["x"] * 200, "n": 2},
        {"prompt": [0] * 100_000},
        {"prompt": [10**30]},
        {"stop": ["x"] * 10_000},
        {"stop": "x" * 1_000_000},
        {"logit_bias": {str(index): 1 for index in range(100_000)}},
        {"max_tokens": -1},
        {"seed": 2**70},
    ],
    ids=lambda fields: ",".join(fields),
)
async def test_no_single_field_exhausts_the_server(fields: dict[str, object]) -> None:
    """B73."""
    async with serving() as server:
        error = error_of(await server.complete(**fields), 400)
        assert len(error["message"]) < 400
        assert error["param"] in fields
        assert (await server.complete()).json()["choices"][0]["text"] == SCRIPT


async def test_request_ids() -> None:
    async with serving() as server:
        own = await server.http.get("/health", headers={"x-request-id": "trace-1"})
        assert own.headers["x-request-id"] == "trace-1"
        hostile = await server.http.get("/health", headers={"x-request-id": "bad id;" * 50})
        assert hostile.headers["x-request-id"].startswith("req-")
        first, second = await server.complete(), await server.http.get("/nope")
        assert first.headers["x-request-id"] != second.headers["x-request-id"]


async def test_status_routes() -> None:
    async with serving() as server:
        models = (await server.http.get("/v1/models")).json()
        assert [model["id"] for model in models["data"]] == [MODEL, "org/alias"]
        assert models["object"] == "list"
        card = (await server.http.get("/v1/models/org/alias")).json()
        assert (card["id"], card["object"], card["max_model_len"]) == ("org/alias", "model", CONTEXT)
        assert (await server.http.get("/health")).json() == {"status": "ok"}
        assert (await server.http.head("/health")).status_code == 200


async def test_no_template_no_chat() -> None:
    async with Server(template=None) as server:
        error = error_of(await server.chat(), 400)
        assert error["code"] == "no_chat_template"
        assert "/v1/completions" in error["message"]
        assert (await server.complete()).status_code == 200
