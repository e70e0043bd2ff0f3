"""Writes tiny GGUF files for tests, byte by byte, sound or damaged in one chosen place."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

STRING = 8
ARRAY = 9
# Value type number -> struct format of one value.
NUMBER_FORMATS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<B",
    10: "<Q",
    11: "<q",
    12: "<d",
}
UINT16, UINT32, INT32, FLOAT32, BOOL = 2, 4, 5, 6, 7

# Tensor type name -> (type number, values per block, bytes per block, positions of its float16 scales).
TENSOR_TYPES = {
    "F32": (0, 1, 4, ()),
    "F16": (1, 1, 2, ()),
    "Q4_0": (2, 32, 18, (0,)),
    "Q4_1": (3, 32, 20, (0, 2)),
    "Q5_0": (6, 32, 22, (0,)),
    "Q5_1": (7, 32, 24, (0, 2)),
    "Q8_0": (8, 32, 34, (0,)),
    "Q4_K": (12, 256, 144, (0, 2)),
    "Q5_K": (13, 256, 176, (0, 2)),
    "Q6_K": (14, 256, 210, (208,)),
    "BF16": (30, 1, 2, ()),
}
QUANTISED = [name for name, (_, size, _, _) in TENSOR_TYPES.items() if size > 1]


def string(text: str | bytes) -> bytes:
    """Length and bytes of a string."""
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def value(kind: int, content: object) -> bytes:
    """Type number and bytes of a single value."""
    body = string(content) if kind == STRING else struct.pack(NUMBER_FORMATS[kind], content)  # type: ignore[arg-type]
    return struct.pack("<I", kind) + body


def array(kind: int, items: list[object], count: int | None = None) -> bytes:
    """Type number, item type, count (the true one unless given) and bytes of an array."""
    bodies = [string(item) if kind == STRING else struct.pack(NUMBER_FORMATS[kind], item) for item in items]  # type: ignore[arg-type]
    head = struct.pack("<IIQ", ARRAY, kind, len(items) if count is None else count)
    return head + b"".join(bodies)


@dataclass
class Tensor:
    """``dimensions`` are in GGUF order (columns first); ``offset`` None means the next aligned place."""

    name: str | bytes
    dimensions: tuple[int, ...]
    type_number: int
    data: bytes
    offset: int | None = None


@dataclass
class Image:
    """The parts of a GGUF file; a count left at None is the true one."""

    keys: list[tuple[str | bytes, bytes]] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    magic: bytes = b"GGUF"
    version: bytes = struct.pack("<I", 3)
    key_count: int | None = None
    tensor_count: int | None = None
    alignment: int = 32

    def add(self, key: str | bytes, kind: int, content: object) -> Image:
        """Add a single value."""
        self.keys.append((key, value(kind, content)))
        return self

    def add_array(self, key: str, kind: int, items: list[object]) -> Image:
        """Add an array."""
        self.keys.append((key, array(kind, items)))
        return self

    def header(self) -> bytes:
        """Everything before the padding in front of the tensor data."""
        tensor_count = len(self.tensors) if self.tensor_count is None else self.tensor_count
        key_count = len(self.keys) if self.key_count is None else self.key_count
        parts = [self.magic, self.version, struct.pack("<QQ", tensor_count, key_count)]
        parts += [string(key) + body for key, body in self.keys]
        offset = 0
        for tensor in self.tensors:
            place = offset if tensor.offset is None else tensor.offset
            dimensions = struct.pack(f"<I{len(tensor.dimensions)}Q", len(tensor.dimensions), *tensor.dimensions)
            parts.append(string(tensor.name) + dimensions + struct.pack("<IQ", tensor.type_number, place))
            offset += len(tensor.data) + -len(tensor.data) % self.alignment
        return b"".join(parts)

    def build(self) -> bytes:
        """The whole file."""
        parts = [self.header()]
        parts.append(bytes(-len(parts[0]) % self.alignment))
        for tensor in self.tensors:
            parts += [tensor.data, bytes(-len(tensor.data) % self.alignment)]
        return b"".join(parts)

    def write(self, path: Path) -> Path:
        """Write the file and return its path."""
        path.write_bytes(self.build())
        return path


def random_tensor(name: str, type_name: str, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """A row-major ``shape`` full of random stored bytes whose floats are all finite."""
    number, size, nbytes, halves = TENSOR_TYPES[type_name]
    rng = np.random.default_rng(seed)
    count = int(np.prod(shape))
    if type_name == "F32":
        data = rng.standard_normal(count).astype("<f4").tobytes()
    elif type_name == "F16":
        data = rng.standard_normal(count).astype("<f2").tobytes()
    elif type_name == "BF16":
        data = (rng.standard_normal(count).astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    else:
        blocks = rng.integers(0, 256, (count // size, nbytes), dtype=np.uint8)
        for at in halves:
            # Any finite float16: all signs, zero and subnormals included.
            bits = rng.integers(0, 0x7C00, len(blocks)) | (rng.integers(0, 2, len(blocks)) << 15)
            blocks[:, at : at + 2] = bits.astype("<u2").view(np.uint8).reshape(-1, 2)
        data = blocks.tobytes()
    return Tensor(name, shape[::-1], number, data)


def small_model() -> Image:
    """A sound file with every kind of value and a few tensors, as a starting point for damage."""
    image = Image()
    image.add("general.architecture", STRING, "llama").add("llama.block_count", UINT32, 2)
    image.add("llama.rope.freq_base", FLOAT32, 10000.0).add("tokenizer.ggml.add_bos_token", BOOL, 1)
    image.add_array("tokenizer.ggml.tokens", STRING, ["<s>", "a", "\u2581word", "", "\U0001f600"])
    image.add_array("tokenizer.ggml.token_type", INT32, [3, 1, 1, 1, 1])
    image.add_array("tokenizer.ggml.scores", FLOAT32, [0.0, -1.0, -2.0, -3.0, -4.0])
    image.tensors = [
        random_tensor("token_embd.weight", "Q8_0", (5, 64), seed=1),
        random_tensor("blk.0.attn_q.weight", "Q4_K", (4, 256), seed=2),
        random_tensor("output_norm.weight", "F32", (64,), seed=3),
    ]
    return image
