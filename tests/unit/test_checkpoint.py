"""open_checkpoint: every tensor accounted for, tied embeddings, shards, pickles, and the habits of GGUF undone."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from neoserve.formats.checkpoint import open_checkpoint, read_config
from neoserve.types.errors import ConfigurationError, ModelNotFoundError, UnsupportedModelError
from neoserve.types.tensors import BF16, F32

from .checkpoint_files import (
    BF16_DTYPE,
    GEMMA3,
    LAYER_GEMMA3,
    LLAMA,
    TIED,
    check_values,
    llama_arrays,
    refused,
    write_index,
    write_model,
    write_safetensors,
    write_sharded,
)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16_DTYPE])
def test_single_file(tmp_path: Path, dtype: Any) -> None:
    arrays = llama_arrays(dtype=dtype)
    with open_checkpoint(write_model(tmp_path, LLAMA, arrays)) as checkpoint:
        check_values(checkpoint, arrays)
        assert checkpoint.path == tmp_path
        assert checkpoint.generation.eos_token_ids == (2,)
        assert checkpoint.nbytes == sum(array.nbytes for array in arrays.values())
        assert checkpoint.tensors["embedding"].native_format() == (BF16 if dtype == BF16_DTYPE else F32)


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_with_and_without_the_model_prefix(tmp_path: Path, prefix: str) -> None:
    arrays = llama_arrays(prefix=prefix)
    checkpoint = open_checkpoint(write_model(tmp_path, LLAMA, arrays))
    np.testing.assert_array_equal(checkpoint.tensors["final_norm"].read_f32(), arrays[f"{prefix}norm.weight"])


def test_gemma3_norms_get_their_one(tmp_path: Path) -> None:
    arrays = llama_arrays(GEMMA3, dtype=BF16_DTYPE)
    checkpoint = open_checkpoint(write_model(tmp_path, GEMMA3, arrays))
    check_values(checkpoint, arrays, LAYER_GEMMA3, norm_offset=1.0)
    norm = checkpoint.tensors["layers.1.attention.q_norm"]
    assert norm.native_format() == F32
    np.testing.assert_array_equal(norm.read_rows(0, 1, F32).values[0], norm.read_f32())
    np.testing.assert_array_equal(norm.read_rows(0, 1, BF16).values[0], norm.read_f32().astype(BF16_DTYPE))


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_text_part_of_a_multimodal_gemma3(tmp_path: Path, prefix: str) -> None:
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": {key: value for key, value in GEMMA3.items() if key != "architectures"},
    }
    arrays = llama_arrays(GEMMA3)
    stored = {name.replace("model.", prefix, 1): array for name, array in arrays.items()}
    root = "model." if prefix.startswith("model.") else ""
    stored[f"{root}vision_tower.patch.weight"] = np.zeros((3, 3), np.float32)
    stored[f"{root}multi_modal_projector.norm.weight"] = np.zeros(3, np.float32)
    check_values(open_checkpoint(write_model(tmp_path, config, stored)), arrays, LAYER_GEMMA3, norm_offset=1.0)


# Accounting


def test_missing_tensor(tmp_path: Path) -> None:
    arrays = llama_arrays()
    del arrays["model.layers.1.mlp.up_proj.weight"]
    write_model(tmp_path / "m", LLAMA, arrays)
    refused(tmp_path / "m", r"m: tensor 'model\.layers\.1\.mlp\.up_proj\.weight' of shape \(40, 32\) is missing;")


def test_missing_tensors_are_counted(tmp_path: Path) -> None:
    """A configuration of a deeper model than the file's."""
    write_model(tmp_path, LLAMA | {"num_hidden_layers": 3}, llama_arrays())
    refused(tmp_path, r"'model\.layers\.2\.input_layernorm\.weight'.*\(9 of 30 are\)")


def test_unexpected_tensor(tmp_path: Path) -> None:
    """A configuration of a shallower model than the file's."""
    write_model(tmp_path, LLAMA | {"num_hidden_layers": 1}, llama_arrays())
    text = refused(tmp_path, r"model\.safetensors: tensor 'model\.layers\.1\..*' of shape .* is no part of this model")
    assert "(9 such tensors)" in text


def test_unused_bias_is_not_dropped_in_silence(tmp_path: Path) -> None:
    arrays = llama_arrays() | {"model.layers.0.self_attn.q_proj.bias": np.ones(32, np.float32)}
    write_model(tmp_path, LLAMA, arrays)
    refused(tmp_path, r"self_attn\.q_proj\.bias' of shape \(32,\) is no part of this model")


def test_biases_are_read_when_the_configuration_has_them(tmp_path: Path) -> None:
    arrays = llama_arrays()
    sizes = {"self_attn.q_proj": 32, "self_attn.k_proj": 16, "self_attn.v_proj": 16, "self_attn.o_proj": 32}
    sizes |= {"mlp.gate_proj": 40, "mlp.up_proj": 40, "mlp.down_proj": 32}
    for layer in range(2):
        for name, size in sizes.items():
            arrays[f"model.layers.{layer}.{name}.bias"] = np.arange(size, dtype=np.float32)
    config = LLAMA | {"attention_bias": True, "mlp_bias": True}
    tensors = open_checkpoint(write_model(tmp_path, config, arrays)).tensors
    for name, size in [("attention.k_bias", 16), ("attention.o_bias", 32), ("mlp.up_bias", 40), ("mlp.down_bias", 32)]:
        np.testing.assert_array_equal(tensors[f"layers.1.{name}"].read_f32(), np.arange(size))


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.0.attn.masked_bias"])
def test_harmless_buffers_are_left_out(tmp_path: Path, name: str) -> None:
    arrays = llama_arrays()
    check_values(open_checkpoint(write_model(tmp_path, LLAMA, arrays | {name: np.zeros(4, np.float32)})), arrays)


def test_misshaped_tensor(tmp_path: Path) -> None:
    arrays = llama_arrays()
    arrays["model.layers.0.self_attn.k_proj.weight"] = np.zeros((32, 16), np.float32)
    write_model(tmp_path, LLAMA, arrays)
    refused(tmp_path, r"model\.safetensors: tensor '.*k_proj\.weight' has shape \(32, 16\), expected \(16, 32\)")


def test_vocabulary_of_another_size(tmp_path: Path) -> None:
    write_model(tmp_path, LLAMA | {"vocab_size": 47}, llama_arrays())
    refused(tmp_path, r"embed_tokens\.weight' has shape \(48, 32\), expected \(47, 32\)")


@pytest.mark.parametrize("dtype", [np.int32, np.float64])
def test_storage_types_that_cannot_be_read_are_refused_at_opening(tmp_path: Path, dtype: Any) -> None:
    arrays = llama_arrays()
    arrays["model.layers.1.mlp.down_proj.weight"] = np.zeros((32, 40), dtype)
    write_model(tmp_path, LLAMA, arrays)
    refused(tmp_path, r"down_proj\.weight' has dtype (I32|F64), which is not supported", UnsupportedModelError)


# Tied embeddings (B59)


def test_untied_with_head(tmp_path: Path) -> None:
    arrays = llama_arrays()
    checkpoint = open_checkpoint(write_model(tmp_path, LLAMA, arrays))
    assert not checkpoint.config.tie_embeddings
    np.testing.assert_array_equal(checkpoint.tensors["lm_head"].read_f32(), arrays["lm_head.weight"])


def test_untied_without_head_is_an_error(tmp_path: Path) -> None:
    arrays = llama_arrays()
    del arrays["lm_head.weight"]
    write_model(tmp_path, LLAMA, arrays)
    refused(
        tmp_path, r"tensor 'lm_head\.weight' \(shape \(48, 32\) expected\) is missing, and tie_word_embeddings is fals"
    )


def test_tied_without_head_shares_the_embedding(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_model(tmp_path, TIED))
    assert checkpoint.config.tie_embeddings
    assert "lm_head" not in checkpoint.tensors


def test_tied_with_an_equal_head_shares_the_embedding(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    arrays = llama_arrays(TIED)
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"].copy()
    checkpoint = open_checkpoint(write_model(tmp_path, TIED, arrays))
    assert checkpoint.config.tie_embeddings
    assert "lm_head" not in checkpoint.tensors
    assert "differ" not in caplog.text


def test_tied_with_another_head_keeps_both_and_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    arrays = llama_arrays(TIED)
    head = arrays["model.embed_tokens.weight"].copy()
    head[-1, -1] += 1
    checkpoint = open_checkpoint(write_model(tmp_path, TIED, arrays | {"lm_head.weight": head}))
    assert not checkpoint.config.tie_embeddings
    np.testing.assert_array_equal(checkpoint.tensors["lm_head"].read_f32(), head)
    assert "tie_word_embeddings is true, but model.embed_tokens.weight and lm_head.weight differ" in caplog.text


def test_tied_with_only_the_head_stored(tmp_path: Path) -> None:
    arrays = llama_arrays(TIED)
    arrays["lm_head.weight"] = arrays.pop("model.embed_tokens.weight")
    checkpoint = open_checkpoint(write_model(tmp_path, TIED, arrays))
    assert checkpoint.config.tie_embeddings
    np.testing.assert_array_equal(checkpoint.tensors["embedding"].read_f32(), arrays["lm_head.weight"])


# Shards (B58)


def test_sharded(tmp_path: Path) -> None:
    arrays, _ = write_sharded(tmp_path)
    check_values(open_checkpoint(tmp_path), arrays)


def test_missing_shard(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    refused(tmp_path, r"names 2 files, but model-00002-of-00002\.safetensors is missing")


def test_index_lists_a_tensor_that_is_in_no_shard(tmp_path: Path) -> None:
    _, weight_map = write_sharded(tmp_path)
    write_index(tmp_path, weight_map | {"model.extra.weight": "model-00001-of-00002.safetensors"})
    refused(tmp_path, r"says that tensor 'model\.extra\.weight' is in model-00001.*but it is not there")


def test_index_does_not_list_a_needed_tensor(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, weight_map = write_sharded(tmp_path)
    del weight_map["model.norm.weight"]
    write_index(tmp_path, weight_map)
    refused(tmp_path, r"'model\.norm\.weight' of shape \(32,\) is missing")
    assert "does not list model-00002-of-00002.safetensors: model.norm.weight" in caplog.text


def test_file_that_the_index_does_not_list_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    arrays, _ = write_sharded(tmp_path)
    write_safetensors(tmp_path / "consolidated.safetensors", {"w": np.zeros((2, 2), np.float32)})
    check_values(open_checkpoint(tmp_path), arrays)
    assert "does not list consolidated.safetensors" in caplog.text


def test_stale_index_beside_a_complete_single_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    arrays = llama_arrays()
    write_model(tmp_path, LLAMA, arrays)
    write_index(tmp_path, {"old.weight": "model-00001-of-00009.safetensors"})
    check_values(open_checkpoint(tmp_path), arrays)
    assert "the single file is used" in caplog.text


def test_index_that_names_the_single_file(tmp_path: Path) -> None:
    arrays = llama_arrays()
    write_model(tmp_path, LLAMA, arrays)
    write_index(tmp_path, dict.fromkeys(arrays, "model.safetensors"))
    check_values(open_checkpoint(tmp_path), arrays)


def test_numbered_set_without_an_index(tmp_path: Path) -> None:
    arrays, _ = write_sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    check_values(open_checkpoint(tmp_path), arrays)
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    refused(tmp_path, r"model-00001-of-00002\.safetensors: this file of 2 is missing")


def test_several_files_without_an_index(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    check_values(open_checkpoint(tmp_path), llama_arrays())
    write_safetensors(tmp_path / "b.safetensors", {"w": np.zeros((2, 2), np.float32)})
    refused(tmp_path, r"2 safetensors files and no model\.safetensors\.index\.json: a\.safetensors, b\.safetensors")


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    write_safetensors(tmp_path / "model-00002-of-00002.safetensors", llama_arrays())
    refused(tmp_path, r"model-00002-of-00002\.safetensors: tensor '.*' is also in model-00001-of-00002\.safetensors")


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/model.safetensors", "sub/model.safetensors", "..", "a.bin", 3, None, "a\0.x"]
)
def test_index_cannot_lead_out_of_the_folder(tmp_path: Path, name: object) -> None:
    write_sharded(tmp_path)
    write_index(tmp_path, {"w": name})
    refused(tmp_path, r"must name a \.safetensors file in the folder")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "[" * 50_000])
def test_damaged_index(tmp_path: Path, content: str) -> None:
    write_sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    refused(tmp_path, r"model\.safetensors\.index\.json: ")


def test_cut_shard(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    os.truncate(shard, shard.stat().st_size - 100)
    refused(tmp_path, r"model-00002-of-00002\.safetensors: .*the file is cut off")


# Pickle (B60), folders, paths


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mknod, (str(self.marker),)


def test_the_bomb_works(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Bomb(tmp_path / "marker")))
    assert (tmp_path / "marker").exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "consolidated.00.pth", "weights.pkl"])
def test_pickles_are_never_read(tmp_path: Path, name: str) -> None:
    marker = tmp_path / "marker"
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / name).write_bytes(pickle.dumps(Bomb(marker)))
    (folder / "modeling_custom.py").write_text(f"open({str(marker)!r}, 'w')")
    refused(folder, rf"{name}: pickle files can run code.*convert it to safetensors", UnsupportedModelError)
    refused(folder / name, "pickle files can run code", UnsupportedModelError)
    write_model(folder, LLAMA | {"auto_map": {"AutoModelForCausalLM": "modeling_custom.Model"}})
    open_checkpoint(folder)
    assert not marker.exists()


def test_what_a_path_may_be(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no such file or folder"):
        open_checkpoint(tmp_path / "gone")
    refused(tmp_path, r"has no model; expected config\.json with \.safetensors files, or a \.gguf file; found nothing")
    write_model(tmp_path / "m")
    refused(tmp_path / "m" / "model.safetensors", "is a part of a checkpoint; give the folder")
    refused(tmp_path / "m" / "config.json", "is a part of a checkpoint")
    (tmp_path / "m" / "config.json").unlink()
    refused(tmp_path / "m", r"has model\.safetensors but no config\.json")
    (tmp_path / "notes.txt").write_text("hello")
    refused(tmp_path / "notes.txt", "notes.txt")


@pytest.mark.parametrize("content", [b"", b"null", b"[1]", b"{", b"\xff", b'{"a":' * 50_000])
def test_damaged_config(tmp_path: Path, content: bytes) -> None:
    write_model(tmp_path)
    (tmp_path / "config.json").write_bytes(content)
    refused(tmp_path, r"config\.json: ")


def test_adapter_without_base_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    write_safetensors(tmp_path / "adapter_model.safetensors", {"w": np.zeros((2, 2), np.float32)})
    refused(tmp_path, "is an adapter without its base model", UnsupportedModelError)


def test_read_config_needs_no_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    config = read_config(tmp_path)
    assert config == read_config(tmp_path / "config.json")
    assert config.num_layers == 2
    assert read_config(tmp_path, overrides={"rope_theta": 5e5}).ropes[0].theta == 5e5


def test_overrides_reach_the_reader(tmp_path: Path) -> None:
    write_model(tmp_path)
    assert open_checkpoint(tmp_path, overrides={"rope_theta": 7e4}).config.ropes[0].theta == 7e4
    with pytest.raises(ConfigurationError, match="override 'rope_tetha'"):
        open_checkpoint(tmp_path, overrides={"rope_tetha": 7e4})


def test_digest_follows_content_not_place(tmp_path: Path) -> None:
    arrays = llama_arrays()
    one = open_checkpoint(write_model(tmp_path / "a", LLAMA, arrays)).digest
    assert open_checkpoint(write_model(tmp_path / "b", LLAMA, arrays)).digest == one
    write_sharded(tmp_path / "c")
    assert open_checkpoint(tmp_path / "c").digest == one
    other = open_checkpoint(write_model(tmp_path / "d", LLAMA | {"rope_theta": 5e5}, arrays)).digest
    changed = {name: array.copy() for name, array in arrays.items()}
    changed["model.layers.1.mlp.down_proj.weight"][5, 5] += 1
    assert len({one, other, open_checkpoint(write_model(tmp_path / "e", LLAMA, changed)).digest}) == 3
