"""config.json in all its spellings -> ModelConfig; what is unknown, absurd or not built is refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from neoserve.formats.config_hf import read_hf_config
from neoserve.formats.text_hf import read_hf_generation, read_hf_tokenizer
from neoserve.types.errors import CheckpointError, ConfigurationError, UnsupportedModelError
from neoserve.types.model import ModelConfig, RopeConfig

from .checkpoint_files import GEMMA3, GEMMA3_270M, LLAMA

MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
DROP = object()


def read(base: dict[str, Any], **changes: Any) -> ModelConfig:
    """The configuration with some fields changed; DROP removes one."""
    values = {name: value for name, value in (base | changes).items() if value is not DROP}
    return read_hf_config(json.loads(json.dumps(values)))


def test_llama() -> None:
    config = read(LLAMA)
    assert config == ModelConfig(
        architecture="llama",
        vocab_size=48,
        hidden_size=32,
        intermediate_size=40,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position=128,
        rms_norm_eps=1e-5,
        attention_scale=1 / math.sqrt(8),
        ropes=(RopeConfig(theta=10000.0, rotary_dim=8),),
        layer_ropes=(0, 0),
        layer_windows=(None, None),
    )


def test_llama_defaults_where_the_file_is_silent() -> None:
    config = read(LLAMA, num_key_value_heads=DROP, rope_theta=DROP, rms_norm_eps=DROP, max_position_embeddings=None)
    assert (config.num_kv_heads, config.ropes[0].theta, config.rms_norm_eps, config.max_position) == (
        4, 10000.0, 1e-6, 2048
    )  # fmt: skip


def test_llama_biases() -> None:
    config = read(LLAMA, attention_bias=True, mlp_bias=True)
    assert config.qkv_bias
    assert config.attention_output_bias
    assert config.mlp_bias


@pytest.mark.parametrize("architectures", [DROP, None, []])
def test_model_type_decides_without_architectures(architectures: Any) -> None:
    assert read(QWEN3, architectures=architectures).architecture == "qwen3"


@pytest.mark.parametrize(("window", "expected"), [(16, 16), (None, None), (DROP, 4096)])
def test_mistral_window(window: Any, expected: int | None) -> None:
    """An explicit null means full attention; an absent field means the default of the published class."""
    assert read(MISTRAL, sliding_window=window).layer_windows == (expected, expected)


def test_qwen2_bias_and_windows() -> None:
    config = read(QWEN2, sliding_window=16, use_sliding_window=False)
    assert config.qkv_bias
    assert not config.attention_output_bias
    assert config.layer_windows == (None, None)
    config = read(QWEN2, sliding_window=16, use_sliding_window=True, max_window_layers=1)
    assert config.layer_windows == (None, 16)
    types = ["sliding_attention", "full_attention"]
    config = read(QWEN2, sliding_window=16, use_sliding_window=True, layer_types=types)
    assert config.layer_windows == (16, None)


def test_qwen2_layer_types_without_a_window_contradict() -> None:
    with pytest.raises(CheckpointError, match="sliding_window is 16; it must be a number of tokens"):
        read(QWEN2, sliding_window=16, use_sliding_window=False, layer_types=["sliding_attention", "full_attention"])


@pytest.mark.parametrize(("head_dim", "expected"), [(DROP, 128), (None, 8), (16, 16)])
def test_qwen3_head_dim_and_norms(head_dim: Any, expected: int) -> None:
    config = read(QWEN3, head_dim=head_dim)
    assert config.head_dim == expected
    assert config.attention_scale == 1 / math.sqrt(expected)
    assert config.qk_norm
    assert not config.qkv_bias


def test_gemma3_270m() -> None:
    config = read(GEMMA3_270M)
    assert config.tie_embeddings  # the class's default: the file is silent
    assert config.activation == "gelu_tanh"
    assert config.attention_scale == 1 / 16
    assert config.embedding_scale == math.sqrt(640)
    assert config.ropes == (RopeConfig(theta=1e6, rotary_dim=256), RopeConfig(theta=1e4, rotary_dim=256))
    assert config.layer_windows == ((512,) * 5 + (None,)) * 3
    assert config.layer_ropes == ((1,) * 5 + (0,)) * 3
    assert config.qk_norm
    assert config.post_norms


@pytest.mark.parametrize(
    "spelling",
    [
        {"layer_types": None, "sliding_window_pattern": 6},
        {"layer_types": None, "_sliding_window_pattern": 6},
        {"layer_types": None, "_sliding_window_pattern": None},
        {
            "rope_theta": None,
            "rope_local_base_freq": None,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        {"rope_theta": None, "rope_local_base_freq": None},
    ],
)
def test_gemma3_spellings_agree(spelling: dict[str, Any]) -> None:
    assert read(GEMMA3_270M, **spelling) == read(GEMMA3_270M)


def test_gemma3_scaling_is_for_global_layers_only() -> None:
    old = read(GEMMA3, rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert old.ropes == (
        RopeConfig(theta=1e6, rotary_dim=8, kind="linear", factor=8.0),
        RopeConfig(theta=1e4, rotary_dim=8),
    )
    parameters = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert read(GEMMA3, rope_parameters=parameters) == old


def test_gemma3_multimodal_uses_its_text_part() -> None:
    """The 4B model's file gives only what differs from the class's defaults."""
    config = read_hf_config(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "num_hidden_layers": 34,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                "sliding_window": 1024,
            },
            "vision_config": {"hidden_size": 1152},
        }
    )
    assert (config.vocab_size, config.num_heads, config.num_kv_heads, config.head_dim) == (262208, 8, 4, 256)
    assert config.layer_windows[:7] == (1024,) * 5 + (None, 1024)
    assert config.max_position == 131072
    with pytest.raises(CheckpointError, match="text_config is missing"):
        read_hf_config({"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"})


LLAMA3_TABLE = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64
}  # fmt: skip
ROPES: list[tuple[str, dict[str, Any], RopeConfig]] = [
    ("default", {}, RopeConfig(theta=10000.0, rotary_dim=8)),
    ("linear", {"factor": 4}, RopeConfig(theta=10000.0, rotary_dim=8, kind="linear", factor=4.0)),
    (
        "dynamic",
        {"factor": 2.0},
        RopeConfig(theta=10000.0, rotary_dim=8, kind="dynamic", factor=2.0, original_max_position=128),
    ),
    (
        "llama3",
        LLAMA3_TABLE,
        RopeConfig(
            theta=10000.0, rotary_dim=8, kind="llama3", factor=8.0, original_max_position=64,
            low_freq_factor=1.0, high_freq_factor=4.0,
        ),
    ),
    (
        "yarn",
        {"factor": 4.0, "original_max_position_embeddings": 32},
        RopeConfig(
            theta=10000.0, rotary_dim=8, kind="yarn", factor=4.0, original_max_position=32, beta_fast=32.0,
            beta_slow=1.0,
        ),
    ),
    (
        "yarn",
        {
            "original_max_position_embeddings": 32, "beta_fast": 16, "beta_slow": 2, "attention_factor": 0.9,
            "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False,
        },
        RopeConfig(
            theta=10000.0, rotary_dim=8, kind="yarn", factor=4.0, original_max_position=32, beta_fast=16.0,
            beta_slow=2.0, attention_factor=0.9, mscale=1.0, mscale_all_dim=0.5, truncate=False,
        ),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "table", "expected"), ROPES)
def test_rope_kinds_in_every_spelling(kind: str, table: dict[str, Any], expected: RopeConfig) -> None:
    assert read(LLAMA, rope_scaling=table | {"rope_type": kind}).ropes == (expected,)
    assert read(LLAMA, rope_scaling=table | {"type": kind}).ropes == (expected,)
    assert read(LLAMA, rope_scaling=table | {"type": kind, "rope_type": kind}).ropes == (expected,)
    new = table | {"rope_type": kind, "rope_theta": 10000.0}
    assert read(LLAMA, rope_parameters=new, rope_theta=DROP).ropes == (expected,)


def test_partial_rotation() -> None:
    assert read(LLAMA, partial_rotary_factor=0.5).ropes[0].rotary_dim == 4
    assert read(LLAMA, rope_parameters={"partial_rotary_factor": 0.5}).ropes[0].rotary_dim == 4
    with pytest.raises(CheckpointError, match=r"partial_rotary_factor 0\.4 of head_dim 8 gives 3"):
        read(LLAMA, partial_rotary_factor=0.4)


BAD_ROPES: list[tuple[dict[str, Any], str]] = [
    (
        {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
        "rope_type 'longrope' is not supported; supported: def",
    ),
    ({"rope_scaling": {"type": "mrope"}}, "rope_type 'mrope' is not supported"),
    (
        {"rope_scaling": {"rope_type": "yarn", "type": "linear"}},
        "rope_type is 'yarn' but rope_scaling.type is 'linear'",
    ),
    ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor is missing"),
    (
        {"rope_scaling": {"rope_type": "linear", "factor": 0.5}},
        "rope_scaling.factor is 0.5; it must be a finite number",
    ),
    ({"rope_scaling": {"rope_type": "linear", "factor": "4"}}, "rope_scaling.factor is '4'"),
    ({"rope_scaling": {"rope_type": "linear", "factor": True}}, "rope_scaling.factor is True"),
    ({"rope_scaling": {"rope_type": "linear", "factor": math.nan}}, "rope_scaling.factor is nan"),
    ({"rope_scaling": ["linear", 4]}, r"rope_scaling is \['linear', 4\]; it must be an object"),
    ({"rope_scaling": {"rope_type": 3}}, "rope_scaling.rope_type is 3; it must be a string"),
    (
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "llama_4_scaling_beta": 0.1}},
        "llama_4_scaling_beta is 0.1",
    ),
    ({"rope_scaling": LLAMA3_TABLE | {"rope_type": "llama3", "low_freq_factor": 5.0}}, "below high_freq_factor"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 0.5}}, "at least beta_slow"),
    (
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"type": "linear", "factor": 4.0}},
        "rope_scaling.factor is 2.0 but rope_parameters.factor is 4.0",
    ),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters.full_attention"),
    ({"rope_theta": 0.0}, "rope_theta is 0.0"),
    ({"rope_theta": 1e400}, "rope_theta is inf"),
]


@pytest.mark.parametrize(("changes", "expected"), BAD_ROPES)
def test_bad_ropes_are_refused(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(CheckpointError, match=expected) as caught:
        read(LLAMA, **changes)
    assert str(caught.value).startswith("config.json: ")


BAD_NUMBERS: list[tuple[dict[str, Any], str]] = [
    ({"vocab_size": DROP}, "vocab_size is missing"),
    ({"vocab_size": 0}, r"vocab_size is 0; it must be an integer in \[1, "),
    ({"vocab_size": 2**60}, "vocab_size is 1152921504606846976"),
    ({"hidden_size": -32}, "hidden_size is -32"),
    ({"hidden_size": "32"}, "hidden_size is '32'"),
    ({"hidden_size": 32.5}, "hidden_size is 32.5"),
    ({"hidden_size": True}, "hidden_size is True"),
    ({"hidden_size": [32]}, r"hidden_size is \[32\]"),
    ({"hidden_size": 2**60}, "hidden_size is"),
    ({"intermediate_size": 0}, "intermediate_size is 0"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
    ({"num_attention_heads": 0}, "num_attention_heads is 0"),
    ({"num_attention_heads": 5}, r"num_attention_heads is 5; it must be a divisor of hidden_size \(32\)"),
    ({"num_attention_heads": 32}, "num_attention_heads is 32; it must be such that"),
    ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
    ({"num_key_value_heads": 3}, "4 attention heads over 3 key/value heads"),
    ({"head_dim": 7}, "head_dim 7 gives 7 rotated columns"),
    ({"head_dim": 2**40}, "head_dim is"),
    ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
    ({"max_position_embeddings": 2**31}, "max_position_embeddings is 2147483648"),
    ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
    ({"rms_norm_eps": -1e-5}, "rms_norm_eps is -1e-05"),
    ({"rms_norm_eps": math.nan}, "rms_norm_eps is nan"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; it must be true or false"),
    ({"attention_bias": 1}, "attention_bias is 1"),
    ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM'; it must be a list of strings"),
    ({"model_type": "qwen2"}, "architectures says 'LlamaForCausalLM' but model_type is 'qwen2'"),
]


@pytest.mark.parametrize(("changes", "expected"), BAD_NUMBERS)
def test_absurd_values_name_their_field(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(CheckpointError, match=expected) as caught:
        read(LLAMA, **changes)
    assert not isinstance(caught.value, UnsupportedModelError)
    assert "\n" not in str(caught.value)


UNSUPPORTED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (LLAMA, {"architectures": ["MixtralForCausalLM"]}, "'MixtralForCausalLM' is not supported; supported: LlamaForC"),
    (LLAMA, {"architectures": DROP, "model_type": "mamba"}, "model_type is 'mamba'.*supported model types: llama"),
    (LLAMA, {"architectures": DROP, "model_type": DROP}, "model_type is None"),
    (LLAMA, {"hidden_act": "relu"}, "hidden_act 'relu' is not supported; supported: silu"),
    (LLAMA, {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    (GEMMA3, {"hidden_activation": "gelu"}, "hidden_activation 'gelu'"),
    (GEMMA3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0; only null"),
    (GEMMA3, {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0; only null"),
    (GEMMA3, {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
    (GEMMA3, {"layer_types": ["linear_attention", "full_attention"]}, "layer_types has 'linear_attention'"),
    (MISTRAL, {"attention_bias": True}, "attention_bias is True; mistral is supported without it"),
    (QWEN2, {"mlp_bias": True}, "mlp_bias is True"),
    (LLAMA, {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quant_method 'gptq' is not supported"),
]


@pytest.mark.parametrize(("base", "changes", "expected"), UNSUPPORTED)
def test_what_is_not_built_is_refused_by_name(base: dict[str, Any], changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(UnsupportedModelError, match=expected):
        read(base, **changes)


@pytest.mark.parametrize("changes", [{"layer_types": ["full_attention"]}, {"sliding_window": None}])
def test_gemma3_windows_must_be_told(changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=next(iter(changes))):
        read(GEMMA3, **changes)


def test_overrides_replace_fields_and_none_is_lost() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0}
    config = read_hf_config(LLAMA, overrides={"rope_scaling": scaling, "max_position_embeddings": 512})
    assert config.ropes[0].kind == "yarn"
    assert config.max_position == 512
    with pytest.raises(ConfigurationError, match="override 'rope_scalling' is not a field that a llama model reads"):
        read_hf_config(LLAMA, overrides={"rope_scalling": scaling})


ODD_VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 7, 2**63, 10**400, 0.0, 1e-320, math.nan, math.inf, "", "1", "silu", "\ud800", [], [1],
    ["x"], [None], {}, {"a": 1}, {"rope_type": None}, [[[]]],
]  # fmt: skip


@pytest.mark.parametrize("base", [LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA3], ids=lambda base: base["model_type"])
def test_odd_values_in_any_field_never_raise_anything_else(base: dict[str, Any]) -> None:
    """Every field that a reader looks at, times every kind of odd value: a configuration, or an error of ours."""
    extra = ["rope_scaling", "rope_parameters", "layer_types", "sliding_window", "use_sliding_window", "text_config"]
    extra += [
        "quantization_config",
        "partial_rotary_factor",
        "final_logit_softcapping",
        "max_window_layers",
        "head_dim",
    ]
    refused: list[str] = []
    for name in [*base, *extra]:
        for value in ODD_VALUES:
            try:
                read_hf_config(base | {name: value})
            except (CheckpointError, ConfigurationError) as error:
                refused.append(str(error))
    assert len(refused) > 200
    assert not [text for text in refused if "\n" in text]
    for name in ("factor", "rope_type", "type", "low_freq_factor", "beta_fast", "mscale", "truncate", "rope_theta"):
        for kind in ("linear", "llama3", "yarn", "dynamic"):
            for value in ODD_VALUES:
                table = LLAMA3_TABLE | {"rope_type": kind} | {name: value}
                try:
                    read_hf_config(base | {"rope_scaling": table})
                except CheckpointError:
                    continue


# generation_config.json


def generation(folder: Path, config: dict[str, Any] = LLAMA, **fields: Any) -> Any:
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return read_hf_generation(folder, config, 48)


def test_generation_defaults(tmp_path: Path) -> None:
    found = generation(
        tmp_path, do_sample=True, temperature=0.7, top_k=20, top_p=0.8, min_p=0.1, repetition_penalty=1.1,
        eos_token_id=[5, 3, 5], pad_token_id=0, transformers_version="5.0.0",
    )  # fmt: skip
    assert found.eos_token_ids == (5, 3)
    assert (found.temperature, found.top_k, found.top_p, found.min_p, found.repetition_penalty) == (
        0.7, 20, 0.8, 0.1, 1.1
    )  # fmt: skip


def test_eos_comes_from_config_json_when_generation_config_is_silent(tmp_path: Path) -> None:
    assert read_hf_generation(tmp_path, LLAMA, 48).eos_token_ids == (2,)
    assert generation(tmp_path, temperature=None).eos_token_ids == (2,)
    assert generation(tmp_path, eos_token_id=7).eos_token_ids == (7,)
    assert generation(tmp_path, LLAMA | {"eos_token_id": None}).eos_token_ids == ()


def test_greedy_checkpoints_stay_greedy(tmp_path: Path) -> None:
    found = generation(tmp_path, do_sample=False, temperature=0.6, top_p=0.9)
    assert (found.temperature, found.top_p) == (0.0, None)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"eos_token_id": 48}, r"generation_config.json: eos_token_id is 48; it must be a token id in \[0, 47\]"),
        ({"eos_token_id": [2, -1]}, "eos_token_id"),
        ({"eos_token_id": "2"}, "eos_token_id"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"top_p": 0.0}, r"top_p is 0.0; it must be in \(0, 1\]"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_k": -3}, "top_k is -3"),
        ({"min_p": 2}, "min_p is 2"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"do_sample": "false"}, "do_sample is 'false'"),
    ],
)
def test_bad_generation_defaults(tmp_path: Path, fields: dict[str, Any], expected: str) -> None:
    with pytest.raises(CheckpointError, match=expected):
        generation(tmp_path, **fields)


def test_defaults_that_are_not_applied_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    generation(tmp_path, no_repeat_ngram_size=3)
    assert "no_repeat_ngram_size is 3; it is not applied" in caplog.text


# Tokenizer files (B51)


def put(folder: Path, name: str, content: object) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")


def test_chat_template_places_in_order(tmp_path: Path) -> None:
    expected = []
    for name, content in [
        ("processor_config.json", {"chat_template": "from processor"}),
        ("tokenizer_config.json", {"chat_template": "from tokenizer"}),
        ("chat_template.json", {"chat_template": "from json"}),
        ("chat_template.jinja", "from jinja"),
    ]:
        put(tmp_path, name, content)
        expected.append((name, content if isinstance(content, str) else content["chat_template"]))
        source = read_hf_tokenizer(tmp_path)
        assert (source.chat_template_origin, source.chat_templates["default"]) == expected[-1]
    assert read_hf_tokenizer(tmp_path.parent / "none").chat_templates == {}


def test_named_chat_templates(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    put(tmp_path, "tokenizer_config.json", {"chat_template": templates})
    put(tmp_path, "additional_chat_templates/rag.jinja", "c")
    source = read_hf_tokenizer(tmp_path)
    assert source.chat_templates == {"default": "a", "tool_use": "b", "rag": "c"}
    assert source.chat_template_origin == "tokenizer_config.json"


@pytest.mark.parametrize("value", [3, ["text"], [{"name": "x"}], {"x": 1}])
def test_chat_template_of_another_type(tmp_path: Path, value: object) -> None:
    put(tmp_path, "tokenizer_config.json", {"chat_template": value})
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: chat_template must be a string"):
        read_hf_tokenizer(tmp_path)


def test_tokenizer_files_and_digest(tmp_path: Path) -> None:
    put(tmp_path, "special_tokens_map.json", {"eos_token": "</s>", "bos_token": "<s>"})
    put(tmp_path, "tokenizer_config.json", {"eos_token": "<end>"})
    put(tmp_path, "tokenizer.json", {"model": {}})
    source = read_hf_tokenizer(tmp_path)
    assert source.tokenizer_json == str(tmp_path / "tokenizer.json")
    assert source.tokenizer_config == {"eos_token": "<end>", "bos_token": "<s>"}
    digests = {source.digest}
    for name, content in [("tokenizer.json", {"model": {"a": 1}}), ("chat_template.jinja", "x")]:
        put(tmp_path, name, content)
        digests.add(read_hf_tokenizer(tmp_path).digest)
    assert len(digests) == 3


def test_tokenizer_json_missing_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    put(tmp_path, "tokenizer.model", "binary")
    assert read_hf_tokenizer(tmp_path).tokenizer_json is None
    assert "tokenizer.json is missing; tokenizer.model alone is not read" in caplog.text
