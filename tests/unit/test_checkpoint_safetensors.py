"""The safetensors reader: values against the safetensors package, and every kind of damage refused by name."""

from __future__ import annotations

import json
import random
import re
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from neoserve.formats.safetensors import SafetensorsFile
from neoserve.types.errors import CheckpointError, NeoServeError, UnsupportedModelError
from neoserve.types.tensors import BF16, F32, INT8_CHANNEL

from .checkpoint_files import BF16_DTYPE, data_of, header_of, safetensors_bytes, write_safetensors

RNG = np.random.default_rng(3)
ARRAYS: dict[str, Any] = {
    "w32": RNG.standard_normal((6, 4)).astype(np.float32),
    "w16": RNG.standard_normal((5, 4)).astype(np.float16),
    "wb16": RNG.standard_normal((7, 3)).astype(BF16_DTYPE),
    "norm": RNG.standard_normal(8).astype(np.float16),
    "scalar": np.array(1.5, np.float32),
    "empty": np.zeros((0, 4), np.float32),
}


def test_reads_what_the_safetensors_package_writes(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(ARRAYS, path, metadata={"format": "pt"})
    opened = SafetensorsFile(path)
    assert opened.metadata == {"format": "pt"}
    assert set(opened.tensors) == set(ARRAYS)
    for name, array in ARRAYS.items():
        tensor = opened.tensors[name]
        assert tensor.shape == array.shape
        assert tensor.nbytes == array.nbytes
        np.testing.assert_array_equal(tensor.read_f32(), array.astype(np.float32))


def test_writes_of_the_test_helper_are_sound(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "m.safetensors", ARRAYS)
    for name, array in safetensors.numpy.load_file(path).items():
        np.testing.assert_array_equal(array.astype(np.float32), ARRAYS[name].astype(np.float32))


@pytest.mark.parametrize("name", ["w32", "w16", "wb16"])
def test_row_reads_in_every_format(tmp_path: Path, name: str) -> None:
    tensor = SafetensorsFile(write_safetensors(tmp_path / "m.safetensors", ARRAYS)).tensors[name]
    array = ARRAYS[name]
    assert tensor.native_format() == (BF16 if name == "wb16" else F32)
    for start, stop in [(0, array.shape[0]), (1, 4), (2, 2)]:
        rows = tensor.read_rows(start, stop, F32)
        assert rows.values.dtype == np.float32
        assert rows.values.flags.c_contiguous
        np.testing.assert_array_equal(rows.values, array[start:stop].astype(np.float32))
        half = tensor.read_rows(start, stop, BF16)
        assert half.values.dtype == ml_dtypes.bfloat16
        expected = array[start:stop].astype(np.float32).astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(half.values.view(np.uint16), expected.view(np.uint16))


def test_row_reads_refuse_bad_ranges_and_formats(tmp_path: Path) -> None:
    tensor = SafetensorsFile(write_safetensors(tmp_path / "m.safetensors", ARRAYS)).tensors["w32"]
    for start, stop in [(-1, 2), (3, 2), (0, 7)]:
        with pytest.raises(ValueError, match="rows"):
            tensor.read_rows(start, stop, F32)
    with pytest.raises(ValueError, match="int8_channel"):
        tensor.read_rows(0, 1, INT8_CHANNEL)


def test_one_dimension_is_one_row(tmp_path: Path) -> None:
    tensor = SafetensorsFile(write_safetensors(tmp_path / "m.safetensors", ARRAYS)).tensors["norm"]
    np.testing.assert_array_equal(tensor.read_rows(0, 1, F32).values, ARRAYS["norm"].astype(np.float32)[None])


def test_native_reads_are_views_of_the_file(tmp_path: Path) -> None:
    tensor = SafetensorsFile(write_safetensors(tmp_path / "m.safetensors", ARRAYS)).tensors["w32"]
    values = tensor.read_rows(1, 3, F32).values
    assert not values.flags.owndata
    assert not values.flags.writeable


def test_header_without_padding_gives_aligned_rows(tmp_path: Path) -> None:
    """Some writers leave the header's length odd; rows are then copied to an aligned place."""
    array = ARRAYS["w32"]
    header = json.dumps(header_of({"w": array})).encode()
    header += b" " * (1 - len(header) % 2)
    path = tmp_path / "m.safetensors"
    path.write_bytes(safetensors_bytes(header, array.tobytes(), pad=False))
    tensor = SafetensorsFile(path).tensors["w"]
    assert tensor.offset % 2 == 1
    rows = tensor.read_rows(2, 5, F32).values
    assert rows.flags.aligned
    np.testing.assert_array_equal(rows, array[2:5])


def test_other_dtypes_are_refused_by_name_when_read(tmp_path: Path) -> None:
    arrays = {"packed": np.zeros((2, 2), np.int32), "half": ARRAYS["w16"]}
    opened = SafetensorsFile(write_safetensors(tmp_path / "m.safetensors", arrays))
    with pytest.raises(UnsupportedModelError, match=r"m\.safetensors: tensor 'packed' has dtype I32.*BF16, F16, F32"):
        opened.tensors["packed"].native_format()
    opened.tensors["half"].native_format()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_norms_must_be_finite(tmp_path: Path, bad: float) -> None:
    norm = np.ones(4, np.float32)
    norm[2] = bad
    opened = SafetensorsFile(write_safetensors(tmp_path / "m.safetensors", {"norm": norm}))
    with pytest.raises(CheckpointError, match=r"tensor 'norm': value 2 is (nan|inf)"):
        opened.tensors["norm"].read_f32()


def test_views_outlive_close(tmp_path: Path) -> None:
    opened = SafetensorsFile(write_safetensors(tmp_path / "m.safetensors", ARRAYS))
    values = opened.tensors["w32"].read_rows(0, 6, F32).values
    opened.close()
    np.testing.assert_array_equal(values, ARRAYS["w32"])


def test_released_pages_are_read_again(tmp_path: Path) -> None:
    opened = SafetensorsFile(write_safetensors(tmp_path / "m.safetensors", ARRAYS))
    before = opened.tensors["w32"].read_f32()
    opened.release_pages()
    np.testing.assert_array_equal(opened.tensors["w32"].read_f32(), before)


W = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
DAMAGED: dict[str, tuple[bytes, str]] = {
    "zero bytes": (b"", "has 0 bytes"),
    "seven bytes": (b"1234567", "has 7 bytes"),
    "header longer than file": (struct.pack("<Q", 500) + b"{}", "header length is 500 bytes, but only 2 follow"),
    "header of 2^63": (struct.pack("<Q", 2**63) + b"{}", "header length is 9223372036854775808 bytes; at most"),
    "not json": (safetensors_bytes(b"{oops", b""), "not valid JSON"),
    "not utf-8": (safetensors_bytes(b"{\xff\xfe}", b""), "not valid JSON"),
    "a list": (safetensors_bytes([1], b""), "JSON list"),
    "deep nesting": (safetensors_bytes(b"[" * 100_000, b""), "not valid JSON"),
    "cut data": (safetensors_bytes({"w": W}, bytes(12)), r"describes 16 bytes.*'w'.*found 12: the file is cut off"),
    "longer data": (safetensors_bytes({"w": W}, bytes(24)), "describes 16 bytes.*found 24.*longer"),
    "hole": (
        safetensors_bytes({"w": W, "v": W | {"data_offsets": [24, 40]}}, bytes(40)),
        "tensor 'v' starts at byte 24 of the data, expected 16: a hole",
    ),
    "overlap": (
        safetensors_bytes({"w": W, "v": W | {"data_offsets": [8, 24]}}, bytes(24)),
        "tensor 'v' starts at byte 8 of the data, expected 16: an overlap",
    ),
    "same bytes twice": (safetensors_bytes({"w": W, "v": W}, bytes(16)), "expected 16: an overlap"),
    "duplicate tensor": (
        safetensors_bytes(b'{"w":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"w":1}', b""),
        "'w' twice",
    ),
    "duplicate field": (
        safetensors_bytes(b'{"w":{"dtype":"F32","dtype":"F32","shape":[0],"data_offsets":[0,0]}}', b""),
        "'dtype' twice",
    ),
    "unknown dtype": (safetensors_bytes({"w": W | {"dtype": "Q4_K"}}, bytes(16)), "unknown dtype 'Q4_K'"),
    "dtype not a string": (safetensors_bytes({"w": W | {"dtype": ["F32"]}}, bytes(16)), "unknown dtype"),
    "shape and bytes differ": (
        safetensors_bytes({"w": W | {"shape": [2, 3]}}, bytes(16)),
        r"tensor 'w' of dtype F32 and shape \[2, 3\] needs 24 bytes, its data_offsets hold 16",
    ),
    "dims of 2^60": (
        safetensors_bytes({"w": W | {"shape": [2**60, 2**60]}}, bytes(16)),
        r"needs \d{37} bytes, its data_offsets hold 16",
    ),
    "dims overflow to the right size": (
        safetensors_bytes({"w": W | {"shape": [2**62, 16]}}, bytes(16)), "needs \\d+ bytes"
    ),
    "negative dim": (safetensors_bytes({"w": W | {"shape": [-2, -2]}}, bytes(16)), "has shape"),
    "float dim": (safetensors_bytes({"w": W | {"shape": [2.0, 2]}}, bytes(16)), "has shape"),
    "bool dim": (safetensors_bytes({"w": W | {"shape": [True, 4]}}, bytes(16)), "has shape"),
    "rank 9": (safetensors_bytes({"w": W | {"shape": [1] * 8 + [4]}}, bytes(16)), "has shape"),
    "offsets reversed": (safetensors_bytes({"w": W | {"data_offsets": [16, 0]}}, bytes(16)), "data_offsets"),
    "offsets beyond": (safetensors_bytes({"w": W | {"data_offsets": [2**62, 2**62 + 16]}}, bytes(16)), "a hole"),
    "one offset": (safetensors_bytes({"w": W | {"data_offsets": [0]}}, bytes(16)), "data_offsets"),
    "missing field": (safetensors_bytes({"w": {"dtype": "F32", "shape": [2, 2]}}, bytes(16)), "exactly dtype"),
    "strange field": (safetensors_bytes({"w": W | {"extra": 1}}, bytes(16)), "exactly dtype"),
    "entry a number": (safetensors_bytes({"w": 5}, b""), "exactly dtype"),
    "metadata not strings": (safetensors_bytes({"__metadata__": {"a": 1}}, b""), "__metadata__"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_damage_is_refused_in_one_line(tmp_path: Path, case: str) -> None:
    content, expected = DAMAGED[case]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=expected) as caught:
        SafetensorsFile(path)
    text = str(caught.value)
    assert text.startswith("bad.safetensors: ")
    assert "\n" not in text
    assert not re.search(re.escape(str(tmp_path)), text)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gone\.safetensors: cannot be opened: No such file"):
        SafetensorsFile(tmp_path / "gone.safetensors")


def test_header_over_100_mb_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.safetensors"
    with open(path, "wb") as stream:
        stream.write(struct.pack("<Q", 200_000_000))
        stream.truncate(300_000_000)
    with pytest.raises(CheckpointError, match="header length is 200000000 bytes; at most 100000000"):
        SafetensorsFile(path)


def test_random_damage_never_raises_anything_else(tmp_path: Path) -> None:
    """400 files with changed, cut or inserted bytes: each opens and reads, or is a CheckpointError."""
    arrays = {name: ARRAYS[name] for name in ("w32", "wb16", "norm")}
    sound = safetensors_bytes(header_of(arrays), data_of(arrays))
    rng = random.Random(11)
    header_end = len(sound) - len(data_of(arrays))
    path = tmp_path / "fuzz.safetensors"
    refused = 0
    for _ in range(400):
        content = bytearray(sound)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(header_end)
            match rng.randrange(3):
                case 0:
                    content[at] = rng.randrange(256)
                case 1:
                    del content[at : at + rng.randint(1, 9)]
                case _:
                    content[at:at] = bytes(rng.choices(b'0123456789{}[]",:F', k=rng.randint(1, 4)))
        path.write_bytes(content)
        try:
            for tensor in SafetensorsFile(path).tensors.values():
                tensor.read_f32()
        except NeoServeError:
            refused += 1
    assert refused > 300
