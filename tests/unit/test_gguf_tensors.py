"""Reading tensors: every type against the ``gguf`` package bit for bit, row order, shapes, memory."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from neoserve.formats.gguf import GGUFFile, GGUFTensor, llama_row_order
from neoserve.formats.gguf_blocks import BLOCK_TYPES, UNSUPPORTED_TYPES
from neoserve.types.errors import CheckpointError
from neoserve.types.tensors import BF16, F32, INT8_CHANNEL, CheckpointTensor, TensorRows, WeightFormat

from .gguf_writer import QUANTISED, TENSOR_TYPES, Image, Tensor, random_tensor

FORMATS = {
    "F32": "f32",
    "F16": "f32",
    "BF16": "bf16",
    "Q4_0": "int4_g32_f16_zero",
    "Q4_1": "int4_g32_f16_minimum",
    "Q5_0": "int8_g32_f16",
    "Q5_1": "int8_g32_f16_minimum",
    "Q8_0": "int8_g32_f16",
    "Q4_K": "int4_g32_f32_minimum",
    "Q5_K": "int8_g32_f32_minimum",
    "Q6_K": "int8_g16_f32",
}
ROWS, COLUMNS = 37, 512


def opened(tmp_path: Path, tensor: Tensor) -> GGUFTensor:
    tmp_path.mkdir(exist_ok=True)
    path = Image(tensors=[tensor]).write(tmp_path / "model.gguf")
    return GGUFFile.open(path).tensors[str(tensor.name)]


def oracle(tensor: Tensor) -> npt.NDArray[np.float32]:
    """What the gguf package makes of the stored bytes, row-major."""
    shape = tensor.dimensions[::-1]
    raw = np.frombuffer(tensor.data, np.uint8).reshape(*shape[:-1], -1)
    kind = gguf.GGMLQuantizationType(tensor.type_number)
    if kind in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16):
        raw = raw.view(np.float32 if kind == gguf.GGMLQuantizationType.F32 else np.float16)
    return np.asarray(gguf.quants.dequantize(raw, kind), np.float32).reshape(shape)


def bits(values: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """Floats as integers, so that comparing also tells +0 from -0."""
    return np.ascontiguousarray(values).view(np.uint32 if values.itemsize == 4 else np.uint16)


def dequantised(rows: TensorRows) -> npt.NDArray[np.float32]:
    """The definition in WeightFormat, in float32."""
    fmt = rows.format
    values = rows.values.astype(np.float32)
    if fmt.kind in ("f32", "bf16"):
        return values
    assert rows.scales is not None
    if rows.zeros is not None:
        values -= np.repeat(rows.zeros.astype(np.float32), fmt.group, axis=1)
    values *= np.repeat(rows.scales.astype(np.float32), fmt.group, axis=1)
    if rows.minimums is not None:
        values += np.repeat(rows.minimums.astype(np.float32), fmt.group, axis=1)
    return values


@pytest.mark.parametrize("type_name", TENSOR_TYPES)
def test_values_equal_the_gguf_package_bit_for_bit(tmp_path: Path, type_name: str) -> None:
    stored = random_tensor("w", type_name, (ROWS, COLUMNS))
    tensor: CheckpointTensor = opened(tmp_path, stored)
    want = oracle(stored)
    assert tensor.shape == (ROWS, COLUMNS)
    assert tensor.storage_type == type_name
    assert tensor.nbytes == len(stored.data)
    assert str(tensor.native_format()) == FORMATS[type_name]
    native = tensor.read_rows(0, ROWS, tensor.native_format())
    np.testing.assert_array_equal(bits(dequantised(native)), bits(want))
    np.testing.assert_array_equal(bits(tensor.read_rows(0, ROWS, F32).values), bits(want))
    np.testing.assert_array_equal(bits(tensor.read_f32()), bits(want))
    half = tensor.read_rows(0, ROWS, BF16).values
    assert half.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(bits(half), bits(want.astype(ml_dtypes.bfloat16)))


@pytest.mark.parametrize("type_name", QUANTISED)
def test_fused_multiply_add_gives_the_same_values(tmp_path: Path, type_name: str) -> None:
    # scale * q is exact, so a kernel's fma(q, scale, minimum), here in float64, rounds to the same float32.
    stored = random_tensor("w", type_name, (8, COLUMNS), seed=5)
    tensor = opened(tmp_path, stored)
    rows = tensor.read_rows(0, 8, tensor.native_format())
    assert rows.scales is not None
    values = rows.values.astype(np.float64)
    if rows.zeros is not None:
        values -= 8
    values *= np.repeat(rows.scales.astype(np.float64), rows.format.group, axis=1)
    exact = values.astype(np.float32).astype(np.float64)
    np.testing.assert_array_equal(values, exact)
    if rows.minimums is not None:
        values += np.repeat(rows.minimums.astype(np.float64), rows.format.group, axis=1)
    np.testing.assert_array_equal(values.astype(np.float32), oracle(stored))


@pytest.mark.parametrize("type_name", TENSOR_TYPES)
def test_arrays_are_as_the_contract_says(tmp_path: Path, type_name: str) -> None:
    tensor = opened(tmp_path, random_tensor("w", type_name, (ROWS, COLUMNS)))
    fmt = tensor.native_format()
    rows = tensor.read_rows(3, 9, fmt)
    kinds = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "int8_group": np.int8, "int4_group": np.uint8}
    assert rows.format == fmt
    assert rows.values.dtype == kinds[fmt.kind]
    assert rows.values.shape == (6, COLUMNS)
    arrays = [rows.values]
    assert (rows.scales is None) == (fmt.kind in ("f32", "bf16"))
    assert (rows.minimums is None) == (fmt.offset != "minimum")
    assert (rows.zeros is None) == (fmt.offset != "zero")
    for array in (rows.scales, rows.minimums):
        if array is not None:
            assert array.dtype == {"f16": np.float16, "f32": np.float32}[fmt.scale_type]
            assert array.shape == (6, COLUMNS // fmt.group)
            arrays.append(array)
    if rows.zeros is not None:
        assert rows.zeros.dtype == np.uint8
        assert (rows.zeros == 8).all()
        assert rows.zeros.shape == (6, COLUMNS // fmt.group)
        arrays.append(rows.zeros)
    if fmt.kind == "int4_group":
        assert rows.values.max() == 15
    assert all(array.flags.c_contiguous for array in arrays)


@pytest.mark.parametrize("type_name", TENSOR_TYPES)
def test_row_blocks_make_up_the_whole(tmp_path: Path, type_name: str) -> None:
    tensor = opened(tmp_path, random_tensor("w", type_name, (ROWS, COLUMNS)))
    for fmt in {tensor.native_format(), F32, BF16}:
        whole = tensor.read_rows(0, ROWS, fmt)
        for start, stop in [(0, 1), (0, 16), (16, 32), (32, ROWS), (ROWS, ROWS)]:
            part = tensor.read_rows(start, stop, fmt)
            for name in ("values", "scales", "minimums", "zeros"):
                array, full = getattr(part, name), getattr(whole, name)
                assert (array is None) == (full is None)
                if array is not None:
                    np.testing.assert_array_equal(array, full[start:stop])


def test_float_rows_are_views_of_the_file(tmp_path: Path) -> None:
    for type_name, fmt in [("F32", F32), ("BF16", BF16)]:
        values = opened(tmp_path / type_name, random_tensor("w", type_name, (4, 8))).read_rows(1, 3, fmt).values
        assert not values.flags.owndata
        assert not values.flags.writeable
        assert values.flags.aligned


def test_large_tensors_are_converted_in_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neoserve.formats.gguf_tensor._VALUES_AT_ONCE", 3 * COLUMNS)
    stored = random_tensor("w", "Q4_K", (ROWS, COLUMNS))
    tensor = opened(tmp_path, stored)
    np.testing.assert_array_equal(tensor.read_rows(5, 36, F32).values, oracle(stored)[5:36])
    np.testing.assert_array_equal(
        bits(tensor.read_rows(5, 36, BF16).values), bits(oracle(stored)[5:36].astype(ml_dtypes.bfloat16))
    )


def test_shapes(tmp_path: Path) -> None:
    stored = random_tensor("experts", "Q8_0", (3, 5, 64))
    tensor = opened(tmp_path, stored)
    assert tensor.shape == (3, 5, 64)
    assert (tensor.rows, tensor.columns) == (15, 64)
    np.testing.assert_array_equal(tensor.read_rows(5, 10, F32).values, oracle(stored)[1])
    assert tensor.read_f32().shape == (3, 5, 64)
    norm = opened(tmp_path / "other", random_tensor("norm", "F32", (64,)))
    assert norm.shape == (64,)
    assert norm.read_f32().shape == (64,)
    assert norm.read_rows(0, 1, F32).values.shape == (1, 64)


@pytest.mark.parametrize("bounds", [(-1, 2), (3, 2), (0, ROWS + 1), (ROWS + 1, ROWS + 1)])
def test_rows_out_of_range(tmp_path: Path, bounds: tuple[int, int]) -> None:
    tensor = opened(tmp_path, random_tensor("w", "Q8_0", (ROWS, COLUMNS)))
    with pytest.raises(ValueError, match=rf"tensor 'w': rows \[{bounds[0]}, {bounds[1]}\) are outside \[0, 37\)"):
        tensor.read_rows(*bounds, F32)


@pytest.mark.parametrize("fmt", [INT8_CHANNEL, WeightFormat("int4_group", 32, "f16", "minimum")])
def test_other_formats_are_refused_by_name(tmp_path: Path, fmt: WeightFormat) -> None:
    tensor = opened(tmp_path, random_tensor("w", "Q8_0", (ROWS, COLUMNS)))
    with pytest.raises(ValueError, match=f"'w' cannot be read as {fmt}; possible: int8_g32_f16, f32, bf16"):
        tensor.read_rows(0, 1, fmt)


@pytest.mark.parametrize(("num_heads", "head_dim"), [(1, 2), (3, 4), (9, 64), (4, 96)])
def test_llama_row_order_undoes_the_conversion(num_heads: int, head_dim: int) -> None:
    rows = num_heads * head_dim
    original = np.random.default_rng(0).standard_normal((rows, 5))
    converted = original.reshape(num_heads, 2, head_dim // 2, 5).swapaxes(1, 2).reshape(rows, 5)
    np.testing.assert_array_equal(converted[llama_row_order(num_heads, head_dim)], original)


@pytest.mark.parametrize(("num_heads", "head_dim"), [(0, 64), (2, 0), (2, 63)])
def test_llama_row_order_of_impossible_heads(num_heads: int, head_dim: int) -> None:
    with pytest.raises(ValueError, match=f"num_heads {num_heads} .* head_dim {head_dim}"):
        llama_row_order(num_heads, head_dim)


@pytest.mark.parametrize("type_name", TENSOR_TYPES)
def test_row_order(tmp_path: Path, type_name: str) -> None:
    stored = random_tensor("q", type_name, (12, COLUMNS))
    order = llama_row_order(3, 4)
    plain = opened(tmp_path, stored)
    tensor = plain.with_row_order(order)
    assert (plain.row_order is None, tensor.name, tensor.shape) == (True, "q", (12, COLUMNS))
    want = oracle(stored)[order]
    np.testing.assert_array_equal(bits(tensor.read_f32()), bits(want))
    np.testing.assert_array_equal(bits(tensor.read_rows(2, 7, F32).values), bits(want[2:7]))
    native = tensor.read_rows(2, 7, tensor.native_format())
    np.testing.assert_array_equal(bits(dequantised(native)), bits(want[2:7]))


def test_row_order_of_a_bias(tmp_path: Path) -> None:
    stored = random_tensor("q.bias", "F32", (12,))
    order = llama_row_order(3, 4)
    bias = opened(tmp_path, stored).with_row_order(order)
    np.testing.assert_array_equal(bias.read_f32(), oracle(stored)[order])


def test_row_order_that_does_not_fit(tmp_path: Path) -> None:
    tensor = opened(tmp_path, random_tensor("q", "Q8_0", (12, 64)))
    for order in (llama_row_order(2, 4), np.zeros(12, np.int64), np.arange(1, 13)):
        with pytest.raises(CheckpointError, match=r"model\.gguf: tensor 'q': expected a row order over 12 rows"):
            tensor.with_row_order(order)
    flat = opened(tmp_path / "other", random_tensor("b", "Q8_0", (64,)))
    with pytest.raises(CheckpointError, match="one-dimensional Q8_0 tensor cannot be reordered"):
        flat.with_row_order(np.arange(64))


def test_every_type_of_the_gguf_package_is_known() -> None:
    for kind in gguf.GGMLQuantizationType:
        if kind.value in BLOCK_TYPES:
            block_type = BLOCK_TYPES[kind.value]
            assert block_type.name == kind.name
            assert (block_type.size, block_type.nbytes) == gguf.GGML_QUANT_SIZES[kind]
        elif kind.value <= max(UNSUPPORTED_TYPES):
            assert UNSUPPORTED_TYPES[kind.value][0] == kind.name
    assert not BLOCK_TYPES.keys() & UNSUPPORTED_TYPES.keys()


class AdvisedBuffer(bytearray):
    """Stands in for the memory map and notes which ranges are released."""

    advised: list[tuple[int, int]]

    def madvise(self, advice: int, start: int, length: int) -> None:
        assert advice == mmap.MADV_DONTNEED
        self.advised.append((start, start + length))


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTNEED"), reason="this system has no madvise")
@pytest.mark.parametrize("page", [4096, 16384, 65536])
def test_released_pages_are_whole_and_inside_the_rows(monkeypatch: pytest.MonkeyPatch, page: int) -> None:
    monkeypatch.setattr(mmap, "PAGESIZE", page)
    stored = random_tensor("w", "Q8_0", (512, 1024))
    # 32-byte aligned, but not on any page boundary.
    offset = 1056
    buffer = AdvisedBuffer(bytes(offset) + stored.data)
    buffer.advised = []
    row_bytes = len(stored.data) // 512
    tensor = GGUFTensor("w", (512, 1024), "model.gguf", BLOCK_TYPES[8], buffer, offset, len(stored.data))  # type: ignore[arg-type]
    for start in range(0, 512, 128):
        buffer.advised.clear()
        tensor.read_rows(start, start + 128, tensor.native_format())
        for first, last in buffer.advised:
            assert first % page == last % page == 0
            assert offset + start * row_bytes <= first < last <= offset + (start + 128) * row_bytes
        assert buffer.advised, "128 rows of 1088 bytes hold a whole page of every size"
    buffer.advised.clear()
    tensor.read_rows(0, 1, tensor.native_format())
    assert not buffer.advised, "a row of 1088 bytes holds no whole page"


def resident_bytes(path: Path) -> int:
    """Bytes of the mapping of ``path`` that are resident in this process."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(maxsplit=1)[0]:
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")
def test_a_full_read_leaves_little_of_the_file_resident(tmp_path: Path) -> None:
    path = Image(tensors=[random_tensor("w", "Q8_0", (4096, 2048))]).write(tmp_path / "large.gguf")
    size = path.stat().st_size
    file = GGUFFile.open(path)
    tensor = file.tensors["w"]
    for start in range(0, 4096, 512):
        tensor.read_rows(start, start + 512, tensor.native_format())
    assert resident_bytes(path) < size // 4
    file.content_digest(full=True)
    assert resident_bytes(path) > size // 2
    file.release_pages()
    assert resident_bytes(path) == 0
    assert tensor.read_rows(0, 1, F32).values.any(), "released pages are read again"
