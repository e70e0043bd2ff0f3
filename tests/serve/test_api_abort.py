"""Clients that leave: the engine stops within a step, in every phase, streaming or not (B23, B24, B25)."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest

from neoserve.api.generation import Choice, Generation
from neoserve.engine.fake import fake_limits
from neoserve.types.options import EngineOptions
from neoserve.types.request import GenerateRequest, TokenDelta
from neoserve.types.sampling import SamplingParams

from .api_harness import MODEL, SCRIPT, VOCABULARY, Call, Server, serving

ENDLESS = {"model": MODEL, "prompt": "p", "max_tokens": 200, "ignore_eos": True}


def call(server: Server, **fields: Any) -> Call:
    return Call(server.app, "/v1/completions", {**ENDLESS, **fields})


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_in_decode(stream: bool) -> None:
    async with serving(seconds_per_step=0.005) as server:
        calls = [call(server, stream=stream) for _ in range(5)]
        await server.running(5)
        for one in calls:
            one.hang_up()
            await one.end()
        await server.idle(1.0)
        assert await server.metric("neoserve:num_aborted_requests_total") == 5
        assert await server.metric('neoserve:num_requests_total{finish_reason="abort"}') == 5
        assert server.engine.stats().generated_tokens < 5 * 200


async def test_leaving_after_some_of_the_stream() -> None:
    async with serving(seconds_per_step=0.005) as server:
        one = call(server, stream=True)
        await one.wait_for_writes(3)
        one.hang_up()
        await one.end()
        await server.idle(1.0)
        assert "[DONE]" not in one.text
        # Tokens that reached the client's side are counted, however the request ended (B82).
        assert await server.metric("neoserve:request_generation_tokens_sum") >= 3


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_in_prefill(stream: bool) -> None:
    """B24: the prefill stops at the next chunk; the next request does not wait for its end."""
    limits = fake_limits(max_tokens=8, vocab_size=VOCABULARY, max_context=256, num_pages=64)
    options = EngineOptions(max_tokens_per_step=8)
    async with serving(step_limits=limits, options=options, seconds_per_step=0.02) as server:
        one = call(server, prompt="x" * 240, stream=stream, max_tokens=1)
        await server.running()
        one.hang_up()
        await one.end()
        await server.idle(1.0)
        assert len(server.executor.history) < 20
        assert one.writes == []
        assert (await server.complete()).json()["choices"][0]["text"] == SCRIPT


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_in_the_queue(stream: bool) -> None:
    options = EngineOptions(max_running_requests=1)
    async with serving(options=options, seconds_per_step=0.01) as server:
        first = call(server)
        await server.running()
        waiting = call(server, prompt="q", stream=stream)
        while server.engine.stats().waiting < 1:
            await asyncio.sleep(0.005)
        waiting.hang_up()
        await waiting.end()
        while server.engine.stats().waiting:
            await asyncio.sleep(0.005)
        assert server.engine.stats().running == 1
        first.hang_up()
        await first.end()
        await server.idle()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_leaving_during_the_upload_is_no_fault(path: str, caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as server:
        one = Call(server.app, path, ENDLESS, whole=False)
        one.hang_up()
        await one.end()
        assert one.status != 500
        assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
        assert (await server.complete()).json()["choices"][0]["text"] == SCRIPT


async def test_leaving_with_several_choices_aborts_all() -> None:
    async with serving(seconds_per_step=0.005) as server:
        one = call(server, n=3, stream=True)
        await server.running(3)
        one.hang_up()
        await one.end()
        await server.idle(1.0)
        assert await server.metric("neoserve:num_aborted_requests_total") == 3


async def test_a_normal_end_aborts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """B23: no abort may be sent for a request that has ended by itself."""
    async with serving() as server:
        aborted: list[str] = []
        abort = server.core.abort
        monkeypatch.setattr(server.core, "abort", lambda name: (aborted.append(name), abort(name))[1])
        for _ in range(10):
            one = Call(server.app, "/v1/completions", {"model": MODEL, "prompt": "p", "stream": True})
            await one.end()
            assert one.text.endswith("data: [DONE]\n\n")
            assert (await server.complete()).status_code == 200
        assert aborted == []
        assert await server.metric("neoserve:num_aborted_requests_total") == 0


async def test_the_next_turn_is_undisturbed() -> None:
    """B25."""
    async with serving(seconds_per_step=0.001) as server:
        for _ in range(20):
            one = call(server, stream=True)
            await one.wait_for_writes(2)
            one.hang_up()
            body = (await server.complete("p", max_tokens=50)).json()
            assert body["choices"][0]["text"] == SCRIPT
            assert body["usage"]["prompt_tokens"] == 1
            await one.end()
            assert len(one.writes) < 50
        await server.idle()
        assert await server.metric("neoserve:num_aborted_requests_total") == 20


async def test_leaving_during_the_cleanup_forgets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second cancellation, while the first is being obeyed, must not leave a request that a drain waits for."""
    async with serving(seconds_per_step=0.005) as server:
        generate = server.engine.generate

        async def slow_to_close(request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
            async with aclosing(generate(request)) as stream:
                try:
                    async for delta in stream:
                        yield delta
                finally:
                    await asyncio.sleep(0.1)

        monkeypatch.setattr(server.engine, "generate", slow_to_close)
        choice = Choice(prompt_token_ids=(1,), sampling=SamplingParams(ignore_eos=True, max_tokens=200))
        generation = Generation(server.state, server.state.loaded(), "twice", [choice], "prompt")

        async def consume() -> None:
            async with aclosing(generation.batches()) as batches:
                async for _ in batches:
                    pass

        task = asyncio.ensure_future(consume())
        await server.running()
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0.02)
        with pytest.raises(asyncio.CancelledError):
            await task
        await server.idle()
        assert await server.state.drain(0.5) is True


async def test_leaving_at_random_times_leaks_nothing() -> None:
    """80 requests of all kinds, most of them left at some moment; then all is free and a drain ends at once."""
    numbers = random.Random(7)
    options = EngineOptions(max_running_requests=4)
    async with serving(seconds_per_step=0.001, options=options) as server:

        async def visit() -> None:
            fields = {"prompt": "x" * numbers.randint(1, 300), "n": numbers.choice([1, 1, 3])}
            one = call(server, stream=numbers.random() < 0.5, max_tokens=numbers.randint(1, 60), **fields)
            if numbers.random() < 0.7:
                await asyncio.sleep(numbers.uniform(0, 0.3))
                one.hang_up()
            await asyncio.wait_for(one.task, 30)

        await asyncio.gather(*(visit() for _ in range(80)))
        await server.idle()
        reasons = [
            await server.metric(f'neoserve:num_requests_total{{finish_reason="{reason}"}}')
            for reason in ("abort", "length", "error")
        ]
        assert reasons[0] > 0
        assert reasons[1] > 0
        assert reasons[2] == 0
        assert await server.state.drain(1.0) is True


async def test_a_refused_choice_aborts_the_others() -> None:
    """One of several prompts does not fit: the whole request is refused and nothing goes on running."""
    async with serving(seconds_per_step=0.005) as server:
        response = await server.complete(["p", "x" * 300], max_tokens=200, ignore_eos=True)
        assert response.status_code == 400
        await server.idle(1.0)


async def test_an_abort_from_elsewhere_asks_the_client_to_come_back() -> None:
    async with serving(seconds_per_step=0.005) as server:
        one = call(server)
        await server.running()
        for request_id in list(server.engine._streams):
            await server.engine.abort(request_id)
        await one.end()
        assert one.status == 503
        assert int(one.headers["retry-after"]) >= 1
        assert '"code":"aborted"' in one.text


async def test_draining_finishes_what_runs_and_refuses_what_is_new() -> None:
    """B86."""
    async with serving(seconds_per_step=0.005) as server:
        one = call(server, stream=True, ignore_eos=False)
        await one.wait_for_writes(1)
        drained = asyncio.ensure_future(server.state.drain(5.0))
        await asyncio.sleep(0)
        refused = await server.complete()
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "shutting_down"
        assert (await server.http.get("/health")).status_code == 503
        assert (await server.http.get("/health/live")).json() == {"status": "draining"}
        assert await drained is True
        await one.end()
        assert one.text.endswith("data: [DONE]\n\n")


async def test_a_client_that_does_not_read_does_not_hold_up_the_drain() -> None:
    """B87."""
    async with serving(seconds_per_step=0.002) as server:
        one = call(server, stream=True)
        await one.wait_for_writes(1)
        one.stop_reading()
        await server.idle(5.0)
        started = asyncio.get_running_loop().time()
        assert await server.state.drain(0.1) is False
        assert asyncio.get_running_loop().time() - started < 2.0
        one.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await one.task


@pytest.mark.parametrize("stream", [False, True])
async def test_what_outlasts_the_drain_ends_with_an_error(stream: bool) -> None:
    async with serving(seconds_per_step=0.02) as server:
        one = call(server, stream=stream)
        await server.running()
        if stream:
            await one.wait_for_writes(1)
        assert await server.state.drain(0.05) is False
        await one.end()
        assert '"code":"aborted"' in one.text
        assert "[DONE]" not in one.text
        assert one.status == (200 if stream else 503)
        assert stream or int(one.headers["retry-after"]) >= 1
        await server.idle()
