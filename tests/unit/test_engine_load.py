"""Loading a model into an engine, and the engine on the native executor with tiny models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from neoserve.engine.core import EngineCore
from neoserve.engine.load import LoadedModel, load_engine
from neoserve.types.errors import CheckpointError, ConfigurationError, ModelNotFoundError
from neoserve.types.options import EngineOptions
from neoserve.types.request import GenerateRequest
from neoserve.types.sampling import SamplingParams

from ..serve.invariance import assert_same_answer, run

pytest.importorskip("neoserve._native")

TINY = Path(__file__).parents[1] / "models" / "golden" / "tiny"
PROMPTS = [[1], [2, 3, 4, 5, 6], list(range(7, 60)), list(range(100, 7, -1))]


def load(name: str, **changes: object) -> LoadedModel:
    values: dict[str, object] = {
        "max_running_requests": 8,
        "max_tokens_per_step": 128,
        "context_length": 128,
        "kv_cache_bytes": 8 << 20,
        "num_threads": 1,
    }
    return load_engine(str(TINY / name), EngineOptions(**{**values, **changes}))


def test_what_was_chosen_is_told():
    loaded = load("gemma3", dtype="bfloat16", page_size=32)
    try:
        assert loaded.served_name == "gemma3"
        assert loaded.config.architecture == "gemma3"
        assert loaded.path == TINY / "gemma3"
        assert loaded.details["weight_formats"] == ["bf16"]
        assert loaded.details["kv_dtype"] == "bf16"
        assert loaded.details["page_size"] == 32
        assert loaded.details["context_length"] == loaded.core.context_length == 128
        assert loaded.details["threads"] == 1
        for word in ("gemma3", "bf16", "context 128 tokens", "KV cache", "1 thread"):
            assert word in loaded.summary
        assert "\n" not in loaded.summary
        assert len(loaded.digest) == 64
        assert loaded.load_seconds > 0
    finally:
        loaded.close()


def test_rows_that_fall_back_are_counted_and_named(caplog):
    """A slow row is never silent: the metric counts the ops on it, and the details name the rows."""
    forced = load("llama", kernel_force="reference")
    rows = [row for _, _, row in forced.core.executor.rows() if row]
    assert forced.core.stats().row_fallbacks == len(rows) > 0
    assert forced.details["kernel_rows"] == sorted(set(rows))
    assert all(row.endswith("_reference") for row in rows)
    assert "portable" not in caplog.text
    forced.close()
    best = load("llama")
    slow = [row for _, _, row in best.core.executor.rows() if row.endswith("_reference")]
    assert best.core.stats().row_fallbacks == len(slow)
    assert ("run on the portable one" in caplog.text) == bool(slow)
    best.close()


def test_packing_reports_its_progress():
    calls: list[tuple[int, int, str]] = []
    options = EngineOptions(max_running_requests=1, context_length=64, kv_cache_bytes=4 << 20)
    load_engine(
        str(TINY / "llama"), options, pack_progress=lambda done, total, name: calls.append((done, total, name))
    ).close()
    assert calls[0][0] == 0
    assert calls[-1][0] == calls[-1][1] > 0
    assert [done for done, _, _ in calls] == sorted(done for done, _, _ in calls)


def test_errors_of_loading_say_what_to_do(tmp_path):
    with pytest.raises(ModelNotFoundError, match="no such file"):
        load_engine(str(tmp_path / "missing"))
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(CheckpointError, match=r"empty\.gguf"):
        load_engine(str(tmp_path / "empty.gguf"))
    with pytest.raises(ConfigurationError, match="kv_cache_bytes"):
        load("llama", kv_cache_bytes=1)
    with pytest.raises(ConfigurationError, match="context_length is 10000000"):
        load("llama", context_length=10**7)


@pytest.mark.parametrize(("name", "dtype"), [("llama", "float32"), ("gemma3", "bfloat16"), ("mistral", "auto")])
def test_no_way_of_running_changes_an_answer(name, dtype):
    """Design D6 through the whole engine: batches, chunks, aborts; tokens and log probabilities bit for bit."""

    def make_core(chunk: int) -> EngineCore:
        return load(name, dtype=dtype, max_tokens_per_step=chunk).core

    assert_same_answer(make_core, PROMPTS, chunks=(128, 9))


def test_greedy_tokens_and_prompt_logprobs_follow_the_golden_logits():
    """The engine's scores of a golden prompt are those of Hugging Face's logits."""
    with np.load(TINY / "llama" / "expected.npz") as golden:
        ids, logits = (
            golden["input_ids"].reshape(-1)[:40],
            golden["logits"].reshape(-1, golden["logits"].shape[-1])[:40],
        )
    loaded = load("llama", dtype="float32")
    request = GenerateRequest(
        request_id="a",
        prompt_token_ids=tuple(ids.tolist()),
        sampling=SamplingParams(temperature=0.0, max_tokens=1, logprobs=0, seed=0),
        prompt_logprobs=1,
    )
    answer = run(loaded.core, [request])["a"]
    loaded.close()
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(-1, keepdims=True))
    assert answer.token_ids[0] == int(exact[-1].argmax())
    assert answer.logprobs[0].logprob == pytest.approx(exact[-1].max(), abs=2e-4)
    assert answer.prompt_logprobs is not None
    for position, score in enumerate(answer.prompt_logprobs[1:]):
        assert score is not None
        assert score.logprob == pytest.approx(exact[position, ids[position + 1]], abs=2e-4)
        assert score.top[0][1] == pytest.approx(exact[position].max(), abs=2e-4)
