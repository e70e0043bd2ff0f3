"""The thread pool at its limits: forks, threads that are refused, more threads than work."""

from __future__ import annotations

import os
import resource

import numpy as np
import pytest

from neoserve import _native

from .bench import Bench
from .linear import run_linear
from .rows import assert_same_bits
from .weights import Format, random_activation, random_weight

pytestmark = pytest.mark.skipif(
    "NEOSERVE_EMULATED_CPU" in os.environ,
    reason="an emulated CPU: the emulator shares fork and the limit of address space with its own needs",
)


def small_bench(threads: int) -> Bench:
    bench = Bench({"x": (64, "f32"), "y": (64, "f32")}, tokens=4, threads=threads)
    bench.op("add", bench["x"], bench["x"], bench["y"])
    bench.set_step_counts(4)
    bench.values("x")[:4] = 1
    bench.values("y")[:4] = 2
    return bench


def in_child(work: object) -> str:
    """What ``work()`` gives, as text, run in a forked child that is given ten seconds."""
    assert callable(work)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        import signal

        signal.alarm(10)
        try:
            text = str(work())
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as stream:
        text = stream.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child ended with status {status}"
    return text


def test_a_forked_child_is_told_and_does_not_hang() -> None:
    bench = small_bench(threads=2)
    bench.run(bench["x"])
    assert "before fork()" in in_child(lambda: bench.model.forward(4, 1, 0))
    bench.run(bench["x"])
    assert (bench.values("x")[:4] == np.float32(5)).all()


def test_refused_threads_are_an_error_that_says_so() -> None:
    def starve() -> str:
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()  # noqa: SIM115
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), used + (64 << 20)))
        try:
            _native.Model(
                threads=1024, arena_bytes=4096, max_tokens=1, max_sequences=1, max_rows=1, max_pages_per_sequence=1,
                page_size=16, kv_dtype="f32",
            )  # fmt: skip
        except RuntimeError as error:
            return str(error)
        return "nothing was refused"

    assert "ask for fewer threads" in in_child(starve)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 5], ids=["gemv", "gemm"])
@pytest.mark.parametrize("n", [1, 4, 63])
def test_every_count_of_threads_gives_the_bits_of_one(n: int, rows: int) -> None:
    """B06: at most four blocks of outputs on 1 to 130 threads; threads without a block do nothing."""
    fmt = Format("int4_group", 32, "f16", "zero")
    numbers = np.random.default_rng(n)
    weight, x = random_weight(numbers, fmt, n, 64), random_activation(numbers, fmt, rows, 64)
    wanted = run_linear(weight, x, "")
    for threads in range(2, 131):
        assert_same_bits(run_linear(weight, x, "", threads=threads, repeats=2), wanted, f"{threads} threads, N {n}")
