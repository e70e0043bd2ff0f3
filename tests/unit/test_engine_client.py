"""AsyncEngine: streams, aborts, refusals, shutdown. Paces are set by the fake model; no test asserts a duration
except as a generous bound on something that would otherwise last for ever.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress

import pytest

from neoserve.engine.client import AsyncEngine, EngineClient
from neoserve.engine.core import EngineCore
from neoserve.engine.fake import FakeExecutor, FakeFaults, fake_limits
from neoserve.types.errors import ContextLengthError, EngineDeadError, InvalidRequestError, QueueFullError
from neoserve.types.options import EngineOptions
from neoserve.types.request import GenerateRequest, TokenDelta
from neoserve.types.sampling import SamplingParams

PACE = 0.002


def make_request(name: str = "a", prompt: tuple[int, ...] = (1, 2), **sampling: object) -> GenerateRequest:
    sampling.setdefault("seed", 0)
    return GenerateRequest(
        request_id=name, prompt_token_ids=prompt, sampling=SamplingParams(**sampling), eos_token_ids=(0,)
    )


def endless(name: str = "a", prompt: tuple[int, ...] = (1, 2)) -> GenerateRequest:
    return make_request(name, prompt, ignore_eos=True, max_tokens=4000)


class CountingCore(EngineCore):
    """Remembers which requests were aborted, and how often it was asked for work."""

    def __init__(self, *arguments: object, **keywords: object) -> None:
        super().__init__(*arguments, **keywords)
        self.aborts: list[str] = []
        self.asked_for_work = 0

    @property
    def has_work(self) -> bool:
        self.asked_for_work += 1
        return super().has_work

    def abort(self, request_id: str) -> TokenDelta | None:
        self.aborts.append(request_id)
        return super().abort(request_id)


@asynccontextmanager
async def engine(
    executor: FakeExecutor | None = None, *, strict: bool = True, **options: int
) -> AsyncIterator[AsyncEngine]:
    executor = executor or FakeExecutor(
        [5, 6, 7], limits=fake_limits(max_context=5000, num_pages=4000), seconds_per_step=PACE
    )
    client = AsyncEngine(CountingCore(executor, EngineOptions(**options), strict=strict))
    await client.start()
    try:
        yield client
    finally:
        await client.stop()
        assert executor.closed
        assert not any(thread.name == "neoserve-engine" for thread in threading.enumerate())


async def collect(client: EngineClient, request: GenerateRequest) -> list[TokenDelta]:
    return [delta async for delta in client.generate(request)]


def tokens(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


async def until(condition: object, seconds: float = 10.0) -> None:
    """Waits for something that must happen soon."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        await asyncio.sleep(0.001)


async def idle(client: AsyncEngine) -> None:
    await until(lambda: client.stats().running == client.stats().waiting == client.stats().used_pages == 0)


async def test_requests_stream_side_by_side():
    async with engine() as client:
        answers = await asyncio.gather(*(collect(client, make_request(f"r{n}", (1,) * (n + 1))) for n in range(20)))
        assert [tokens(answer) for answer in answers] == [[5, 6, 7, 0]] * 20
        assert all([delta.finish_reason for delta in answer] == [None] * 3 + ["stop"] for answer in answers)


async def test_no_abort_follows_a_normal_end():
    """B23, second half: a finished stream must not be aborted afterwards."""
    async with engine() as client:
        for number in range(30):
            async with aclosing(client.generate(make_request(f"r{number}"))) as stream:
                async for delta in stream:
                    if delta.finish_reason:
                        break
        await idle(client)
        assert client.core.aborts == []


@pytest.mark.parametrize("how", ["aclose", "break", "cancel", "timeout"])
async def test_leaving_a_stream_aborts_its_request(how):
    """B23, first half: however the consumer goes away, the sequence ends and its pages are free."""
    async with engine() as client:
        started = asyncio.Event()

        async def consume() -> None:
            stream = client.generate(endless())
            async for _ in stream:
                started.set()
                if how == "break":
                    return
                if how == "aclose":
                    await stream.aclose()

        task = asyncio.create_task(asyncio.wait_for(consume(), 0.3) if how == "timeout" else consume())
        await started.wait()
        if how == "cancel":
            task.cancel()
        with suppress(asyncio.CancelledError, asyncio.TimeoutError):
            await task
        await idle(client)
        assert client.core.aborts == ["a"]
        generated = client.stats().generated_tokens
        await asyncio.sleep(20 * PACE)
        assert client.stats().generated_tokens == generated < 4000


async def test_twenty_consumers_leave_at_once():
    async with engine(max_running_requests=8) as client:
        tasks = [asyncio.create_task(collect(client, endless(f"r{number}"))) for number in range(20)]
        await until(lambda: client.stats().running == 8 and client.stats().waiting == 12)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await idle(client)
        assert sorted(client.core.aborts) == sorted(f"r{number}" for number in range(20))
        assert tokens(await collect(client, make_request("next"))) == [5, 6, 7, 0]


async def test_leaving_during_a_long_prefill_stops_it_at_the_next_chunk():
    """B24: the abort does not wait for the first token."""
    limits = fake_limits(max_context=5000, num_pages=400)
    executor = FakeExecutor([5], limits=limits, seconds_per_token=0.0005)
    async with engine(executor, max_tokens_per_step=64) as client:
        task = asyncio.create_task(collect(client, make_request("long", (1,) * 4000)))
        await until(lambda: len(executor.history) >= 2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert tokens(await collect(client, make_request("short", (1,)))) == [5, 0]
        assert client.stats().prompt_tokens < 2000
        assert len(executor.history) < 20


async def test_a_cancel_before_the_first_delta_aborts_too():
    async with engine() as client:
        task = asyncio.create_task(collect(client, endless()))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await idle(client)
        assert tokens(await collect(client, make_request())) == [5, 6, 7, 0]


async def test_the_next_turn_with_the_same_id_is_not_the_old_one():
    """B25: stop a turn, at once send the next one; fifty times."""
    async with engine() as client:
        for number in range(50):
            async with aclosing(client.generate(endless("conversation"))) as stream:
                count = 0
                async for _ in stream:
                    count += 1
                    if count > number % 4:
                        break
            assert tokens(await collect(client, make_request("conversation"))) == [5, 6, 7, 0]
        await idle(client)


async def test_leaving_a_refused_stream_does_not_abort_the_request_that_has_its_id():
    executor = FakeExecutor([5, 6, 7], seconds_per_step=0.05)
    async with engine(executor) as client:
        first = asyncio.create_task(collect(client, make_request("same")))
        await until(lambda: client.stats().running == 1)
        second = asyncio.create_task(collect(client, make_request("same")))
        await asyncio.sleep(0)
        second.cancel()
        assert tokens(await first) == [5, 6, 7, 0]
        assert client.core.aborts == []
        assert isinstance((await asyncio.gather(second, return_exceptions=True))[0], asyncio.CancelledError)


async def test_abort_by_id_ends_the_stream_with_abort():
    async with engine() as client:
        task = asyncio.create_task(collect(client, endless()))
        await until(lambda: client.stats().generated_tokens > 3)
        await client.abort("unknown")
        await client.abort("a")
        deltas = await task
        assert deltas[-1].finish_reason == "abort"
        assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)


async def test_a_slow_consumer_delays_nobody():
    async with engine() as client:
        slow = client.generate(make_request("slow"))
        assert (await slow.__anext__()).token_ids == (5,)
        assert tokens(await collect(client, make_request("fast"))) == [5, 6, 7, 0]
        await until(lambda: client.stats().running == 0)
        assert [delta.token_ids async for delta in slow] == [(6,), (7,), (0,)]
        assert client.core.aborts == []


async def test_refusals_reach_the_caller():
    async with engine(max_running_requests=1, max_queued_requests=1) as client:
        with pytest.raises(InvalidRequestError, match="prompt has token id 128"):
            await collect(client, make_request(prompt=(128,)))
        with pytest.raises(ContextLengthError):
            await collect(client, make_request(prompt=(1,) * 5000))
        first = asyncio.create_task(collect(client, endless("first")))
        await until(lambda: client.stats().running == 1)
        with pytest.raises(InvalidRequestError, match="request_id 'first' is in use"):
            await collect(client, endless("first"))
        second = asyncio.create_task(collect(client, make_request("second")))
        await until(lambda: client.stats().waiting == 1)
        with pytest.raises(QueueFullError):
            await collect(client, make_request("third"))
        await client.abort("first")
        assert (await first)[-1].finish_reason == "abort"
        assert tokens(await second) == [5, 6, 7, 0]
        assert client.core.aborts == ["first"]


async def test_bad_requests_are_told_at_once_while_a_step_is_long():
    """B73: within 100 ms, not after the step."""
    executor = FakeExecutor([5], seconds_per_step=1.0)
    async with engine(executor) as client:
        task = asyncio.create_task(collect(client, endless()))
        await asyncio.sleep(0.05)
        started = time.monotonic()
        with pytest.raises(InvalidRequestError):
            await collect(client, make_request("bad", logit_bias={500: 1.0}))
        assert time.monotonic() - started < 0.5
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_what_piles_up_during_a_long_step_is_bounded():
    """B73: a burst of requests while the engine computes is refused at once beyond what it could ever queue."""
    executor = FakeExecutor([5], seconds_per_step=0.5)
    async with engine(executor, max_running_requests=2, max_queued_requests=3) as client:
        first = asyncio.create_task(collect(client, make_request("first")))
        await until(lambda: client.stats().running == 1)
        burst = [asyncio.create_task(collect(client, make_request(f"r{number}"))) for number in range(50)]
        started = time.monotonic()
        await until(lambda: sum(task.done() for task in burst) >= 45)
        assert time.monotonic() - started < 0.4
        results = await asyncio.gather(first, *burst, return_exceptions=True)
        refused = [result for result in results if isinstance(result, QueueFullError)]
        assert len(refused) == 51 - sum(isinstance(result, list) for result in results) >= 45
        assert all(tokens(result) == [5, 0] for result in results if isinstance(result, list))


async def test_a_missing_seed_is_drawn():
    executor = FakeExecutor()
    async with engine(executor) as client:
        answers = [tokens(await collect(client, make_request(seed=None, max_tokens=12))) for _ in range(4)]
        assert len({tuple(answer) for answer in answers}) > 1
        fixed = [tokens(await collect(client, make_request(seed=7, max_tokens=12))) for _ in range(2)]
        assert fixed[0] == fixed[1]


async def test_a_failed_step_fails_its_stream_and_the_engine_goes_on():
    executor = FakeExecutor([5, 6, 7], faults=FakeFaults(forward_errors=[MemoryError("no room")]))
    async with engine(executor) as client:
        deltas = await collect(client, make_request("a"))
        assert (deltas[-1].finish_reason, deltas[-1].error) == ("error", "the model step failed: MemoryError: no room")
        assert tokens(await collect(client, make_request("b"))) == [5, 6, 7, 0]
        assert client.dead_reason is None


async def test_a_dead_engine_refuses_and_says_why():
    executor = FakeExecutor([5], faults=FakeFaults(poison_token=1))
    async with engine(executor, max_failed_steps=2) as client:
        for name in ("a", "b"):
            assert (await collect(client, make_request(name)))[-1].finish_reason == "error"
        assert client.dead_reason is not None
        with pytest.raises(EngineDeadError, match="2 steps failed in a row"):
            await collect(client, make_request("c"))


async def test_a_fault_of_the_engine_itself_leaves_nobody_waiting():
    async with engine(max_running_requests=1) as client:
        tasks = [asyncio.create_task(collect(client, endless(name))) for name in ("running", "waiting")]
        await until(lambda: client.stats().waiting == 1 and client.stats().generated_tokens > 0)

        def broken_commit(*_: object) -> list[TokenDelta]:
            raise KeyError("a bug")

        client.core.scheduler.commit = broken_commit
        for deltas in await asyncio.gather(*tasks):
            assert deltas[-1].finish_reason == "error"
            assert "internal fault of the engine: KeyError" in (deltas[-1].error or "")
        with pytest.raises(EngineDeadError, match="internal fault"):
            await collect(client, make_request("next"))


async def test_stop_drains_then_aborts_what_is_left():
    executor = FakeExecutor([5, 6, 7], seconds_per_step=0.01, limits=fake_limits(max_context=5000, num_pages=4000))
    client = AsyncEngine(EngineCore(executor, strict=True))
    await client.start()
    short = asyncio.create_task(collect(client, make_request("short")))
    long = asyncio.create_task(collect(client, endless("long")))
    await until(lambda: client.stats().running == 2)
    stopping = asyncio.create_task(client.stop(drain_seconds=0.5))
    await asyncio.sleep(0)
    with pytest.raises(EngineDeadError, match="shutting down"):
        await collect(client, make_request("late"))
    await stopping
    assert (await short)[-1].finish_reason == "stop"
    assert (await long)[-1].finish_reason == "abort"
    assert executor.closed
    await client.stop()


async def test_stop_returns_as_soon_as_everything_is_delivered():
    client = AsyncEngine(EngineCore(FakeExecutor([5, 6, 7]), strict=True))
    await client.start()
    task = asyncio.create_task(collect(client, make_request()))
    await asyncio.sleep(0)
    await asyncio.wait_for(client.stop(drain_seconds=60), 10)
    assert tokens(await task) == [5, 6, 7, 0]


async def test_an_engine_that_was_never_started_refuses_and_stops():
    executor = FakeExecutor([5])
    client = AsyncEngine(EngineCore(executor))
    with pytest.raises(EngineDeadError, match="not started"):
        await collect(client, make_request())
    await client.stop()
    await client.stop()
    assert executor.closed


async def test_an_idle_engine_does_not_spin():
    async with engine() as client:
        await collect(client, make_request())
        await idle(client)
        await asyncio.sleep(0.02)
        asked = client.core.asked_for_work
        await asyncio.sleep(0.2)
        assert client.core.asked_for_work == asked


def test_a_consumer_whose_event_loop_is_gone_is_aborted():
    """A stream that nobody can read any more must not run to max_tokens."""
    core = CountingCore(
        FakeExecutor([5], limits=fake_limits(max_context=5000, num_pages=4000), seconds_per_step=PACE), strict=True
    )
    client = AsyncEngine(core)
    loop = asyncio.new_event_loop()
    stream = client.generate(endless())

    async def first() -> TokenDelta:
        await client.start()
        return await stream.__anext__()

    assert loop.run_until_complete(first()).token_ids == (5,)
    loop.close()
    deadline = time.monotonic() + 10
    while client.stats().running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (client.stats().running, core.aborts) == (0, ["a"])
    asyncio.run(client.stop())


async def test_many_random_streams_and_aborts_leave_nothing_behind():
    """Load with random cancels; afterwards all pages are free (B18) and the engine still answers."""
    limits = fake_limits(max_context=200, num_pages=40)
    async with engine(FakeExecutor(limits=limits), max_queued_requests=500) as client:

        async def one(number: int) -> str:
            request = make_request(f"r{number}", (1,) * (1 + number * 37 % 90), max_tokens=1 + number % 30)
            task = asyncio.create_task(collect(client, request))
            if number % 3 == 0:
                await asyncio.sleep(0.003 * (number % 11))
                task.cancel()
            result = (await asyncio.gather(task, return_exceptions=True))[0]
            return "cancelled" if isinstance(result, asyncio.CancelledError) else str(result[-1].finish_reason)

        ends = await asyncio.gather(*(one(number) for number in range(120)))
        assert set(ends) <= {"cancelled", "stop", "length"}
        assert sum(end != "cancelled" for end in ends) >= 80
        await idle(client)
        assert (await collect(client, make_request("after", max_tokens=2)))[-1].finish_reason is not None
