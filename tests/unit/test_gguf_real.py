"""Real GGUF models against the ``gguf`` package, when NEOSERVE_TEST_MODELS names a folder that holds them."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import gguf
import numpy as np
import pytest

from neoserve.formats.gguf import GGUFFile
from neoserve.types.tensors import F32

pytestmark = pytest.mark.model

NAMES = ["smollm2-135m-instruct-q4_1.gguf", "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", "gemma-3-270m-q4_k_m.gguf"]


def model_path(name: str) -> Path:
    folder = os.environ.get("NEOSERVE_TEST_MODELS")
    if not folder:
        pytest.skip(f"NEOSERVE_TEST_MODELS is not set; it names the folder with {name}")
    path = Path(folder).expanduser() / name
    if not path.exists():
        pytest.skip(f"{path} is missing")
    return path


@pytest.mark.parametrize("name", NAMES)
def test_real_model(name: str) -> None:
    path = model_path(name)
    file = GGUFFile.open(path)
    peer = gguf.GGUFReader(path)
    keys = {key: field for key, field in peer.fields.items() if not key.startswith("GGUF.")}
    assert list(file.metadata) == list(keys)
    for key, field in keys.items():
        assert file.metadata[key] == field.contents(), key
    assert list(file.tensors) == [tensor.name for tensor in peer.tensors]
    compared: Counter[str] = Counter()
    for tensor, other in zip(file.tensors.values(), peer.tensors, strict=True):
        assert tensor.shape == tuple(int(extent) for extent in reversed(other.shape))
        assert (tensor.storage_type, tensor.nbytes) == (other.tensor_type.name, other.n_bytes)
        compared[tensor.storage_type] += 1
        if compared[tensor.storage_type] <= 3:
            stored = other.data[:64] if len(tensor.shape) > 1 else other.data
            want = gguf.quants.dequantize(stored, other.tensor_type).reshape(-1, tensor.columns)
            np.testing.assert_array_equal(tensor.read_rows(0, len(want), F32).values, want)
