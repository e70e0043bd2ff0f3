"""The tiny models written as GGUF, by the ``gguf`` package and the habits of its converters, give the same logits.

Habits: rows of q and k (and their biases) of the ``llama`` architecture are in the order of adjacent rotation pairs,
Gemma's norm weights hold the 1 that is added to them, Llama 3's scaling is a tensor of frequency divisors.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from neoserve.formats.checkpoint import open_checkpoint

from .golden.cases import Case, case_named, weights
from .step_driver import StepDriver
from .tiny import expected, native

CASES = (
    "llama",
    "llama-linear",
    "llama-llama3",
    "llama-yarn",
    "llama-tied-mqa",
    "llama-bias",
    "llama-d80",
    "llama-odd",
    "mistral-full",
    "qwen2",
    "qwen3",
    "gemma3",
)
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
}
GEMMA_NAMES = NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def _gguf_name(name: str, names: dict[str, str]) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{names[part]}.{kind}"
    return f"{names[stem]}.{kind}"


def _pairs_adjacent(value: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Row i of the first half of a head goes to 2i, row i of the second half to 2i + 1."""
    halves = value.reshape(heads, 2, -1, *value.shape[1:])
    return np.ascontiguousarray(np.swapaxes(halves, 1, 2)).reshape(value.shape)


def _llama3_divisors(scaling: dict[str, Any], theta: float, head_dim: int) -> npt.NDArray[np.float32]:
    """Long waves are divided by the factor, short ones are kept, those between are blended."""
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    divisors = []
    for pair in range(head_dim // 2):
        turns = original / (2 * math.pi * theta ** (2 * pair / head_dim))
        blend = min(max((turns - low) / (high - low), 0.0), 1.0)
        divisors.append(1.0 / ((1 - blend) / factor + blend))
    return np.array(divisors, np.float32)


class _Converter:
    """Writes one case as a GGUF file of float32 tensors."""

    def __init__(self, case: Case, path: Path) -> None:
        self.config: dict[str, Any] = case.config
        source = case if case.weights_of is None else case_named(case.weights_of)
        rounding = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}[source.storage]
        self.tensors = {name: value.astype(rounding).astype(np.float32) for name, value in weights(source).items()}
        self.architecture = {"mistral": "llama", "gemma3_text": "gemma3"}.get(
            self.config["model_type"], self.config["model_type"]
        )
        self.heads = self.config["num_attention_heads"]
        self.head_dim = self.config.get("head_dim", self.config["hidden_size"] // self.heads)
        self.writer = gguf.GGUFWriter(path, self.architecture)

    def write(self) -> None:
        self._write_shape()
        self._write_rope()
        if self.architecture == "gemma3":
            self.writer.add_sliding_window(self.config["sliding_window"])
            self.writer.add_uint32("gemma3.attention.sliding_window_pattern", self.config["sliding_window_pattern"])
            self.writer.add_float32("gemma3.attention.scale", self.config["query_pre_attn_scalar"] ** -0.5)
        self._write_tokenizer()
        for name, value in self.tensors.items():
            self.writer.add_tensor(_gguf_name(name, self._names()), self._converted(name, value))
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()

    def _names(self) -> dict[str, str]:
        return GEMMA_NAMES if self.architecture == "gemma3" else NAMES

    def _converted(self, name: str, value: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        if self.architecture == "llama" and ".q_proj." in name:
            return _pairs_adjacent(value, self.heads)
        if self.architecture == "llama" and ".k_proj." in name:
            return _pairs_adjacent(value, self.config["num_key_value_heads"])
        if self.architecture == "gemma3" and "norm" in name:
            return value + np.float32(1)
        return value

    def _write_shape(self) -> None:
        writer, config = self.writer, self.config
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(config["hidden_size"])
        writer.add_block_count(config["num_hidden_layers"])
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count(self.heads)
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(self.head_dim)
        writer.add_value_length(self.head_dim)
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])

    def _write_rope(self) -> None:
        writer, scaling = self.writer, self.config.get("rope_scaling")
        writer.add_rope_dimension_count(self.head_dim)
        writer.add_rope_freq_base(self.config["rope_theta"])
        match (scaling or {}).get("rope_type", (scaling or {}).get("type")):
            case "linear":
                writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
                writer.add_rope_scaling_factor(scaling["factor"])
            case "yarn":
                writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
                writer.add_rope_scaling_factor(scaling["factor"])
                writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
            case "llama3":
                divisors = _llama3_divisors(scaling, self.config["rope_theta"], self.head_dim)
                writer.add_tensor("rope_freqs.weight", divisors)

    def _write_tokenizer(self) -> None:
        self.writer.add_tokenizer_model("gpt2")
        self.writer.add_tokenizer_pre("gpt-2")
        self.writer.add_token_list([chr(0x100 + token) for token in range(self.config["vocab_size"])])
        self.writer.add_token_merges([])
        self.writer.add_eos_token_id(2)


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    case = case_named(name)
    _Converter(case, tmp_path / "model.gguf").write()
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    ids, wanted = expected(name)
    executor = native(checkpoint, context_length=len(ids))
    try:
        logits = StepDriver(executor).run(ids).logits
    finally:
        executor.close()
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=1e-4)
