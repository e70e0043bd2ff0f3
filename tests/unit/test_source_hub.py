"""Hub models against a local fake hub, through the real huggingface_hub in a process of its own."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from neoserve.formats.hub import HubReference, choose_files, explain
from neoserve.types.errors import ConfigurationError, ModelNotFoundError, UnsupportedModelError

from .checkpoint_files import LLAMA, data_of, gguf_image, header_of, llama_arrays, safetensors_bytes
from .fake_hub import COMMIT, FakeHub

PROBE = """
import json, sys
from neoserve.formats.checkpoint import open_checkpoint
from neoserve.formats.source import resolve_model
from neoserve.types.errors import NeoServeError
answers = []
for reference in sys.argv[1:]:
    calls = []
    try:
        found = resolve_model(reference, progress=lambda *call: calls.append(call))
        answer = {"path": str(found.path), "name": found.served_name, "origin": found.origin, "calls": calls}
        answer["tensors"] = len(open_checkpoint(found.path).tensors)
    except NeoServeError as error:
        answer = {"error": type(error).__name__, "text": str(error)}
    answers.append(answer)
print(json.dumps(answers))
"""

ARRAYS = llama_arrays()
SAFETENSORS = safetensors_bytes(header_of(ARRAYS), data_of(ARRAYS))
GGUF = gguf_image(ARRAYS).build()
CHECKPOINT = {
    "config.json": json.dumps(LLAMA).encode(),
    "model.safetensors": SAFETENSORS,
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "README.md": b"# model",
    "pytorch_model.bin": b"never",
    "consolidated.safetensors": b"never",
    "onnx/model.onnx": b"never",
    "original/model.safetensors": b"never",
}
GGUFS = {
    "m-Q4_K_M.gguf": GGUF,
    "m-Q4_K_S.gguf": GGUF,
    "m-Q8_0.gguf": GGUF,
    "mmproj-m-f16.gguf": b"no",
    "README.md": b"",
}


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    files = {"org/checkpoint": CHECKPOINT, "org/quants": GGUFS, "org/one-gguf": {"only.gguf": GGUF, "README.md": b""}}
    with FakeHub(dict(files)) as running:
        yield running


class Prober:
    """Resolves references in a fresh process whose hub settings are ours (the library reads them when imported)."""

    def __init__(self, hub: FakeHub, home: Path) -> None:
        self.hub = hub
        self.home = home

    def __call__(self, *references: str, **variables: str) -> list[dict[str, Any]]:
        kept = {name: value for name, value in os.environ.items() if not name.upper().startswith("HF_")}
        no_proxy = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
        own = {"HF_ENDPOINT": self.hub.endpoint, "HF_HOME": str(self.home), "HF_HUB_DISABLE_XET": "1"}
        result = subprocess.run(
            [sys.executable, "-c", PROBE, *references],
            env=kept | no_proxy | own | variables,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        answers: list[dict[str, Any]] = json.loads(result.stdout)
        return answers


@pytest.fixture
def probe(hub: FakeHub, tmp_path: Path) -> Prober:
    return Prober(hub, tmp_path / "hf")


def downloaded(hub: FakeHub) -> set[str]:
    marker = f"/resolve/{COMMIT}/"
    return {request.split(marker)[1] for request in hub.requests if request.startswith("GET") and marker in request}


def test_checkpoint_and_selector_then_offline_and_outage(probe: Prober, hub: FakeHub) -> None:
    """Only what is needed is fetched; afterwards the cache serves without a hub and, offline, without asking it."""
    references = ("org/checkpoint", "org/quants:q4_k_m", f"org/checkpoint@{COMMIT}", "org/one-gguf")
    checkpoint, quant, revision, only = first = probe(*references, HF_TOKEN="hf_secret")
    assert [answer["tensors"] for answer in first] == [len(ARRAYS)] * 4
    assert checkpoint["name"] == "org/checkpoint"
    assert checkpoint["origin"] == "Hugging Face hub, org/checkpoint"
    assert Path(checkpoint["path"]).is_relative_to(probe.home)
    assert revision["path"] == checkpoint["path"]
    assert quant["name"] == "org/quants"
    assert Path(quant["path"]).name == "m-Q4_K_M.gguf"
    assert Path(only["path"]).name == "only.gguf"
    needed = {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
    assert downloaded(hub) == needed | {"m-Q4_K_M.gguf", "only.gguf"}
    assert "hf_secret" in hub.tokens
    total = sum(len(CHECKPOINT[name]) for name in needed)
    assert checkpoint["calls"][-1] == ["Downloading org/checkpoint", total, total]
    assert revision["calls"] == []  # nothing was fetched

    asked = len(hub.requests)
    *cached, missing, unknown = probe(*references, "org/quants:Q8_0", "org/other", HF_HUB_OFFLINE="1")
    assert [answer["path"] for answer in cached] == [answer["path"] for answer in first]
    for answer, name in ((missing, "org/quants:Q8_0"), (unknown, "org/other")):
        assert answer["error"] == "ModelNotFoundError"
        assert f"{name} is not in the cache, and HF_HUB_OFFLINE is set" in answer["text"]
    assert len(hub.requests) == asked

    hub.stop()
    *cached, missing = probe(*references, "org/other")
    assert [answer["path"] for answer in cached] == [answer["path"] for answer in first]
    assert "org/other is not in the cache, and the hub (http://127.0.0.1" in missing["text"]
    assert "HF_ENDPOINT" in missing["text"]


def test_refusals_say_what_to_do(probe: Prober, hub: FakeHub) -> None:
    hub.refuse = {
        "org/gated": (403, "GatedRepo"),
        "org/private": (401, ""),
        "org/broken": (500, ""),
    }
    expected = {
        "org/gone": "neither a local path nor a model on the hub; check the spelling",
        "org/gated": "is gated: accept its licence at http://127.0.0.1",
        "org/private": "set HF_TOKEN",
        "org/broken": "HTTP 500; try again later",
        "org/checkpoint@v9": "org/checkpoint has no revision 'v9'",
        "org/quants": "org/quants has 3 GGUF models; select one, as org/quants:Q4_K_M, of: m-Q4_K_M.gguf, m-Q4_K_S",
    }
    for answer, text in zip(probe(*expected), expected.values(), strict=True):
        assert answer["error"] == "ModelNotFoundError"
        assert text in answer["text"]
        assert "\n" not in answer["text"]
    assert downloaded(hub) == set()


def test_failing_hub_leaves_the_cache_usable(probe: Prober, hub: FakeHub) -> None:
    (first,) = probe("org/one-gguf")
    hub.refuse["org/one-gguf"] = (503, "")
    (second,) = probe("org/one-gguf")
    assert second["path"] == first["path"]


# Choice of files, without a hub


def choose(reference: str, *names: str) -> tuple[set[str], str | None]:
    parsed = HubReference.parse(reference)
    assert parsed is not None
    choice = choose_files(parsed, names)
    return set(choice.files), choice.gguf


def test_sharded_checkpoint_comes_whole() -> None:
    shards = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    files, gguf = choose("o/n", "config.json", "model.safetensors.index.json", *shards, "x.gguf", "training_args.bin")
    assert files == {"config.json", "model.safetensors.index.json", *shards}
    assert gguf is None


def test_split_gguf_comes_whole() -> None:
    parts = [f"Q8_0/m-Q8_0-0000{number}-of-00002.gguf" for number in (1, 2)]
    files, gguf = choose("o/n:Q8_0", *parts, "m-Q4_0.gguf")
    assert files == set(parts)
    assert gguf == parts[0]


@pytest.mark.parametrize(
    ("selector", "expected"),
    [("Q4_K", "m-Q4_K.gguf"), ("q4_k_m", "m-Q4_K_M.gguf"), ("m-Q4_K.gguf", "m-Q4_K.gguf"), ("bf16", "BF16/m.gguf")],
)
def test_selector_is_a_whole_word(selector: str, expected: str) -> None:
    assert choose(f"o/n:{selector}", "m-Q4_K.gguf", "m-Q4_K_M.gguf", "BF16/m.gguf")[1] == expected


@pytest.mark.parametrize(
    ("selector", "expected"),
    [("Q5_K", "no GGUF model matches 'Q5_K'; the repository has: a-Q4_0"), ("Q4_0", "2 GGUF models match 'Q4_0'")],
)
def test_selector_that_does_not_decide(selector: str, expected: str) -> None:
    with pytest.raises(ModelNotFoundError, match=expected):
        choose(f"o/n:{selector}", "a-Q4_0.gguf", "b-Q4_0.gguf")


def test_repositories_without_a_model() -> None:
    with pytest.raises(UnsupportedModelError, match=r"only pickle weights \(pytorch_model\.bin\)"):
        choose("o/n", "config.json", "pytorch_model.bin")
    with pytest.raises(ModelNotFoundError, match="no safetensors checkpoint"):
        choose("o/n", "README.md")


@pytest.mark.parametrize(
    "text",
    [
        "name", "org/", "/name", "a/b/c", "../name", "org/..", "org/na..me", "org/name:../x", "org/name@../../x",
        "o/n:", "o/n@", "org/na me", "org/na\0me", "org/%2e%2e", "C:\\models\\x", "org\\name", "o" * 97 + "/n",
        "o/" + "n" * 97, "https://host/org/name", "o/n:" + "q" * 201, "ó/n", "-o/n", "o/n.git", "o--x/n",
    ],
)  # fmt: skip
def test_names_that_are_no_hub_ids(text: str) -> None:
    """B75: nothing but a plain name reaches the hub's client and its cache folder."""
    assert HubReference.parse(text) is None


def test_parts_of_a_reference() -> None:
    assert HubReference.parse("o/n") == HubReference("o/n", "main", None)
    assert HubReference.parse("o/n@v1.0:Q4_0") == HubReference("o/n", "v1.0", "Q4_0")
    assert str(HubReference("o/n", "v1.0", "Q4_0")) == "o/n@v1.0:Q4_0"


@pytest.mark.parametrize(("number", "variable"), [(errno.ENOSPC, "disk is full"), (errno.EROFS, "you can write")])
def test_disk_trouble_is_not_a_missing_model(number: int, variable: str) -> None:
    found = explain(OSError(number, os.strerror(number)), HubReference("o/n"))
    assert isinstance(found, ConfigurationError)
    assert variable in str(found)
    assert "HF_HOME" in str(found)


def test_programming_errors_are_not_dressed_up() -> None:
    error = KeyError("bug")
    assert explain(error, HubReference("o/n")) is error
