"""GET /metrics: strict format, every request counted once, times that agree with a client's clock (B82, B84, B85)."""

from __future__ import annotations

import asyncio
import time

from prometheus_client.parser import text_string_to_metric_families

from neoserve.engine.fake import FakeFaults
from neoserve.types.options import EngineOptions

from .api_harness import MODEL, SCRIPT, Call, serving

EXPECTED = {
    "neoserve:num_running_reqs": "gauge",
    "neoserve:num_queue_reqs": "gauge",
    "neoserve:token_usage": "gauge",
    "neoserve:num_threads": "gauge",
    "neoserve:prompt_tokens": "counter",
    "neoserve:generation_tokens": "counter",
    "neoserve:time_to_first_token_seconds": "histogram",
    "neoserve:inter_token_latency_seconds": "histogram",
    "neoserve:e2e_request_latency_seconds": "histogram",
    "neoserve:num_requests": "counter",
    "neoserve:num_aborted_requests": "counter",
    "neoserve:row_fallbacks": "counter",
    "neoserve:step_seconds": "counter",
}


async def test_the_exposition_is_strict_and_complete() -> None:
    async with serving() as server:
        await server.chat()
        response = await server.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = list(text_string_to_metric_families(response.text))
    types = {family.name: family.type for family in families}
    assert EXPECTED.items() <= types.items()
    assert len(types) == len(families)
    samples = [(sample.name, tuple(sorted(sample.labels.items()))) for family in families for sample in family.samples]
    assert len(samples) == len(set(samples))
    assert all(dict(labels)["model_name"] == MODEL for _, labels in samples)
    assert all(family.documentation for family in families)


async def test_every_request_is_counted_once() -> None:
    """B82: the engine's counters and the sums per request agree when nothing was aborted."""
    async with serving() as server:
        await server.complete("abc", max_tokens=50)
        await server.complete("de", max_tokens=3)
        await server.complete(["x", "y"], n=2, max_tokens=2)
        assert (await server.complete("")).status_code == 400
        generated = len(SCRIPT) + 1 + 3 + 4 * 2
        assert await server.metric("neoserve:generation_tokens_total") == generated
        assert await server.metric("neoserve:request_generation_tokens_sum") == generated
        assert await server.metric("neoserve:prompt_tokens_total") == 3 + 2 + 4
        assert await server.metric("neoserve:request_prompt_tokens_sum") == 3 + 2 + 4
        assert await server.metric("neoserve:request_prompt_tokens_count") == 6
        assert await server.metric('neoserve:num_requests_total{finish_reason="stop"}') == 1
        assert await server.metric('neoserve:num_requests_total{finish_reason="length"}') == 5
        assert await server.metric("neoserve:e2e_request_latency_seconds_count") == 6
        assert await server.metric("neoserve:time_to_first_token_seconds_count") == 6
        assert await server.metric("neoserve:inter_token_latency_seconds_count") == generated - 6


async def test_aborted_and_failed_requests_are_counted_as_such() -> None:
    async with serving(seconds_per_step=0.005, faults=FakeFaults(poison_token=ord("!"))) as server:
        for _ in range(5):
            body = {"model": MODEL, "prompt": "p", "stream": True, "max_tokens": 100, "ignore_eos": True}
            call = Call(server.app, "/v1/completions", body)
            await call.wait_for_writes(1)
            call.hang_up()
            await call.end()
        assert (await server.complete("!")).status_code == 500
        assert await server.metric("neoserve:num_aborted_requests_total") == 5
        assert await server.metric('neoserve:num_requests_total{finish_reason="abort"}') == 5
        assert await server.metric('neoserve:num_requests_total{finish_reason="error"}') == 1
        assert await server.metric("neoserve:e2e_request_latency_seconds_count") == 0


async def test_gauges_follow_the_load_and_return_to_zero() -> None:
    options = EngineOptions(max_running_requests=2)
    async with serving(seconds_per_step=0.005, options=options) as server:
        body = {"model": MODEL, "prompt": "p", "max_tokens": 100, "ignore_eos": True}
        calls = [Call(server.app, "/v1/completions", body) for _ in range(5)]
        await server.running(2)
        while server.engine.stats().waiting < 3:
            await asyncio.sleep(0.005)
        assert await server.metric("neoserve:num_running_reqs") == 2
        assert await server.metric("neoserve:num_queue_reqs") == 3
        assert 0 < await server.metric("neoserve:token_usage") < 1
        for call in calls:
            call.hang_up()
            await call.end()
        await server.idle()
        for name in ("num_running_reqs", "num_queue_reqs", "token_usage", "num_used_pages"):
            assert await server.metric(f"neoserve:{name}") == 0


async def test_times_agree_with_a_clients_clock() -> None:
    """B85: a request that waits in the queue has a late first token in the histogram, too."""
    options = EngineOptions(max_running_requests=1)
    async with serving(seconds_per_step=0.01, options=options) as server:
        started = time.perf_counter()
        first = Call(server.app, "/v1/completions", {"model": MODEL, "prompt": "a", "stream": True, "max_tokens": 30})
        await server.running(1)
        second = Call(server.app, "/v1/completions", {"model": MODEL, "prompt": "b", "stream": True, "max_tokens": 1})
        await second.wait_for_writes(1)
        waited = time.perf_counter() - started
        await first.end()
        await second.end()
        ttft = await server.metric("neoserve:time_to_first_token_seconds_sum")
        e2e = await server.metric("neoserve:e2e_request_latency_seconds_sum")
    assert 0.1 < ttft <= waited + 0.5
    assert ttft <= e2e
