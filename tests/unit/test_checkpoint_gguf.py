"""open_checkpoint of GGUF files: the format's habits undone, tensors accounted for, folders and split files."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from neoserve.formats.checkpoint import open_checkpoint
from neoserve.formats.parameters import model_parameters
from neoserve.types.tensors import F32

from .checkpoint_files import (
    GEMMA3,
    LAYER,
    LAYER_GEMMA3,
    LLAMA,
    TIED,
    check_values,
    gguf_image,
    llama_arrays,
    refused,
    write_model,
)
from .gguf_writer import Image, Tensor, string


def write_gguf(path: Path, image: Image) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return image.write(path)


def test_gguf_equals_the_safetensors_it_was_made_of(tmp_path: Path) -> None:
    """Rows of q and k come back in Hugging Face's order."""
    arrays = llama_arrays()
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", gguf_image(arrays)))
    check_values(checkpoint, arrays)
    assert checkpoint.generation.eos_token_ids == (2,)
    assert checkpoint.tokenizer.gguf is not None


def test_gguf_bias_of_q_and_k_is_permuted_with_them(tmp_path: Path) -> None:
    image = gguf_image(llama_arrays())
    stored = np.arange(32, dtype="<f4")
    for layer in range(2):
        for part, size in (("q", 32), ("k", 16), ("v", 16)):
            image.tensors.append(Tensor(f"blk.{layer}.attn_{part}.bias", (size,), 0, stored[:size].tobytes()))
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", image))
    assert checkpoint.config.qkv_bias
    order = stored.reshape(4, 4, 2).swapaxes(1, 2).reshape(-1)
    np.testing.assert_array_equal(checkpoint.tensors["layers.0.attention.q_bias"].read_f32(), order)
    np.testing.assert_array_equal(checkpoint.tensors["layers.1.attention.k_bias"].read_f32(), order[:16])
    np.testing.assert_array_equal(checkpoint.tensors["layers.1.attention.v_bias"].read_f32(), stored[:16])


def test_gguf_of_other_architectures_keeps_its_rows(tmp_path: Path) -> None:
    config = GEMMA3 | {"model_type": "gemma3_text"}
    arrays = llama_arrays(config)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", gguf_image(arrays, config, "gemma3")))
    check_values(checkpoint, arrays, LAYER_GEMMA3, norm_offset=1.0)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_qwen_biases_and_norms_in_both_formats(tmp_path: Path, architecture: str) -> None:
    config = LLAMA | {"architectures": [f"Q{architecture[1:]}ForCausalLM"], "model_type": architecture, "head_dim": 8}
    arrays = llama_arrays(config)
    table = dict(LAYER)
    for part, size in (("q", 32), ("k", 16), ("v", 16)):
        if architecture == "qwen2":
            table[f"attention.{part}_bias"] = f"self_attn.{part}_proj.bias"
        elif part != "v":
            table[f"attention.{part}_norm"], size = f"self_attn.{part}_norm.weight", 8
        for layer in range(2):
            if architecture == "qwen2" or part != "v":
                arrays[f"model.layers.{layer}.{list(table.values())[-1]}"] = np.arange(size, dtype=np.float32)
    check_values(open_checkpoint(write_model(tmp_path / "hf", config, arrays)), arrays, table)
    path = write_gguf(tmp_path / "m.gguf", gguf_image(arrays, config, architecture))
    check_values(open_checkpoint(path), arrays, table)


def test_gguf_tied(tmp_path: Path) -> None:
    arrays = llama_arrays(TIED)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", gguf_image(arrays, TIED)))
    assert checkpoint.config.tie_embeddings
    check_values(checkpoint, arrays)


def test_gguf_accounting(tmp_path: Path) -> None:
    image = gguf_image(llama_arrays())
    image.tensors.append(Tensor("blk.0.ffn_gate_inp.weight", (32, 8), 0, bytes(1024)))
    write_gguf(tmp_path / "m.gguf", image)
    refused(tmp_path / "m.gguf", r"tensor 'blk\.0\.ffn_gate_inp\.weight' of shape \(8, 32\) is no part of this model")
    image = gguf_image(llama_arrays())
    image.tensors = [tensor for tensor in image.tensors if tensor.name != "blk.1.ffn_up.weight"]
    write_gguf(tmp_path / "m.gguf", image)
    refused(tmp_path / "m.gguf", r"m\.gguf: tensor 'blk\.1\.ffn_up\.weight' of shape \(40, 32\) is missing")
    image = gguf_image(llama_arrays())
    image.tensors = [
        Tensor(tensor.name, (40, 31), 0, tensor.data[: 40 * 31 * 4]) if "blk.0.ffn_down" in str(tensor.name) else tensor
        for tensor in image.tensors
    ]
    write_gguf(tmp_path / "m.gguf", image)
    refused(tmp_path / "m.gguf", r"'blk\.0\.ffn_down\.weight' has shape \(31, 40\), expected \(32, 40\)")


def test_gguf_rope_factors_are_configuration(tmp_path: Path) -> None:
    image = gguf_image(llama_arrays())
    image.tensors.append(Tensor("rope_freqs.weight", (4,), 0, np.array([1, 2, 3, 4], "<f4").tobytes()))
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", image))
    assert checkpoint.config.ropes[0].frequency_factors == (1.0, 2.0, 3.0, 4.0)
    assert "rope_freqs.weight" not in checkpoint.tensors


def test_folder_with_one_gguf(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", gguf_image(llama_arrays()))
    (tmp_path / "mmproj-m-f16.gguf").write_bytes(b"an image projector is not a model")
    (tmp_path / "README.md").write_text("x")
    assert open_checkpoint(tmp_path).digest == open_checkpoint(path).digest


def test_folder_with_several_ggufs(tmp_path: Path) -> None:
    for name in ("a-q4_0.gguf", "a-q8_0.gguf"):
        write_gguf(tmp_path / "m" / name, gguf_image(llama_arrays()))
    refused(tmp_path / "m", r"m: holds 2 GGUF models; give the path of one: a-q4_0\.gguf, a-q8_0\.gguf")


def split(folder: Path, image: Image) -> list[Path]:
    """The image as two numbered files."""
    paths = []
    for number in range(2):
        part = Image()
        part.keys = list(image.keys) if number == 0 else []
        part.add("split.no", 2, number).add("split.count", 2, 2).add("split.tensors.count", 5, len(image.tensors))
        part.tensors = image.tensors[:10] if number == 0 else image.tensors[10:]
        paths.append(write_gguf(folder / f"m-{number + 1:05}-of-00002.gguf", part))
    return paths


def test_split_gguf_as_folder_and_by_any_part(tmp_path: Path) -> None:
    arrays = llama_arrays()
    paths = split(tmp_path, gguf_image(arrays))
    for path in (tmp_path, *paths):
        check_values(open_checkpoint(path), arrays)
    paths[0].unlink()
    refused(tmp_path, r"m-00001-of-00002\.gguf: this part of 2 is missing")


def test_safetensors_win_over_a_gguf_in_the_same_folder(tmp_path: Path) -> None:
    write_model(tmp_path)
    write_gguf(tmp_path / "m.gguf", gguf_image(llama_arrays()))
    assert open_checkpoint(tmp_path).tokenizer.gguf is None


def test_gguf_with_a_damaged_name_is_one_line(tmp_path: Path) -> None:
    image = gguf_image(llama_arrays())
    image.keys.append(("bad", string("x")[:4]))
    (tmp_path / "m.gguf").write_bytes(image.build())
    refused(tmp_path / "m.gguf", r"m\.gguf")


@pytest.mark.model
@pytest.mark.parametrize(
    "name", ["smollm2-135m-instruct-q4_1", "qwen2.5-coder-0.5b-instruct-q4_k_m", "gemma-3-270m-q4_k_m"]
)
def test_real_files_open(name: str) -> None:
    folder = Path(os.environ.get("NEOSERVE_TEST_MODELS", ""))
    if not (folder / f"{name}.gguf").is_file():
        pytest.skip(f"NEOSERVE_TEST_MODELS does not name a folder with {name}.gguf")
    with open_checkpoint(folder / f"{name}.gguf") as checkpoint:
        assert set(checkpoint.tensors) == set(model_parameters(checkpoint.config))
        assert checkpoint.tensors["layers.0.attention.q"].read_rows(0, 8, F32).values.shape[0] == 8
        assert np.isfinite(checkpoint.tensors["final_norm"].read_f32()).all()
