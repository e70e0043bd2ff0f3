"""The tiny random models: their configurations and seeded weights, needing numpy only.

Each case is one configuration as it is found in published checkpoints. Both spellings of rotary settings occur:
``rope_scaling`` beside ``rope_theta`` (transformers 4) and ``rope_parameters`` (transformers 5).
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]

VOCAB = 128
HIDDEN = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One tiny checkpoint. ``weights_of`` names the case whose weight file is shared (a relative link).

    ``storage`` is the element type in the file; ``shards`` above 1 writes an index; ``length`` counts input ids.
    """

    name: str
    config: dict[str, object]
    weights_of: str | None = None
    storage: str = "F32"
    shards: int = 1
    length: int = 64
    why: str = ""
    eos: int | list[int] = field(default_factory=lambda: [2, 5])


def _config(model_type: str, architecture: str, **changes: object) -> dict[str, object]:
    config: dict[str, object] = {
        "architectures": [architecture],
        "model_type": model_type,
        "torch_dtype": "float32",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "use_cache": True,
    }
    config.update(changes)
    return {key: value for key, value in config.items() if value is not ...}


def _llama(**changes: object) -> dict[str, object]:
    return _config("llama", "LlamaForCausalLM", **changes)


def _gemma3(**changes: object) -> dict[str, object]:
    base: dict[str, object] = {
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "num_attention_heads": 2,
        "head_dim": 32,
        "hidden_act": ...,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 24,
        "rms_norm_eps": 1e-6,
        "sliding_window": 16,
        "tie_word_embeddings": ...,
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 1,
    }
    return _config("gemma3_text", "Gemma3ForCausalLM", **{**base, **changes})


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

CASES: tuple[Case, ...] = (
    Case(name="llama", config=_llama(head_dim=32), why="untied, GQA 4:2, heads x head_dim differs from hidden"),
    Case(
        name="llama-linear",
        config=_llama(head_dim=32, rope_scaling={"type": "linear", "factor": 4.0}),
        weights_of="llama",
        why="linear scaling, old key `type`",
    ),
    Case(
        name="llama-dynamic",
        config=_llama(head_dim=32, rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
        weights_of="llama",
        why="dynamic scaling inside the trained length, where it changes nothing",
    ),
    Case(
        name="llama-llama3",
        config=_llama(head_dim=32, rope_scaling=LLAMA3_ROPE),
        weights_of="llama",
        why="llama3 scaling, sequence longer than the original length 32",
    ),
    Case(
        name="llama-yarn",
        config=_llama(
            head_dim=32,
            max_position_embeddings=128,
            rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
        weights_of="llama",
        why="yarn with default betas and attention factor, sequence longer than the original length 32",
    ),
    Case(
        name="llama-yarn-mscale",
        config=_llama(
            head_dim=32,
            max_position_embeddings=128,
            rope_theta=...,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 4.0,
                "beta_slow": 0.5,
                "mscale": 1.0,
                "mscale_all_dim": 0.4,
                "truncate": False,
            },
        ),
        weights_of="llama",
        why="yarn with own betas, mscale ratio and untruncated range, in `rope_parameters`",
    ),
    Case(
        name="llama-yarn-factor",
        config=_llama(
            head_dim=32,
            max_position_embeddings=128,
            rope_scaling={
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "attention_factor": 0.75,
                "beta_fast": 8,
            },
        ),
        weights_of="llama",
        why="yarn with an explicit attention factor",
    ),
    Case(
        name="llama-tied-mqa",
        config=_llama(num_key_value_heads=1, tie_word_embeddings=True, torch_dtype="bfloat16"),
        storage="BF16",
        eos=2,
        why="tied embeddings, MQA, head_dim left out (hidden / heads)",
    ),
    Case(
        name="llama-bias",
        config=_llama(num_key_value_heads=4, attention_bias=True, mlp_bias=True, torch_dtype="float16"),
        storage="F16",
        why="biases on q, k, v, o and the MLP; as many KV heads as heads; float16 file",
    ),
    Case(
        name="llama-d80",
        config=_llama(head_dim=80, num_attention_heads=2, num_key_value_heads=1, torch_dtype="bfloat16"),
        storage="BF16",
        why="head_dim 80",
    ),
    Case(
        name="llama-d128-bf16",
        config=_llama(head_dim=128, num_attention_heads=2, num_key_value_heads=1, torch_dtype="bfloat16"),
        storage="BF16",
        why="head_dim 128, bfloat16 file",
    ),
    Case(
        name="llama-odd",
        config=_llama(
            vocab_size=131,
            hidden_size=42,
            intermediate_size=54,
            head_dim=16,
            num_attention_heads=3,
            num_key_value_heads=1,
            tie_word_embeddings=True,
            torch_dtype="float16",
        ),
        storage="F16",
        why="hidden, inner and vocabulary sizes divide by neither 4 nor 8: every kernel meets its tails",
    ),
    Case(
        name="llama-sharded",
        config=_llama(num_key_value_heads=1, torch_dtype="bfloat16"),
        storage="BF16",
        shards=3,
        why="three files with an index",
    ),
    Case(
        name="mistral",
        config=_config("mistral", "MistralForCausalLM", sliding_window=24, head_dim=32, torch_dtype="bfloat16"),
        storage="BF16",
        why="every layer with a window of 24, shorter than the sequence",
    ),
    Case(
        name="mistral-full",
        config=_config("mistral", "MistralForCausalLM", sliding_window=None, head_dim=32, torch_dtype="bfloat16"),
        weights_of="mistral",
        why="`sliding_window: null` means full attention",
    ),
    Case(
        name="qwen2",
        config=_config(
            "qwen2",
            "Qwen2ForCausalLM",
            rope_theta=1000000.0,
            rms_norm_eps=1e-6,
            tie_word_embeddings=True,
            use_sliding_window=False,
            sliding_window=16,
            max_window_layers=1,
        ),
        why="biases on q, k, v only; tied; a window that is switched off",
    ),
    Case(
        name="qwen2-window",
        config=_config(
            "qwen2",
            "Qwen2ForCausalLM",
            rope_theta=1000000.0,
            rms_norm_eps=1e-6,
            tie_word_embeddings=True,
            use_sliding_window=True,
            sliding_window=16,
            max_window_layers=1,
        ),
        weights_of="qwen2",
        why="layers from max_window_layers on have a window, the ones before do not",
    ),
    Case(
        name="qwen3",
        config=_config(
            "qwen3",
            "Qwen3ForCausalLM",
            head_dim=32,
            rope_theta=1000000.0,
            rms_norm_eps=1e-6,
            attention_bias=False,
            use_sliding_window=False,
            sliding_window=None,
            max_window_layers=2,
            torch_dtype="bfloat16",
        ),
        storage="BF16",
        why="RMS norm on each q and k head",
    ),
    Case(
        name="gemma3",
        config=_gemma3(
            sliding_window_pattern=2,
            rope_theta=1000000.0,
            rope_local_base_freq=10000.0,
            rope_scaling={"rope_type": "linear", "factor": 8.0},
        ),
        eos=[1, 106],
        why="window 16 on layers 0 and 2; two rope bases, linear scaling on the global one; query scalar, GeGLU",
    ),
    Case(
        name="gemma3-types",
        config=_gemma3(
            layer_types=["full_attention", "sliding_attention", "sliding_attention"],
            rope_theta=...,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            },
        ),
        weights_of="gemma3",
        eos=[1, 106],
        why="layer_types and nested rope_parameters, as transformers 5 writes them",
    ),
)


def case_named(name: str) -> Case:
    """The case called ``name``; KeyError if there is none."""
    return {case.name: case for case in CASES}[name]


def input_ids(case: Case) -> npt.NDArray[np.int64]:
    """Token ids [length] of ``case``; cases that share weights share them, so that their logits can be compared."""
    vocab = int(case.config["vocab_size"])  # type: ignore[call-overload]
    return np.random.default_rng(_seed(case.weights_of or case.name, "ids")).integers(0, vocab, case.length)


def _seed(name: str, part: str) -> int:
    return zlib.crc32(f"{name}/{part}".encode())


def weights(case: Case) -> dict[str, Array]:
    """Tensors of ``case`` under their Hugging Face names, float32 (unrounded).

    Gains are chosen so that attention is far from uniform and logits spread over several units: an error in rope,
    masks, scales or norms then moves the logits by far more than rounding does.
    """
    config = case.config
    hidden, inner = int(config["hidden_size"]), int(config["intermediate_size"])  # type: ignore[call-overload]
    vocab = int(config["vocab_size"])  # type: ignore[call-overload]
    heads, kv_heads = int(config["num_attention_heads"]), int(config["num_key_value_heads"])  # type: ignore[call-overload]
    head_dim = int(config.get("head_dim", hidden // heads))  # type: ignore[call-overload]
    gemma = str(config["model_type"]).startswith("gemma")
    qkv_bias = bool(config.get("attention_bias")) or config["model_type"] == "qwen2"
    shapes: dict[str, tuple[tuple[int, ...], float]] = {}

    def linear(name: str, n: int, k: int, gain: float, bias: bool = False) -> None:
        shapes[f"{name}.weight"] = ((n, k), gain / k**0.5)
        if bias:
            shapes[f"{name}.bias"] = ((n,), 0.3)

    tied = bool(config.get("tie_word_embeddings", gemma))
    # A tied table is also the output matrix: its rows are as long as those of an untied lm_head.
    shapes["model.embed_tokens.weight"] = ((vocab, hidden), 3.0 / hidden**0.5 if tied else 1.0)
    for layer in range(int(config["num_hidden_layers"])):  # type: ignore[call-overload]
        prefix = f"model.layers.{layer}"
        linear(f"{prefix}.self_attn.q_proj", heads * head_dim, hidden, 1.5, qkv_bias)
        linear(f"{prefix}.self_attn.k_proj", kv_heads * head_dim, hidden, 1.5, qkv_bias)
        linear(f"{prefix}.self_attn.v_proj", kv_heads * head_dim, hidden, 1.0, qkv_bias)
        linear(f"{prefix}.self_attn.o_proj", hidden, heads * head_dim, 1.0, bool(config.get("attention_bias")))
        for part, n, k in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            linear(f"{prefix}.mlp.{part}_proj", n, k, 1.2, bool(config.get("mlp_bias")))
        norms = ["input_layernorm", "post_attention_layernorm"]
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if gemma else []
        for norm in norms:
            shapes[f"{prefix}.{norm}.weight"] = ((hidden,), 0.0)
        if gemma or config["model_type"] == "qwen3":
            shapes[f"{prefix}.self_attn.q_norm.weight"] = ((head_dim,), 0.0)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = ((head_dim,), 0.0)
    shapes["model.norm.weight"] = ((hidden,), 0.0)
    if not tied:
        linear("lm_head", vocab, hidden, 3.0)
    return {name: _draw(case.name, name, shape, scale, gemma) for name, (shape, scale) in shapes.items()}


def _draw(case: str, name: str, shape: tuple[int, ...], scale: float, gemma: bool) -> Array:
    """Scale 0 marks a norm weight: around 1, stored around 0 by Gemma, which adds 1 when it runs."""
    values = np.random.default_rng(_seed(case, name)).standard_normal(shape)
    if scale == 0.0:
        values = 0.25 * values + (0.0 if gemma else 1.0)
        return values.astype(np.float32)
    return (values * scale).astype(np.float32)
