"""GGUF metadata -> ModelConfig, checked against what the same model's config.json says."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from neoserve.formats.config_gguf import read_gguf_config
from neoserve.formats.config_hf import read_hf_config
from neoserve.formats.gguf import GGUFFile
from neoserve.formats.text_gguf import read_gguf_generation, read_gguf_tokenizer
from neoserve.types.errors import CheckpointError, ConfigurationError, UnsupportedModelError
from neoserve.types.model import ModelConfig, RopeConfig

from .checkpoint_files import GEMMA3, GEMMA3_270M, LLAMA, gguf_image, llama_arrays, set_key
from .gguf_writer import ARRAY, BOOL, FLOAT32, INT32, STRING, UINT32, Image, Tensor

Key = tuple[str, int, Any]


def image(config: dict[str, Any] = LLAMA, architecture: str = "llama", *keys: Key) -> Image:
    made = gguf_image(llama_arrays(config), config, architecture)
    for key in keys:
        set_key(made, *key)
    return made


def read(folder: Path, made: Image, overrides: dict[str, object] | None = None) -> ModelConfig:
    return read_gguf_config(GGUFFile.open(made.write(folder / "m.gguf")), overrides)


def f32(value: float) -> float:
    return float(np.float32(value))


def test_llama_equals_its_config_json(tmp_path: Path) -> None:
    expected = replace(read_hf_config(LLAMA), rms_norm_eps=f32(1e-5))
    assert read(tmp_path, image()) == expected


def test_tied_when_the_output_matrix_is_absent(tmp_path: Path) -> None:
    config = LLAMA | {"tie_word_embeddings": True}
    assert read(tmp_path, image(config)) == replace(read_hf_config(config), rms_norm_eps=f32(1e-5))


def gemma_image(*keys: Key) -> Image:
    window: Key = ("gemma3.attention.sliding_window", UINT32, 16)
    lengths: list[Key] = [(f"gemma3.attention.{part}_length", UINT32, 8) for part in ("key", "value")]
    return image(GEMMA3, "gemma3", window, *lengths, *keys)


def test_gemma3_equals_its_config_json(tmp_path: Path) -> None:
    """Converters write neither the pattern (6) nor the local base (10000) unless told."""
    expected = read_hf_config(GEMMA3 | {"sliding_window_pattern": 6})
    assert read(tmp_path, gemma_image()) == replace(expected, rms_norm_eps=f32(1e-5))


def test_gemma3_pattern_and_local_base(tmp_path: Path) -> None:
    keys: list[Key] = [
        ("gemma3.attention.sliding_window_pattern", UINT32, 2),
        ("gemma3.rope.freq_base_swa", FLOAT32, 5000.0),
        ("gemma3.rope.scaling.type", STRING, "linear"),
        ("gemma3.rope.scaling.factor", FLOAT32, 8.0),
    ]
    config = read(tmp_path, gemma_image(*keys))
    assert config.layer_windows == (16, None)
    assert config.layer_ropes == (1, 0)
    assert config.ropes == (
        RopeConfig(theta=1e6, rotary_dim=8, kind="linear", factor=8.0),
        RopeConfig(theta=5000.0, rotary_dim=8),
    )
    flags: Key = ("gemma3.attention.sliding_window_pattern", ARRAY, (BOOL, [0, 1]))
    assert read(tmp_path, gemma_image(flags)).layer_windows == (None, 16)
    bad: Key = ("gemma3.attention.sliding_window_pattern", ARRAY, (BOOL, [0, 1, 1]))
    with pytest.raises(CheckpointError, match="a period or 2 booleans"):
        read(tmp_path, gemma_image(bad))


def test_gemma3_of_62_layers_scales_by_hidden_size(tmp_path: Path) -> None:
    """The 27B model's query_pre_attn_scalar is hidden / heads, which its file does not say."""
    made = gemma_image(("gemma3.block_count", UINT32, 62), ("gemma3.attention.key_length", UINT32, 16))
    set_key(made, "gemma3.attention.value_length", UINT32, 16)
    assert read(tmp_path, made).attention_scale == pytest.approx(8**-0.5)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ([], {}),
        ([("llama.rope.scaling.type", STRING, "none"), ("llama.rope.scaling.factor", FLOAT32, 4.0)], {}),
        ([("llama.rope.scaling.factor", FLOAT32, 0.0)], {}),
        ([("llama.rope.scaling.factor", FLOAT32, 4.0)], {"kind": "linear", "factor": 4.0}),
        ([("llama.rope.scale_linear", FLOAT32, 2.0)], {"kind": "linear", "factor": 2.0}),
        ([("llama.rope.dimension_count", UINT32, 4)], {"rotary_dim": 4}),
        (
            [
                ("llama.rope.scaling.type", STRING, "yarn"),
                ("llama.rope.scaling.factor", FLOAT32, 4.0),
                ("llama.rope.scaling.original_context_length", UINT32, 32),
            ],
            {"kind": "yarn", "factor": 4.0, "original_max_position": 32, "beta_fast": 32.0, "beta_slow": 1.0},
        ),
        (
            [("llama.rope.scaling.type", STRING, "yarn"), ("llama.rope.scaling.attn_factor", FLOAT32, 0.5)],
            {
                "kind": "yarn", "original_max_position": 128, "beta_fast": 32.0, "beta_slow": 1.0,
                "attention_factor": 0.5,
            },
        ),
    ],
)  # fmt: skip
def test_rope(tmp_path: Path, keys: list[Key], expected: dict[str, Any]) -> None:
    assert read(tmp_path, image(LLAMA, "llama", *keys)).ropes == (
        replace(RopeConfig(theta=10000.0, rotary_dim=8), **expected),
    )


def with_factors(values: list[float]) -> Image:
    made = image()
    data = np.array(values, "<f4").tobytes()
    made.tensors.append(Tensor("rope_freqs.weight", (len(values),), 0, data))
    return made


def test_frequency_factors(tmp_path: Path) -> None:
    assert read(tmp_path, with_factors([1.0, 1.5, 2.0, 8.0])).ropes[0].frequency_factors == (1.0, 1.5, 2.0, 8.0)
    with pytest.raises(CheckpointError, match="3 rotary frequency factors; expected 4"):
        read(tmp_path, with_factors([1.0, 1.0, 1.0]))
    with pytest.raises(CheckpointError, match=r"'rope_freqs\.weight' holds 0\.0"):
        read(tmp_path, with_factors([1.0, 0.0, 1.0, 1.0]))


@pytest.mark.parametrize(("window", "expected"), [(16, 16), (0, None), (128, None), (4096, None)])
def test_mistral_window_in_a_llama_file(tmp_path: Path, window: int, expected: int | None) -> None:
    made = image(LLAMA, "llama", ("llama.attention.sliding_window", UINT32, window))
    assert read(tmp_path, made).layer_windows == (expected, expected)


def test_heads_may_be_listed_per_layer_if_equal(tmp_path: Path) -> None:
    same: Key = ("llama.attention.head_count_kv", ARRAY, (UINT32, [2, 2]))
    assert read(tmp_path, image(LLAMA, "llama", same)).num_kv_heads == 2
    other: Key = ("llama.attention.head_count_kv", ARRAY, (UINT32, [2, 4]))
    with pytest.raises(UnsupportedModelError, match=r"llama\.attention\.head_count_kv differs between layers"):
        read(tmp_path, image(LLAMA, "llama", other))


BAD: list[tuple[Key, str]] = [
    (("general.architecture", STRING, "mamba"), "'mamba' is not supported; supported: gemma3, llama, qwen2, qwen3"),
    (("general.type", STRING, "adapter"), "general.type is 'adapter'; only 'model'"),
    (("llama.expert_count", UINT32, 8), "llama.expert_count 8 is not supported"),
    (("llama.final_logit_softcapping", FLOAT32, 30.0), "llama.final_logit_softcapping 30.0"),
    (("llama.residual_scale", FLOAT32, 0.2), "llama.residual_scale"),
    (("llama.rope.scaling.type", STRING, "longrope"), "llama.rope.scaling.type 'longrope'.*none, linear, yarn"),
    (("llama.attention.value_length", UINT32, 4), "value_length is 4 but key_length is 8"),
    (("llama.block_count", UINT32, 0), "llama.block_count is 0"),
    (("llama.block_count", UINT32, 2**32 - 1), "llama.block_count is 4294967295"),
    (("llama.embedding_length", STRING, "32"), "llama.embedding_length is '32'"),
    (("llama.embedding_length", UINT32, 30), "llama.attention.head_count is 4; it must be a divisor"),
    (("llama.attention.head_count", UINT32, 0), "llama.attention.head_count is 0"),
    (("llama.attention.head_count_kv", UINT32, 3), "4 attention heads over 3 key/value heads"),
    (("llama.attention.layer_norm_rms_epsilon", FLOAT32, 0.0), "layer_norm_rms_epsilon is 0.0"),
    (("llama.rope.freq_base", FLOAT32, float("nan")), "llama.rope.freq_base is nan"),
    (("llama.rope.dimension_count", UINT32, 10), "10 rotated columns in heads of 8"),
    (("llama.context_length", UINT32, 0), "llama.context_length is 0"),
    (("llama.vocab_size", UINT32, 50), "llama.vocab_size is 50; it must be 48, the rows of token_embd.weight"),
    (("tokenizer.ggml.tokens", ARRAY, (STRING, ["a"] * 49)), "tokens has 49 entries.*only 48 rows"),
]


@pytest.mark.parametrize(("key", "expected"), BAD)
def test_bad_metadata_names_its_key(tmp_path: Path, key: Key, expected: str) -> None:
    with pytest.raises(CheckpointError, match=expected) as caught:
        read(tmp_path, image(LLAMA, "llama", key))
    assert str(caught.value).startswith("m.gguf: ")
    assert "\n" not in str(caught.value)


ODD: list[tuple[int, Any]] = [
    (UINT32, 0), (UINT32, 2**32 - 1), (INT32, -1), (FLOAT32, float("nan")), (FLOAT32, float("inf")), (FLOAT32, 0.5),
    (BOOL, 1), (STRING, ""), (STRING, "x"), (ARRAY, (UINT32, [])), (ARRAY, (STRING, ["a", "b"])),
    (ARRAY, (FLOAT32, [1.5])),
]  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
def test_odd_values_in_any_key_never_raise_anything_else(tmp_path: Path, odd: tuple[int, Any]) -> None:
    names = [str(key) for key, _ in gemma_image().keys if str(key).startswith(("gemma3.", "general."))]
    names += ["gemma3.rope.scaling.type", "gemma3.rope.scaling.factor", "gemma3.rope.freq_base_swa"]
    names += ["gemma3.attention.sliding_window_pattern", "gemma3.rope.dimension_count", "general.type"]
    names += ["tokenizer.ggml.eos_token_id", "general.sampling.temp", "tokenizer.chat_template"]
    refused: list[str] = []
    for name in names:
        gguf = GGUFFile.open(gemma_image((name, *odd)).write(tmp_path / "m.gguf"))
        try:
            config = read_gguf_config(gguf)
            read_gguf_generation(gguf, config.vocab_size)
            read_gguf_tokenizer(gguf)
        except CheckpointError as error:
            refused.append(str(error))
    assert len(refused) > len(names) // 2
    assert not [text for text in refused if "\n" in text]


@pytest.mark.parametrize("name", ["block_count", "context_length", "attention.head_count"])
def test_missing_key(tmp_path: Path, name: str) -> None:
    made = image()
    made.keys = [pair for pair in made.keys if pair[0] != f"llama.{name}"]
    with pytest.raises(CheckpointError, match=f"llama.{name} is missing"):
        read(tmp_path, made)


def test_windows_that_a_qwen_file_cannot_place_are_refused(tmp_path: Path) -> None:
    made = image(LLAMA, "qwen3", ("qwen3.attention.sliding_window", UINT32, 16))
    with pytest.raises(UnsupportedModelError, match="does not say which layers"):
        read(tmp_path, made)


def test_overrides(tmp_path: Path) -> None:
    assert read(tmp_path, image(), {"llama.rope.freq_base": 5e5}).ropes[0].theta == 5e5
    with pytest.raises(ConfigurationError, match=r"override 'rope\.freq_base' is not a key"):
        read(tmp_path, image(), {"rope.freq_base": 5e5})


# Text


def text(folder: Path, *keys: Key) -> tuple[Any, tuple[int, ...]]:
    gguf = GGUFFile.open(image(LLAMA, "llama", *keys).write(folder / "m.gguf"))
    return read_gguf_tokenizer(gguf), read_gguf_generation(gguf, 48).eos_token_ids


def test_tokens_that_end_generation(tmp_path: Path) -> None:
    eot: Key = ("tokenizer.ggml.eot_token_id", UINT32, 7)
    eom: Key = ("tokenizer.ggml.eom_token_id", UINT32, 9)
    assert text(tmp_path)[1] == (2,)
    assert text(tmp_path, eot, eom)[1] == (2, 7, 9)


def test_sampling_defaults(tmp_path: Path) -> None:
    keys: list[Key] = [
        ("general.sampling.temp", FLOAT32, 0.5),
        ("general.sampling.top_k", INT32, 20),
        ("general.sampling.top_p", FLOAT32, 0.75),
        ("general.sampling.min_p", FLOAT32, 0.25),
        ("general.sampling.penalty_repeat", FLOAT32, 1.5),
    ]
    gguf = GGUFFile.open(image(LLAMA, "llama", *keys).write(tmp_path / "m.gguf"))
    found = read_gguf_generation(gguf, 48)
    assert (found.temperature, found.top_k, found.top_p, found.min_p, found.repetition_penalty) == (
        0.5, 20, 0.75, 0.25, 1.5
    )  # fmt: skip
    gguf = GGUFFile.open(image(LLAMA, "llama", ("general.sampling.top_p", FLOAT32, 0.0)).write(tmp_path / "m.gguf"))
    with pytest.raises(CheckpointError, match=r"general\.sampling\.top_p is 0\.0; it must be in \(0, 1\]"):
        read_gguf_generation(gguf, 48)


def test_keys_that_nothing_reads_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    read(tmp_path, image(LLAMA, "llama", ("llama.rope.scaling.finetuned", BOOL, 1)))
    assert "is not known" not in caplog.text
    read(tmp_path, image(LLAMA, "llama", ("llama.rope.novelty", UINT32, 3)))
    assert "llama.rope.novelty is not known (1 such keys); left out" in caplog.text


@pytest.mark.parametrize("name", ["bos", "eos", "eot", "eom"])
def test_special_ids_beyond_the_vocabulary_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match=rf"tokenizer\.ggml\.{name}_token_id is 48; it must be in \[0, 47\]"):
        text(tmp_path, (f"tokenizer.ggml.{name}_token_id", UINT32, 48))


def test_tokenizer_source(tmp_path: Path) -> None:
    source, _ = text(
        tmp_path,
        ("tokenizer.chat_template", STRING, "usual"),
        ("tokenizer.chat_template.tool_use", STRING, "tools"),
    )
    assert source.chat_templates == {"default": "usual", "tool_use": "tools"}
    assert source.chat_template_origin == "m.gguf: tokenizer.chat_template"
    assert source.gguf["tokenizer.ggml.tokens"][46:] == ["<|im_end|>", "<|endoftext|>"]
    assert source.gguf["tokenizer.ggml.add_bos_token"] is False
    assert "general.architecture" not in source.gguf
    with pytest.raises(KeyError):
        source.gguf["general.architecture"]
    copy = pickle.loads(pickle.dumps(source.gguf))
    assert copy == dict(source.gguf)
    assert len(copy) == len(source.gguf)


def test_tokenizer_digest_follows_the_content(tmp_path: Path) -> None:
    same = [text(tmp_path)[0].digest for _ in range(2)]
    other = text(tmp_path, ("tokenizer.ggml.add_bos_token", BOOL, 1))[0].digest
    weights = text(tmp_path, ("llama.rope.freq_base", FLOAT32, 5e5))[0].digest
    assert same[0] == same[1] == weights != other


@pytest.mark.model
def test_gemma_3_270m_file_equals_the_published_config() -> None:
    folder = os.environ.get("NEOSERVE_TEST_MODELS")
    if not folder or not (Path(folder) / "gemma-3-270m-q4_k_m.gguf").is_file():
        pytest.skip("NEOSERVE_TEST_MODELS does not name a folder with gemma-3-270m-q4_k_m.gguf")
    config = read_gguf_config(GGUFFile.open(Path(folder) / "gemma-3-270m-q4_k_m.gguf"))
    assert config == replace(read_hf_config(GEMMA3_270M), rms_norm_eps=f32(1e-6))
