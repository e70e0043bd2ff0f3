"""Finds and opens the safetensors files of a Hugging Face checkpoint folder.

Which files count:

* ``model.safetensors`` wins over ``model.safetensors.index.json`` unless the index itself names it; a stale index
  beside a complete single file is left out with a warning.
* With an index, the index decides: every shard it names must be there and hold the tensors it lists. Tensors and
  files that it does not list are left out with a warning.
* Without either, a complete numbered set (NAME-00001-of-00003.safetensors) or the only safetensors file is taken.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from neoserve.formats.fields import read_json
from neoserve.formats.safetensors import SafetensorsFile, SafetensorsTensor
from neoserve.types.errors import CheckpointError, UnsupportedModelError

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
PICKLE_SUFFIXES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

_NUMBERED: Final = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
_ADAPTER: Final = "adapter_model.safetensors"

_log = logging.getLogger(__name__)


class HFWeights:
    """The opened files of one checkpoint and their tensors by stored name."""

    def __init__(self, folder: Path) -> None:
        self.files: list[SafetensorsFile] = []
        self.tensors: dict[str, SafetensorsTensor] = {}
        try:
            if (folder / INDEX).is_file() and _index_decides(folder):
                self._open_index(folder)
            else:
                self._open_files(folder, _plain_files(folder))
        except BaseException:
            self.close()
            raise

    def release_pages(self) -> None:
        """Takes all file pages out of resident memory; they are read again when needed."""
        for file in self.files:
            file.release_pages()

    def close(self) -> None:
        """Unmaps every file."""
        for file in self.files:
            file.close()

    def _open(self, path: Path) -> SafetensorsFile:
        file = SafetensorsFile(path)
        self.files.append(file)
        return file

    def _open_files(self, folder: Path, names: Iterable[str]) -> None:
        for name in names:
            for tensor in self._open(folder / name).tensors.values():
                other = self.tensors.setdefault(tensor.name, tensor)
                if other is not tensor:
                    raise CheckpointError(
                        f"{name}: tensor {tensor.name!r} is also in {other.file}; expected it once. Keep only the "
                        "files of one checkpoint in the folder"
                    )

    def _open_index(self, folder: Path) -> None:
        weight_map = _weight_map(folder)
        shards = sorted(set(weight_map.values()))
        missing = [name for name in shards if not (folder / name).is_file()]
        if missing:
            raise CheckpointError(
                f"{INDEX}: names {len(shards)} files, but {missing[0]} "
                f"{f'and {len(missing) - 1} more are' if missing[1:] else 'is'} missing; fetch the checkpoint again"
            )
        opened = {name: self._open(folder / name) for name in shards}
        for tensor, shard in weight_map.items():
            found = opened[shard].tensors.get(tensor)
            if found is None:
                raise CheckpointError(
                    f"{INDEX}: says that tensor {tensor!r} is in {shard}, but it is not there; the index and the "
                    "files are of different checkpoints: fetch them again"
                )
            self.tensors[tensor] = found
        unlisted = [f"{file.file}: {name}" for file in self.files for name in file.tensors if name not in weight_map]
        unlisted += sorted(
            path.name for path in folder.glob("*.safetensors") if path.name not in opened and path.name != _ADAPTER
        )
        if unlisted:
            _log.warning("%s does not list %s (%d in all); left out", INDEX, unlisted[0], len(unlisted))


def _index_decides(folder: Path) -> bool:
    return not (folder / SINGLE).is_file() or SINGLE in _weight_map(folder).values()


def _weight_map(folder: Path) -> dict[str, str]:
    """The index as tensor -> file name. File names must be plain names in the folder itself."""
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{INDEX}: weight_map must be an object that maps tensors to files")
    for tensor, shard in weight_map.items():
        plain = isinstance(shard, str) and re.fullmatch(r"[\w.+-]+\.safetensors", shard, re.ASCII)
        if not plain or shard.startswith("."):
            raise CheckpointError(
                f"{INDEX}: weight_map[{tensor!r}] is {shard!r}; it must name a .safetensors file in the folder"
            )
    return weight_map


def _plain_files(folder: Path) -> list[str]:
    if (folder / SINGLE).is_file():
        if (folder / INDEX).is_file():
            _log.warning("%s does not name %s; the single file is used and the index left out", INDEX, SINGLE)
        return [SINGLE]
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if names == [_ADAPTER]:
        raise UnsupportedModelError(
            f"{_ADAPTER}: is an adapter without its base model, which cannot be served; merge it into the base model"
        )
    names = [name for name in names if name != _ADAPTER]
    numbered = [match for match in map(_NUMBERED.fullmatch, names) if match]
    if len(names) > 1 and len(numbered) == len(names):
        return _numbered_set(numbered)
    if len(names) == 1 and not (numbered and int(numbered[0]["count"]) > 1):
        return names
    if numbered and len(numbered) == len(names):
        return _numbered_set(numbered)
    raise CheckpointError(
        f"the folder has {len(names)} safetensors files and no {INDEX}: {', '.join(names[:8])}; "
        "keep one, or add the index"
    )


def _numbered_set(numbered: list[re.Match[str]]) -> list[str]:
    stem, count = numbered[0]["stem"], int(numbered[0]["count"])
    present = {match.string for match in numbered}
    if count != len(present) and count > 1000:
        raise CheckpointError(f"{numbered[0].string}: the name says {count} files, found {len(present)}")
    expected = [f"{stem}-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    missing = [name for name in expected if name not in present]
    foreign = sorted(present - set(expected))
    if foreign:
        raise CheckpointError(f"{foreign[0]}: belongs to another checkpoint than {expected[0]}; keep one in the folder")
    if missing:
        raise CheckpointError(f"{missing[0]}: this file of {count} is missing; fetch the checkpoint again")
    return expected
