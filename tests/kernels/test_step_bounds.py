"""Model.forward checks every count and index of a step before any work: a bad one is a ValueError that names the
array and the value, and the model goes on working."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from .bench import Bench, Group, Span
from .weights import Format, random_weight

VOCAB, DIM, PAGES = 20, 16, 5
TOKENS, SEQUENCES, ROWS, WIDTH = 12, 3, 4, 2  # capacities; pages of 16 tokens


@pytest.fixture
def bench() -> Bench:
    """embed, kv_write, attention, gather_rows over two KV groups; a good step of three sequences is set."""
    made = Bench(
        {"x": (DIM, "f32"), "o": (DIM, "f32"), "y": (DIM, "f32", "rows")},
        tokens=TOKENS,
        rows=ROWS,
        sequences=SEQUENCES,
        table_width=WIDTH,
        groups=[Group(1, 1, DIM, PAGES), Group(1, 1, DIM, PAGES + 1)],
    )
    table = made.weight(random_weight(np.random.default_rng(50), Format("f32"), VOCAB, DIM).pack(""))
    heads = {"heads": 1, "kv_heads": 1, "head_dim": DIM}
    made.op("embed", made["x"], ("input", "token_ids"), table, scale=1.0)
    for group in range(2):
        made.op("kv_write", ("none",), made["x"], made["x"], ("kv", group, 0))
        made.op("attention", made["o"], made["x"], ("kv", group, 0), scale=1.0, window=0, **heads)
    made.op("gather_rows", made["y"], made["o"], ("input", "logit_rows"))
    made.step["token_ids"][:] = range(TOKENS)
    made.set_step([Span(0, 5, [3]), Span(16, 2, [0, 4]), Span(31, 1, [2, 1])], [4, 6, 7])
    return made


def put(name: str, index: int, value: int) -> Callable[[dict[str, Any]], None]:
    def change(step: dict[str, Any]) -> None:
        step[name][index] = value

    return change


def put_page(group: int, sequence: int, page: int, value: int) -> Callable[[dict[str, Any]], None]:
    def change(step: dict[str, Any]) -> None:
        step["block_tables"][group][sequence, page] = value

    return change


BIG, SMALL = 2**31 - 1, -(2**31)
WRONG_VALUES = {
    "token_ids negative": (put("token_ids", 7, -1), "token_ids", -1),
    "token_ids at the vocabulary": (put("token_ids", 0, VOCAB), "token_ids", VOCAB),
    "token_ids huge": (put("token_ids", 3, BIG), "token_ids", BIG),
    "positions off by one": (put("positions", 1, 2), "positions", 2),
    "positions negative": (put("positions", 0, -1), "positions", -1),
    "positions of a decoded token": (put("positions", 7, 30), "positions", 30),
    "positions huge": (put("positions", 6, BIG), "positions", BIG),
    "query_start not from 0": (put("query_start", 0, 1), "query_start", 1),
    "query_start ends early": (put("query_start", 3, 7), "query_start", 7),
    "query_start ends late": (put("query_start", 3, 9), "query_start", 9),
    "query_start of an empty sequence": (put("query_start", 2, 5), "query_start", 5),
    "query_start descending": (put("query_start", 2, 4), "query_start", 4),
    "query_start negative": (put("query_start", 1, SMALL), "query_start", SMALL),
    "query_start beyond the step": (put("query_start", 1, 9), "query_start", 9),
    "context_len zero": (put("context_len", 0, 0), "context_len", 0),
    "context_len below the query": (put("context_len", 0, 4), "context_len", 4),
    "context_len beyond the block table": (put("context_len", 2, 33), "context_len", 33),
    "context_len huge": (put("context_len", 1, BIG), "context_len", BIG),
    "context_len negative": (put("context_len", 1, SMALL), "context_len", SMALL),
    "block_tables negative": (put_page(0, 0, 0, -1), "block_tables", -1),
    "block_tables at the pool": (put_page(0, 1, 1, PAGES), "block_tables", PAGES),
    "block_tables of the second group": (put_page(1, 2, 1, PAGES + 1), "block_tables", PAGES + 1),
    "block_tables of a decoding sequence's first page": (put_page(1, 2, 0, BIG), "block_tables", BIG),
    "logit_rows negative": (put("logit_rows", 0, -1), "logit_rows", -1),
    "logit_rows at the token count": (put("logit_rows", 2, 8), "logit_rows", 8),
}


@pytest.mark.parametrize("case", WRONG_VALUES)
def test_a_value_out_of_bounds_is_refused(bench: Bench, case: str) -> None:
    change, array, value = WRONG_VALUES[case]
    bench.run(bench["x"], bench["o"], bench["y"])
    before = bench.arena.copy()
    change(bench.step)
    with pytest.raises(ValueError, match=rf"{array}\b.*{re.escape(str(value))}\b"):
        bench.model.forward(*bench.counts)
    assert np.array_equal(bench.arena, before), "a refused step did some work"
    bench.set_step([Span(0, 5, [3]), Span(16, 2, [0, 4]), Span(31, 1, [2, 1])], [4, 6, 7])
    bench.step["token_ids"][:] = range(TOKENS)
    bench.run(bench["x"], bench["o"], bench["y"])


@pytest.mark.parametrize(
    ("counts", "name", "value"),
    [
        ((0, 3, 3), "num_tokens", 0),
        ((-1, 3, 3), "num_tokens", -1),
        ((TOKENS + 1, 3, 3), "num_tokens", TOKENS + 1),
        ((BIG, 3, 3), "num_tokens", BIG),
        ((8, 0, 3), "num_sequences", 0),
        ((8, -1, 3), "num_sequences", -1),
        ((8, SEQUENCES + 1, 3), "num_sequences", SEQUENCES + 1),
        ((8, SMALL, 3), "num_sequences", SMALL),
        ((8, 3, -1), "num_logit_rows", -1),
        ((8, 3, ROWS + 1), "num_logit_rows", ROWS + 1),
        ((8, 3, BIG), "num_logit_rows", BIG),
        ((8, 2, 3), "query_start", 7),
        ((7, 3, 0), "query_start", 8),
    ],
)
def test_a_count_out_of_bounds_is_refused(bench: Bench, counts: tuple[int, int, int], name: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"{name}\b.*{re.escape(str(value))}\b"):
        bench.model.forward(*counts)
    bench.run(bench["x"], bench["o"], bench["y"])


def test_entries_beyond_the_counts_are_never_read(bench: Bench) -> None:
    """Stale values of a larger earlier step are no error and change nothing."""
    bench.run(bench["x"], bench["o"], bench["y"])
    wanted = bench.values("y")[:3].copy()
    for name, used in (("token_ids", 8), ("positions", 8), ("query_start", 4), ("context_len", 3), ("logit_rows", 3)):
        bench.step[name][used:] = SMALL
    for table in bench.step["block_tables"]:
        table[0, 1:] = BIG
    bench.run(bench["x"], bench["o"], bench["y"])
    assert bench.values("y")[:3].tobytes() == wanted.tobytes()


def test_a_step_without_logit_rows_runs(bench: Bench) -> None:
    bench.set_step([Span(0, 5, [3])])
    bench.run(bench["x"], bench["o"])
    assert bench.model.logits().shape == (0, DIM)


def test_a_step_at_every_limit_runs(bench: Bench) -> None:
    bench.set_step([Span(0, 10, [0]), Span(31, 1, [1, 2]), Span(31, 1, [3, 4])], [0, 9, 10, 11])
    bench.run(bench["x"], bench["o"], bench["y"])


def test_a_closed_model_refuses_and_its_views_stay_valid(bench: Bench) -> None:
    bench.run(bench["x"], bench["o"], bench["y"])
    logits, arena, step = bench.model.logits(), bench.arena, bench.step
    kept = logits.copy(), arena.copy()
    bench.model.close()
    bench.model.close()  # closing twice is no error
    assert np.array_equal(logits, kept[0])
    assert np.array_equal(arena, kept[1])
    for array in (*[step[n] for n in step if n != "block_tables"], *step["block_tables"], logits, arena):
        array[:] = 1  # a write after close must land in memory that is still ours
        assert (array == 1).all()
    model = bench.model
    for call in (
        lambda: model.forward(8, 3, 3),
        model.logits,
        model.arena,
        model.step_arrays,
        model.rows,
        model.profile,
        lambda: model.sample({}),
        lambda: model.add_vector(np.ones(3, np.float32)),
        lambda: model.add_group(1, 1, 16, 1),
        lambda: model.set_profiling(True),
    ):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_views_outlive_the_model_object() -> None:
    made = Bench({"x": (16, "f32")}, tokens=2)
    arena, ids = made.arena, made.step["token_ids"]
    del made
    arena[:] = 7
    ids[:] = 7
    assert arena.sum() == 7 * len(arena)
