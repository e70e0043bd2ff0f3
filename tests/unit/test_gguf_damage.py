"""Damaged, foreign and hostile GGUF files: one clear line each, and no more memory than the file is large."""

from __future__ import annotations

import os
import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from neoserve.formats.gguf import GGUFFile
from neoserve.formats.gguf_blocks import BLOCK_TYPES, UNSUPPORTED_TYPES
from neoserve.types.errors import CheckpointError, UnsupportedModelError
from neoserve.types.tensors import BF16, F32

from .gguf_writer import (
    ARRAY,
    INT32,
    QUANTISED,
    STRING,
    TENSOR_TYPES,
    UINT32,
    Image,
    Tensor,
    array,
    random_tensor,
    small_model,
    string,
    value,
)


def use_everything(file: GGUFFile) -> None:
    """Decode all metadata and read all tensors in all formats."""
    file.content_digest()
    for key in file.metadata:
        file.metadata.get_float(key) if file.metadata.type_name(key) == "float32" else file.metadata[key]
    for tensor in file.tensors.values():
        for fmt in (tensor.native_format(), F32, BF16):
            tensor.read_rows(0, tensor.rows, fmt)


def refusal(path: Path, kind: type[CheckpointError] = CheckpointError) -> str:
    """The text of the error that opening ``path`` ends with, after what every such text must fulfil."""
    with pytest.raises(CheckpointError) as caught:
        GGUFFile.open(path)
    assert type(caught.value) is kind
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{path}: ")
    return message


def refused_bytes(tmp_path: Path, data: bytes, kind: type[CheckpointError] = CheckpointError) -> str:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    return refusal(path, kind)


def test_the_sound_file_is_accepted(tmp_path: Path) -> None:
    use_everything(GGUFFile.open(small_model().write(tmp_path / "model.gguf")))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the file is empty (0 bytes)"),
        (b"GG", "the file has only 2 bytes"),
        (b"GGUF", "the version needs 4 bytes at offset 4, found 0 left"),
        (b"GGUF" + struct.pack("<I", 3), "the tensor count needs 8 bytes at offset 8, found 0 left"),
        (b"PK\x03\x04" + bytes(60), r"the file begins with 'PK\x03\x04', expected 'GGUF'"),
        (b"ggjt" + bytes(60), "the file begins with 'ggjt', expected 'GGUF'"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "a Git LFS pointer"),
    ],
)
def test_not_a_gguf_file(tmp_path: Path, data: bytes, message: str) -> None:
    assert message in refused_bytes(tmp_path, data)


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    assert "no such file" in refusal(tmp_path / "absent.gguf")
    assert "expected a GGUF file, found a folder" in refusal(tmp_path)
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "expected a GGUF file, found a special file" in refusal(tmp_path / "pipe.gguf")


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (struct.pack("<I", 1), "GGUF version 1; supported: 2 and 3"),
        (struct.pack("<I", 4), "GGUF version 4; supported: 2 and 3"),
        (struct.pack("<I", 0), "GGUF version 0"),
        (struct.pack(">I", 3), "the file is big-endian; only little-endian files are supported"),
    ],
)
def test_other_versions(tmp_path: Path, version: bytes, message: str) -> None:
    image = small_model()
    image.version = version
    assert message in refused_bytes(tmp_path, image.build(), UnsupportedModelError)


def test_cut_anywhere(tmp_path: Path) -> None:
    image = small_model()
    data = image.build()
    needed = len(data) - -len(image.tensors[-1].data) % image.alignment
    path = tmp_path / "bad.gguf"
    for size in range(1, needed, 7):
        path = tmp_path / f"{size}.gguf"
        path.write_bytes(data[:size])
        assert "cut short or damaged" in refusal(path)


def damaged_key(key: str | bytes, body: bytes) -> Callable[[Image], None]:
    return lambda image: image.keys.append((key, body))


def raw_head(tail: bytes) -> bytes:
    """A header that announces one key and no tensor, followed by ``tail``."""
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + tail


HUGE = [2**31, 2**32, 2**48, 2**60, 2**63, 2**64 - 1]


@pytest.mark.parametrize("count", HUGE)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda n: raw_head(struct.pack("<Q", n) + b"key" * 9), "key 0 of 1 (length {n}) needs {n} bytes"),
        (lambda n: raw_head(string("k") + struct.pack("<IQ", STRING, n)), "key 'k' (string of length {n}) needs"),
        (lambda n: raw_head(string("k") + array(STRING, ["a"], n)), "key 'k' has {n} strings, found 9 bytes left"),
        (lambda n: raw_head(string("k") + array(INT32, [1], n)), "key 'k' needs {bytes} bytes"),
        (lambda n: b"GGUF" + struct.pack("<IQQ", 3, 0, n), "the header announces {n} keys, found 0 bytes left"),
        (lambda n: b"GGUF" + struct.pack("<IQQ", 3, n, 0), "the header announces {n} tensors, found 0 bytes left"),
    ],
    ids=["key length", "string length", "string count", "number count", "key count", "tensor count"],
)
def test_absurd_lengths_and_counts(tmp_path: Path, count: int, make: Callable[[int], bytes], message: str) -> None:
    tracemalloc.start()
    try:
        text = refused_bytes(tmp_path, make(count))
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()
    assert message.format(n=count, bytes=4 * count) in text


@pytest.mark.parametrize("position", [0, 3, 100])
def test_absurd_length_inside_a_string_array(tmp_path: Path, position: int) -> None:
    items = [string("token")] * 200
    items[position] = struct.pack("<Q", 2**62) + b"token"
    body = struct.pack("<IIQ", ARRAY, STRING, 200) + b"".join(items)
    text = refused_bytes(tmp_path, raw_head(string("tokens") + body))
    assert f"string {position} of key 'tokens' needs {2**62 + 8} bytes" in text


def test_last_string_of_an_array_is_cut(tmp_path: Path) -> None:
    # Nothing follows that would miss the bytes, and the lengths are short enough for the fast scan.
    body = struct.pack("<IIQ", ARRAY, STRING, 200) + string("token") * 199 + struct.pack("<Q", 6) + b"token"
    assert "string 199 of key 'tokens' needs 14 bytes" in refused_bytes(tmp_path, raw_head(string("tokens") + body))


def test_string_array_that_ends_inside_a_length(tmp_path: Path) -> None:
    items = b"".join([string("token")] * 200 + [string("x" * 2600)])
    body = struct.pack("<IIQ", ARRAY, STRING, 205) + items + b"\x05\0\0"
    text = refused_bytes(tmp_path, raw_head(string("tokens") + body))
    assert "string 201 of key 'tokens' needs 8 bytes" in text
    assert "found 3 left" in text


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damaged_key("", value(UINT32, 1)), "key 7 of 8 is empty"),
        (damaged_key(b"\xff\xfe", value(UINT32, 1)), "key 7 of 8 is not UTF-8"),
        (damaged_key("k" * 65536, value(UINT32, 1)), "has length 65536; expected at most 65535"),
        (damaged_key("llama.block_count", value(UINT32, 1)), "key 'llama.block_count' occurs twice"),
        (damaged_key("line\nbreak", struct.pack("<I", 13)), r"key 'line\nbreak' has value type 13; expected 0 to 12"),
        (damaged_key("k", struct.pack("<IIQ", ARRAY, 99, 1)), "key 'k' has value type 99"),
        (damaged_key("k", struct.pack("<IIQ", ARRAY, ARRAY, 1)), "key 'k' is an array of arrays (depth 2)"),
        (damaged_key("general.alignment", value(UINT32, 0)), "key 'general.alignment' is 0; expected a power of two"),
        (damaged_key("general.alignment", value(UINT32, 4)), "key 'general.alignment' is 4"),
        (damaged_key("general.alignment", value(UINT32, 48)), "key 'general.alignment' is 48"),
        (damaged_key("general.alignment", value(STRING, "32")), "'general.alignment': expected uint32, found string"),
        (damaged_key("general.alignment", value(10, 32)), "'general.alignment': expected uint32, found uint64"),
        (damaged_key("general.alignment", array(UINT32, [32])), "expected uint32, found array of 1 uint32"),
    ],
)
def test_damaged_keys(tmp_path: Path, damage: Callable[[Image], None], message: str) -> None:
    image = small_model()
    damage(image)
    assert message in refused_bytes(tmp_path, image.build())


F32_DATA = bytes(64)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (Tensor("", (16,), 0, F32_DATA), "the name of tensor 3 of 4 is empty"),
        (Tensor(b"\x80", (16,), 0, F32_DATA), "the name of tensor 3 of 4 is not UTF-8"),
        (Tensor("output_norm.weight", (16,), 0, F32_DATA), "tensor 'output_norm.weight' occurs twice"),
        (Tensor("t", (), 0, F32_DATA), "tensor 't' has 0 dimensions; expected 1 to 4"),
        (Tensor("t", (1, 1, 1, 1, 16), 0, F32_DATA), "tensor 't' has 5 dimensions; expected 1 to 4"),
        (Tensor("t", (16, 0), 0, F32_DATA), "tensor 't' has shape (0, 16); expected dimensions of at least 1"),
        (Tensor("t", (2**60,), 0, F32_DATA), f"tensor 't' of shape ({2**60},), F32 needs {2**62} bytes"),
        (Tensor("t", (2**63, 2), 0, F32_DATA), f"needs {2**66} bytes"),
        (Tensor("t", (2**32, 2**32), 0, F32_DATA), f"needs {2**66} bytes"),
        (Tensor("t", (2**60,) * 4, 8, F32_DATA), "needs"),
        (Tensor("t", (48,), 8, F32_DATA), "tensor 't' has rows of 48 values; expected a multiple of 32 for Q8_0"),
        (Tensor("t", (128,), 12, F32_DATA), "rows of 128 values; expected a multiple of 256 for Q4_K"),
        (Tensor("t", (16,), 0, F32_DATA, 8), "tensor 't' is at offset 8; expected a multiple of 32"),
        (Tensor("t", (16,), 0, F32_DATA, 64), "at offset 64 overlaps tensor 'token_embd.weight', which ends at 340"),
        (Tensor("t", (16,), 0, F32_DATA, 2**20), "tensor 't' takes bytes"),
        (Tensor("t", (16,), 0, F32_DATA, 2**63), "tensor 't' takes bytes"),
        (Tensor("t", (16,), 5000, F32_DATA), "tensor 't' is of unknown type 5000; expected one of F32, F16, Q4_0"),
        (Tensor("t", (16,), 2**32 - 1, F32_DATA), "unknown type 4294967295"),
    ],
)
def test_damaged_tensors(tmp_path: Path, tensor: Tensor, message: str) -> None:
    image = small_model()
    image.tensors.append(tensor)
    assert message in refused_bytes(tmp_path, image.build())


@pytest.mark.parametrize("number", UNSUPPORTED_TYPES)
def test_unsupported_types_name_an_alternative(tmp_path: Path, number: int) -> None:
    image = small_model()
    image.tensors.append(Tensor("t", (256,), number, bytes(512)))
    message = refused_bytes(tmp_path, image.build(), UnsupportedModelError)
    name, instead = UNSUPPORTED_TYPES[number]
    assert f"tensor 't' is of type {name}, which is not supported: use a {instead} file of this model" in message
    assert instead.removesuffix("_M") in {known.name for known in BLOCK_TYPES.values()}


@pytest.mark.parametrize("special", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("type_name", QUANTISED)
def test_scales_that_are_not_finite(tmp_path: Path, type_name: str, special: float) -> None:
    _, size, nbytes, halves = TENSOR_TYPES[type_name]
    for at in halves:
        stored = random_tensor("w", type_name, (6, 3 * size))
        data = bytearray(stored.data)
        place = (4 * 3 + 2) * nbytes + at
        data[place : place + 2] = np.float16(special).tobytes()
        stored.data = bytes(data)
        tensor = GGUFFile.open(Image(tensors=[stored]).write(tmp_path / f"{at}.gguf")).tensors["w"]
        tensor.read_rows(0, 4, tensor.native_format())
        for fmt in (tensor.native_format(), F32, BF16):
            with pytest.raises(CheckpointError, match=r"\.gguf: tensor 'w': row 4, block 2: .* expected a finite"):
                tensor.read_rows(3, 6, fmt)


@pytest.mark.parametrize("special", [np.inf, np.nan])
@pytest.mark.parametrize("dtype", ["F32", "F16"])
def test_norms_that_are_not_finite(tmp_path: Path, dtype: str, special: float) -> None:
    values = np.ones(32, "<f4" if dtype == "F32" else "<f2")
    values[5] = special
    stored = Tensor("norm", (32,), TENSOR_TYPES[dtype][0], values.tobytes())
    tensor = GGUFFile.open(Image(tensors=[stored]).write(tmp_path / "m.gguf")).tensors["norm"]
    with pytest.raises(CheckpointError, match=rf"tensor 'norm': value 5 is {special}, expected a finite number"):
        tensor.read_f32()


def test_random_damage(tmp_path: Path) -> None:
    """500 mutations of a sound file: each opens and reads, or is refused; nothing else may happen."""
    sound = small_model().build()
    header = len(small_model().header())
    rng = random.Random(20260101)
    refused = 0
    for index in range(500):
        data = bytearray(sound)
        for _ in range(rng.randint(1, 4)):
            end = header if rng.random() < 0.8 else len(data)
            data[rng.randrange(4, end)] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
        if rng.random() < 0.1:
            del data[rng.randrange(len(data)) :]
        # A new file each time: cutting one that is still mapped would take its pages away.
        path = tmp_path / f"{index}.gguf"
        path.write_bytes(data)
        message = None
        try:
            use_everything(GGUFFile.open(path))
        except CheckpointError as error:
            message = str(error)
        if message is not None:
            refused += 1
            assert "\n" not in message
            assert str(path) in message
    assert 100 < refused < 490
