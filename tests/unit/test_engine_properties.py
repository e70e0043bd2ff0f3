"""Random requests, aborts and executor faults through the whole engine: what is answered is answered right."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neoserve.engine.core import EngineCore
from neoserve.engine.fake import FakeExecutor, fake_limits
from neoserve.types.errors import ContextLengthError, QueueFullError
from neoserve.types.options import EngineOptions
from neoserve.types.request import GenerateRequest, TokenDelta
from neoserve.types.sampling import SamplingParams

EOS = 7

requests = st.builds(
    lambda prompt, **fields: ("add", tuple(prompt), fields),
    st.lists(st.integers(0, 31), min_size=1, max_size=70),
    temperature=st.sampled_from([0.0, 1.0, 1.5]),
    max_tokens=st.one_of(st.none(), st.integers(1, 20)),
    min_tokens=st.sampled_from([0, 0, 1]),
    seed=st.integers(0, 5),
    logprobs=st.sampled_from([None, None, 0, 2]),
    presence_penalty=st.sampled_from([0.0, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.2]),
    ignore_eos=st.booleans(),
)
operations = st.lists(
    st.one_of(
        requests,
        requests,
        st.tuples(st.just("step"), st.integers(1, 5)),
        st.tuples(st.just("abort"), st.integers(0, 20)),
        st.tuples(st.just("fail"), st.sampled_from(["forward_errors", "sample_errors"])),
    ),
    max_size=25,
)
machines = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 50),
        "max_sequences": st.integers(1, 5),
        "max_logit_rows": st.integers(1, 9),
        "num_pages": st.integers(2, 12),
        "window": st.sampled_from([None, 5, 20]),
    }
)


def make_core(machine: dict[str, int | None]) -> EngineCore:
    limits = fake_limits(vocab_size=32, max_context=96, **machine)
    options = EngineOptions(max_running_requests=4, max_queued_requests=6, max_failed_steps=1000)
    return EngineCore(FakeExecutor(limits=limits), options, strict=True)


def solo(machine: dict[str, int | None], request: GenerateRequest) -> list[TokenDelta]:
    core, deltas = make_core(machine), []
    core.add(request)
    while core.has_work:
        deltas += core.step()
    return deltas


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(machines, operations)
def test_answers_equal_solo_runs_whatever_happens_around_them(machine, trace):
    """Finished answers are the whole solo answer; aborted and failed ones are its beginning. Nothing is left over."""
    core = make_core(machine)
    sent: list[GenerateRequest] = []
    got: dict[str, list[TokenDelta]] = {}

    def note(deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            assert got[delta.request_id] == [] or got[delta.request_id][-1].finish_reason is None
            # What the cache saves depends on what ran before; nothing else does.
            got[delta.request_id].append(replace(delta, cached_tokens=0))

    for operation, *arguments in trace:
        if operation == "add":
            request = GenerateRequest(
                request_id=f"r{len(sent)}",
                prompt_token_ids=arguments[0],
                sampling=SamplingParams(**arguments[1]),
                eos_token_ids=(EOS,),
                prompt_logprobs=len(sent) % 3 or None,
            )
            try:
                core.add(request)
            except (ContextLengthError, QueueFullError):
                continue
            sent.append(request)
            got[request.request_id] = []
        elif operation == "step":
            for _ in range(arguments[0]):
                note(core.step())
        elif operation == "abort":
            delta = core.abort(f"r{arguments[0]}")
            note([] if delta is None else [delta])
        else:
            getattr(core.executor.faults, arguments[0]).append(RuntimeError("fault switch"))
    core.executor.faults.forward_errors.clear()
    core.executor.faults.sample_errors.clear()
    while core.has_work:
        note(core.step())
    core.scheduler.check_integrity()
    assert core.stats().used_pages == 0
    for request in sent:
        mine, expected = got[request.request_id], solo(machine, request)
        assert mine[-1].finish_reason is not None
        if mine[-1].finish_reason in ("abort", "error"):
            assert mine[:-1] == expected[: len(mine) - 1]
            assert mine[-1].token_ids == ()
        else:
            assert mine == expected
