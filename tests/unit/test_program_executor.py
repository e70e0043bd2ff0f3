"""Preparing and running whole models: numpy reference and native executor of one program, in every weight format."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from neoserve.models.registry import build_program
from neoserve.program.executor import build_executor, build_reference_executor, prepare
from neoserve.program.ir import View
from neoserve.program.reference import ReferenceExecutor
from neoserve.types.errors import CheckpointError, ConfigurationError, UnsupportedModelError
from neoserve.types.model import RopeConfig
from neoserve.types.options import EngineOptions
from neoserve.types.step import Executor, Float32Array, SampleOutput
from neoserve.types.tensors import WeightFormat

from .program_fakes import FORMATS, INT4_MINIMUM, FakeCheckpoint, fake_checkpoint, llama_config

OPTIONS = EngineOptions(max_tokens_per_step=64, max_running_requests=3, kv_cache_bytes=4 << 20, context_length=128)
LLAMA = llama_config()
GEMMA = llama_config(
    architecture="gemma3", num_layers=3, layer_windows=(16, None, 16), layer_ropes=(0, 1, 0), activation="gelu_tanh",
    ropes=(RopeConfig(theta=10000.0, rotary_dim=16), RopeConfig(theta=1e6, rotary_dim=16, kind="linear", factor=8.0)),
    qk_norm=True, post_norms=True, embedding_scale=8.0, tie_embeddings=True,
)  # fmt: skip
QWEN = llama_config(architecture="qwen2", qkv_bias=True)
IDS = np.random.default_rng(0).integers(0, 96, 50)


@contextmanager
def executor_of(checkpoint: FakeCheckpoint, options: EngineOptions = OPTIONS, **changes: Any) -> Iterator[Executor]:
    pytest.importorskip("neoserve._native", reason="the native module is not built")
    executor = build_executor(checkpoint, options, build_program, **changes)
    try:
        yield executor
    finally:
        executor.close()


def fill(executor: Executor, sequences: list[tuple[int, int, int]]) -> None:
    """Sets up a step: (sequence slot, first position, tokens) each; slot s owns pages [s * 8, s * 8 + 8)."""
    step, start = executor.step, 0
    for index, (slot, first, count) in enumerate(sequences):
        stop = start + count
        step.token_ids[start:stop] = IDS[first : first + count]
        step.positions[start:stop] = np.arange(first, first + count)
        step.query_start[index : index + 2] = (start, stop)
        step.context_len[index] = first + count
        for table in step.block_tables:
            table[index, :8] = np.arange(8) + 8 * slot
        start = stop
    step.num_tokens = step.num_logit_rows = start
    step.num_sequences = len(sequences)
    step.logit_rows[:start] = np.arange(start)


def run(executor: Executor, chunks: list[int]) -> Float32Array:
    """Logits of the first sum(chunks) ids, computed chunk by chunk."""
    parts, done = [], 0
    for count in chunks:
        fill(executor, [(0, done, count)])
        executor.forward()
        parts.append(executor.logits().copy())
        done += count
    return np.concatenate(parts)


def fill_long(executor: Executor, first: int, count: int) -> None:
    """One sequence of repeated ids over pages in descending order; the last 8 tokens give logits."""
    fill(executor, [(0, 0, 1)])
    step = executor.step
    step.num_tokens, step.num_logit_rows = count, 8
    step.token_ids[:count] = (np.arange(first, first + count) * 7) % 96
    step.positions[:count] = np.arange(first, first + count)
    step.query_start[:2] = (0, count)
    step.context_len[0] = first + count
    step.block_tables[0][0, :40] = np.arange(40)[::-1]
    step.logit_rows[:8] = np.arange(count - 8, count)


class TestBitEquality:
    """Design D6: native rows and the contract written in numpy give the same bits."""

    @pytest.mark.parametrize("config", [LLAMA, GEMMA, QWEN], ids=lambda config: config.architecture)
    @pytest.mark.parametrize("fmt", FORMATS, ids=str)
    def test_native_equals_the_contract(self, fmt: WeightFormat, config: Any) -> None:
        checkpoint = fake_checkpoint(config, fmt)
        reference = build_reference_executor(checkpoint, OPTIONS, build_program, precision="contract")
        expected = run(reference, [20, 1, 5])
        with executor_of(checkpoint) as native:
            np.testing.assert_array_equal(run(native, [20, 1, 5]), expected)
        assert expected.std() > 0.1

    @pytest.mark.parametrize(("dtype", "window"), [("float32", None), ("float32", 300), ("bfloat16", 40)])
    def test_attention_over_several_partitions(self, dtype: Any, window: int | None) -> None:
        """Partitions of 256 positions are merged in one order, wherever a window or a chunk begins."""
        config = llama_config(
            architecture="mistral", num_layers=1, layer_ropes=(0,), layer_windows=(window,), max_position=640
        )
        checkpoint = fake_checkpoint(config)
        options = replace(OPTIONS, dtype=dtype, context_length=640, max_tokens_per_step=320)
        reference = build_reference_executor(checkpoint, options, build_program, precision="contract")
        with executor_of(checkpoint, options) as native:
            for executor in (reference, native):
                fill_long(executor, 0, 300)
                executor.forward()
                fill_long(executor, 300, 270)
                executor.forward()
            np.testing.assert_array_equal(native.logits(), reference.logits())

    def test_f32_all_through(self) -> None:
        options = replace(OPTIONS, dtype="float32")
        checkpoint = fake_checkpoint(LLAMA)
        expected = run(build_reference_executor(checkpoint, options, build_program, precision="contract"), [26])
        with executor_of(checkpoint, options) as native:
            np.testing.assert_array_equal(run(native, [26]), expected)

    @pytest.mark.parametrize("fmt", [FORMATS[0], INT4_MINIMUM], ids=str)
    def test_chunks_threads_and_company_change_nothing(self, fmt: WeightFormat) -> None:
        checkpoint = fake_checkpoint(GEMMA, fmt)
        with executor_of(checkpoint, replace(OPTIONS, num_threads=1)) as one:
            whole = run(one, [50])
            np.testing.assert_array_equal(run(one, [1, 16, 3, 30]), whole)
            fill(one, [(1, 0, 30), (0, 49, 1), (2, 0, 7)])
            one.forward()
            together = one.logits().copy()
        np.testing.assert_array_equal(together, np.concatenate([whole[:30], whole[49:50], whole[:7]]))
        with executor_of(checkpoint, replace(OPTIONS, num_threads=3)) as three:
            np.testing.assert_array_equal(run(three, [50]), whole)

    def test_more_threads_than_work(self) -> None:
        """B06: threads without a share of an op's blocks do nothing, and change nothing."""
        checkpoint = fake_checkpoint(LLAMA, INT4_MINIMUM)
        with executor_of(checkpoint, replace(OPTIONS, num_threads=1)) as one:
            expected = run(one, [3, 1])
        with executor_of(checkpoint, replace(OPTIONS, num_threads=67)) as many:
            np.testing.assert_array_equal(run(many, [3, 1]), expected)

    def test_the_reference_row_can_be_forced_and_is_used(self) -> None:
        checkpoint = fake_checkpoint(LLAMA, INT4_MINIMUM)
        with executor_of(checkpoint) as best:
            expected = run(best, [40])
        with executor_of(checkpoint, replace(OPTIONS, kernel_force="reference")) as forced:
            np.testing.assert_array_equal(run(forced, [40]), expected)
            rows = {row for _, _, row in forced.rows() if row}  # type: ignore[attr-defined]
        assert rows
        assert all(row.endswith("_reference") for row in rows)


class TestReference:
    @pytest.mark.parametrize("fmt", FORMATS, ids=str)
    @pytest.mark.parametrize("precision", ["float32", "float64"])
    def test_precisions_agree(self, fmt: WeightFormat, precision: Any) -> None:
        """They differ by roundings, which an int8 or bf16 rounding may enlarge: a little of the logits' spread."""
        checkpoint = fake_checkpoint(LLAMA, fmt)
        expected = run(build_reference_executor(checkpoint, OPTIONS, build_program, precision="contract"), [30])
        found = run(build_reference_executor(checkpoint, OPTIONS, build_program, precision=precision), [30])
        assert np.sqrt(np.mean((found - expected) ** 2)) < 0.01 * expected.std()

    def test_observe_sees_every_op_that_writes(self) -> None:
        checkpoint = fake_checkpoint(LLAMA)
        prepared = prepare(checkpoint, OPTIONS, build_program)
        seen: list[tuple[str, tuple[int, ...]]] = []
        executor = ReferenceExecutor(
            prepared.program, checkpoint.tensors, prepared.limits, kv_dtype="bf16",
            observe=lambda instruction, array: seen.append((instruction.op, array.shape)),  # type: ignore[union-attr]
        )  # fmt: skip
        run(executor, [5])
        writers = [item for item in prepared.program.instructions if isinstance(item.output, View)]
        assert [op for op, _ in seen] == [item.op for item in writers]
        assert seen[-1] == ("linear", (5, 96))

    def test_sampler_gets_the_logits(self) -> None:
        def greedy(logits: Float32Array, batch: Any) -> SampleOutput:
            assert batch == "batch"
            ids = logits.argmax(axis=1).astype(np.int32)
            empty = np.zeros((len(ids), 0))
            return SampleOutput(ids, np.zeros(len(ids), np.float32), empty.astype(np.int32), empty.astype(np.float32))

        checkpoint = fake_checkpoint(LLAMA)
        executor = build_reference_executor(checkpoint, OPTIONS, build_program, sampler=greedy)
        logits = run(executor, [5])
        np.testing.assert_array_equal(executor.sample("batch").token_ids, logits.argmax(axis=1))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="without a sampler"):
            build_reference_executor(checkpoint, OPTIONS, build_program).sample("batch")  # type: ignore[arg-type]

    def test_misuse_is_refused(self) -> None:
        checkpoint = fake_checkpoint(LLAMA)
        executor = build_reference_executor(checkpoint, OPTIONS, build_program)
        with pytest.raises(ValueError, match="before the first forward"):
            executor.logits()
        executor.close()
        with pytest.raises(ValueError, match="closed"):
            executor.forward()
        for option in ({"num_threads": 1}, {"kernel_force": "avx2"}):
            with pytest.raises(ConfigurationError, match=next(iter(option))):
                build_reference_executor(checkpoint, replace(OPTIONS, **option), build_program)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match="float16"):
            build_reference_executor(checkpoint, OPTIONS, build_program, precision="float16")  # type: ignore[arg-type]


BAD_STEPS: list[tuple[str, Any]] = [
    ("num_tokens", lambda step: setattr(step, "num_tokens", 65)),
    ("num_tokens", lambda step: setattr(step, "num_tokens", 0)),
    ("num_sequences", lambda step: setattr(step, "num_sequences", 4)),
    ("num_logit_rows", lambda step: setattr(step, "num_logit_rows", 65)),
    ("query_start", lambda step: step.query_start.__setitem__(1, 19)),
    ("query_start", lambda step: step.query_start.__setitem__(0, 1)),
    ("token_ids", lambda step: step.token_ids.__setitem__(3, 96)),
    ("token_ids", lambda step: step.token_ids.__setitem__(3, -1)),
    ("logit_rows", lambda step: step.logit_rows.__setitem__(2, 20)),
    ("positions", lambda step: step.positions.__setitem__(4, 9)),
    ("context_len", lambda step: step.context_len.__setitem__(0, 129)),
    ("block_tables", lambda step: step.block_tables[0].__setitem__((0, 1), 10**6)),
    ("block_tables", lambda step: step.block_tables[0].__setitem__((0, 0), -1)),
]


@pytest.mark.parametrize(("field", "damage"), BAD_STEPS)
@pytest.mark.parametrize("kind", ["reference", "native"])
def test_a_step_outside_its_bounds_is_refused_before_any_work(kind: str, field: str, damage: Any) -> None:
    checkpoint = fake_checkpoint(LLAMA)
    if kind == "reference":
        check_refusal(build_reference_executor(checkpoint, OPTIONS, build_program), field, damage)
    else:
        with executor_of(checkpoint) as executor:
            check_refusal(executor, field, damage)


def check_refusal(executor: Executor, field: str, damage: Any) -> None:
    fill(executor, [(0, 0, 20)])
    damage(executor.step)
    with pytest.raises(ValueError, match=field if isinstance(executor, ReferenceExecutor) else "step refused"):
        executor.forward()
    np.testing.assert_array_equal(run(executor, [20]), run(executor, [20]))


class TestPrepare:
    def test_limits(self) -> None:
        prepared = prepare(fake_checkpoint(GEMMA), OPTIONS, build_program)
        limits = prepared.limits
        assert (limits.max_tokens, limits.max_sequences, limits.max_context) == (64, 3, 128)
        assert limits.max_logit_rows == 64
        assert limits.max_pages_per_sequence == 8
        assert [(group.window, group.layers) for group in limits.groups] == [(16, (0, 2)), (None, (1,))]
        assert {group.num_pages for group in limits.groups} == {24}
        assert "context 128 tokens" in prepared.summary

    def test_dtype_decides_weights_and_kv(self) -> None:
        for dtype, kind, kv in (
            ("auto", "int4_group", "bf16"),
            ("float32", "f32", "f32"),
            ("bfloat16", "bf16", "bf16"),
        ):
            options = replace(OPTIONS, dtype=dtype)  # type: ignore[arg-type]
            prepared = prepare(fake_checkpoint(LLAMA, INT4_MINIMUM), options, build_program)
            assert {weight.format.kind for weight in prepared.program.weights.values()} == {kind}
            assert prepared.kv_dtype == kv
            assert f"weights {next(iter(prepared.program.weights.values())).format}" in prepared.summary
            assert f"pages of 16 tokens, {kv})" in prepared.summary

    def test_context_is_capped_by_memory_and_said(self) -> None:
        options = replace(OPTIONS, context_length=None, kv_cache_bytes=5 * 4160)
        prepared = prepare(fake_checkpoint(LLAMA), options, build_program)
        assert prepared.limits.max_context == 80
        assert "the model's 128 tokens need" in prepared.summary

    def test_weights_come_off_the_available_memory(self) -> None:
        checkpoint = fake_checkpoint(LLAMA)
        options = replace(OPTIONS, kv_cache_bytes=None, context_length=None)
        with pytest.raises(ConfigurationError, match="half of the available memory is 0 B"):
            prepare(checkpoint, options, build_program, available_bytes=1000)
        assert prepare(checkpoint, options, build_program, available_bytes=1 << 30).limits.max_context == 128

    def test_what_does_not_fit_together_is_refused(self) -> None:
        options = replace(OPTIONS, kv_cache_bytes=1 << 20, context_length=None, max_running_requests=64)
        with pytest.raises(
            ConfigurationError, match=r"the model needs 1 MiB .* but 0 MiB are available; lower kv_cache"
        ):
            prepare(fake_checkpoint(LLAMA), options, build_program, available_bytes=400_000)

    def test_context_beyond_the_trained_length_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="context_length is 129; the model holds at most 128 tokens"):
            prepare(fake_checkpoint(LLAMA), replace(OPTIONS, context_length=129), build_program)

    def test_dynamic_rope_may_be_stretched_by_its_factor(self) -> None:
        rope = RopeConfig(theta=10000.0, rotary_dim=16, kind="dynamic", factor=2.0, original_max_position=128)
        checkpoint = fake_checkpoint(replace(LLAMA, ropes=(rope,)))
        near = prepare(checkpoint, OPTIONS, build_program)
        far = prepare(checkpoint, replace(OPTIONS, context_length=256), build_program)
        assert far.program.vectors["rope_frequencies.0"] != near.program.vectors["rope_frequencies.0"]
        with pytest.raises(ConfigurationError, match="at most 256"):
            prepare(checkpoint, replace(OPTIONS, context_length=257), build_program)

    def test_a_capped_context_decides_dynamic_rope(self) -> None:
        """The frequencies belong to the length that is served, not to the length that was wished for."""
        rope = RopeConfig(theta=10000.0, rotary_dim=16, kind="dynamic", factor=4.0, original_max_position=64)
        checkpoint = fake_checkpoint(replace(LLAMA, ropes=(rope,), max_position=512))
        capped = prepare(checkpoint, replace(OPTIONS, context_length=None, kv_cache_bytes=12 << 12), build_program)
        assert 64 < capped.limits.max_context < 512
        chosen = replace(OPTIONS, context_length=capped.limits.max_context)
        assert prepare(checkpoint, chosen, build_program).program == capped.program


class TestNative:
    @pytest.mark.parametrize("fmt", FORMATS, ids=str)
    def test_packing_in_many_small_ranges_changes_nothing(
        self, fmt: WeightFormat, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        checkpoint = fake_checkpoint(LLAMA, fmt)
        with executor_of(checkpoint, replace(OPTIONS, num_threads=1)) as executor:
            expected = run(executor, [30])
        monkeypatch.setattr("neoserve.program.native.BLOCK_BYTES", 1)
        with executor_of(checkpoint, replace(OPTIONS, num_threads=3)) as executor:
            np.testing.assert_array_equal(run(executor, [30]), expected)
        reads = [len(tensor.reads) for tensor in checkpoint.tensors.values()]  # type: ignore[attr-defined]
        assert max(reads) >= 6

    @pytest.mark.parametrize("name", ["embedding", "layers.1.mlp.down", "lm_head"])
    def test_a_damaged_tensor_ends_the_load_with_its_name(self, name: str) -> None:
        checkpoint = fake_checkpoint(LLAMA, INT4_MINIMUM)
        scales = checkpoint.tensors[name].rows.scales  # type: ignore[attr-defined]
        scales[-1, -1] = np.nan
        with (
            pytest.raises(CheckpointError, match=rf"tensor {name} rows .* NaN or infinity"),
            executor_of(checkpoint, replace(OPTIONS, num_threads=2)),
        ):
            pass

    def test_progress_and_release(self) -> None:
        checkpoint, calls = fake_checkpoint(LLAMA), []
        with executor_of(checkpoint, progress=lambda *call: calls.append(call)):
            pass
        total = sum(tensor.nbytes for tensor in checkpoint.tensors.values() if len(tensor.shape) == 2)
        assert calls[0][:2] == (0, total)
        assert calls[-1] == (total, total, "")
        assert [done for done, _, _ in calls] == sorted(done for done, _, _ in calls)
        assert len(checkpoint.released) == len(calls) - 1

    def test_profile_names_every_instruction(self) -> None:
        with executor_of(fake_checkpoint(LLAMA)) as executor:
            executor.set_profiling(True)  # type: ignore[attr-defined]
            run(executor, [20])
            profile = executor.profile()  # type: ignore[attr-defined]
            labels = [item.label for item in executor.program.instructions]  # type: ignore[attr-defined]
        assert [label for label, _, _ in profile] == labels
        assert sum(seconds for _, _, seconds in profile) > 0

    def test_unknown_kernels_are_refused(self) -> None:
        with (
            pytest.raises(ConfigurationError, match='"avx9"'),
            executor_of(fake_checkpoint(LLAMA), replace(OPTIONS, kernel_force="avx9")),
        ):
            pass

    def test_head_dim_that_pages_cannot_hold(self) -> None:
        config = llama_config(head_dim=24, ropes=(RopeConfig(theta=1e4, rotary_dim=24),))
        with (
            pytest.raises(UnsupportedModelError, match=r"head_dim is 24; .* multiple of 16"),
            executor_of(fake_checkpoint(config)),
        ):
            pass

    def test_closed(self) -> None:
        with executor_of(fake_checkpoint(LLAMA)) as executor:
            run(executor, [4])
            executor.close()
            for call in (executor.forward, executor.logits):
                with pytest.raises(ValueError, match="closed"):
                    call()
