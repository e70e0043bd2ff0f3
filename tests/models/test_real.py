"""Published models: greedy tokens and perplexity against transformers in float32 on the same dequantised weights.

NEOSERVE_TEST_MODELS names the folder of the GGUF files (the default model is found in the cache too). The perplexity
tests also need NEOSERVE_TEST_TEXT, the path of the text whose digest is in golden/real/perplexity.json; they take
minutes, and NEOSERVE_TEST_WINDOWS limits them to the first windows of it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from neoserve.eval.perplexity import perplexity, text_windows
from neoserve.text.load import load_tokenizer

from .real_models import DEFAULT_MODEL, GOLDEN, MODELS, golden, open_model, real_executor
from .step_driver import StepDriver, assert_same_bits

pytestmark = pytest.mark.model

TIE = 1e-3  # two logits nearer than this may swap by float32 rounding alone


@pytest.fixture(scope="module", params=MODELS)
def float32_driver(request: pytest.FixtureRequest) -> Iterator[tuple[str, StepDriver]]:
    checkpoint = open_model(request.param)
    executor = real_executor(checkpoint, dtype="float32")
    yield request.param, StepDriver(executor, seed=4)
    executor.close()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("prompt", range(8))
def test_greedy_tokens_equal_transformers(float32_driver: tuple[str, StepDriver], prompt: int) -> None:
    name, driver = float32_driver
    case = golden(name)["prompts"][prompt]
    output = driver.generate(case["prompt_ids"], len(case["output_ids"]), chunk=512)
    where = next((i for i, pair in enumerate(zip(output, case["output_ids"], strict=True)) if len(set(pair)) > 1), None)
    if where is not None:
        gap = case["gaps"][where]
        assert gap < TIE, (
            f"{name}, prompt {case['name']!r}: token {where} is {output[where]}, transformers has "
            f"{case['output_ids'][where]} with a gap of {gap} to its second"
        )


@pytest.mark.parametrize("name", MODELS)
def test_prompt_ids_equal_transformers(name: str) -> None:
    checkpoint = open_model(name)
    tokenizer = load_tokenizer(checkpoint.tokenizer)
    for case in golden(name)["prompts"]:
        ids = tokenizer.encode(case["text"], add_bos=golden(name)["adds_bos"], parse_special=True)
        assert ids == case["prompt_ids"], f"prompt {case['name']!r}"


def _text() -> str:
    """The text of the golden perplexities, or a skip; another text fails."""
    path = os.environ.get("NEOSERVE_TEST_TEXT")
    if not path:
        pytest.skip("NEOSERVE_TEST_TEXT is not set; it names the text of golden/real/perplexity.json")
    wanted = _golden_perplexity()["text"]
    raw = Path(path).expanduser().read_bytes()[: wanted["bytes"]]
    assert hashlib.sha256(raw).hexdigest() == wanted["sha256"], f"{path} is not the text of the golden perplexities"
    return raw.decode("utf-8")


def _golden_perplexity() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((GOLDEN / "perplexity.json").read_text(encoding="utf-8"))
    return loaded


def _windows(name: str, checkpoint: Any) -> list[list[int]]:
    wanted = _golden_perplexity()["models"][name]
    tokens = load_tokenizer(checkpoint.tokenizer).encode(_text(), add_bos=False, parse_special=False)
    assert len(tokens) == wanted["tokens"]
    assert hashlib.sha256(np.asarray(tokens, "<u4").tobytes()).hexdigest() == wanted["tokens_sha256"]
    windows = text_windows(tokens, wanted["window"], wanted["bos"])
    assert len(windows) == wanted["windows"]
    return windows[: len(wanted["nll"])]


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("dtype", "bound"), [("auto", 0.007), ("bfloat16", 0.003)])
@pytest.mark.parametrize("name", MODELS)
def test_perplexity_is_near_float32(name: str, dtype: str, bound: float) -> None:
    """``auto`` runs the GGUF weights quantised as they are. Both sides score the same windows."""
    checkpoint = open_model(name)
    count = int(os.environ.get("NEOSERVE_TEST_WINDOWS") or 10**6)
    windows = _windows(name, checkpoint)[:count]
    wanted = _golden_perplexity()["models"][name]
    expected = math.exp(sum(wanted["nll"][: len(windows)]) / (len(windows) * (wanted["window"] - 1)))
    executor = real_executor(checkpoint, dtype=dtype)
    try:
        measured = perplexity(executor, windows)
    finally:
        executor.close()
    print(f"{name} {dtype}: {measured:.4f}, transformers float32 {expected:.4f}, {measured / expected - 1:+.3%}")
    assert abs(measured / expected - 1) < bound


@pytest.mark.timeout(1800)
def test_default_model_is_invariant() -> None:
    """The bit-for-bit property of test_invariance.py at a real model's sizes, in its own quantised format."""
    checkpoint = open_model(DEFAULT_MODEL)
    prompts = [golden(DEFAULT_MODEL)["prompts"][index]["prompt_ids"] for index in (7, 1, 5)]
    ids = prompts[0][:330]
    executor = real_executor(checkpoint, num_threads=1)
    try:
        alone = StepDriver(executor).run(ids, chunk=64).logits
    finally:
        executor.close()
    for threads, page_size in ((1, 64), (2, 16), (3, 32)):
        executor = real_executor(checkpoint, num_threads=threads, page_size=page_size)
        driver = StepDriver(executor, seed=threads)
        where = f"{threads} threads, pages of {page_size}"
        try:
            last = driver.run(ids, chunk=110, rows="last").logits
            assert_same_bits(last, alone[109::110], f"{where}, chunks of 110")
            first, second, third = (driver.add(part) for part in (ids[:120], prompts[1], prompts[2]))
            driver.step((second, len(prompts[1]) - 8), (first, 20))
            for _ in range(8):
                driver.step((first, 12), (second, 1), (third, 3))
            assert_same_bits(first.logits, alone[: first.done], f"{where}, in a batch")
        finally:
            executor.close()


@pytest.mark.timeout(600)
def test_near_equal_prompts_answer_together_as_alone() -> None:
    """B08: five prompts that differ in one number, one by one and at once."""
    checkpoint = open_model(DEFAULT_MODEL)
    tokenizer = load_tokenizer(checkpoint.tokenizer)
    words = ("amber-17", "amber-71", "cobalt-17", "cobalt-18", "maple-17")
    prompts = [
        tokenizer.encode(
            f"<|im_start|>user\nRemember the passphrase {word}. Repeat it.<|im_end|>\n<|im_start|>assistant\n",
            add_bos=False,
            parse_special=True,
        )
        for word in words
    ]
    executor = real_executor(checkpoint)
    driver = StepDriver(executor, seed=8)
    try:
        alone = [driver.generate(prompt, 16) for prompt in prompts]
        assert len({tuple(output) for output in alone}) > 1, "the prompts must not all have one answer"
        running = [driver.add(prompt) for prompt in prompts]
        driver.step(*((one, len(one.token_ids)) for one in running), rows="last")
        together = [[int(one.rows[-1].argmax())] for one in running]
        for _ in range(15):
            for one, output in zip(running, together, strict=True):
                one.token_ids.append(output[-1])
            driver.step(*((one, 1) for one in running))
            for one, output in zip(running, together, strict=True):
                output.append(int(one.rows[-1].argmax()))
    finally:
        executor.close()
    assert together == alone
