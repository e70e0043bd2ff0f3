"""Executor faults: the requests of the step end with "error", the others and the engine go on."""

from __future__ import annotations

import pytest

from neoserve.engine.core import EngineCore
from neoserve.engine.fake import FakeExecutor, FakeFaults
from neoserve.types.errors import EngineDeadError
from neoserve.types.options import EngineOptions
from neoserve.types.request import GenerateRequest, TokenDelta
from neoserve.types.sampling import SamplingParams


def make_core(faults: FakeFaults, **options: int) -> EngineCore:
    return EngineCore(FakeExecutor([5, 6, 7], faults=faults), EngineOptions(**options), strict=True)


def add(core: EngineCore, name: str, *prompt: int) -> None:
    sampling = SamplingParams(temperature=0.0, seed=0, max_tokens=10)
    core.add(GenerateRequest(request_id=name, prompt_token_ids=prompt or (1, 2), sampling=sampling, eos_token_ids=(0,)))


def run(core: EngineCore) -> dict[str, list[TokenDelta]]:
    deltas: dict[str, list[TokenDelta]] = {}
    while core.has_work:
        for delta in core.step():
            deltas.setdefault(delta.request_id, []).append(delta)
    core.scheduler.check_integrity()
    return deltas


def reasons(deltas: dict[str, list[TokenDelta]]) -> dict[str, str | None]:
    return {name: mine[-1].finish_reason for name, mine in deltas.items()}


@pytest.mark.parametrize("error", [RuntimeError("boom"), MemoryError("no room"), ValueError("bound")])
@pytest.mark.parametrize("call", ["forward_errors", "sample_errors"])
def test_a_failed_step_ends_its_requests_and_frees_their_pages(call, error):
    core = make_core(FakeFaults(), max_running_requests=2)
    for name in ("a", "b", "waiting"):
        add(core, name)
    core.step()
    getattr(core.executor.faults, call).append(error)
    deltas = core.step()
    assert [(delta.request_id, delta.finish_reason) for delta in deltas] == [("a", "error"), ("b", "error")]
    assert all(delta.error == f"the model step failed: {type(error).__name__}: {error}" for delta in deltas)
    assert core.stats().used_pages == 0
    assert reasons(run(core)) == {"waiting": "stop"}
    assert core.dead_reason is None


def test_fail_after_some_tokens():
    core = make_core(FakeFaults(fail_after_tokens=2), max_failed_steps=3)
    add(core, "a")
    deltas = run(core)["a"]
    assert [delta.token_ids for delta in deltas] == [(5,), (6,), ()]
    assert deltas[-1].finish_reason == "error"


def test_a_poison_prompt_does_not_end_later_requests():
    core = make_core(FakeFaults(poison_token=99))
    for number in range(5):
        add(core, f"bad-{number}", 1, 99)
        assert reasons(run(core)) == {f"bad-{number}": "error"}
        add(core, f"good-{number}")
        assert reasons(run(core)) == {f"good-{number}": "stop"}
    assert core.dead_reason is None


def test_nan_logits_end_one_request_alone():
    core = make_core(FakeFaults(nan_token=99))
    add(core, "bad", 1, 99)
    add(core, "good")
    deltas = run(core)
    assert reasons(deltas) == {"bad": "error", "good": "stop"}
    assert "no finite value" in (deltas["bad"][-1].error or "")
    assert [token for delta in deltas["good"] for token in delta.token_ids] == [5, 6, 7, 0]


def test_failures_in_a_row_end_the_engine_and_every_request():
    core = make_core(FakeFaults(poison_token=1), max_failed_steps=3, max_running_requests=1)
    for name in ("a", "b", "c", "d", "e"):
        add(core, name)
    deltas = run(core)
    assert reasons(deltas) == dict.fromkeys("abcde", "error")
    assert "the model step failed" in (deltas["a"][0].error or "")
    assert "3 steps failed in a row" in (deltas["e"][0].error or "")
    assert not core.has_work
    with pytest.raises(EngineDeadError, match=r"3 steps failed in a row; the last: .*poison token 1"):
        add(core, "f")


def test_a_good_step_starts_the_count_again():
    core = make_core(FakeFaults(poison_token=99), max_failed_steps=2)
    for number in range(6):
        add(core, f"r{number}", 99 if number % 2 else 1)
        run(core)
    assert core.dead_reason is None


def test_the_fake_refuses_calls_after_close():
    executor = FakeExecutor([5])
    executor.close()
    with pytest.raises(RuntimeError, match="closed"):
        executor.forward()


def _break(executor: FakeExecutor, field: str) -> None:
    step = executor.step
    if field == "token_ids":
        step.token_ids[0] = 128
    elif field == "positions":
        step.positions[1] = 5
    elif field == "query_start":
        step.query_start[1] = 1
    elif field == "logit_rows":
        step.logit_rows[0] = 2
    elif field == "block_tables":
        step.block_tables[0][0, 0] = 128
    else:
        step.num_tokens = 65


@pytest.mark.parametrize("field", ["token_ids", "positions", "query_start", "logit_rows", "block_tables", "num_tokens"])
def test_the_fake_notices_malformed_steps(field):
    """What makes the other tests worth something: a wrong array never passes unseen."""
    core = EngineCore(FakeExecutor([5]))
    add(core, "a")
    core.scheduler.plan(core.executor.step)
    _break(core.executor, field)
    with pytest.raises(ValueError, match="malformed step"):
        core.executor.forward()


def test_the_fake_notices_kv_that_was_never_written():
    core = EngineCore(FakeExecutor([5]))
    add(core, "a", *range(1, 20))
    core.step()
    core.scheduler.plan(core.executor.step)
    core.executor.step.block_tables[0][0, 0] = 77
    with pytest.raises(ValueError, match="never written"):
        core.executor.forward()
