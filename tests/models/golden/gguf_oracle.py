"""Loads a GGUF file into a float32 transformers model: the oracle of the real-model tests.

It shares no code with NeoServe: tensors are dequantised by the ``gguf`` package, the configuration is spelled out
per architecture, and the tokenizers are those of transformers and sentencepiece. Needs these, torch and gguf.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import sentencepiece
import torch
import transformers
from tokenizers import pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

sys.path.insert(0, str(Path(__file__).parents[2] / "unit" / "golden"))
import make_tokenizer_ids  # assembles a sentencepiece model out of a GGUF file's pieces

TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
GEMMA_LAYER = LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


class Metadata:
    """Scalar metadata of a GGUF file under the keys of its architecture."""

    def __init__(self, reader: gguf.GGUFReader) -> None:
        self._reader = reader
        self.architecture = str(self.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        field = self._reader.fields.get(key)
        return default if field is None else field.contents()

    def own(self, key: str, default: Any = None) -> Any:
        return self.get(f"{self.architecture}.{key}", default)


def _shape(meta: Metadata, vocab: int, tied: bool) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "hidden_size": meta.own("embedding_length"),
        "intermediate_size": meta.own("feed_forward_length"),
        "num_hidden_layers": meta.own("block_count"),
        "num_attention_heads": meta.own("attention.head_count"),
        "num_key_value_heads": meta.own("attention.head_count_kv"),
        "max_position_embeddings": meta.own("context_length"),
        "rms_norm_eps": float(np.float32(meta.own("attention.layer_norm_rms_epsilon"))),
        "tie_word_embeddings": tied,
        "attn_implementation": "eager",
    }


def build_model(meta: Metadata, vocab: int, tied: bool) -> Any:
    """An empty transformers model of the file's architecture."""
    shape = _shape(meta, vocab, tied)
    theta = float(meta.own("rope.freq_base"))
    match meta.architecture:
        case "llama":
            rope = {"rope_type": "default", "rope_theta": theta}
            return LlamaForCausalLM(LlamaConfig(**shape, rope_parameters=rope))
        case "qwen2":
            rope = {"rope_type": "default", "rope_theta": theta}
            return Qwen2ForCausalLM(Qwen2Config(**shape, rope_parameters=rope))
        case "gemma3":
            # What GGUF leaves out: the pattern of 6, the local base 10000, and head_dim as the query scalar.
            head_dim = meta.own("attention.key_length")
            rope = {
                "full_attention": {"rope_type": "default", "rope_theta": theta},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            }
            window = meta.own("attention.sliding_window")
            config = Gemma3TextConfig(
                **shape, rope_parameters=rope, head_dim=head_dim, query_pre_attn_scalar=head_dim, sliding_window=window
            )
            return Gemma3ForCausalLM(config)
        case other:
            raise SystemExit(f"no oracle for architecture {other!r}")


def hugging_face_name(name: str, architecture: str) -> str:
    """Name of a GGUF tensor in transformers; KeyError if it has none."""
    if name in TOP:
        return TOP[name]
    matched = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if matched is None:
        raise KeyError(name)
    layer, part, kind = matched.groups()
    table = GEMMA_LAYER if architecture == "gemma3" else LAYER
    return f"model.layers.{layer}.{table[part]}.{kind}"


def undo_habits(name: str, value: np.ndarray, meta: Metadata) -> np.ndarray:
    """Reverses what the conversion to GGUF does to values: llama's q/k row order, Gemma's norm weights plus one."""
    if meta.architecture == "llama" and (".attn_q." in name or ".attn_k." in name):
        heads = meta.own("attention.head_count" if ".attn_q." in name else "attention.head_count_kv")
        # The file pairs rows (2i, 2i + 1) of a head for rope; transformers pairs (i, i + head_dim / 2).
        paired = value.reshape(heads, value.shape[0] // heads // 2, 2, *value.shape[1:])
        return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(value.shape)
    if meta.architecture == "gemma3" and name.endswith("norm.weight"):
        less = value - np.float32(1)
        if not np.array_equal(less + np.float32(1), value):
            raise SystemExit(f"{name}: taking the 1 away loses bits; the oracle would not be exact")
        return less
    return value


def load_model(path: Path) -> Any:
    """The model of a GGUF file as a transformers model in float32, eager attention, in evaluation mode."""
    reader = gguf.GGUFReader(path)
    meta = Metadata(reader)
    state: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        value = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        value = value.reshape([int(n) for n in reversed(tensor.shape)])
        target = hugging_face_name(tensor.name, meta.architecture)
        state[target] = torch.from_numpy(np.array(undo_habits(tensor.name, value, meta)))
    tied = "lm_head.weight" not in state
    if tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model = build_model(meta, state["model.embed_tokens.weight"].shape[0], tied).float()
    model.load_state_dict(state, strict=True)
    return model.eval()


class Tokenizer:
    """encode(text) and decode(ids) of a GGUF file's tokenizer, neither adding nor expecting BOS.

    Byte-level BPE is transformers' own conversion, which parses special tokens in text, with SmolLM's splitting of
    digits put back. Gemma's is the sentencepiece library itself, which never does: transformers' conversion cuts
    long runs of blanks otherwise than the library.
    """

    def __init__(self, path: Path) -> None:
        fields = make_tokenizer_ids.metadata(path)
        if fields["tokenizer.ggml.model"] == "llama":
            model = make_tokenizer_ids.sentencepiece_model(fields)
            pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
            self.encode, self.decode = pieces.encode, pieces.decode
            return
        tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        if fields["tokenizer.ggml.pre"] == "smollm":
            tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            )
        self.encode: Callable[[str], list[int]] = partial(tokenizer.encode, add_special_tokens=False)
        self.decode: Callable[[list[int]], str] = tokenizer.decode


def adds_bos(path: Path) -> int | None:
    """The BOS id if the file says that prompts start with it, else None."""
    meta = Metadata(gguf.GGUFReader(path))
    return int(meta.get("tokenizer.ggml.bos_token_id")) if meta.get("tokenizer.ggml.add_bos_token") else None


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
