"""Model.sample against the reference of neoserve.sampling, on logits made for its borders (docs/ops.md, "Sampling").

Random batches of real models are in tests/unit/test_sampling_native.py; here the logits go through a program of one
gather, so that the test also runs where no model is.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from neoserve import _native
from neoserve.sampling.philox import philox4x32, uniform
from neoserve.sampling.reference import NO_TOKEN, row_distribution, sample_reference
from neoserve.types.step import ALL_IDS, SampleOutput, SamplingBatch

from .bench import Bench

Float32 = npt.NDArray[np.float32]
TOLERANCE = 1e-9  # sums of some hundred binary64 terms in another order differ by less
Lists = Sequence[dict[int, float]]


def _ragged(lists: Lists | None, rows: int, dtype: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    lists = [{}] * rows if lists is None else lists
    start = np.cumsum([0, *map(len, lists)]).astype(np.int32)
    ids = np.array([token for entry in lists for token in entry], np.int32)
    return start, ids, np.array([value for entry in lists for value in entry.values()], dtype)


def make_batch(
    rows: int,
    *,
    history: Lists | None = None,
    bias: Lists | None = None,
    forbidden: Lists | None = None,
    valid_vocabulary: int = ALL_IDS,
    **fields: Any,
) -> SamplingBatch:
    """Rows at temperature 1 without any filter, seeds and positions counting up; ``fields`` replace arrays."""
    neutral = {"temperature": 1, "top_p": 1, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0}
    arrays: dict[str, Any] = {name: np.full(rows, value, np.float32) for name, value in neutral.items()}
    arrays["frequency_penalty"] = np.zeros(rows, np.float32)
    arrays["top_k"], arrays["num_logprobs"] = np.zeros(rows, np.int32), np.full(rows, -1, np.int32)
    arrays["seed"] = np.arange(rows, dtype=np.uint64) + np.uint64(7)
    arrays["position"] = np.arange(rows, dtype=np.int32)
    for name, value in fields.items():
        arrays[name][:] = value
    arrays["history_start"], arrays["history_tokens"], arrays["history_output_counts"] = _ragged(
        history, rows, np.int32
    )
    arrays["bias_start"], arrays["bias_tokens"], arrays["bias_values"] = _ragged(bias, rows, np.float32)
    arrays["forbidden_start"], arrays["forbidden_tokens"], _ = _ragged(forbidden, rows, np.int32)
    return SamplingBatch(**arrays, valid_vocabulary=valid_vocabulary)


def as_dict(batch: SamplingBatch) -> dict[str, Any]:
    return {name: getattr(batch, name) for name in SamplingBatch.__dataclass_fields__}


def model_of(logits: Float32, threads: int = 2) -> Bench:
    rows, vocab = logits.shape
    bench = Bench({"x": (vocab, "f32"), "y": (vocab, "f32", "rows")}, tokens=rows, rows=rows, threads=threads)
    bench.op("gather_rows", bench["y"], bench["x"], ("input", "logit_rows"))
    bench.set_step_counts(rows, rows)
    bench.step["logit_rows"][:rows] = range(rows)
    bench.values("x")[:] = logits
    bench.run(bench["y"])
    return bench


def sample(logits: Float32, batch: SamplingBatch, threads: int = 2) -> SampleOutput:
    return SampleOutput(*model_of(logits, threads).model.sample(as_dict(batch)))


def assert_like_reference(logits: Float32, batch: SamplingBatch, *, exact: bool = False) -> SampleOutput:
    found, wanted = sample(logits, batch), sample_reference(logits, batch)
    for row, (token, expected) in enumerate(zip(found.token_ids.tolist(), wanted.token_ids.tolist(), strict=True)):
        if token == expected:
            continue
        assert not exact, f"row {row} drew {token}, not {expected}"
        u = uniform(int(batch.seed[row]), int(batch.position[row]))
        assert row_distribution(logits, batch, row).accepts(token, u, TOLERANCE), f"row {row} drew {token}, u {u}"
    return found


@pytest.mark.parametrize(
    ("counter", "key", "wanted"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter: Any, key: Any, wanted: tuple[int, ...]) -> None:
    """The three vectors of philox4x32-10 that its authors publish with Random123."""
    assert philox4x32(counter, key) == wanted


def test_uniform_is_philox() -> None:
    assert _native.uniform(0, 0) == (0x6627E8D5 >> 8) / 2**24
    numbers = np.random.default_rng(70)
    for seed in [0, 1, 2**32 - 1, 2**32, 2**64 - 1, *numbers.integers(0, 2**63, 20).tolist()]:
        for position in (0, 1, 77, 2**31 - 1):
            word = philox4x32((position, 0, 0, 0), (seed & 0xFFFFFFFF, seed >> 32))[0]
            assert _native.uniform(seed, position) == (word >> 8) / 2**24


def test_greedy_takes_the_lowest_id_of_the_maxima() -> None:
    numbers = np.random.default_rng(71)
    logits = numbers.choice(np.float32([-3, 0, 0.5]), (40, 57))
    logits[0] = -5
    logits[1, :] = [-np.inf] * 56 + [-3e38]
    logits[2, 10:13] = np.finfo(np.float32).max
    found = assert_like_reference(logits, make_batch(40, temperature=0), exact=True)
    assert found.token_ids[:3].tolist() == [0, 56, 10]
    assert np.array_equal(found.token_ids, logits.argmax(axis=1))


def test_a_vocabulary_of_one() -> None:
    for temperature in (0, 1, 1e-30, 1e30):
        found = assert_like_reference(np.zeros((3, 1), np.float32), make_batch(3, temperature=temperature), exact=True)
        assert found.token_ids.tolist() == [0, 0, 0]


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-6, 0.5, 2.0, 1e6, 3e38])
def test_temperatures_of_all_sizes(temperature: float) -> None:
    logits = np.random.default_rng(72).standard_normal((64, 200)).astype(np.float32) * 20
    found = assert_like_reference(logits, make_batch(64, temperature=temperature))
    if temperature < 1e-5:
        assert np.array_equal(found.token_ids, logits.argmax(axis=1))
    else:
        assert len(set(found.token_ids.tolist())) > 5


@pytest.mark.parametrize("top_k", [1, 2, 5, 100, 10**6, 2**31 - 1])
def test_top_k_with_ties_at_its_border(top_k: int) -> None:
    """Equal logits at the border: the lowest ids stay."""
    logits = np.random.default_rng(73).choice(np.float32([0, 1, 1.5]), (96, 80))
    found = assert_like_reference(logits, make_batch(96, top_k=top_k))
    for row, token in enumerate(found.token_ids.tolist()):
        kept = np.argsort(-logits[row], kind="stable")[:top_k]
        assert token in kept


@pytest.mark.parametrize("top_p", [1e-9, 0.25, 0.5, 0.75, 0.9999999])
def test_top_p_where_sums_meet_the_border(top_p: float) -> None:
    """Four equal tokens have probability 1/4 each: sums reach 1/4, 1/2 and 3/4 exactly, and there the prefix ends."""
    logits = np.full((64, 40), -1000, np.float32)
    logits[:, [3, 9, 20, 31]] = 2
    found = assert_like_reference(logits, make_batch(64, top_p=top_p), exact=True)
    kept = [3, 9, 20, 31][: max(1, int(np.ceil(np.float32(top_p) * 4)))]
    assert set(found.token_ids.tolist()) == set(kept)


@pytest.mark.parametrize(("min_p", "count"), [(1.0, 1), (0.6, 1), (0.5, 2), (0.25, 3), (0.24, 3), (0.1, 4), (0.0, 5)])
def test_min_p(min_p: float, count: int) -> None:
    """Weights 1, 1/2, 1/4, 1/8 and a trace. A float of ln 2 is not exact, so borders are put just inside."""
    logits = np.log(np.array([1, 0.5001, 0.2501, 0.125, 0.05])).astype(np.float32)
    logits = np.tile(logits, (150, 1))
    found = assert_like_reference(logits, make_batch(150, min_p=min_p))
    assert set(found.token_ids.tolist()) == set(range(count))


def test_a_draw_that_meets_a_border_takes_the_token_beyond_it() -> None:
    """1024 equal tokens and a u that is a multiple of 1/1024: the running sum must exceed u, not reach it."""
    vocab = 1024
    u, seed = next((u, seed) for seed in range(10**6) if (u := _native.uniform(seed, 5) * vocab) == int(u) and u > 0)
    found = assert_like_reference(np.zeros((1, vocab), np.float32), make_batch(1, seed=seed, position=5), exact=True)
    assert found.token_ids.tolist() == [int(u)]


def test_filters_apply_in_order() -> None:
    """top-k, then min-p, then top-p, each on what the one before left; all three at once over random rows."""
    numbers = np.random.default_rng(74)
    logits = (numbers.standard_normal((96, 120)) * 3).astype(np.float32)
    batch = make_batch(
        96,
        top_k=numbers.choice([0, 3, 30], 96),
        min_p=numbers.choice([0, 0.05, 0.3], 96),
        top_p=numbers.choice([1, 0.9, 0.4], 96),
        temperature=numbers.choice([0.7, 1.3], 96),
    )
    assert_like_reference(logits, batch)


def test_bias_penalties_and_forbidden_ids() -> None:
    """In this order: bias, repetition (by sign), frequency and presence of generated ids, forbidden."""
    numbers = np.random.default_rng(75)
    rows, vocab = 80, 50
    logits = (numbers.standard_normal((rows, vocab)) * 4).astype(np.float32)

    def lists(longest: int, low: float, high: float) -> Lists:
        return [
            {int(i): float(numbers.uniform(low, high)) for i in numbers.choice(vocab, longest, replace=False)}
            for _ in range(rows)
        ]

    history = [{i: int(count) for i, count in row.items()} for row in lists(20, 0, 4)]
    batch = make_batch(
        rows,
        history=history,
        bias=lists(8, -100, 100),
        forbidden=lists(10, 0, 1),
        temperature=numbers.choice([0, 1], rows),
        repetition_penalty=numbers.choice([0.5, 1, 1.5], rows),
        presence_penalty=numbers.uniform(-2, 2, rows),
        frequency_penalty=numbers.uniform(-2, 2, rows),
    )
    found = assert_like_reference(logits, batch)
    for row in range(rows):
        span = slice(batch.forbidden_start[row], batch.forbidden_start[row + 1])
        assert found.token_ids[row] not in batch.forbidden_tokens[span]


def test_rows_that_can_draw_nothing_say_so() -> None:
    """All forbidden, all -inf, all NaN: -1, whatever the filters, and no other row is touched."""
    logits = np.zeros((5, 6), np.float32)
    logits[1], logits[2], logits[3, 1:] = -np.inf, np.nan, np.nan
    forbidden: Lists = [dict.fromkeys(range(6), 0.0), {}, {}, {}, {}]
    for temperature in (0.0, 1.0):
        for filters in ({}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.9}):
            batch = make_batch(5, temperature=temperature, forbidden=forbidden, num_logprobs=2, **filters)
            found = assert_like_reference(logits, batch, exact=True)
            assert found.token_ids[:4].tolist() == [NO_TOKEN, NO_TOKEN, NO_TOKEN, 0]
            assert np.isnan(found.logprobs[:3]).all()
            assert found.token_ids[4] >= 0


def test_infinite_and_nan_logits() -> None:
    """+inf is drawn surely, the lowest id first; NaN is never drawn."""
    logits = np.random.default_rng(76).standard_normal((4, 30)).astype(np.float32)
    logits[0, [7, 20]], logits[1, 29], logits[2, ::2], logits[3, 5:] = np.inf, np.inf, np.nan, np.nan
    for temperature in (0.0, 1.0, 1e6):
        found = assert_like_reference(logits, make_batch(4, temperature=temperature), exact=temperature == 0)
        assert found.token_ids[:2].tolist() == [7, 29]
        assert found.token_ids[2] % 2 == 1
        assert found.token_ids[3] < 5


def test_log_probabilities_are_of_the_unmodified_softmax() -> None:
    """Alternatives best first, ties by id; bias, penalties and temperature do not show (binary64, then rounded)."""
    numbers = np.random.default_rng(77)
    logits = numbers.choice(np.float32([-2, 0, 1, 3]), (30, 64)) + numbers.standard_normal((30, 1)).astype(np.float32)
    bias: Lists = [{3: 50.0}] * 30
    batch = make_batch(30, bias=bias, temperature=0.3, num_logprobs=numbers.choice([-1, 0, 5, 20, 64], 30))
    found = assert_like_reference(logits, batch)
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
    for row, count in enumerate(batch.num_logprobs.tolist()):
        assert np.isnan(found.logprobs[row]) == (count < 0)
        if count < 0:
            continue
        assert abs(found.logprobs[row] - exact[row, found.token_ids[row]]) <= 2e-6
        best = np.argsort(-logits[row], kind="stable")[:count]
        assert np.array_equal(found.top_ids[row, :count], best)
        assert np.abs(found.top_logprobs[row, :count] - exact[row, best]).max(initial=0) <= 2e-6
        assert (found.top_ids[row, count:] == NO_TOKEN).all()


@pytest.mark.parametrize("valid", [1, 10, 60, 64, 70])
def test_log_probabilities_leave_out_rows_beyond_the_valid_vocabulary(valid: int) -> None:
    """Padding rows hold the largest logits: they are no alternatives and not part of the sum."""
    logits = np.random.default_rng(79).standard_normal((12, 64)).astype(np.float32)
    logits[:, 60:] += 30
    beyond: Lists = [dict.fromkeys(range(valid, 64), 0.0)] * 12
    batch = make_batch(12, forbidden=beyond, num_logprobs=20, valid_vocabulary=valid)
    found, wanted = assert_like_reference(logits, batch, exact=True), sample_reference(logits, batch)
    kept = logits[:, :valid].astype(np.float64)
    exact = kept - np.log(np.exp(kept).sum(axis=1, keepdims=True))
    assert found.top_ids.shape == (12, min(valid, 20))
    for output in (found, wanted):
        assert np.array_equal(output.top_ids, np.argsort(-kept, axis=1, kind="stable")[:, :20])
        assert np.abs(output.logprobs - exact[range(12), output.token_ids]).max() <= 2e-6
        assert np.abs(output.top_logprobs - np.take_along_axis(exact, output.top_ids, axis=1)).max() <= 2e-6


def test_a_drawn_token_beyond_the_valid_vocabulary_has_probability_zero() -> None:
    logits = np.zeros((1, 8), np.float32)
    batch = make_batch(1, bias=[{7: 50.0}], num_logprobs=0, valid_vocabulary=7)
    for output in (sample(logits, batch), sample_reference(logits, batch)):
        assert (output.token_ids[0], output.logprobs[0]) == (7, -np.inf)


OUT_OF_MEMORY = """
import resource
import numpy as np
from tests.kernels.test_sampler import as_dict, make_batch, model_of
bench, batch = model_of(np.zeros((4, 1 << 23), np.float32)), as_dict(make_batch(4))
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limit = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 20), limit[1]))
try:
    bench.model.sample(batch)
except MemoryError:
    print("refused")
resource.setrlimit(resource.RLIMIT_AS, limit)
print(len(bench.model.sample(batch)[0]))
"""


@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer ends the process itself")
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs the size of the address space")
@pytest.mark.skipif("NEOSERVE_EMULATED_CPU" in os.environ, reason="an emulated Python cannot start itself")
def test_memory_that_runs_out_in_a_draw_ends_the_call_and_not_the_process() -> None:
    """The candidates of a row need 64 MiB, which no thread of the pool gets; the model works again afterwards."""
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-c", OUT_OF_MEMORY], cwd=root, capture_output=True, text=True, timeout=120, check=False
    )
    assert (run.returncode, run.stdout.split()) == (0, ["refused", "4"]), run.stderr


@pytest.mark.parametrize("valid", [0, -1, 1.5, "9", None])
def test_a_valid_vocabulary_that_is_no_count_is_refused(valid: Any) -> None:
    bench, batch = model_of(np.zeros((2, 9), np.float32)), as_dict(make_batch(2))
    with pytest.raises(ValueError, match="valid_vocabulary"):
        bench.model.sample({**batch, "valid_vocabulary": valid})
    del batch["valid_vocabulary"]
    assert bench.model.sample(batch)[0].shape == (2,)


def test_a_row_draws_the_same_alone_with_others_and_with_any_threads() -> None:
    logits = np.random.default_rng(78).standard_normal((33, 90)).astype(np.float32)
    whole = make_batch(33, top_p=0.9, num_logprobs=3)
    wanted = sample(logits, whole, threads=1)
    for threads in (2, 5):
        found = sample(logits, whole, threads)
        for name in ("token_ids", "logprobs", "top_ids", "top_logprobs"):
            assert getattr(found, name).tobytes() == getattr(wanted, name).tobytes()
    for row in (0, 17, 32):
        alone = make_batch(1, top_p=0.9, num_logprobs=3, seed=whole.seed[row], position=whole.position[row])
        assert sample(logits[row : row + 1], alone).token_ids[0] == wanted.token_ids[row]


def test_draws_follow_the_distribution() -> None:
    """4096 seeds over weights 8, 4, 2, 1, 1: chi-square of 4 degrees of freedom is below 23.5 but once in 10^4."""
    logits = np.tile(np.log(np.array([8, 4, 2, 1, 1], np.float32)), (4096, 1))
    found = sample(logits, make_batch(4096))
    counts = np.bincount(found.token_ids, minlength=5)
    expected = 256 * np.array([8, 4, 2, 1, 1])
    assert (((counts - expected) ** 2) / expected).sum() < 23.5


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("history_tokens", [-1]),
        ("history_tokens", [9]),
        ("bias_tokens", [9]),
        ("bias_tokens", [2**31 - 1]),
        ("forbidden_tokens", [-(2**31)]),
        ("history_start", [0, 5, 1]),
        ("bias_start", [-1, 0, 1]),
        ("forbidden_start", [0, 2, 9]),
        ("temperature", [1.0]),
        ("seed", [1]),
        ("history_output_counts", []),
        ("bias_values", []),
    ],
)
def test_a_batch_that_would_read_out_of_bounds_is_refused(name: str, value: list[float]) -> None:
    logits = np.zeros((2, 9), np.float32)
    lists: Lists = [{}, {1: 2.0}]
    bench, batch = model_of(logits), as_dict(make_batch(2, history=lists, bias=lists, forbidden=lists))
    with pytest.raises(ValueError, match=name.removesuffix("_start").removesuffix("_tokens")):
        bench.model.sample({**batch, name: np.array(value, batch[name].dtype)})
    assert bench.model.sample(batch)[0].shape == (2,)


def test_a_batch_of_fewer_rows_than_the_step_is_refused() -> None:
    bench = model_of(np.zeros((2, 9), np.float32))
    with pytest.raises(ValueError, match="has 1 entries; expected 2"):
        bench.model.sample(as_dict(make_batch(1)))


@pytest.mark.parametrize("name", sorted(SamplingBatch.__dataclass_fields__.keys() - {"valid_vocabulary"}))
def test_an_array_that_is_missing_or_of_another_type_is_refused_by_name(name: str) -> None:
    bench, batch = model_of(np.zeros((2, 9), np.float32)), as_dict(make_batch(2))
    with pytest.raises((ValueError, KeyError, TypeError), match=name):
        bench.model.sample({key: array for key, array in batch.items() if key != name})
    with pytest.raises((ValueError, TypeError), match=name):
        bench.model.sample({**batch, name: batch[name].astype(np.float64)})
