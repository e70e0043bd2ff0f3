"""The numpy reference of every tiny model against the logits that transformers computed in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from neoserve.formats.checkpoint import open_checkpoint
from neoserve.models.registry import build_program, known_architectures
from neoserve.program.executor import build_reference_executor, prepare
from neoserve.program.reference import ReferenceExecutor
from neoserve.types.options import EngineOptions
from neoserve.types.step import Float32Array

TINY = Path(__file__).parent / "golden" / "tiny"
NAMES = sorted(folder.name for folder in TINY.iterdir() if (folder / "expected.npz").is_file())
TOLERANCE = 1e-4
OPTIONS = EngineOptions(
    dtype="float32", max_tokens_per_step=128, max_running_requests=2, kv_cache_bytes=8 << 20, context_length=128
)


def run(executor: ReferenceExecutor, ids: npt.NDArray[np.int64], chunks: list[int], sequence: int = 0) -> Float32Array:
    """Logits of all positions, computed in steps of the given numbers of tokens; pages lie scattered."""
    step, limits = executor.step, executor.limits
    pages = limits.max_pages_per_sequence
    for table, group in zip(step.block_tables, limits.groups, strict=True):
        order = np.random.default_rng(sequence).permutation(group.num_pages)
        table[0, :pages] = order[:pages]
    parts, done = [], 0
    for count in chunks:
        step.num_tokens = step.num_logit_rows = count
        step.num_sequences = 1
        step.token_ids[:count] = ids[done : done + count]
        step.positions[:count] = np.arange(done, done + count)
        step.query_start[:2] = (0, count)
        step.context_len[0] = done + count
        step.logit_rows[:count] = np.arange(count)
        executor.forward()
        parts.append(executor.logits().copy())
        done += count
    assert done == len(ids)
    return np.concatenate(parts)


def golden(name: str) -> tuple[npt.NDArray[np.int64], Float32Array]:
    arrays = np.load(TINY / name / "expected.npz")
    ids = arrays["input_ids"].reshape(-1)
    return ids, arrays["logits"].reshape(len(ids), -1)


def test_every_architecture_has_a_golden_model() -> None:
    covered = {open_checkpoint(TINY / name).config.architecture for name in NAMES}
    assert covered == set(known_architectures())


def test_every_rope_kind_has_a_golden_model() -> None:
    covered = {rope.kind for name in NAMES for rope in open_checkpoint(TINY / name).config.ropes}
    assert covered == {"default", "linear", "dynamic", "llama3", "yarn"}


@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_transformers(name: str, precision: str) -> None:
    ids, expected = golden(name)
    with open_checkpoint(TINY / name) as checkpoint:
        executor = build_reference_executor(checkpoint, OPTIONS, build_program, precision=precision)  # type: ignore[arg-type]
        logits = run(executor, ids, [len(ids)])
    assert expected.std() > 1, "a golden model whose logits hardly vary would prove nothing"
    np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_chunked_prefill_and_decode_give_the_same_logits(name: str) -> None:
    ids, expected = golden(name)
    with open_checkpoint(TINY / name) as checkpoint:
        executor = build_reference_executor(checkpoint, OPTIONS, build_program)
        logits = run(executor, ids, [1, 16, 17, *[1] * (len(ids) - 34)])
    np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen2-window"])
def test_two_sequences_in_one_step(name: str) -> None:
    """A decode row and a prefill chunk share a step: neither sees the other's KV."""
    ids, expected = golden(name)
    with open_checkpoint(TINY / name) as checkpoint:
        executor = build_reference_executor(checkpoint, OPTIONS, build_program)
        run(executor, ids[:-1], [len(ids) - 1])
        step, last, count = executor.step, len(ids) - 1, 20
        for table in step.block_tables:
            free = np.setdiff1d(np.arange(executor.limits.groups[0].num_pages), table[0])
            table[1, : free.size][: table.shape[1]] = free[: table.shape[1]]
        step.num_tokens, step.num_sequences, step.num_logit_rows = 1 + count, 2, 2
        step.token_ids[: 1 + count] = [ids[last], *ids[:count]]
        step.positions[: 1 + count] = [last, *range(count)]
        step.query_start[:3] = (0, 1, 1 + count)
        step.context_len[:2] = (last + 1, count)
        step.logit_rows[:2] = (count, 0)
        executor.forward()
        logits = executor.logits()
    np.testing.assert_allclose(logits, expected[[count - 1, last]], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("name", "change"), [("mistral", "windowless"), ("llama-yarn", "unscaled")])
def test_the_comparison_can_fail(name: str, change: str) -> None:
    """Without its window, or with unscaled rope, a golden model must be far off: the sequences reach that far."""
    ids, expected = golden(name)
    overrides: dict[str, object] = {"sliding_window": None} if change == "windowless" else {"rope_scaling": None}
    with open_checkpoint(TINY / name, overrides=overrides) as checkpoint:
        logits = run(build_reference_executor(checkpoint, OPTIONS, build_program), ids, [len(ids)])
    assert np.abs(logits - expected).max() > 100 * TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_is_near(name: str) -> None:
    """Rounding weights, activations and KV to bf16 moves logits by a little, not by a mistake's worth."""
    ids, expected = golden(name)
    options = EngineOptions(
        dtype="bfloat16", max_tokens_per_step=128, max_running_requests=2, kv_cache_bytes=8 << 20, context_length=128
    )
    with open_checkpoint(TINY / name) as checkpoint:
        prepared = prepare(checkpoint, options, build_program)
        logits = run(build_reference_executor(checkpoint, options, build_program), ids, [len(ids)])
    assert prepared.kv_dtype == "bf16"
    assert {str(weight.format) for weight in prepared.program.weights.values()} == {"bf16"}
    error = np.sqrt(np.mean((logits - expected) ** 2)) / expected.std()
    assert 0 < error < 0.05
