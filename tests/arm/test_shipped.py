"""The program as it is shipped, on the CPU at hand or an emulated one: every weight format answers (field report B01).

An instruction that the CPU lacks ends the run with SIGILL, at import as well as in any command here. The commands run
in this process, because an emulated Python cannot start itself.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from neoserve.cli.main import main

from ..models.real_models import DEFAULT_MODEL, model_file
from ..serve.tiny_served import make_tiny_model

WORDS = ("--max-tokens", "8", "--temperature", "0", "--threads", "2", "--context-length", "64")
FORMATS = [
    ("--dtype", "float32"),
    ("--dtype", "bfloat16"),
    ("--quantization", "int8"),
    ("--quantization", "int4"),
]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Standard output of a command that must succeed."""
    code = main(arguments)
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version").split()[-1].count(".") == 2


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads(run(capsys, "doctor", "--json"))
    assert report["rows"]
    shown = run(capsys, "doctor")
    assert all(row["row"] in shown for row in report["rows"])


@pytest.mark.parametrize("choice", FORMATS, ids=" ".join)
def test_every_format_answers(choice: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(make_tiny_model(tmp_path))
    first = run(capsys, "generate", "Once", "--model", model, *WORDS, *choice)
    assert first.strip()
    assert run(capsys, "generate", "Once", "--model", model, *WORDS, *choice) == first


@pytest.mark.model
def test_default_model_answers(capsys: pytest.CaptureFixture[str]) -> None:
    model = str(model_file(DEFAULT_MODEL))
    assert "Paris" in run(capsys, "generate", "The capital of France is", "--model", model, *WORDS)
