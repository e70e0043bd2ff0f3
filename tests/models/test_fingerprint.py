"""The fingerprint of the default model is one and the same on every CPU: x86-64, and emulated AArch64 (make test-arm).

Emulation is slow: NEOSERVE_TEST_PROMPTS=2 takes the first two prompts (default: all).
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
    limit = int(os.environ.get("NEOSERVE_TEST_PROMPTS") or len(PROMPTS))
    found = fingerprint(str(model_file(DEFAULT_MODEL)), options, limit)
    assert not found.exempt
    assert [len(output) for output in found.outputs] == [NEW_TOKENS] * limit
    outputs = [list(output) for output in found.outputs]
    if os.environ.get("NEOSERVE_WRITE_GOLDEN") == "1":
        assert limit == len(PROMPTS)
        written = {"logits": found.logits, "prompts": found.prompts, "outputs": [str(output) for output in outputs]}
        text = json.dumps({**_golden(), name: written}, sort_keys=True, indent=1)
        PATH.write_text(text + "\n", encoding="utf-8")
    expected = _golden()[name]
    assert outputs == [json.loads(output) for output in expected["outputs"][:limit]]
    assert list(found.prompts) == expected["prompts"][:limit]
    if limit == len(PROMPTS):
        assert found.logits == expected["logits"]


def test_cases_differ() -> None:
    golden = _golden()
    assert set(golden) == set(CASES)
    assert len({case["logits"] for case in golden.values()}) == len(CASES)
