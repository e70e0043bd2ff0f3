"""The fingerprint of the default model is one and the same on every CPU: x86-64, and emulated AArch64 (make test-arm).

NEOSERVE_WRITE_GOLDEN=1 rewrites the golden file, after a deliberate change of the op contract or of the prompts.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from neoserve.bench.fingerprint import NEW_TOKENS, PROMPTS, fingerprint
from neoserve.types.options import EngineOptions

from .real_models import DEFAULT_MODEL, model_file

PATH = Path(__file__).parent / "golden" / "real" / "fingerprints.json"
CASES: dict[str, dict[str, Any]] = {
    "stored": {},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
}


def _golden() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(PATH.read_text(encoding="utf-8")) if PATH.exists() else {}
    return loaded


@pytest.mark.model
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", CASES)
def test_equal_on_every_cpu(name: str) -> None:
    # Under emulation several of these run at once, a processor each.
    threads = 1 if "NEOSERVE_EMULATED_CPU" in os.environ else 2
    options = EngineOptions(context_length=512, num_threads=threads, **CASES[name])
    found = fingerprint(str(model_file(DEFAULT_MODEL)), options)
    assert not found.exempt
    assert [len(output) for output in found.outputs] == [NEW_TOKENS] * len(PROMPTS)
    written = {"logits": found.logits, "outputs": [list(output) for output in found.outputs]}
    if os.environ.get("NEOSERVE_WRITE_GOLDEN") == "1":
        text = json.dumps({**_golden(), name: written}, sort_keys=True)
        PATH.write_text(text.replace("]], ", "]],\n ").replace("}, ", "},\n ") + "\n", encoding="utf-8")
    expected = _golden()[name]
    assert written["outputs"] == expected["outputs"]
    assert written["logits"] == expected["logits"]


def test_cases_differ() -> None:
    golden = _golden()
    assert set(golden) == set(CASES)
    assert len({case["logits"] for case in golden.values()}) == len(CASES)
