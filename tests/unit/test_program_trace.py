"""Tracing: stacked weights, quantise reuse, labels, and the errors a model file can meet."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from neoserve.models.registry import build_program, known_architectures
from neoserve.program.catalog import ParameterSpec, build_catalog, choose_format
from neoserve.program.ir import LOGITS, Program, ProgramError, View
from neoserve.program.trace import TraceBounds, Tracer
from neoserve.program.verify import check_symbolic, verify
from neoserve.types.errors import CheckpointError, ConfigurationError, UnsupportedModelError
from neoserve.types.tensors import BF16, F32, WeightFormat

from .program_fakes import (
    FORMATS,
    INT4_MINIMUM,
    INT8_CHANNEL,
    INT8_G16,
    INT8_G32,
    catalog_of,
    decoder_shapes,
    fake_tensors,
    llama_config,
)


def spec(n: int, k: int, fmt: WeightFormat = F32) -> ParameterSpec:
    return ParameterSpec((n, k), fmt)


def tracer_with(**parameters: ParameterSpec) -> Tracer:
    return Tracer("test", {"table": spec(8, 64), **parameters})


def ops(program: Program) -> list[str]:
    return [instruction.op for instruction in program.instructions]


class TestStacking:
    def stack(self, *parts: ParameterSpec, biases: bool = False) -> tuple[list[View], list[str], Tracer]:
        parameters = {f"w{i}": part for i, part in enumerate(parts)}
        parameters |= {f"b{i}": ParameterSpec((part.shape[0],), F32) for i, part in enumerate(parts)}
        tracer = tracer_with(**parameters)
        x = tracer.embed("table", 8, 64)
        names = [f"w{i}" for i in range(len(parts))]
        tracer.linear(
            x, names, [part.shape[0] for part in parts], biases=[f"b{i}" for i in range(len(parts))] if biases else ()
        )
        linears = [item for item in tracer._instructions if item.op == "linear"]
        return [item.output for item in linears if item.output], [str(item.inputs[1]) for item in linears], tracer

    def test_equal_formats_become_one_weight(self) -> None:
        views, weights, tracer = self.stack(spec(64, 64), spec(32, 64), spec(16, 64))
        assert [(view.column, view.columns) for view in views] == [(0, 112)]
        assert tracer._weights[weights[0][1:]].parts == ("w0", "w1", "w2")

    def test_another_format_starts_another_weight(self) -> None:
        views, weights, _ = self.stack(spec(64, 64, INT8_G32), spec(32, 64, INT8_G32), spec(32, 64, INT4_MINIMUM))
        assert [(view.column, view.columns) for view in views] == [(0, 96), (96, 32)]
        assert len(set(weights)) == 2

    def test_a_format_between_two_equal_ones_keeps_the_order(self) -> None:
        views, _, _ = self.stack(spec(16, 64, BF16), spec(16, 64, F32), spec(16, 64, BF16))
        assert [(view.column, view.columns) for view in views] == [(0, 16), (16, 16), (32, 16)]

    def test_rows_that_do_not_fill_a_block_are_not_stacked(self) -> None:
        views, _, _ = self.stack(spec(24, 64), spec(16, 64), spec(16, 64))
        assert [(view.column, view.columns) for view in views] == [(0, 24), (24, 32)]

    def test_biases_are_split_like_weights(self) -> None:
        _, _, tracer = self.stack(spec(16, 64), spec(16, 64), spec(8, 64), biases=True)
        sizes = sorted(vector.size for vector in tracer._vectors.values())
        assert sizes == [8, 32]

    def test_wrong_counts_are_refused(self) -> None:
        tracer = tracer_with(w=spec(16, 64))
        x = tracer.embed("table", 8, 64)
        with pytest.raises(ProgramError, match="1 weights, 2 widths"):
            tracer.linear(x, ["w"], [16, 16])
        with pytest.raises(ProgramError, match="output has 64 columns, weights give 16"):
            tracer.linear(x, ["w"], [16], accumulate_into=x)


class TestQuantize:
    def test_one_copy_serves_all_readers(self) -> None:
        tracer = tracer_with(a=spec(16, 64, INT8_G32), b=spec(24, 64, INT8_G32))
        x = tracer.embed("table", 8, 64)
        tracer.linear(x, ["a"], [16])
        tracer.linear(x, ["b"], [24])
        assert [item.op for item in tracer._instructions].count("quantize") == 1

    def test_each_activation_format_gets_its_own(self) -> None:
        formats = (INT8_CHANNEL, INT8_G32, INT8_G16, BF16)
        tracer = tracer_with(**{f"w{i}": spec(16, 64, fmt) for i, fmt in enumerate(formats)})
        x = tracer.embed("table", 8, 64)
        for i in range(len(formats)):
            tracer.linear(x, [f"w{i}"], [16])
        made = [
            tracer._buffers[item.output.buffer].format
            for item in tracer._instructions
            if item.op == "quantize" and item.output
        ]
        assert made == ["int8_token", "int8_g32", "int8_g16", "bf16"]

    def test_a_write_makes_the_copy_stale(self) -> None:
        tracer = tracer_with(a=spec(64, 64, INT8_G32), b=spec(64, 64, INT8_G32))
        x = tracer.embed("table", 8, 64)
        y = tracer.linear(x, ["a"], [64])
        tracer.add(x, y)
        tracer.linear(x, ["b"], [64])
        assert [item.op for item in tracer._instructions].count("quantize") == 2

    def test_a_write_to_other_columns_of_the_buffer_counts_too(self) -> None:
        tracer = tracer_with(a=spec(16, 32, INT8_G32), n=ParameterSpec((32,), F32))
        x = tracer.embed("table", 8, 64)
        left, right = x.slice(0, 32), x.slice(32, 32)
        tracer.linear(left, ["a"], [16])
        tracer.rms_norm(right, "n", 1e-5, in_place=True)
        tracer.linear(left, ["a"], [16])
        assert [item.op for item in tracer._instructions].count("quantize") == 2

    def test_f32_weights_read_the_buffer_itself(self) -> None:
        tracer = tracer_with(a=spec(16, 64))
        tracer.linear(tracer.embed("table", 8, 64), ["a"], [16])
        assert [item.op for item in tracer._instructions] == ["embed", "linear"]


class TestErrors:
    def test_missing_tensor_is_named(self) -> None:
        shapes = decoder_shapes(llama_config())
        del shapes["lm_head"]
        with pytest.raises(CheckpointError, match=r"tensor lm_head \(96, 64\) is missing"):
            build_program(llama_config(), catalog_of(fake_tensors(shapes)))

    @pytest.mark.parametrize("name", ["embedding", "layers.1.attention.k", "layers.0.mlp.down", "final_norm"])
    def test_misshaped_tensor_is_named_with_both_shapes(self, name: str) -> None:
        shapes = decoder_shapes(llama_config())
        found = tuple(size + 16 for size in shapes[name])
        with pytest.raises(CheckpointError) as error:
            build_program(llama_config(), catalog_of(fake_tensors({**shapes, name: found})))
        assert all(text in str(error.value) for text in (name, str(found), str(shapes[name])))

    def test_slice_outside_a_value(self) -> None:
        x = tracer_with().embed("table", 8, 64)
        with pytest.raises(ProgramError, match=r"columns \[48, 80\)"):
            x.slice(48, 32)

    def test_result_must_be_the_logits(self) -> None:
        tracer = tracer_with()
        with pytest.raises(ProgramError, match=LOGITS):
            tracer.finish(tracer.embed("table", 8, 64))

    def test_unknown_architecture_lists_the_known(self) -> None:
        with pytest.raises(UnsupportedModelError, match="gemma3, llama, mistral, qwen2, qwen3"):
            build_program(llama_config(architecture="registry"), {})
        assert known_architectures() == ("gemma3", "llama", "mistral", "qwen2", "qwen3")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"layer_windows": (8, None)}, "layer 0 has a sliding window of 8"),
            ({"activation": "gelu_tanh"}, "activation is 'gelu_tanh'"),
            ({"qk_norm": True}, "qk_norm is True"),
            ({"post_norms": True}, "post_norms is True"),
            ({"embedding_scale": 8.0}, "embedding_scale is 8.0"),
        ],
    )
    def test_llama_refuses_what_it_does_not_have(self, change: dict[str, object], message: str) -> None:
        config = llama_config(**change)
        with pytest.raises(UnsupportedModelError, match=message):
            build_program(config, catalog_of(fake_tensors(decoder_shapes(config))))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"layer_ropes": (0,)}, "layer_ropes has 1 entries, num_layers is 2"),
            ({"layer_ropes": (0, 1)}, "points outside its 1 ropes"),
            ({"num_kv_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
            ({"head_dim": 8}, "rotary_dim 16 exceeds head_dim 8"),
            ({"layer_windows": (0, None)}, "a window is a positive number"),
        ],
    )
    def test_inconsistent_config_is_named(self, change: dict[str, object], message: str) -> None:
        with pytest.raises(CheckpointError, match=message):
            build_program(llama_config(**change), {})


class TestFrozenValues:
    """Design D2: Python values and branches freeze into a program; tracing twice shows those that follow a size."""

    def trace(self, change: Callable[[TraceBounds], int]) -> Callable[[TraceBounds], Program]:
        def build(bounds: TraceBounds) -> Program:
            catalog = {"table": spec(8, 64), "head": spec(8, 64)}
            tracer = Tracer("frozen", catalog, bounds)
            x = tracer.embed("table", 8, 64, scale=float(change(bounds)))
            rows = tracer.gather_rows(x)
            return tracer.finish(tracer.linear(rows, ["head"], [8], name=LOGITS))

        return build

    def test_a_constant_is_fine(self) -> None:
        assert ops(check_symbolic(self.trace(lambda bounds: 3))) == ["embed", "gather_rows", "linear"]

    def test_a_value_that_follows_the_bounds_is_found(self) -> None:
        with pytest.raises(ProgramError, match=r"scale=512\.0.*scale=37\.0"):
            check_symbolic(self.trace(lambda bounds: bounds.max_tokens))

    def test_a_branch_that_follows_the_bounds_is_found(self) -> None:
        with pytest.raises(ProgramError, match="depends on the bounds"):
            check_symbolic(self.trace(lambda bounds: 1 if bounds.max_rows > 8 else 2))

    def test_constants_that_the_text_abridges_are_compared(self) -> None:
        def build(bounds: TraceBounds) -> Program:
            catalog = {"table": spec(8, 64), "head": spec(8, 64)}
            tracer = Tracer("frozen", catalog, bounds)
            x = tracer.embed("table", 8, 64)
            tracer.rope(x, tracer.rope_table([1 / bounds.max_tokens] * 4, 1.0), 16)
            rows = tracer.gather_rows(x)
            return tracer.finish(tracer.linear(rows, ["head"], [8], name=LOGITS))

        with pytest.raises(ProgramError, match="differ in length or values"):
            check_symbolic(build)


class TestWholeModels:
    @pytest.mark.parametrize("fmt", FORMATS, ids=str)
    def test_llama_verifies_in_every_format(self, fmt: WeightFormat) -> None:
        config = llama_config()
        catalog = catalog_of(fake_tensors(decoder_shapes(config), fmt))
        program = build_program(config, catalog)
        verify(program, catalog)
        assert ("quantize" in ops(program)) == (fmt != F32)

    def test_one_layer_reads_as_expected(self) -> None:
        config = llama_config(num_layers=1)
        program = build_program(config, catalog_of(fake_tensors(decoder_shapes(config))))
        assert ops(program) == [
            "embed", "rope_table",
            "rms_norm", "linear", "rope", "rope", "kv_write", "attention", "linear",
            "rms_norm", "linear", "silu_mul", "linear",
            "gather_rows", "rms_norm", "linear",
        ]  # fmt: skip

    def test_labels_and_sources_lead_to_the_block(self) -> None:
        config = llama_config()
        program = build_program(config, catalog_of(fake_tensors(decoder_shapes(config))))
        by_label = {item.label: item for item in program.instructions}
        assert by_label["layers.1.attention.{q,k,v}"].source.startswith("blocks/attention.py:")
        assert by_label["layers.0.rope"].source.startswith("blocks/attention.py:")
        assert by_label["layers.0.mlp.down"].source.startswith("blocks/mlp.py:")

    def test_tied_embedding_is_one_weight_used_twice(self) -> None:
        config = llama_config(tie_embeddings=True)
        program = build_program(config, catalog_of(fake_tensors(decoder_shapes(config))))
        users = [item.op for item in program.instructions if "%embedding" in item.inputs]
        assert users == ["embed", "linear"]
        assert "lm_head" not in program.weights

    def test_layers_of_equal_window_share_a_page_group(self) -> None:
        config = llama_config(architecture="mistral", num_layers=3, layer_windows=(8, None, 8), layer_ropes=(0, 0, 0))
        program = build_program(config, catalog_of(fake_tensors(decoder_shapes(config))))
        assert [(group.name, group.layers) for group in program.kv_groups] == [("window_8", (0, 2)), ("full", (1,))]

    def test_equal_ropes_share_a_table(self) -> None:
        config = llama_config(num_layers=4, layer_ropes=(0, 1, 0, 1), ropes=llama_config().ropes * 2)
        program = build_program(config, catalog_of(fake_tensors(decoder_shapes(config))))
        assert ops(program).count("rope_table") == 1

    def test_only_asked_rows_reach_the_head(self) -> None:
        config = llama_config()
        program = build_program(config, catalog_of(fake_tensors(decoder_shapes(config))))
        after = ops(program).index("gather_rows")
        views = [item.output for item in program.instructions[after:]]
        assert {program.buffers[view.buffer].rows for view in views if view} == {"rows"}


class TestFormats:
    @pytest.mark.parametrize(
        ("native", "dtype", "kept"),
        [
            (F32, "auto", BF16), (BF16, "auto", BF16), (INT4_MINIMUM, "auto", INT4_MINIMUM),
            (F32, "float32", F32), (BF16, "float32", F32), (INT4_MINIMUM, "float32", F32),
            (F32, "bfloat16", BF16), (BF16, "bfloat16", BF16), (INT8_G32, "bfloat16", BF16),
        ],
    )  # fmt: skip
    def test_matrices(self, native: WeightFormat, dtype: str, kept: WeightFormat) -> None:
        assert choose_format((16, 64), native, dtype) == kept  # type: ignore[arg-type]

    @pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
    def test_vectors_stay_f32(self, dtype: str) -> None:
        assert choose_format((64,), BF16, dtype) == F32  # type: ignore[arg-type]

    def test_unknown_dtype_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match=r"'float16'.*auto, float32, bfloat16"):
            build_catalog(fake_tensors({"w": (16, 64)}), "float16")  # type: ignore[arg-type]
