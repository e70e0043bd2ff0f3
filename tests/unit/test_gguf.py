"""Opening sound GGUF files: metadata, tensors, split files, digest."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from neoserve.formats import gguf_cursor
from neoserve.formats.gguf import GGUFFile
from neoserve.types.errors import CheckpointError
from neoserve.types.tensors import F32

from .gguf_writer import (
    BOOL,
    FLOAT32,
    INT32,
    STRING,
    UINT16,
    UINT32,
    Image,
    Tensor,
    random_tensor,
    small_model,
    string,
)


def open_image(image: Image, folder: Path) -> GGUFFile:
    return GGUFFile.open(image.write(folder / "model.gguf"))


@pytest.mark.parametrize("version", [2, 3])
def test_opens_both_versions(tmp_path: Path, version: int) -> None:
    image = small_model()
    image.version = struct.pack("<I", version)
    file = open_image(image, tmp_path)
    assert file.version == version
    assert file.paths == (tmp_path / "model.gguf",)
    assert list(file.tensors) == ["token_embd.weight", "blk.0.attn_q.weight", "output_norm.weight"]
    assert file.nbytes == sum(len(tensor.data) for tensor in image.tensors)


SCALARS = [
    (0, 255),
    (1, -128),
    (2, 65535),
    (3, -32768),
    (4, 2**32 - 1),
    (5, -(2**31)),
    (6, 0.5),
    (7, True),
    (7, False),
    (8, "Grüße \U0001f600"),
    (10, 2**64 - 1),
    (11, -(2**63)),
    (12, 1e300),
]


@pytest.mark.parametrize(("kind", "expected"), SCALARS)
def test_every_scalar_type(tmp_path: Path, kind: int, expected: object) -> None:
    metadata = open_image(Image().add("key", kind, expected), tmp_path).metadata
    assert metadata["key"] == expected
    assert type(metadata["key"]) is type(expected)
    assert not metadata.is_array("key")


@pytest.mark.parametrize(("kind", "expected"), SCALARS)
@pytest.mark.parametrize("count", [0, 1, 3])
def test_every_array_type(tmp_path: Path, kind: int, expected: object, count: int) -> None:
    # The array comes last, so that an empty one ends exactly where the file does.
    metadata = open_image(Image(alignment=1).add_array("key", kind, [expected] * count), tmp_path).metadata
    assert metadata.get_array("key") == metadata["key"] == [expected] * count
    assert all(type(item) is type(expected) for item in metadata.get_array("key"))
    assert metadata.array_length("key") == count
    assert metadata.is_array("key")


def test_typed_getters(tmp_path: Path) -> None:
    metadata = open_image(small_model(), tmp_path).metadata
    assert metadata.get_int("llama.block_count") == 2
    assert metadata.get_float("llama.rope.freq_base") == 10000.0
    assert metadata.get_str("general.architecture") == "llama"
    assert metadata.get_bool("tokenizer.ggml.add_bos_token") is True
    assert metadata.get_strings("tokenizer.ggml.tokens") == ["<s>", "a", "\u2581word", "", "\U0001f600"]
    scores = metadata.get_numbers("tokenizer.ggml.scores")
    assert scores.dtype == np.float32
    assert scores.tolist() == [0.0, -1.0, -2.0, -3.0, -4.0]
    assert metadata.type_name("tokenizer.ggml.tokens") == "array of 5 string"
    assert len(metadata) == len(list(metadata)) == 7


def test_missing_keys(tmp_path: Path) -> None:
    metadata = open_image(small_model(), tmp_path).metadata
    assert metadata.get_int("absent", 7) == 7
    assert metadata.get_float("absent", None) is None
    assert metadata.get_str("absent", "x") == "x"
    assert metadata.get_bool("absent", False) is False
    assert "absent" not in metadata
    with pytest.raises(KeyError):
        metadata["absent"]
    for getter, expected in [
        (metadata.get_int, "an integer"),
        (metadata.get_float, "a float"),
        (metadata.get_str, "a string"),
        (metadata.get_bool, "a bool"),
        (metadata.get_array, "an array"),
        (metadata.get_strings, "an array"),
        (metadata.get_numbers, "an array"),
    ]:
        with pytest.raises(CheckpointError, match=f"model.gguf: key 'absent' is missing; expected {expected}"):
            getter("absent")


WRONG_READS = [
    ("get_int", FLOAT32, 1.0, "an integer, found float32"),
    ("get_int", BOOL, 1, "an integer, found bool"),
    ("get_int", STRING, "1", "an integer, found string"),
    ("get_float", UINT32, 1, "a float, found uint32"),
    ("get_str", UINT32, 1, "a string, found uint32"),
    ("get_bool", UINT32, 1, "a bool, found uint32"),
    ("get_array", UINT32, 1, "an array, found uint32"),
    ("get_float", FLOAT32, float("nan"), "a finite number, found nan"),
    ("get_float", FLOAT32, float("inf"), "a finite number, found inf"),
    ("get_bool", BOOL, 2, "a bool stored as 0 or 1, found 2"),
    ("get_str", STRING, b"\xff", "UTF-8 text"),
]


@pytest.mark.parametrize(("getter", "kind", "content", "message"), WRONG_READS)
def test_reading_a_key_as_another_type(tmp_path: Path, getter: str, kind: int, content: object, message: str) -> None:
    metadata = open_image(Image().add("some.key", kind, content), tmp_path).metadata
    with pytest.raises(CheckpointError, match=rf"model.gguf: key 'some.key': expected {message}"):
        getattr(metadata, getter)("some.key")


@pytest.mark.parametrize(
    ("getter", "kind", "items", "message"),
    [
        ("get_int", UINT32, [1], "expected an integer, found array of 1 uint32"),
        ("get_strings", UINT32, [1], "expected an array of string, found array of 1 uint32"),
        ("get_numbers", STRING, ["a"], "expected an array of numbers, found array of 1 string"),
        ("get_array", STRING, ["a", b"\xc3", "b"], "item 1: expected UTF-8 text"),
        ("get_array", BOOL, [0, 3], "expected a bool stored as 0 or 1, found 3"),
    ],
)
def test_reading_an_array_as_another_type(
    tmp_path: Path, getter: str, kind: int, items: list[object], message: str
) -> None:
    metadata = open_image(Image().add_array("some.key", kind, items), tmp_path).metadata
    with pytest.raises(CheckpointError, match=f"model.gguf: key 'some.key': {message}"):
        getattr(metadata, getter)("some.key")


def random_strings(kind: str, count: int) -> list[object]:
    rng = random.Random(kind)
    lengths = {
        "short": lambda: rng.randint(1, 12),
        "empty": lambda: rng.choice([0, 0, 3]),
        "long": lambda: rng.choice([2, 255, 256, 257, 1000]),
        "zeros": lambda: rng.randint(1, 40),
    }[kind]
    # Text full of NUL characters looks like the length prefixes that the fast scan searches for.
    alphabet = "\0\0\0\0\0\x05a" if kind == "zeros" else "abc \u2581é\U0001f600"
    return ["".join(rng.choices(alphabet, k=lengths())) for _ in range(count)]


@pytest.mark.parametrize("window", [16, 61, 1024, 1 << 18])
@pytest.mark.parametrize("kind", ["short", "empty", "long", "zeros"])
def test_fast_scan_finds_the_same_strings_as_a_walk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, window: int
) -> None:
    monkeypatch.setattr(gguf_cursor, "_SCAN_WINDOW", window)
    strings = random_strings("short", 500) + random_strings(kind, 2000) + random_strings("short", 500)
    image = Image().add_array("tokens", STRING, strings).add("after", UINT32, 42)
    metadata = open_image(image, tmp_path).metadata
    assert metadata.get_strings("tokens") == strings
    assert metadata.get_int("after") == 42


def test_ordinary_vocabulary_needs_no_walk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_walk(*_: object) -> None:
        raise AssertionError("strings were walked one by one")

    monkeypatch.setattr(gguf_cursor.Cursor, "_walk", no_walk)
    strings = random_strings("short", 60000)
    assert open_image(Image().add_array("tokens", STRING, strings), tmp_path).metadata["tokens"] == strings


def test_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    path = tmp_path / "peer.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(3)
    writer.add_rope_freq_base(1e6)
    writer.add_token_list(["a", "bc", "def"])
    writer.add_array("some.flags", [True, False])
    writer.add_custom_alignment(128)
    weight = np.arange(6, dtype=np.float32).reshape(2, 3)
    writer.add_tensor("w", weight)
    writer.add_tensor("v", weight.astype(np.float16).T.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile.open(path)
    assert file.metadata.get_int("qwen2.block_count") == 3
    assert file.metadata.get_array("tokenizer.ggml.tokens") == ["a", "bc", "def"]
    assert file.metadata.get_array("some.flags") == [True, False]
    assert file.tensors["w"].shape == (2, 3)
    np.testing.assert_array_equal(file.tensors["w"].read_f32(), weight)
    np.testing.assert_array_equal(file.tensors["v"].read_f32(), weight.T)


@pytest.mark.parametrize("alignment", [8, 32, 64, 4096])
def test_alignment_key(tmp_path: Path, alignment: int) -> None:
    image = Image(alignment=alignment).add("general.alignment", UINT32, alignment)
    image.tensors = [random_tensor("a", "F32", (3,)), random_tensor("b", "F32", (2, 5), seed=1)]
    file = open_image(image, tmp_path)
    for tensor in image.tensors:
        assert file.tensors[str(tensor.name)].read_f32().tobytes() == tensor.data


def test_file_may_end_without_padding_or_tensors(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    image = Image(tensors=[random_tensor("a", "F32", (3,))])
    path.write_bytes(image.build()[:-20])
    assert GGUFFile.open(path).tensors["a"].read_f32().tobytes() == image.tensors[0].data
    bare = tmp_path / "bare.gguf"
    bare.write_bytes(Image().add("a", BOOL, 1).header())
    assert not GGUFFile.open(bare).tensors


def split_images() -> list[Image]:
    images = []
    for number in range(3):
        image = Image().add("split.no", UINT16, number).add("split.count", UINT16, 3)
        image.add("split.tensors.count", INT32, 3)
        image.tensors = [random_tensor(f"t{number}", "F32", (2, 4), seed=number)]
        images.append(image)
    images[0].add("general.architecture", STRING, "llama")
    return images


def write_split(images: list[Image], folder: Path) -> list[Path]:
    return [image.write(folder / f"m-{number + 1:05}-of-00003.gguf") for number, image in enumerate(images)]


@pytest.mark.parametrize("opened", [0, 1, 2])
def test_any_part_opens_the_split_checkpoint(tmp_path: Path, opened: int) -> None:
    images = split_images()
    paths = write_split(images, tmp_path)
    file = GGUFFile.open(paths[opened])
    assert file.paths == tuple(paths)
    assert list(file.tensors) == ["t0", "t1", "t2"]
    assert file.metadata.get_str("general.architecture") == "llama"
    for number, tensor in enumerate(file.tensors.values()):
        assert tensor.file == str(paths[number])
        assert tensor.read_rows(0, 2, F32).values.tobytes() == images[number].tensors[0].data


def test_missing_part(tmp_path: Path) -> None:
    paths = write_split(split_images(), tmp_path)
    paths[1].unlink()
    with pytest.raises(CheckpointError, match=r"m-00002-of-00003.gguf: this part of 3 is missing"):
        GGUFFile.open(paths[0])


def test_part_under_another_name(tmp_path: Path) -> None:
    renamed = split_images()[1].write(tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match=r"model.gguf: key 'split.no' is 1, expected 0 for part 1 of 1"):
        GGUFFile.open(renamed)
    with pytest.raises(CheckpointError, match="part 00004 of 00003"):
        GGUFFile.open(tmp_path / "m-00004-of-00003.gguf")


@pytest.mark.parametrize(
    ("index", "body", "message"),
    [
        (0, struct.pack("<IH", UINT16, 2), "key 'split.no' is 2, expected 1 for part 2 of 3"),
        (1, struct.pack("<IH", UINT16, 4), "key 'split.count' is 4, expected 3"),
        (2, struct.pack("<Ii", INT32, 9), "key 'split.tensors.count' is 9, expected 3"),
        (0, struct.pack("<I", STRING) + string("1"), "key 'split.no': expected an integer, found string"),
    ],
)
def test_parts_that_disagree(tmp_path: Path, index: int, body: bytes, message: str) -> None:
    images = split_images()
    images[1].keys[index] = (images[1].keys[index][0], body)
    paths = write_split(images, tmp_path)
    with pytest.raises(CheckpointError, match=f"m-00002-of-00003.gguf: {message}"):
        GGUFFile.open(paths[0])


def test_parts_of_different_models(tmp_path: Path) -> None:
    images = split_images()
    images[2].add("general.architecture", STRING, "qwen2")
    with pytest.raises(CheckpointError, match=r"m-00003-of-00003.gguf: key 'general.architecture' differs"):
        GGUFFile.open(write_split(images, tmp_path)[0])
    images = split_images()
    images[2].tensors[0].name = "t0"
    with pytest.raises(CheckpointError, match=r"m-00003-of-00003.gguf: tensor 't0' is also in .*m-00001"):
        GGUFFile.open(write_split(images, tmp_path)[0])


def test_digest_follows_content_only(tmp_path: Path) -> None:
    def digest(image: Image, name: str, full: bool = False) -> str:
        return GGUFFile.open(image.write(tmp_path / name)).content_digest(full)

    def flipped(tensor: Tensor, at: int) -> Tensor:
        data = bytearray(tensor.data)
        data[at] ^= 1
        return Tensor(tensor.name, tensor.dimensions, tensor.type_number, bytes(data))

    base = Image(tensors=[random_tensor("w", "F32", (100, 100))]).add("a", UINT32, 1)
    assert digest(base, "x.gguf") == digest(base, "y.gguf")
    assert digest(base, "x.gguf") != digest(base, "x.gguf", full=True)
    others = [Image(tensors=base.tensors).add("a", UINT32, 2)]
    others += [Image(base.keys, [flipped(base.tensors[0], at)]) for at in (0, 20000, 39999)]
    assert len({digest(image, f"{index}.gguf") for index, image in enumerate([base, *others])}) == 5
    # A byte outside the samples is seen by the full digest alone.
    unsampled = Image(base.keys, [flipped(base.tensors[0], 5000)])
    assert digest(unsampled, "u.gguf") == digest(base, "v.gguf")
    assert digest(unsampled, "u2.gguf", full=True) != digest(base, "v2.gguf", full=True)
