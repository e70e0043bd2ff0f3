"""The same request gives the same logits, bit for bit, however it is run (design D6).

Alone or in a batch, in any chunks, with any page size and number of threads, on fresh or used pages.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from neoserve.formats.checkpoint import open_checkpoint
from neoserve.program.executor import Checkpoint
from neoserve.types.step import Float32Array

from .step_driver import StepDriver, assert_same_bits
from .tiny import CONTEXT, FORMATS, native, quantised, tiny_folder

ARCHITECTURES = ("llama", "llama-bias", "llama-d80", "llama-odd", "mistral", "qwen2", "qwen3", "gemma3")
QUANTISED = ("llama", "qwen2", "gemma3")
COMBINATIONS = [(name, fmt) for name in ARCHITECTURES for fmt in ("float32", "bfloat16")]
COMBINATIONS += [(name, fmt) for name in QUANTISED for fmt in FORMATS]
COMBINATIONS += [("llama-odd", "int8_channel")]  # no group divides its sizes

LENGTH = 300  # beyond the first attention partition of 256 positions, and no multiple of a page
IDS = np.random.default_rng(20).integers(0, 128, LENGTH).tolist()
OTHERS = [np.random.default_rng(n).integers(0, 128, n).tolist() for n in (5, 150, 271)]


class Subject:
    """A tiny model in one format, with the logits [LENGTH, V] of IDS run alone, at once, on one thread."""

    def __init__(self, name: str, fmt: str) -> None:
        quantise = fmt in FORMATS
        self.checkpoint: Checkpoint = quantised(name, FORMATS[fmt]) if quantise else open_checkpoint(tiny_folder(name))
        self.dtype = "auto" if quantise else fmt
        with_driver = self.driver()
        self.alone: Float32Array = with_driver.run(IDS).logits
        with_driver.executor.close()

    def driver(self, seed: int = 0, **options: object) -> StepDriver:
        """A driver of a fresh executor; pages are handed out in the order of ``seed``."""
        return StepDriver(native(self.checkpoint, dtype=self.dtype, context_length=CONTEXT, **options), seed)


@pytest.fixture(scope="module", params=COMBINATIONS, ids=[f"{name}-{fmt}" for name, fmt in COMBINATIONS])
def subject(request: pytest.FixtureRequest) -> Subject:
    return Subject(*request.param)


@pytest.fixture
def driver(subject: Subject) -> Iterator[StepDriver]:
    made = subject.driver(seed=1)
    yield made
    made.executor.close()


def test_chunks(subject: Subject, driver: StepDriver) -> None:
    for chunk in (1, 7, 16, 33, 256):
        assert_same_bits(driver.run(IDS, chunk).logits, subject.alone, f"chunks of {chunk}")


def test_rows_of_logits(subject: Subject, driver: StepDriver) -> None:
    """One logits row per step instead of one per token: the output matrix sees other numbers of rows."""
    logits = driver.run(IDS, chunk=25, rows="last").logits
    assert_same_bits(logits, subject.alone[24::25], "last rows of chunks of 25")


def test_batch(subject: Subject, driver: StepDriver) -> None:
    """Prefill and decode of four sequences mixed at random, against each of them alone."""
    alone = [subject.alone, *(driver.run(ids).logits for ids in OTHERS)]
    random = np.random.default_rng(7)
    running = [driver.add(ids) for ids in (IDS, *OTHERS)]
    while True:
        waiting = [one for one in running if one.done < len(one.token_ids)]
        if not waiting:
            break
        chosen = [one for one in waiting if random.random() < 0.8] or waiting[:1]
        random.shuffle(chosen)
        parts = [(one, min(int(random.choice([1, 1, 3, 16, 40])), len(one.token_ids) - one.done)) for one in chosen]
        driver.step(*parts)
    for index, one in enumerate(running):
        assert_same_bits(one.logits, alone[index], f"sequence {index} of the batch")


def test_many_decodes(subject: Subject, driver: StepDriver) -> None:
    """Thirty-five equal sequences decode together: every one of them must follow the one alone."""
    head, tail = IDS[:20], IDS[20:26]
    running = [driver.add(head + tail) for _ in range(35)]
    for one in running:
        driver.step((one, len(head)))
    for _ in tail:
        driver.step(*((one, 1) for one in running))
    for index, one in enumerate(running):
        assert_same_bits(one.logits, subject.alone[:26], f"sequence {index} of 35 equal ones")


def test_used_pages(subject: Subject, driver: StepDriver) -> None:
    driver.run(IDS[::-1])
    assert_same_bits(driver.run(IDS).logits, subject.alone, "pages that held another sequence")


@pytest.mark.parametrize("page_size", [32, 64])
def test_page_sizes(subject: Subject, page_size: int) -> None:
    driver = subject.driver(seed=2, page_size=page_size)
    try:
        assert_same_bits(driver.run(IDS).logits, subject.alone, f"pages of {page_size}, at once")
        assert_same_bits(driver.run(IDS, 37).logits, subject.alone, f"pages of {page_size}, chunks of 37")
        assert_same_bits(driver.run(IDS[:80], 1).logits, subject.alone[:80], f"pages of {page_size}, decode")
    finally:
        driver.executor.close()


@pytest.mark.parametrize("threads", [2, 3])
def test_thread_counts(subject: Subject, threads: int) -> None:
    driver = subject.driver(seed=3, num_threads=threads)
    try:
        for repeat in range(3):  # chunks are claimed in another order every time
            assert_same_bits(driver.run(IDS).logits, subject.alone, f"{threads} threads, run {repeat}")
        assert_same_bits(driver.run(IDS, 11).logits, subject.alone, f"{threads} threads, chunks of 11")
        assert_same_bits(driver.run(IDS[:24], 1).logits, subject.alone[:24], f"{threads} threads, decode")
    finally:
        driver.executor.close()


def test_greedy_tokens(subject: Subject, driver: StepDriver) -> None:
    """Tokens drawn step by step, alone and beside a long prefill."""
    alone = driver.generate(IDS[:40], 24)
    beside = driver.add(OTHERS[2])
    sequence = driver.add(IDS[:40])
    driver.step((sequence, 40), (beside, 30), rows="last")
    output = [int(sequence.rows[-1].argmax())]
    while len(output) < 24:
        sequence.token_ids.append(output[-1])
        driver.step((beside, 9), (sequence, 1), rows="last")
        output.append(int(sequence.rows[-1].argmax()))
    assert output == alone
