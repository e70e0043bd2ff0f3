"""Writes tiny checkpoints for tests: safetensors byte by byte, and whole model folders and GGUF files."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from neoserve.formats.checkpoint import Checkpoint, open_checkpoint
from neoserve.formats.parameters import model_parameters
from neoserve.types.errors import CheckpointError
from neoserve.types.tensors import F32

from .gguf_writer import ARRAY, BOOL, FLOAT32, INT32, STRING, UINT32, Image, Tensor

Arrays = dict[str, npt.NDArray[Any]]
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int32": "I32", "uint8": "U8", "float64": "F64"}

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
TIED = LLAMA | {"tie_word_embeddings": True}
GEMMA3: dict[str, Any] = LLAMA | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "head_dim": 8,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 8,
    "sliding_window": 16,
    "sliding_window_pattern": 2,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "tie_word_embeddings": True,
}

GEMMA3_270M: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "_sliding_window_pattern": 6,
    "attention_bias": False, "attn_logit_softcapping": None, "bos_token_id": 2, "eos_token_id": 1,
    "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 640,
    "intermediate_size": 2048, "max_position_embeddings": 32768, "num_attention_heads": 4, "num_hidden_layers": 18,
    "num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000.0,
    "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": 512, "use_bidirectional_attention": False,
    "vocab_size": 262144,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
}  # fmt: skip
"""The published config.json of gemma-3-270m, as far as it concerns the model's computation."""


def llama_arrays(config: Mapping[str, Any] = LLAMA, prefix: str = "model.", dtype: Any = np.float32) -> Arrays:
    """Random weights with Hugging Face's names and shapes for a llama-like configuration."""
    rng = np.random.default_rng(7)
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    query, key = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}embed_tokens.weight": (vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        at = f"{prefix}layers.{layer}."
        shapes |= {
            f"{at}input_layernorm.weight": (hidden,),
            f"{at}self_attn.q_proj.weight": (query, hidden),
            f"{at}self_attn.k_proj.weight": (key, hidden),
            f"{at}self_attn.v_proj.weight": (key, hidden),
            f"{at}self_attn.o_proj.weight": (hidden, query),
            f"{at}post_attention_layernorm.weight": (hidden,),
            f"{at}mlp.gate_proj.weight": (inner, hidden),
            f"{at}mlp.up_proj.weight": (inner, hidden),
            f"{at}mlp.down_proj.weight": (hidden, inner),
        }
        if "gemma3" in config["model_type"]:
            shapes |= {
                f"{at}pre_feedforward_layernorm.weight": (hidden,),
                f"{at}post_feedforward_layernorm.weight": (hidden,),
                f"{at}self_attn.q_norm.weight": (head_dim,),
                f"{at}self_attn.k_norm.weight": (head_dim,),
            }
    shapes[f"{prefix}norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def header_of(arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, Any]:
    """The header of a file that holds the arrays in this order."""
    header: dict[str, Any] = {}
    position = 0
    for name, array in arrays.items():
        end = position + array.nbytes
        header[name] = {
            "dtype": DTYPES[array.dtype.name], "shape": list(array.shape), "data_offsets": [position, end]
        }  # fmt: skip
        position = end
    return header


def safetensors_bytes(header: object, data: bytes, *, length: int | None = None, pad: bool = True) -> bytes:
    """A file from a header (an object to be dumped, or bytes as they are) and tensor bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    if pad:
        text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def data_of(arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """The bytes of the arrays, one after the other."""
    return b"".join(array.tobytes() for array in arrays.values())


def write_safetensors(path: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> Path:
    """A sound file."""
    path.write_bytes(safetensors_bytes(header_of(arrays), data_of(arrays)))
    return path


def write_model(folder: Path, config: Mapping[str, Any] = LLAMA, arrays: Arrays | None = None) -> Path:
    """A model folder with config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", llama_arrays(config) if arrays is None else arrays)
    return folder


def write_sharded(folder: Path, config: Mapping[str, Any] = LLAMA) -> tuple[Arrays, dict[str, str]]:
    """A folder with two shards and an index; returns all arrays and the index's map."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    arrays = llama_arrays(config)
    names = list(arrays)
    weight_map = {}
    for number, part in enumerate((names[:9], names[9:]), 1):
        shard = f"model-{number:05}-of-00002.safetensors"
        write_safetensors(folder / shard, {name: arrays[name] for name in part})
        weight_map |= dict.fromkeys(part, shard)
    write_index(folder, weight_map)
    return arrays, weight_map


def write_index(folder: Path, weight_map: object) -> None:
    """The index of a sharded checkpoint."""
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def permute(array: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Rows as conversion to GGUF stores q and k of the llama architecture (pairs of a rotation side by side)."""
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


HF_TO_GGUF = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
}  # fmt: skip
GEMMA3_TO_GGUF = HF_TO_GGUF | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_arrays(arrays: Arrays, config: Mapping[str, Any]) -> Arrays:
    """Hugging Face arrays under GGUF names, with that format's habits (q/k permutation, Gemma's norms + 1)."""
    gemma = "gemma3" in config["model_type"]
    table = GEMMA3_TO_GGUF if gemma else HF_TO_GGUF
    outer = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    found: Arrays = {}
    for name, array in arrays.items():
        stem, kind = name.rsplit(".", 1)
        if stem in outer:
            renamed = f"{outer[stem]}.{kind}"
        else:
            _, _, layer, inner = stem.split(".", 3)
            renamed = f"blk.{layer}.{table[inner]}.{kind}"
        if config["model_type"] == "llama" and ".attn_q." in renamed:
            array = permute(array, config["num_attention_heads"])
        if config["model_type"] == "llama" and ".attn_k." in renamed:
            array = permute(array, config["num_key_value_heads"])
        found[renamed] = array + 1 if gemma and "norm" in renamed else array
    return found


def gguf_image(arrays: Arrays, config: Mapping[str, Any] = LLAMA, architecture: str = "llama") -> Image:
    """A GGUF file of Hugging Face arrays in F32, with the metadata that a converter writes."""
    image = Image()
    image.add("general.architecture", STRING, architecture)
    for key, name in (
        ("block_count", "num_hidden_layers"),
        ("context_length", "max_position_embeddings"),
        ("embedding_length", "hidden_size"),
        ("feed_forward_length", "intermediate_size"),
        ("attention.head_count", "num_attention_heads"),
        ("attention.head_count_kv", "num_key_value_heads"),
    ):
        image.add(f"{architecture}.{key}", UINT32, config[name])
    image.add(f"{architecture}.attention.layer_norm_rms_epsilon", FLOAT32, config["rms_norm_eps"])
    image.add(f"{architecture}.rope.freq_base", FLOAT32, config["rope_theta"])
    vocab = config["vocab_size"]
    tokens = [f"t{index}" for index in range(vocab - 2)] + ["<|im_end|>", "<|endoftext|>"]
    image.add("tokenizer.ggml.model", STRING, "gpt2").add("tokenizer.ggml.pre", STRING, "smollm")
    image.add_array("tokenizer.ggml.tokens", STRING, list(tokens))
    image.add_array("tokenizer.ggml.token_type", INT32, [1] * (vocab - 2) + [3, 3])
    image.add("tokenizer.ggml.eos_token_id", UINT32, 2).add("tokenizer.ggml.add_bos_token", BOOL, 0)
    image.tensors = [
        Tensor(name, array.shape[::-1], 0, array.astype("<f4").tobytes())
        for name, array in gguf_arrays(arrays, config).items()
    ]
    return image


def set_key(image: Image, key: str, kind: int, content: object) -> Image:
    """Replaces or adds a key; an ARRAY kind takes (item kind, items)."""
    image.keys = [pair for pair in image.keys if pair[0] != key]
    if kind == ARRAY:
        item_kind, items = content  # type: ignore[misc]
        return image.add_array(key, item_kind, items)
    return image.add(key, kind, content)


BF16_DTYPE = np.dtype(ml_dtypes.bfloat16)


LAYER = {
    "input_norm": "input_layernorm.weight",
    "attention.q": "self_attn.q_proj.weight",
    "attention.k": "self_attn.k_proj.weight",
    "attention.v": "self_attn.v_proj.weight",
    "attention.o": "self_attn.o_proj.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "mlp.gate": "mlp.gate_proj.weight",
    "mlp.up": "mlp.up_proj.weight",
    "mlp.down": "mlp.down_proj.weight",
}
LAYER_GEMMA3 = LAYER | {
    "attention.q_norm": "self_attn.q_norm.weight",
    "attention.k_norm": "self_attn.k_norm.weight",
    "post_attention_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "post_mlp_norm": "post_feedforward_layernorm.weight",
}


def stored_name(canonical: str, table: dict[str, str] = LAYER) -> str:
    outer = {"embedding": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "lm_head": "lm_head.weight"}
    if canonical in outer:
        return outer[canonical]
    _, layer, name = canonical.split(".", 2)
    return f"model.layers.{layer}.{table[name]}"


def check_values(checkpoint: Checkpoint, arrays: Arrays, table: dict[str, str] = LAYER, norm_offset: float = 0) -> None:
    """Every canonical tensor has the values of the Hugging Face array that it stands for."""
    assert set(checkpoint.tensors) == set(model_parameters(checkpoint.config))
    for name, tensor in checkpoint.tensors.items():
        expected = arrays[stored_name(name, table)].astype(np.float32)
        if name.endswith("norm"):
            expected = expected + np.float32(norm_offset)
        assert tensor.shape == expected.shape
        np.testing.assert_array_equal(tensor.read_f32(), expected, err_msg=name)
        if expected.ndim == 2:
            np.testing.assert_array_equal(tensor.read_rows(1, 3, F32).values, expected[1:3], err_msg=name)


def refused(folder: Path, expected: str, kind: type[CheckpointError] = CheckpointError) -> str:
    with pytest.raises(kind, match=expected) as caught:
        open_checkpoint(folder)
    text = str(caught.value)
    assert "\n" not in text
    return text
