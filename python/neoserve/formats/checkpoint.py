"""Opens a checkpoint, whatever its format, as one thing: configuration, tokenizer, and tensors by canonical name.

Canonical names: ``embedding``, ``final_norm``, ``lm_head`` (absent when tied), and ``layers.{i}.`` followed by the
names that ``parameters.layer_parameters`` lists. Every tensor of the files is accounted for when it is opened: it is a
parameter of the expected shape, or known to be harmless, or an error.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol, cast

import ml_dtypes
import numpy as np
import numpy.typing as npt

from neoserve.formats import names
from neoserve.formats.config_gguf import read_gguf_config
from neoserve.formats.config_hf import CONFIG_FILE, read_hf_config
from neoserve.formats.fields import read_json
from neoserve.formats.gguf import GGUFFile, llama_row_order
from neoserve.formats.locate import Located, locate_checkpoint
from neoserve.formats.parameters import EMBEDDING, Shape, model_parameters
from neoserve.formats.text_gguf import read_gguf_generation, read_gguf_tokenizer
from neoserve.formats.text_hf import read_hf_generation, read_hf_tokenizer
from neoserve.formats.weights_hf import HFWeights
from neoserve.types.errors import CheckpointError
from neoserve.types.model import GenerationDefaults, ModelConfig, TokenizerSource
from neoserve.types.tensors import BF16, F32, CheckpointTensor, TensorRows, WeightFormat

_log = logging.getLogger(__name__)

_SAMPLE: Final = 1024
_COMPARE_VALUES: Final = 1 << 20


class _Store(Protocol):
    """The opened files behind a checkpoint."""

    def digest(self) -> str: ...
    def release_pages(self) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, eq=False, kw_only=True)
class Checkpoint:
    """An opened model. Tensors are read lazily from memory-mapped files, which stay open until ``close``.

    ``tensors`` has exactly the parameters of ``parameters.model_parameters(config)``; with tied embeddings there is no
    ``lm_head``. ``path`` is the file or folder that was opened. Usable as a context manager.
    """

    path: Path
    config: ModelConfig
    generation: GenerationDefaults
    tokenizer: TokenizerSource
    tensors: Mapping[str, CheckpointTensor]
    store: _Store

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters as stored."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of configuration and weights, whatever the model's name and place.

        Of every tensor it covers name, type, shape and the first, middle and last 1024 bytes: milliseconds, and
        different for any two models that were trained or quantised differently. It is not a check against tampering.
        """
        return hashlib.sha256(f"{self.store.digest()}\n{self.config!r}".encode()).hexdigest()

    def release_pages(self) -> None:
        """Takes the file's pages out of resident memory; call it between the tensors of a load to keep the peak low."""
        self.store.release_pages()

    def close(self) -> None:
        """Gives the files back. Arrays that are views of them stay valid; no tensor may be read afterwards.

        Safetensors are unmapped at once or with their last view; a GGUF mapping ends with the last of its tensors.
        """
        self.store.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def open_checkpoint(path: Path, *, overrides: Mapping[str, object] | None = None) -> Checkpoint:
    """Opens a .gguf file (or any part of a split one), or a folder with config.json and safetensors or with one GGUF.

    ``overrides`` replace fields of config.json, or keys of the GGUF metadata, before they are read. Raises
    CheckpointError (UnsupportedModelError for what is sound but not built), naming file, field or tensor, the value
    found, and what to do; ConfigurationError for an override that nothing reads.
    """
    found = locate_checkpoint(path)
    return _open_gguf(found, overrides) if found.gguf is not None else _open_hf(found, overrides)


def read_config(path: Path, *, overrides: Mapping[str, object] | None = None) -> ModelConfig:
    """The configuration alone: of a config.json, of a folder that has one (weights are not needed), or of a GGUF."""
    if path.name == CONFIG_FILE or (path.is_dir() and (path / CONFIG_FILE).is_file()):
        file = path if path.name == CONFIG_FILE else path / CONFIG_FILE
        return read_hf_config(read_json(file), overrides=overrides)
    with open_checkpoint(path, overrides=overrides) as checkpoint:
        return checkpoint.config


# Hugging Face


def _open_hf(found: Located, overrides: Mapping[str, object] | None) -> Checkpoint:
    folder = found.path
    raw = read_json(folder / CONFIG_FILE)
    config = read_hf_config(raw, overrides=overrides)
    weights = HFWeights(folder)
    try:
        stored: dict[str, CheckpointTensor] = dict(weights.tensors)
        if raw.get("model_type") == "gemma3":
            stored = {name: tensor for name, tensor in stored.items() if not names.is_vision(name)}
        head, prefix = names.hf_head(stored), names.hf_prefix(stored)
        embedding = names.hf_name(config.architecture, EMBEDDING, prefix, head)
        config = _settle_tying(config, stored, embedding, head)
        wanted = {
            parameter: (names.hf_name(config.architecture, parameter, prefix, head), shape)
            for parameter, shape in model_parameters(config).items()
        }
        tensors = _account(wanted, stored, folder.name)
        offset = names.layout(config.architecture).norm_offset
        if offset:
            tensors = {
                name: OffsetTensor(tensor, offset) if name.endswith("norm") else tensor
                for name, tensor in tensors.items()
            }
        return Checkpoint(
            path=found.path,
            config=config,
            generation=read_hf_generation(folder, raw, config.vocab_size),
            tokenizer=read_hf_tokenizer(folder),
            tensors=tensors,
            store=_HFStore(weights),
        )
    except BaseException:
        weights.close()
        raise


def _settle_tying(config: ModelConfig, stored: dict[str, CheckpointTensor], embedding: str, head: str) -> ModelConfig:
    """Applies the rule for tied embeddings, the one transformers 5 has, and leaves in ``stored`` what it keeps.

    Tied and one of the two stored: it serves as both. Tied and both stored: equal ones are shared; different ones are
    both kept, untied, with a warning, for the weights are surer than the flag. Untied: both must be there.
    """
    if not config.tie_embeddings:
        if head not in stored and embedding in stored:
            raise CheckpointError(
                f"{stored[embedding].file}: tensor {head!r} (shape {stored[embedding].shape} expected) is missing, "
                "and tie_word_embeddings is false; set it to true if the model shares its embedding"
            )
        return config
    if head not in stored:
        return config
    if embedding not in stored:
        stored[embedding] = stored.pop(head)
        return config
    if stored[head].shape == stored[embedding].shape and _same_values(stored[embedding], stored[head]):
        del stored[head]
        return config
    _log.warning(
        "%s: tie_word_embeddings is true, but %s and %s differ; both are kept, untied",
        stored[head].file,
        embedding,
        head,
    )
    return replace(config, tie_embeddings=False)


def _same_values(one: CheckpointTensor, other: CheckpointTensor) -> bool:
    rows, columns = one.shape
    step = max(1, _COMPARE_VALUES // max(1, columns))
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        first, second = (tensor.read_rows(start, stop, F32).values for tensor in (one, other))
        if not np.array_equal(first, second):
            return False
    return True


class OffsetTensor:
    """A norm weight whose file leaves a constant out (Hugging Face's Gemma stores weight - 1); read as float32."""

    def __init__(self, tensor: CheckpointTensor, offset: float) -> None:
        self._tensor = tensor
        self._offset = np.float32(offset)
        self.name = tensor.name
        self.shape = tensor.shape
        self.file = tensor.file
        self.storage_type = tensor.storage_type
        self.nbytes = tensor.nbytes

    def native_format(self) -> WeightFormat:
        """f32: the sum does not fit the stored type in general."""
        return F32

    def read_rows(self, start: int, stop: int, fmt: WeightFormat) -> TensorRows:
        """As the tensor's own, offset added in float32."""
        values = self._tensor.read_rows(start, stop, F32).values.astype(np.float32) + self._offset
        if fmt == BF16:
            return TensorRows(BF16, values.astype(ml_dtypes.bfloat16))
        if fmt != F32:
            raise ValueError(f"{self.name}: a norm cannot be read as {fmt}; use f32 or bf16")
        return TensorRows(F32, values)

    def read_f32(self) -> npt.NDArray[np.float32]:
        """The whole weight, offset added."""
        return self._tensor.read_f32() + self._offset


class _HFStore:
    def __init__(self, weights: HFWeights) -> None:
        self._weights = weights

    def digest(self) -> str:
        digest = hashlib.sha256(b"safetensors")
        for name, tensor in sorted(self._weights.tensors.items()):
            digest.update(f"\n{name} {tensor.storage_type} {tensor.shape}\n".encode())
            digest.update(tensor.sample(_SAMPLE))
        return digest.hexdigest()

    def release_pages(self) -> None:
        self._weights.release_pages()

    def close(self) -> None:
        self._weights.close()


# GGUF


def _open_gguf(found: Located, overrides: Mapping[str, object] | None) -> Checkpoint:
    gguf = GGUFFile.open(cast(Path, found.gguf))
    config = read_gguf_config(gguf, overrides)
    stored: dict[str, CheckpointTensor] = dict(gguf.tensors)
    stored.pop(names.GGUF_ROPE_FACTORS, None)  # read as a part of the configuration
    wanted = {
        parameter: (names.gguf_name(config.architecture, parameter), shape)
        for parameter, shape in model_parameters(config).items()
    }
    tensors = _account(wanted, stored, gguf.paths[0].name)
    if names.layout(config.architecture).gguf_permuted:
        orders = {
            "attention.q": llama_row_order(config.num_heads, config.head_dim),
            "attention.k": llama_row_order(config.num_kv_heads, config.head_dim),
        }
        for name in tensors:
            order = orders.get(name.split(".", 2)[-1].removesuffix("_bias"))
            if order is not None:
                tensors[name] = gguf.tensors[wanted[name][0]].with_row_order(order)
    return Checkpoint(
        path=found.path,
        config=config,
        generation=read_gguf_generation(gguf, config.vocab_size),
        tokenizer=read_gguf_tokenizer(gguf),
        tensors=tensors,
        store=_GGUFStore(gguf),
    )


class _GGUFStore:
    def __init__(self, gguf: GGUFFile) -> None:
        self._gguf = gguf

    def digest(self) -> str:
        return self._gguf.content_digest()

    def release_pages(self) -> None:
        self._gguf.release_pages()

    def close(self) -> None:
        self._gguf.release_pages()


# Both


def _account(
    wanted: Mapping[str, tuple[str, Shape]], stored: Mapping[str, CheckpointTensor], place: str
) -> dict[str, CheckpointTensor]:
    """The stored tensors under their canonical names. Raises CheckpointError for a missing, mis-shaped or stray one."""
    missing = [(name, shape) for name, shape in wanted.values() if name not in stored]
    if missing:
        name, shape = missing[0]
        raise CheckpointError(
            f"{place}: tensor {name!r} of shape {shape} is missing"
            f"{f' ({len(missing)} of {len(wanted)} are)' if missing[1:] else ''}; the file is incomplete or its "
            "configuration is of another model"
        )
    for name, shape in wanted.values():
        tensor = stored[name]
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{tensor.file}: tensor {name!r} has shape {tuple(tensor.shape)}, expected {shape} by the configuration"
            )
        tensor.native_format()  # refuses a storage type that cannot be read, before anything is loaded
    known = {name for name, _ in wanted.values()}
    stray = [name for name in stored if name not in known and not names.is_harmless(name)]
    if stray:
        raise CheckpointError(
            f"{stored[stray[0]].file}: tensor {stray[0]!r} of shape {tuple(stored[stray[0]].shape)} is no part of this "
            f"model{f' ({len(stray)} such tensors)' if stray[1:] else ''}; the configuration may be of another model"
        )
    return {parameter: stored[name] for parameter, (name, _) in wanted.items()}
