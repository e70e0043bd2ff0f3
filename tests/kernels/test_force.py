"""The force knob, and what the registry tells of rows: `neoserve doctor` and --kernels rest on it."""

from __future__ import annotations

import os
import re

import numpy as np
import pytest

from neoserve import _native

from .bench import Bench, Group, Span
from .rows import ALL_ROWS, REFERENCE, RELAXED_FOLDERS, USABLE_FOLDERS, USABLE_ROWS, Row, row_named
from .weights import Format, random_weight

FOLDERS = _native.folders()
LACKING_FOLDERS = [folder for folder in FOLDERS if folder not in USABLE_FOLDERS]
GROUP = {"int8_group": (16, "f16"), "int4_group": (16, "f32")}


def test_nothing_but_bf16_dot_products_is_relaxed() -> None:
    """Tests hold relaxed rows to a bound instead of equal bits; the build must not grant that to any other row."""
    linear = [row.name for row in ALL_ROWS if row.folder in RELAXED_FOLDERS and row.op == "linear_bf16"]
    assert _native.relaxed_rows() == linear


def rows_of_forced_op(op: str, force: str) -> str:
    """Binds one op with ``force``, runs it, and returns the row that ran."""
    kv = "bf16" if op.endswith("_bf16") else "f32"
    columns = 32
    bench = Bench(
        {"x": (2 * columns, "f32"), "y": (columns, "f32"), "b": (columns, "bf16"), "q": (columns, "int8_token")},
        force=force,
        tokens=2,
        kv=kv,
        groups=[Group(1, 2, 16, 1)],
    )
    x, y = bench.buffers["x"].view(0, columns), bench["y"]
    bench.arena[:] = 0
    out = y
    if op.startswith("linear_"):
        kind = op.removeprefix("linear_")
        group, scale = GROUP.get(kind, (0, ""))
        fmt = Format(kind, group, scale)
        weight = random_weight(np.random.default_rng(0), fmt, columns, columns)
        bench = Bench({"x": (columns, fmt.activation), "y": (columns, "f32")}, force=force, tokens=2)
        bench.arena[:] = 0
        out = bench["y"]
        bench.op("linear", out, bench["x"], bench.weight(weight.pack(force)), accumulate=0)
    elif op == "rms_norm":
        bench.op(op, y, x, bench.vector(np.ones(columns)), eps=1e-5, width=columns)
    elif op.startswith("quantize_"):
        out = bench["b"] if op.endswith("bf16") else bench["q"]
        bench.op("quantize", out, x)
    elif op == "rope":
        bench.op(op, y, y, bench["y"], head_dim=columns)
    elif op == "add":
        bench.op(op, y, y, x)
    elif op.startswith("kv_write"):
        bench.op("kv_write", ("none",), x, x, ("kv", 0, 0))
    elif op.startswith("attention"):
        bench.op("attention", y, x, ("kv", 0, 0), scale=1.0, window=0, heads=2, kv_heads=2, head_dim=16)
    else:
        bench.op(op, y, bench["x"])
    bench.set_step([Span(0, 2, [0])])
    bench.run(out) if not op.startswith("kv_write") else bench.run()
    ((_, _, row),) = bench.model.rows()
    return row


@pytest.mark.parametrize("row", USABLE_ROWS, ids=lambda row: row.name)
def test_forcing_a_row_runs_it(row: Row) -> None:
    assert rows_of_forced_op(row.op, row.name) == row.name


@pytest.mark.parametrize("op", sorted({row.op for row in ALL_ROWS}))
@pytest.mark.parametrize("folder", USABLE_FOLDERS)
def test_forcing_a_feature_set_never_uses_a_more_preferred_one(op: str, folder: str) -> None:
    """Its own row if it has one for the op; else the next set below it."""
    below = FOLDERS[FOLDERS.index(folder) :]
    wanted = next(row for f in below for row in USABLE_ROWS if row.folder == f and row.op == op)
    assert rows_of_forced_op(op, folder) == wanted.name


@pytest.mark.parametrize("op", sorted({row.op for row in ALL_ROWS}))
def test_without_force_the_most_preferred_row_of_this_cpu_runs(op: str) -> None:
    assert rows_of_forced_op(op, "") == next(row.name for row in USABLE_ROWS if row.op == op)


@pytest.mark.parametrize("force", LACKING_FOLDERS + [row.name for row in ALL_ROWS if row.missing])
def test_a_force_that_the_cpu_lacks_is_refused_by_name(force: str) -> None:
    missing = next(row.missing for row in ALL_ROWS if row.missing and force in (row.name, row.folder))
    for call in (
        _native.rows,
        lambda name: _native.pack_weight("f32", 4, 4, force=name),
        lambda name: Bench({}, force=name),
    ):
        with pytest.raises(ValueError, match=re.escape(force)) as error:
            call(force)
        assert f"lacks {missing}" in str(error.value)
        assert "neoserve doctor" in str(error.value)


@pytest.mark.parametrize("force", ["avx1024", "AVX2", "reference ", "linear", "linear_f32", "-"])
def test_an_unknown_force_is_refused_with_the_known_names(force: str) -> None:
    for call in (
        _native.rows,
        lambda name: _native.pack_weight("f32", 4, 4, force=name),
        lambda name: Bench({}, force=name),
    ):
        with pytest.raises(ValueError, match=re.escape(f'"{force}"')) as error:
            call(force)
        assert all(folder in str(error.value) for folder in FOLDERS)


def test_every_op_has_one_chosen_row_and_a_reason_for_each_other() -> None:
    for force in ("", *USABLE_FOLDERS, *[row.name for row in USABLE_ROWS]):
        chosen: dict[str, int] = {}
        for op, _, _, is_chosen, reason in _native.rows(force):
            chosen[op] = chosen.get(op, 0) + is_chosen
            assert bool(reason) != is_chosen
        assert set(chosen.values()) == {1}, f"force {force!r}"


def test_the_reference_comes_last_and_has_every_op() -> None:
    assert FOLDERS[-1] == REFERENCE
    assert {row.op for row in ALL_ROWS if row.folder == REFERENCE} == {row.op for row in ALL_ROWS}
    assert all(not row.missing for row in ALL_ROWS if row.folder == REFERENCE)


def test_row_names_are_unique_and_say_op_and_feature_set() -> None:
    names = [row.name for row in ALL_ROWS]
    assert len(set(names)) == len(names)
    assert all(row.name == f"{row.op}_{row.folder}" for row in ALL_ROWS)


def test_features_agree_with_the_rows() -> None:
    """A row lacks exactly features that were not found."""
    found = set(_native.cpu_features())
    for row in ALL_ROWS:
        assert not found & set(row.missing.split(", ")), row.name


def _expected(variable: str) -> list[str]:
    return [name for name in os.environ.get(variable, "").split(",") if name]


@pytest.mark.skipif(not _expected("NEOSERVE_EXPECT_FEATURES"), reason="NEOSERVE_EXPECT_FEATURES is not set")
def test_features_are_those_that_the_lane_expects() -> None:
    """The emulated CPU of a CI lane has these features and no others ("none": no feature at all)."""
    wanted = set(_expected("NEOSERVE_EXPECT_FEATURES")) - {"none"}
    assert set(_native.cpu_features()) == wanted


@pytest.mark.skipif(not _expected("NEOSERVE_EXPECT_ROWS"), reason="NEOSERVE_EXPECT_ROWS is not set")
def test_rows_are_those_that_the_lane_expects() -> None:
    """The lane names rows that must be the chosen ones for their ops, so that a silent fall-back fails it."""
    chosen = {name for _, name, _, is_chosen, _ in _native.rows() if is_chosen}
    for name in _expected("NEOSERVE_EXPECT_ROWS"):
        assert row_named(name).name in chosen, f"{name} is not chosen; chosen: {sorted(chosen)}"
