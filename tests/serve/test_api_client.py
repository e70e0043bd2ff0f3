"""The official ``openai`` client against a real HTTP server with a scripted model (B32, B33, B43)."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from .api_harness import HI, MODEL, SCRIPT
from .process import ServerProcess, get, scripted

TEXT = SCRIPT + "." * 100


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with scripted("0.001", "5") as process:
        process.wait_until_ready()
        yield process


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HI, seed=1)
    (choice,) = answer.choices
    assert choice.message.content == TEXT
    assert choice.message.role == "assistant"
    assert choice.message.refusal is None
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + len(TEXT) + 1
    assert answer._request_id


def test_chat_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=HI, stream=True, stream_options={"include_usage": True}, logprobs=True, top_logprobs=2
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == TEXT
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(TEXT) + 1
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]].count("stop") == 1
    tokens = [item for chunk in chunks[:-1] if (found := chunk.choices[0].logprobs) for item in found.content or []]
    assert bytes(byte for item in tokens for byte in item.bytes or []).startswith(TEXT.encode())


def test_chat_stream_helper(client: openai.OpenAI) -> None:
    """The client's own accumulator checks the order of roles, contents and finish reasons."""
    with client.chat.completions.stream(model=MODEL, messages=HI) as stream:
        assert stream.get_final_completion().choices[0].message.content == TEXT


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=5, logprobs=1, echo=True)
    assert [choice.text for choice in answer.choices] == ["aHello", "bHello"]
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == ["a", *"Hello"]
    pieces = client.completions.create(model=MODEL, prompt="a", max_tokens=5, stream=True)
    assert "".join(chunk.choices[0].text for chunk in pieces) == "Hello"


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL, "org/alias"]
    assert client.models.retrieve("org/alias").id == "org/alias"


def test_errors_become_the_clients_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=HI)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=HI, response_format={"type": "json_object"})
    assert refused.value.param == "response_format"
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x" * 1000}], stream=True)
    assert long.value.code == "context_length_exceeded"
    assert client.chat.completions.create(model=MODEL, messages=HI, max_tokens=1).choices[0].finish_reason == "length"


def test_a_fault_in_mid_stream_raises() -> None:
    with scripted("0.001", "5", "20") as process:
        client = openai.OpenAI(base_url=f"{process.wait_until_ready()}/v1", api_key="none", max_retries=0)
        stream = client.chat.completions.create(model=MODEL, messages=HI, stream=True)
        got: list[str] = []
        with pytest.raises(openai.APIError, match="fault switch"):
            got.extend(chunk.choices[0].delta.content or "" for chunk in stream)
        assert got[1:] == list(TEXT[: len(got) - 1])


def test_closing_a_stream_aborts_it(client: openai.OpenAI, server: ServerProcess) -> None:
    before = _metric(server, "neoserve:num_aborted_requests_total")
    stream = client.chat.completions.create(model=MODEL, messages=HI, stream=True)
    next(iter(stream))
    stream.close()
    body = {"model": MODEL, "messages": HI, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=0.05)
    deadline = time.monotonic() + 2
    while _metric(server, "neoserve:num_aborted_requests_total") < before + 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert _metric(server, "neoserve:num_running_reqs") == 0


def test_parallel_streams(client: openai.OpenAI) -> None:
    def ask(index: int) -> str:
        stream = client.chat.completions.create(model=MODEL, messages=HI, stream=True, seed=index)
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    with ThreadPoolExecutor(12) as pool:
        assert set(pool.map(ask, range(12))) == {TEXT}


GIANTS = {
    "letters": "a" * 5_000_000,
    "blanks": " " * 5_000_000,
    "emoji": "😀" * 250_000,
    "mixed": "a1 _\n\t.é" * 125_000,
    "messages": None,
}


@pytest.mark.parametrize("kind", GIANTS)
def test_giant_texts_do_not_stop_the_others(kind: str, server: ServerProcess) -> None:
    """B77: refused, while /health goes on answering: never is it silent for most of the time that the refusal takes."""
    text = GIANTS[kind]
    messages = [{"role": "user", "content": text}] if text is not None else [{"role": "user", "content": "x"}] * 200_000
    raw = json.dumps({"model": MODEL, "messages": messages}, ensure_ascii=False).encode()
    slowest = 0.0
    done = threading.Event()

    def poll() -> None:
        nonlocal slowest
        while not done.is_set():
            start = time.monotonic()
            assert get(server.url, "/health").status_code == 200
            slowest = max(slowest, time.monotonic() - start)

    poller = threading.Thread(target=poll)
    poller.start()
    start = time.monotonic()
    try:
        response = httpx.post(f"{server.url}/v1/chat/completions", content=raw, timeout=60)
        took = time.monotonic() - start
    finally:
        done.set()
        poller.join()
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"
    # On a quiet machine a refusal takes less than a second; on a loaded one both times grow alike.
    assert slowest < max(1.0, took / 2)


def _metric(server: ServerProcess, name: str) -> float:
    lines = get(server.url, "/metrics").text.splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{"))
