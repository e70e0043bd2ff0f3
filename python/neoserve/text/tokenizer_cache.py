"""Built tokenizers on disk, so that the second start does not build them again.

An entry is two files: ``<key>.tokenizer.json`` and ``<key>.info.json``, which holds the facts about the vocabulary
and the digest of the first file. The second is written last and both by rename, so a crash leaves no entry; one
that does not read back is built anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from dataclasses import asdict
from pathlib import Path

import tokenizers

from neoserve.text.vocabulary import VocabularyInfo

# Part of every key: raise it whenever the builder gives another tokenizer for the same metadata.
BUILDER_VERSION = 1

_log = logging.getLogger(__name__)


def default_cache_dir() -> Path | None:
    """The user's cache folder for built tokenizers (``$XDG_CACHE_HOME/neoserve/tokenizers``).

    A relative XDG_CACHE_HOME is ignored, as its specification asks. None if the user has no home folder.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        try:
            base = Path.home() / ".cache"
        except RuntimeError:
            return None
    return base / "neoserve" / "tokenizers"


def cache_key(digest: str, pre_override: str | None) -> str:
    """The name of the entry for a checkpoint with this ``digest``, built with this override."""
    parts = [str(BUILDER_VERSION), tokenizers.__version__, digest, pre_override or ""]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def read_entry(folder: Path, key: str) -> tuple[tokenizers.Tokenizer, VocabularyInfo] | None:
    """The entry, or None if there is none or it is damaged (which is logged)."""
    info_path, tokenizer_path = _paths(folder, key)
    try:
        entry = json.loads(info_path.read_text(encoding="utf-8"))
        data = tokenizer_path.read_bytes()
        if hashlib.sha256(data).hexdigest() != entry.pop("sha256"):
            raise ValueError("the digest does not match")
        info = VocabularyInfo(**{**entry, "eos_ids": tuple(entry["eos_ids"])})
        return tokenizers.Tokenizer.from_buffer(data), info
    except FileNotFoundError:
        return None
    except Exception as error:  # whatever is wrong with the copy, the original is at hand
        _log.warning("the cached tokenizer %s is damaged (%s); building it again", tokenizer_path, error)
        return None


def write_entry(folder: Path, key: str, tokenizer: tokenizers.Tokenizer, info: VocabularyInfo) -> None:
    """Store an entry; a full or read-only disk is logged and otherwise ignored."""
    info_path, tokenizer_path = _paths(folder, key)
    data = tokenizer.to_str().encode()
    entry = {**asdict(info), "sha256": hashlib.sha256(data).hexdigest()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_atomically(tokenizer_path, data)
        _write_atomically(info_path, json.dumps(entry).encode())
    except OSError as error:
        _log.warning("cannot cache the tokenizer in %s: %s; the next start builds it again", folder, error)


def _paths(folder: Path, key: str) -> tuple[Path, Path]:
    return folder / f"{key}.info.json", folder / f"{key}.tokenizer.json"


def _write_atomically(path: Path, data: bytes) -> None:
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
