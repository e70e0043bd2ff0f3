"""How Hugging Face and GGUF name the parameters of each architecture: one table each.

Adding an architecture means adding one row to ``LAYOUTS`` (and its configuration reader).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from neoserve.formats.parameters import EMBEDDING, FINAL_NORM, LM_HEAD
from neoserve.types.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class NameLayout:
    """Names of one architecture.

    ``hf`` and ``gguf`` map a layer parameter's canonical name to the name after the layer's prefix
    (``model.layers.{i}.`` and ``blk.{i}.``). ``norm_offset`` is added to every norm weight of a Hugging Face
    checkpoint; GGUF files already hold it. ``gguf_permuted`` tells that GGUF files of this architecture store the
    rows of q and k in the order of adjacent rotation pairs.
    """

    hf: Mapping[str, str]
    gguf: Mapping[str, str]
    norm_offset: float = 0.0
    gguf_permuted: bool = False


_HF: Final = {
    "input_norm": "input_layernorm.weight",
    "attention.q": "self_attn.q_proj.weight",
    "attention.k": "self_attn.k_proj.weight",
    "attention.v": "self_attn.v_proj.weight",
    "attention.o": "self_attn.o_proj.weight",
    "attention.q_bias": "self_attn.q_proj.bias",
    "attention.k_bias": "self_attn.k_proj.bias",
    "attention.v_bias": "self_attn.v_proj.bias",
    "attention.o_bias": "self_attn.o_proj.bias",
    "attention.q_norm": "self_attn.q_norm.weight",
    "attention.k_norm": "self_attn.k_norm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "mlp.gate": "mlp.gate_proj.weight",
    "mlp.up": "mlp.up_proj.weight",
    "mlp.down": "mlp.down_proj.weight",
    "mlp.gate_bias": "mlp.gate_proj.bias",
    "mlp.up_bias": "mlp.up_proj.bias",
    "mlp.down_bias": "mlp.down_proj.bias",
}
_HF_GEMMA3: Final = _HF | {
    "post_attention_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "post_mlp_norm": "post_feedforward_layernorm.weight",
}
_GGUF: Final = {
    "input_norm": "attn_norm.weight",
    "attention.q": "attn_q.weight",
    "attention.k": "attn_k.weight",
    "attention.v": "attn_v.weight",
    "attention.o": "attn_output.weight",
    "attention.q_bias": "attn_q.bias",
    "attention.k_bias": "attn_k.bias",
    "attention.v_bias": "attn_v.bias",
    "attention.o_bias": "attn_output.bias",
    "attention.q_norm": "attn_q_norm.weight",
    "attention.k_norm": "attn_k_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "mlp.gate": "ffn_gate.weight",
    "mlp.up": "ffn_up.weight",
    "mlp.down": "ffn_down.weight",
    "mlp.gate_bias": "ffn_gate.bias",
    "mlp.up_bias": "ffn_up.bias",
    "mlp.down_bias": "ffn_down.bias",
}
_GGUF_GEMMA3: Final = _GGUF | {
    "post_attention_norm": "post_attention_norm.weight",
    "post_mlp_norm": "post_ffw_norm.weight",
}

LAYOUTS: Final[Mapping[str, NameLayout]] = {
    "llama": NameLayout(hf=_HF, gguf=_GGUF, gguf_permuted=True),
    "mistral": NameLayout(hf=_HF, gguf=_GGUF),
    "qwen2": NameLayout(hf=_HF, gguf=_GGUF),
    "qwen3": NameLayout(hf=_HF, gguf=_GGUF),
    "gemma3": NameLayout(hf=_HF_GEMMA3, gguf=_GGUF_GEMMA3, norm_offset=1.0),
}

GGUF_ROPE_FACTORS: Final = "rope_freqs.weight"
_GGUF_OUTER: Final = {EMBEDDING: "token_embd.weight", FINAL_NORM: "output_norm.weight", LM_HEAD: "output.weight"}

# Where the text model sits: alone, bare (saved without its head), or inside a multimodal checkpoint.
_HF_PREFIXES: Final = ("model.", "", "language_model.model.", "model.language_model.")
_HF_HEADS: Final = ("lm_head.weight", "language_model.lm_head.weight")

# Buffers that older libraries saved beside the weights; they are recomputed, never read.
_HARMLESS: Final = re.compile(r"(^|\.)(rotary_emb\.(inv_freq|cos_cached|sin_cached)|masked_bias|attn\.bias)$")
_VISION: Final = re.compile(r"^(model\.)?(vision_tower|multi_modal_projector)\.")


def layout(architecture: str) -> NameLayout:
    """The name table of an architecture. Raises UnsupportedModelError listing the known ones."""
    found = LAYOUTS.get(architecture)
    if found is None:
        raise UnsupportedModelError(
            f"architecture {architecture!r} is not supported; supported: {', '.join(sorted(LAYOUTS))}"
        )
    return found


def gguf_name(architecture: str, parameter: str) -> str:
    """Name of a canonical parameter in a GGUF file."""
    if parameter in _GGUF_OUTER:
        return _GGUF_OUTER[parameter]
    _, index, name = parameter.split(".", 2)
    return f"blk.{index}.{layout(architecture).gguf[name]}"


def hf_name(architecture: str, parameter: str, prefix: str, head: str) -> str:
    """Name of a canonical parameter in a Hugging Face checkpoint; see ``hf_prefix`` and ``hf_head``."""
    match parameter:
        case "embedding":
            return f"{prefix}embed_tokens.weight"
        case "final_norm":
            return f"{prefix}norm.weight"
        case "lm_head":
            return head
    _, index, name = parameter.split(".", 2)
    return f"{prefix}layers.{index}.{layout(architecture).hf[name]}"


def hf_prefix(names: Collection[str]) -> str:
    """The prefix under which the text model's tensors are stored (``model.`` when none can be told)."""
    for anchor in ("embed_tokens.weight", "norm.weight", "layers.0.input_layernorm.weight"):
        for prefix in _HF_PREFIXES:
            if prefix + anchor in names:
                return prefix
    return _HF_PREFIXES[0]


def hf_head(names: Collection[str]) -> str:
    """The name of the output matrix, whether stored or not."""
    return next((name for name in _HF_HEADS if name in names), _HF_HEADS[0])


def is_harmless(name: str) -> bool:
    """Whether a tensor may stand in a checkpoint without being used."""
    return _HARMLESS.search(name) is not None


def is_vision(name: str) -> bool:
    """Whether a tensor belongs to the image part of a multimodal checkpoint."""
    return _VISION.match(name) is not None
