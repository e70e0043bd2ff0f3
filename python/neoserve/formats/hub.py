"""Models from the Hugging Face hub, by huggingface_hub: its cache, endpoint, token and offline settings hold.

Only the files that are needed are fetched: a checkpoint's safetensors with their JSON and template files, or the one
GGUF model that the selector names. When the hub cannot be reached, what is in the cache is used.
"""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from neoserve.formats.config_hf import CONFIG_FILE
from neoserve.formats.locate import gguf_models
from neoserve.formats.progress import Progress, shown_progress
from neoserve.formats.weights_hf import PICKLE_SUFFIXES
from neoserve.types.errors import ConfigurationError, ModelNotFoundError, UnsupportedModelError

_SEGMENT: Final = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}"
_REFERENCE: Final = re.compile(
    rf"(?P<repo>{_SEGMENT}/{_SEGMENT})(?:@(?P<revision>[A-Za-z0-9][A-Za-z0-9._/-]{{0,199}}))?"
    r"(?::(?P<selector>[A-Za-z0-9][A-Za-z0-9._/-]{0,199}))?",
    re.ASCII,
)
_DEFAULT_REVISION: Final = "main"
_POLL_SECONDS: Final = 0.2
_SIDE_FILES: Final = re.compile(r"[^/]+\.(json|jinja|txt|model)|additional_chat_templates/[^/]+\.jinja")


@dataclass(frozen=True, slots=True)
class HubReference:
    """``org/name[@revision][:selector]``; the selector is a GGUF quantisation such as Q4_K_M, or a file name."""

    repo: str
    revision: str = _DEFAULT_REVISION
    selector: str | None = None

    @classmethod
    def parse(cls, text: str) -> HubReference | None:
        """None for a text that is not of this form."""
        match = _REFERENCE.fullmatch(text)
        if match is None or ".." in text or "--" in match["repo"] or match["repo"].endswith((".git", ".", "-")):
            return None
        return cls(match["repo"], match["revision"] or _DEFAULT_REVISION, match["selector"])

    def __str__(self) -> str:
        revision = "" if self.revision == _DEFAULT_REVISION else f"@{self.revision}"
        return self.repo + revision + (f":{self.selector}" if self.selector else "")


@dataclass(frozen=True, slots=True)
class HubChoice:
    """Files to fetch, and the (first) GGUF file among them if the model is one."""

    files: tuple[str, ...]
    gguf: str | None


def fetch_hub(reference: HubReference, progress: Progress | None) -> Path:
    """The model as a local folder or GGUF file in the hub's cache.

    Raises ModelNotFoundError saying what to do (token, licence, spelling, network, selector), UnsupportedModelError for
    a repository of pickle files only, ConfigurationError when the disk is full.
    """
    # Imported here: it takes long, and local models do not need it.
    import huggingface_hub as hub

    try:
        try:
            info = hub.HfApi().model_info(reference.repo, revision=reference.revision, files_metadata=True)
            sizes = {sibling.rfilename: sibling.size for sibling in info.siblings or ()}
        except Exception as error:
            cached = _cached_snapshot(reference)
            if cached is None or not _is_outage(error):
                raise
            return _in_snapshot(reference, cached, error)
        choice = choose_files(reference, sizes)
        known = [sizes[name] for name in choice.files]
        total = None if None in known else sum(size or 0 for size in known)
        label = f"Downloading {reference}"
        with shown_progress(progress) as report, _watched(_store(reference) / "blobs", label, total, report):
            folder = hub.snapshot_download(
                reference.repo,
                revision=reference.revision,
                allow_patterns=[name.replace("[", "[[]") for name in choice.files],
            )
    except (ModelNotFoundError, UnsupportedModelError):
        raise
    except Exception as error:
        raise explain(error, reference) from None
    return Path(folder) / choice.gguf if choice.gguf else Path(folder)


def choose_files(reference: HubReference, names: Iterable[str]) -> HubChoice:
    """What to fetch of a repository. Raises ModelNotFoundError listing the candidates when the choice is open."""
    present = sorted(names)
    models = gguf_models(present)
    safetensors = [name for name in present if name.endswith(".safetensors") and "/" not in name]
    # Other layouts of the same weights, and adapters, are not part of the checkpoint.
    main = [name for name in safetensors if not name.startswith(("consolidated", "adapter_"))]
    if reference.selector is not None:
        first = _select(reference, models)
        return HubChoice(tuple(models[first]), first)
    if CONFIG_FILE in present and safetensors:
        side = [name for name in present if _SIDE_FILES.fullmatch(name)]
        return HubChoice((*side, *(main or safetensors)), None)
    if len(models) == 1:
        ((first, parts),) = models.items()
        return HubChoice(tuple(parts), first)
    if models:
        raise ModelNotFoundError(
            f"{reference} has {len(models)} GGUF models; select one, as {reference.repo}:Q4_K_M, of: {_listed(models)}"
        )
    pickle = next((name for name in present if Path(name).suffix.lower() in PICKLE_SUFFIXES), None)
    if pickle is not None:
        raise UnsupportedModelError(
            f"{reference} has only pickle weights ({pickle}), which can run code and are never read; "
            "choose a repository or a revision with safetensors or GGUF files"
        )
    raise ModelNotFoundError(f"{reference} has no safetensors checkpoint with {CONFIG_FILE} and no GGUF file")


def _select(reference: HubReference, models: dict[str, list[str]]) -> str:
    wanted = str(reference.selector)
    if wanted in models:
        return wanted
    # The quantisation stands between separators: Q4_K must not match Q4_K_M.
    token = re.compile(rf"(^|[-./]){re.escape(wanted)}([-./]|$)", re.IGNORECASE)
    found = [first for first in models if token.search(first)]
    if len(found) == 1:
        return found[0]
    problem = f"{len(found)} GGUF models match" if found else "no GGUF model matches"
    listed = _listed(found or models) or "none"
    raise ModelNotFoundError(f"{reference}: {problem} {wanted!r}; the repository has: {listed}")


def _listed(models: Iterable[str]) -> str:
    names = list(models)
    return ", ".join(names[:24]) + (f" and {len(names) - 24} more" if len(names) > 24 else "")


def _store(reference: HubReference) -> Path:
    """The repository's folder in the hub's cache; its layout is documented and shared by all clients."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{reference.repo.replace('/', '--')}"


def _cached_snapshot(reference: HubReference) -> Path | None:
    """The folder of the revision in the hub's cache, if it was fetched before."""
    store = _store(reference)
    try:
        commit = (store / "refs" / reference.revision).read_text(encoding="utf-8").strip()
    except OSError:
        commit = reference.revision
    snapshot = store / "snapshots" / commit
    return snapshot if re.fullmatch(r"[\w.-]+", commit) and snapshot.is_dir() else None


def _in_snapshot(reference: HubReference, snapshot: Path, outage: Exception) -> Path:
    """The model in the cache. Where the cache lacks what the selector names, it is the outage that is to be told."""
    names = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file()]
    try:
        choice = choose_files(reference, names)
    except ModelNotFoundError:
        if reference.selector is None:
            raise
        raise outage from None
    return snapshot / choice.gguf if choice.gguf else snapshot


def _is_outage(error: Exception) -> bool:
    """Whether the hub was not reached (or is failing), as opposed to having said no."""
    from huggingface_hub import errors

    if isinstance(error, errors.HfHubHTTPError):
        status = getattr(error.response, "status_code", 500)
        return status >= 500 or status == 429
    return isinstance(error, OSError) or _is_transport(error)


def _is_transport(error: Exception) -> bool:
    """Errors of the HTTP library beneath huggingface_hub, which differs between its versions."""
    return type(error).__module__.split(".")[0] in ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3")


def explain(error: Exception, reference: HubReference) -> Exception:
    """The error to show for one of huggingface_hub's; an unrelated error is returned as it is."""
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{reference.repo}"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ConfigurationError(f"cannot store {reference}: the disk is full; set HF_HOME to a folder on another one")
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EROFS):
        return ConfigurationError(f"cannot store {reference}: {error.strerror}; set HF_HOME to a folder you can write")
    if isinstance(error, errors.GatedRepoError):
        return ModelNotFoundError(
            f"{reference} is gated: accept its licence at {page}, set HF_TOKEN (or run: hf auth login), and start again"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelNotFoundError(f"{reference.repo} has no revision {reference.revision!r}; see {page}")
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelNotFoundError(
            f"{reference.repo} is neither a local path nor a model on the hub; check the spelling, or, if it is "
            "private, set HF_TOKEN (or run: hf auth login)"
        )
    if isinstance(error, errors.OfflineModeIsEnabled):
        return ModelNotFoundError(
            f"{reference} is not in the cache, and HF_HUB_OFFLINE is set; unset it to fetch the model"
        )
    if isinstance(error, errors.HFValidationError):
        return ModelNotFoundError(f"{reference} is not a valid name on the hub")
    if isinstance(error, errors.HfHubHTTPError):
        status = getattr(error.response, "status_code", None)
        if status in (401, 403):
            return ModelNotFoundError(
                f"access to {reference} is refused (HTTP {status}); set HF_TOKEN (or run: hf auth login) to a valid "
                f"token that may read {page}"
            )
        return ModelNotFoundError(f"{reference} cannot be fetched: the hub answers HTTP {status}; try again later")
    if isinstance(error, (OSError, errors.LocalEntryNotFoundError)) or _is_transport(error):
        return ModelNotFoundError(
            f"{reference} is not in the cache, and the hub ({constants.ENDPOINT}) cannot be reached; check the "
            "network, set HF_ENDPOINT to a mirror, or give a local file or folder"
        )
    return error


@contextmanager
def _watched(blobs: Path, label: str, total: int | None, progress: Progress) -> Iterator[None]:
    """Reports the growth of the hub's cache while the block runs, in place of the library's own bars.

    The library's bars differ between its versions and cannot be told where to draw; files on disk are the same for all.
    """
    from huggingface_hub import utils

    quieten = not utils.are_progress_bars_disabled()  # type: ignore[attr-defined]
    if quieten:
        utils.disable_progress_bars()  # type: ignore[attr-defined]
    before, stop = _bytes_in(blobs), threading.Event()

    def watch() -> None:
        while not stop.wait(_POLL_SECONDS):
            grown = _bytes_in(blobs) - before
            if grown > 0:  # nothing is shown for what is already there
                progress(label, grown if total is None else min(grown, total), total)

    watcher = threading.Thread(target=watch, name="hub-progress", daemon=True)
    watcher.start()
    try:
        yield
        grown = _bytes_in(blobs) - before
    finally:
        stop.set()
        watcher.join()
        if quieten:
            utils.enable_progress_bars()  # type: ignore[attr-defined]
    if grown > 0:
        # Files that were there already count as done.
        progress(label, total or grown, total or grown)


def _bytes_in(folder: Path) -> int:
    total = 0
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return 0
    for entry in entries:
        with suppress(OSError):  # renamed meanwhile
            total += entry.stat().st_size
    return total
