"""The prefix cache over HTTP: what usage and metrics say of it, who shares with whom, flush and listing."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from neoserve.api.state import ServerState
from neoserve.engine.fake import fake_limits
from neoserve.types.options import EngineOptions

from .api_harness import MODEL, VOCABULARY, Call, Server, events, serving

TEXT = "a prompt of fifty bytes, one token for each byte.."
LONG = TEXT * 3


def cached(response: httpx.Response) -> int:
    assert response.status_code == 200, response.text
    details: dict[str, int] = response.json()["usage"]["prompt_tokens_details"]
    return details["cached_tokens"]


async def streamed(server: Server, path: str, body: dict[str, Any]) -> int:
    call = Call(server.app, path, {"model": MODEL, "stream": True, "stream_options": {"include_usage": True}, **body})
    await call.end()
    tokens: int = events(call.text)[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


async def test_usage_counts_what_was_found_exactly() -> None:
    async with serving() as server:
        assert cached(await server.complete(TEXT)) == 0
        assert cached(await server.complete(TEXT)) == 48
        assert cached(await server.complete(TEXT[:48])) == 32
        assert cached(await server.complete(TEXT[:20] + "!")) == 16
        assert cached(await server.complete("!" + TEXT)) == 0
        assert await streamed(server, "/v1/completions", {"prompt": TEXT}) == 48
        messages = [{"role": "user", "content": TEXT}]
        first = await server.chat(messages)
        assert cached(first) == 0
        prompt_tokens = first.json()["usage"]["prompt_tokens"]
        assert cached(await server.chat(messages)) == (prompt_tokens - 1) // 16 * 16
        assert await streamed(server, "/v1/chat/completions", {"messages": messages}) == (prompt_tokens - 1) // 16 * 16


async def test_the_next_turn_of_a_conversation_finds_prompt_and_answer() -> None:
    async with serving() as server:
        messages = [{"role": "user", "content": TEXT}]
        first = await server.chat(messages)
        usage = first.json()["usage"]
        answer = first.json()["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "and?"}]
        # The token that ended the answer was never fed back, so its KV was never stored.
        stored = usage["prompt_tokens"] + usage["completion_tokens"] - 1
        assert cached(await server.chat(messages)) == stored // 16 * 16


async def test_choices_and_prompts_of_one_request() -> None:
    """``n`` choices compute their prompt once and count what was there before the request: nothing."""
    async with serving() as server:
        response = await server.complete(LONG, n=3, max_tokens=2)
        assert cached(response) == 0
        stats = server.engine.stats()
        assert stats.prompt_tokens + stats.cached_tokens == 3 * 150
        # Two chunks of 64 are computed once. The 22 tokens after them are too few to wait for; whether a later choice
        # finds them depends on the step in which it arrives.
        assert 2 * 128 <= stats.cached_tokens <= 2 * 144
        assert cached(await server.complete([LONG, TEXT], n=2, max_tokens=2)) == 144 + 48


async def test_scoring_a_prompt_computes_all_of_it() -> None:
    async with serving() as server:
        cold = await server.complete(TEXT, echo=True, logprobs=2, max_tokens=0)
        warm = await server.complete(TEXT, echo=True, logprobs=2, max_tokens=0)
        assert cached(warm) == 0
        assert warm.json()["choices"] == cold.json()["choices"]
        assert cached(await server.complete(TEXT, echo=True, max_tokens=1)) == 48


@pytest.mark.parametrize("field", ["cache_salt", "extra_key"])
async def test_a_salt_shares_with_its_like_only(field: str) -> None:
    """B21: x, y, x, none; the positive case is seen, too."""
    async with serving() as server:
        salts: list[dict[str, Any]] = [{field: "x"}, {field: "y"}, {field: "x"}, {}, {}]
        assert [cached(await server.complete(TEXT, **salt)) for salt in salts] == [0, 0, 48, 0, 48]
        messages = [{"role": "user", "content": TEXT}]
        assert cached(await server.chat(messages, **salts[0])) == 0
        assert cached(await server.chat(messages, **salts[1])) == 0
        assert cached(await server.chat(messages, **salts[2])) > 0


async def test_salt_and_extra_key_are_two_fields() -> None:
    async with serving() as server:
        await server.complete(TEXT, cache_salt="x")
        assert cached(await server.complete(TEXT, extra_key="x")) == 0
        assert cached(await server.complete(TEXT, cache_salt="x", extra_key="x")) == 0


async def test_metrics_equal_the_usage() -> None:
    """B83, B84: hits in tokens; used, evictable and free pages add up and are told apart."""
    async with serving() as server:
        found = [cached(await server.complete(TEXT[:length])) for length in (50, 50, 33, 10)]
        assert sum(found) == 48 + 32
        assert await server.metric("neoserve:cached_tokens_total") == sum(found)
        assert await server.metric("neoserve:prompt_tokens_total") == 50 + 50 + 33 + 10 - sum(found)
        assert await server.metric("neoserve:cache_hit_rate") == sum(found) / 143
        await server.idle()
        assert await server.metric("neoserve:num_used_pages") == 0
        assert await server.metric("neoserve:token_usage") == 0
        held = await server.metric("neoserve:num_evictable_pages")
        assert held == server.core.scheduler.tables.tree.num_pages > 3
        assert (await server.http.post("/flush_cache")).json() == {"flushed_pages": held}
        assert await server.metric("neoserve:num_evictable_pages") == 0
        assert await server.metric("neoserve:evicted_pages_total") == 0
        assert cached(await server.complete(TEXT)) == 0


async def test_evictions_are_counted() -> None:
    limits = fake_limits(vocab_size=VOCABULARY, max_context=128, num_pages=8)
    async with serving(step_limits=limits) as server:
        for letter in "abcdef":
            assert cached(await server.complete(letter * 60, max_tokens=2)) == 0
        assert cached(await server.complete("f" * 60, max_tokens=2)) == 48
        assert await server.metric("neoserve:evicted_pages_total") > 0


async def test_flush_is_refused_while_requests_run() -> None:
    async with serving(seconds_per_step=0.005) as server:
        call = Call(
            server.app, "/v1/completions", {"model": MODEL, "prompt": "p", "max_tokens": 100, "ignore_eos": True}
        )
        await server.running(1)
        response = await server.http.post("/flush_cache")
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "requests_running"
        call.hang_up()
        await call.end()
        await server.idle()
        assert (await server.http.post("/flush_cache")).status_code == 200
        assert (await server.http.get("/flush_cache")).status_code == 405


async def test_the_tree_is_listed_without_prompts() -> None:
    async with serving() as server:
        for end in ("one" * 12, "two" * 12):
            await server.complete(TEXT[:33] + end, max_tokens=1)
        body = (await server.http.get("/cache/tree")).json()
        assert [(run["run"], run["parent"], run["tokens"], run["readers"]) for run in body["runs"]] == [
            (0, None, 32, 0),
            (1, 0, 32, 0),
            (2, 0, 32, 0),
        ]
        assert (body["enabled"], body["page_size"], body["num_runs"]) == (True, 16, 3)
        assert (body["used_pages"], body["evictable_pages"], body["total_pages"]) == (0, 6, 256)
        assert len({run["key"] for run in body["runs"]}) == 3
        assert not any("token_ids" in run for run in body["runs"])
        cut = (await server.http.get("/cache/tree?limit=1")).json()
        assert (len(cut["runs"]), cut["num_runs"]) == (1, 3)


@pytest.mark.parametrize("query", ["limit=-1", "limit=x", "limit=5001", "limit=", "token_ids=65", "token_ids=²"])
async def test_the_listing_refuses_other_bounds(query: str) -> None:
    async with serving() as server:
        response = await server.http.get(f"/cache/tree?{query}")
        assert response.status_code == 400
        assert response.json()["error"]["param"] == query.split("=")[0]


async def test_token_ids_are_shown_only_with_leave() -> None:
    async with serving() as server:
        await server.complete(TEXT, max_tokens=1)
        refused = await server.http.get("/cache/tree?token_ids=4")
        assert refused.status_code == 403
        assert "--show-cached-tokens" in refused.json()["error"]["message"]
        server.state.show_cached_tokens = True
        runs = (await server.http.get("/cache/tree?token_ids=4")).json()["runs"]
        assert [run["token_ids"] for run in runs] == [list(TEXT[:4].encode())]
    assert ServerState().show_cached_tokens is False


async def test_without_the_cache_nothing_is_found_or_listed() -> None:
    async with serving(options=EngineOptions(enable_prefix_caching=False)) as server:
        assert [cached(await server.complete(TEXT)) for _ in range(2)] == [0, 0]
        body = (await server.http.get("/cache/tree")).json()
        assert (body["enabled"], body["runs"], body["evictable_pages"]) == (False, [], 0)
        assert (await server.http.post("/flush_cache")).json() == {"flushed_pages": 0}


async def test_a_turn_that_was_stopped_does_not_spoil_the_next() -> None:
    """B25: leave in the middle, at once ask again with the same history; the answer is that of an undisturbed run."""
    async with serving(seconds_per_step=0.001) as server:
        expected = (await server.complete(LONG, max_tokens=20, cache_salt="undisturbed")).json()
        for _ in range(20):
            body = {"model": MODEL, "prompt": LONG, "stream": True, "max_tokens": 100, "ignore_eos": True}
            call = Call(server.app, "/v1/completions", body)
            await call.wait_for_writes(1)
            call.hang_up()
            again = (await server.complete(LONG, max_tokens=20)).json()
            await call.end()
            assert again["choices"] == expected["choices"]
            assert again["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]
        await server.idle()


async def test_a_stopped_engine_refuses_to_flush() -> None:
    async with serving() as server:
        await server.engine.stop()
        responses = [await server.http.post("/flush_cache"), await server.http.get("/cache/tree")]
        assert [response.status_code for response in responses] == [503, 503]
        await asyncio.sleep(0)
