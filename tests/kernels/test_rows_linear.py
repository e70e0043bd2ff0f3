"""Every linear row against the reference row on the same operands: equal bits (docs/ops.md, "linear")."""

from __future__ import annotations

import numpy as np
import pytest

from .linear import run_linear
from .rows import REFERENCE, assert_same_bits, candidates, row_named
from .weights import FORMATS, Activation, Format, Weight, random_activation, random_weight

# Outputs around the block of 16 and around the four-block tiles; rows around the micro-tiles of 4 and 8.
NS = (1, 5, 15, 16, 17, 31, 33, 64, 65, 100)
MS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 17)
CASES = [(fmt, row) for fmt in FORMATS for row in candidates(fmt.op)]


def relaxed_bound(weight: Weight, x: Activation) -> np.ndarray:
    """For bf16 dot-product rows [rows, n]: they multiply exactly and add with any rounding and order in binary32, and
    may flush subnormal operands and sums; each of K additions errs by at most 2^-23 of the sum of magnitudes (twice,
    for the reference errs too), plus the smallest normal per addition and the products of subnormal operands."""
    rows, columns = np.abs(x.exact()), np.abs(weight.exact())
    smallest = 2.0**-126
    flushed = np.where(rows < smallest, rows, 0) @ columns.T + rows @ np.where(columns < smallest, columns, 0).T
    return 2 * weight.k * (2.0**-23 * (rows @ columns.T) + smallest) + flushed


def assert_like_reference(weight: Weight, x: Activation, row: str, **options: object) -> None:
    found = run_linear(weight, x, row, **options)  # type: ignore[arg-type]
    wanted = run_linear(weight, x, REFERENCE, **options)  # type: ignore[arg-type]
    what = f"{row}, {weight.format}, M {len(x.values)}, N {weight.n}, K {weight.k}, {sorted(options)}"
    if row_named(row).relaxed:
        bound = relaxed_bound(weight, x)
        for key in ("bias", "into"):  # one further rounding for each addition
            bound += 2.0**-23 * (np.abs(wanted) + np.abs(np.asarray(options.get(key, 0), np.float64)))
        with np.errstate(invalid="ignore"):
            close = (np.abs(found.astype(np.float64) - wanted) <= bound) | ~np.isfinite(wanted)
        assert close.all(), what
    else:
        assert_same_bits(found, wanted, what)


def k_choices(fmt: Format) -> list[int]:
    """Multiples of the group; for bf16 even; for int8 per channel also values that are no multiple of 4."""
    if fmt.group:
        return [fmt.group, 2 * fmt.group, 5 * fmt.group]
    return {"f32": [1, 7, 64, 99], "bf16": [2, 6, 64, 98]}.get(fmt.kind, [1, 3, 6, 64, 99, 250])


@pytest.mark.parametrize(("fmt", "row"), CASES, ids=[f"{row}-{fmt}" for fmt, row in CASES])
def test_random_operands(fmt: Format, row: str) -> None:
    numbers = np.random.default_rng([1, FORMATS.index(fmt)])
    for n, m in zip(numbers.permutation(NS)[:5].tolist(), numbers.permutation(MS)[:5].tolist(), strict=True):
        k = int(numbers.choice(k_choices(fmt)))
        weight, x = random_weight(numbers, fmt, n, k), random_activation(numbers, fmt, m, k)
        assert_like_reference(weight, x, row)


@pytest.mark.parametrize(("fmt", "row"), CASES, ids=[f"{row}-{fmt}" for fmt, row in CASES])
def test_extreme_operands(fmt: Format, row: str) -> None:
    """Largest and smallest quantised values throughout, zero rows, subnormal and huge scales, overflow to infinity."""
    numbers = np.random.default_rng([2, FORMATS.index(fmt)])
    k = fmt.group * 2 if fmt.group else 62
    for n, m in ((17, 9), (3, 5)):
        weight = random_weight(numbers, fmt, n, k, extreme=True)
        assert_like_reference(weight, random_activation(numbers, fmt, m, k, extreme=True), row)


@pytest.mark.parametrize(("fmt", "row"), CASES, ids=[f"{row}-{fmt}" for fmt, row in CASES])
def test_bias_and_accumulation(fmt: Format, row: str) -> None:
    """y + bias is rounded before it is added to the output; N ends inside a block."""
    numbers = np.random.default_rng([3, FORMATS.index(fmt)])
    k = fmt.group or 34
    for n, m in ((33, 4), (7, 11)):
        weight, x = random_weight(numbers, fmt, n, k), random_activation(numbers, fmt, m, k)
        bias = numbers.standard_normal(n).astype(np.float32) * 10
        into = numbers.standard_normal((m, n)).astype(np.float32) * 10
        assert_like_reference(weight, x, row, bias=bias)
        assert_like_reference(weight, x, row, into=into)
        assert_like_reference(weight, x, row, bias=bias, into=into)


@pytest.mark.parametrize("row", candidates("linear_int8_channel"))
@pytest.mark.parametrize(("w", "q"), [(-128, -127), (-128, 127), (127, 127), (-1, -127), (0, 127), (-128, 0)])
def test_int8_sums_are_exact_at_the_ends_of_the_range(row: str, w: int, q: int) -> None:
    """A product of bytes that saturates at 16 bits, or an unsigned reading of one side, shows here at once."""
    for k in (1, 2, 3, 4, 5, 64, 4096):
        weight = Weight(Format("int8_channel"), np.full((18, k), w, np.int8), np.ones(18, np.float32))
        x = Activation(np.full((3, k), q, np.int8), np.ones((3, 1), np.float32), np.full((3, 1), q * k, np.int32))
        for force in (row, REFERENCE):
            found = run_linear(weight, x, force)
            assert (found == np.float32(w * q * k)).all(), f"{force}, K {k}"


@pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS if fmt.group in (0, 32)], ids=str)
def test_a_row_does_not_depend_on_its_neighbours(fmt: Format) -> None:
    """Design D6: the bits of a token's result are the same alone and in any batch, on the chosen row."""
    numbers = np.random.default_rng(4)
    k = fmt.group * 3 or 70
    weight, x = random_weight(numbers, fmt, 70, k), random_activation(numbers, fmt, 19, k)
    chosen = weight.pack("").row_name
    whole = run_linear(weight, x, chosen)
    for first, count in ((0, 1), (3, 2), (5, 3), (4, 4), (9, 7), (8, 8), (2, 17)):
        part = slice(first, first + count)
        quantised = [None if a is None else a[part] for a in (x.scales, x.sums)]
        alone = run_linear(weight, Activation(x.values[part], *quantised), chosen)
        assert_same_bits(alone, whole[part], f"{chosen}, rows {part}")


@pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS if fmt.group in (0, 64)], ids=str)
def test_thread_count_and_repetition_change_nothing(fmt: Format) -> None:
    """B06: more threads than blocks is an ordinary case; chunks are claimed in any order."""
    numbers = np.random.default_rng(5)
    k = fmt.group * 2 or 66
    for n in (1, 4, 63, 200):
        weight, x = random_weight(numbers, fmt, n, k), random_activation(numbers, fmt, 5, k)
        wanted = run_linear(weight, x, "", repeats=2)
        for threads in (2, 3, 7):
            assert_same_bits(run_linear(weight, x, "", threads=threads, repeats=3), wanted, f"{threads} threads, N {n}")


@pytest.mark.slow
@pytest.mark.parametrize("threads", [64, 65, 130])
def test_far_more_threads_than_work(threads: int) -> None:
    """B06: beyond 64 threads the row split of another engine underflowed. Threads without a chunk do nothing."""
    fmt = Format("int4_group", 32, "f16", "zero")
    numbers = np.random.default_rng(7)
    for n in (1, 4, 63):
        weight, x = random_weight(numbers, fmt, n, 64), random_activation(numbers, fmt, 3, 64)
        wanted = run_linear(weight, x, REFERENCE)
        assert_same_bits(run_linear(weight, x, "", threads=threads, repeats=2), wanted, f"{threads} threads, N {n}")


@pytest.mark.slow
@pytest.mark.parametrize(("fmt", "row"), CASES, ids=[f"{row}-{fmt}" for fmt, row in CASES])
def test_many_shapes(fmt: Format, row: str) -> None:
    numbers = np.random.default_rng([6, FORMATS.index(fmt)])
    for m, n in zip((*MS, 64), (*NS, 300), strict=True):
        for k in k_choices(fmt):
            weight, x = random_weight(numbers, fmt, n, k), random_activation(numbers, fmt, m, k)
            assert_like_reference(weight, x, row, repeats=2)
