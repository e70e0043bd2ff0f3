"""kv_write and attention rows against the reference rows: equal bits over mixed steps (docs/ops.md, "attention").

The two run together, since a page can be read by attention alone. Every page holds NaN before use, so a read of a
position that is not visible, or of another sequence, layer or group, shows.
"""

from __future__ import annotations

import numpy as np
import pytest

from .paged import Float32, Paged, Shape, mixed_steps, plain_steps, random_tokens
from .rows import REFERENCE, assert_same_bits, candidates, row_named
from .weights import from_bf16, to_bf16

ROWS = [*candidates("attention_f32", "attention_bf16"), *candidates("kv_write_f32", "kv_write_bf16")]
BF16_ROWS = [row for row in ROWS if "_bf16_" in row]
F32_ROWS = [row for row in ROWS if "_f32_" in row]


def tolerance(shape: Shape, q: Float32, k: Float32, v: Float32) -> float:
    """For bf16 dot-product rows: a score errs by at most delta = 2 dim 2^-23 scale |q| . |k| (each of `dim` additions,
    in both rows); that changes each weight by a factor within exp(+-2 delta), hence an output, an average of V, by at
    most 2 (exp(2 delta) - 1) max |v|; 2^-18 max |v| covers the rounding of what follows."""
    largest = float(np.abs(v).max())
    products = shape.dim * float(np.abs(q).max()) * float(np.abs(k).max())
    delta = 2 * shape.dim * 2.0**-23 * shape.scale * products
    return largest * (2 * float(np.expm1(2 * delta)) + 2.0**-18)


def assert_like_reference(shape: Shape, lengths: list[int], row: str, seed: int, threads: int = 1) -> None:
    numbers = np.random.default_rng([20, seed])
    sequences = [random_tokens(numbers, shape, length) for length in lengths]
    wanted = Paged(shape, sequences, REFERENCE, seed=1).run(plain_steps(lengths, 64))
    paged = Paged(shape, sequences, row, threads=threads, seed=2)
    assert row in paged.rows_ran()
    found = paged.run(mixed_steps(numbers, lengths, 64))
    for index, tokens in enumerate(sequences):
        what = f"{row}, {shape}, sequence {index} of {lengths}"
        assert np.isfinite(wanted[index]).all(), f"the reference read what it must not: {what}"
        if any(row_named(name).relaxed for name in paged.rows_ran()):
            bound = tolerance(shape, tokens.q, tokens.k, tokens.v)
            assert np.abs(found[index].astype(np.float64) - wanted[index]).max() <= bound, what
        else:
            assert_same_bits(found[index], wanted[index], what)


def rows_for(kv: str) -> list[str]:
    return F32_ROWS if kv == "f32" else BF16_ROWS


CASES = [(kv, row) for kv in ("f32", "bf16") for row in rows_for(kv)]


@pytest.mark.parametrize(("kv", "row"), CASES)
@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, 256])
def test_head_sizes(kv: str, row: str, dim: int) -> None:
    assert_like_reference(Shape(dim, kv=kv), [21, 1, 37], row, dim)


@pytest.mark.parametrize(("kv", "row"), CASES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (2, 2), (3, 1), (4, 2), (8, 1), (9, 3), (14, 2)])
def test_head_groups(kv: str, row: str, heads: int, kv_heads: int) -> None:
    """Multi-head, grouped and multi-query attention; groups that are no multiple of the micro-tile."""
    assert_like_reference(Shape(16, heads, kv_heads, kv=kv), [19, 34, 2], row, heads)


@pytest.mark.parametrize(("kv", "row"), CASES)
@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize("window", [0, 1, 15, 16, 17])
def test_windows_and_page_sizes(kv: str, row: str, window: int, page_size: int) -> None:
    assert_like_reference(Shape(32, 3, 1, window, page_size, kv), [70, 15, 16, 17], row, window)


@pytest.mark.parametrize(("kv", "row"), CASES)
@pytest.mark.parametrize(("window", "lengths"), [(0, [256, 257, 290]), (40, [255, 300])])
def test_contexts_over_several_partitions(kv: str, row: str, window: int, lengths: list[int]) -> None:
    """Partitions are 256 positions: contexts end before, at and after the border, windows straddle it."""
    assert_like_reference(Shape(16, 2, 1, window, 32, kv), lengths, row, window)


@pytest.mark.slow
@pytest.mark.parametrize(("kv", "row"), [case for case in CASES if case[1].startswith("attention")])
@pytest.mark.parametrize("window", [0, 17, 300])
def test_long_contexts(kv: str, row: str, window: int) -> None:
    assert_like_reference(Shape(64, 4, 2, window, 16, kv), [700, 513, 300, 1], row, window, threads=2)


@pytest.mark.parametrize("kv", ["f32", "bf16"])
def test_threads_chunks_pages_and_company_change_nothing(kv: str) -> None:
    """Design D6 on the chosen rows: the bits of a sequence are those it has alone, however it is cut into steps,
    whatever its pages are, with any number of threads, run after run."""
    shape = Shape(32, 4, 2, 0, 16, kv)
    numbers = np.random.default_rng(21)
    lengths = [300, 40, 17, 5]
    sequences = [random_tokens(numbers, shape, length) for length in lengths]
    wanted = [Paged(shape, [s], "", seed=i).run(plain_steps([len(s)], 64))[0] for i, s in enumerate(sequences)]
    for threads in (1, 2, 3, 7):
        paged = Paged(shape, sequences, "", threads=threads, seed=threads)
        found = paged.run(mixed_steps(numbers, lengths, 64))
        for index in range(len(lengths)):
            assert_same_bits(found[index], wanted[index], f"{threads} threads, sequence {index}")


@pytest.mark.parametrize("page_size", [32, 64])
def test_page_size_changes_nothing(page_size: int) -> None:
    numbers = np.random.default_rng(22)
    tokens = random_tokens(numbers, Shape(32), 270)
    small = Paged(Shape(32, page_size=16), [tokens], "").run(plain_steps([270], 64))
    large = Paged(Shape(32, page_size=page_size), [tokens], "").run(plain_steps([270], 64))
    assert_same_bits(large[0], small[0], f"page size {page_size} against 16")


@pytest.mark.parametrize(("kv", "row"), [*CASES, ("f32", ""), ("bf16", "")])
def test_a_single_token_returns_its_own_value(kv: str, row: str) -> None:
    """exp(0) = 1 and v * 1 / 1 = v: what is read back is V, rounded to the KV dtype, to the bit."""
    shape = Shape(64, 4, 2, kv=kv)
    tokens = random_tokens(np.random.default_rng(23), shape, 1)
    tokens.v[0, :4] = [3.0e38, 1e-40, 1.00390625, 1.01171875]  # the last two are ties in bf16
    found = Paged(shape, [tokens], row or REFERENCE).run([[(0, 1)]])[0].reshape(2, 2, 64)
    stored = tokens.v if kv == "f32" else from_bf16(to_bf16(tokens.v))
    for head in range(2):
        assert_same_bits(found[:, head], stored.reshape(2, 64), f"query head {head} of each group")


@pytest.mark.parametrize(("kv", "row"), CASES)
def test_a_later_token_cannot_reach_an_earlier_one(kv: str, row: str) -> None:
    """Causality holds for non-finite values too: NaN in the last token of a chunk leaves the tokens before it alone,
    else one odd token would spoil pages that other requests share."""
    shape = Shape(16, 2, 1, kv=kv)
    numbers = np.random.default_rng(24)
    tokens = random_tokens(numbers, shape, 30)
    wanted = Paged(shape, [tokens], REFERENCE).run([[(0, 30)]])[0]
    for part in (tokens.k, tokens.v):
        part[29] = np.nan
    found = Paged(shape, [tokens], row).run([[(0, 30)]])[0]
    assert np.isfinite(found[:29]).all()
    if not row_named(row).relaxed:
        assert_same_bits(found[:29], wanted[:29], row)


@pytest.mark.parametrize(("kv", "row"), CASES)
def test_scores_far_apart(kv: str, row: str) -> None:
    """Weights that underflow to the floor of exp, and equal scores throughout."""
    shape = Shape(16, 2, 1, kv=kv)
    numbers = np.random.default_rng(25)
    for factor in (0.0, 30.0, 1e4):
        tokens = random_tokens(numbers, shape, 40)
        tokens.q *= np.float32(factor)
        wanted = Paged(shape, [tokens], REFERENCE).run([[(0, 40)]])[0]
        found = Paged(shape, [tokens], row).run([[(0, 40)]])[0]
        assert np.isfinite(wanted).all()
        if not row_named(row).relaxed:
            assert_same_bits(found, wanted, f"{row}, factor {factor}")
