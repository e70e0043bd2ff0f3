"""The core that an emulated AArch64 CPU is taken for, from its MIDR_EL1 register (sysfs is the host's)."""

from __future__ import annotations

import json
import os

import pytest

from neoserve import _native

CPU = os.environ.get("NEOSERVE_EMULATED_CPU", "")
pytestmark = pytest.mark.skipif(not CPU, reason="runs under an emulated AArch64 CPU: make test-arm")

NAMES = {
    "cortex-a72": ("41:d08", "Cortex-A72"),
    "neoverse-n1": ("41:d0c", "Neoverse N1"),
    "neoverse-v1": ("41:d40", "Neoverse V1"),
    "neoverse-n2": ("41:d49", "Neoverse N2"),
}


def test_the_core_has_its_name() -> None:
    found = _native.cores()
    assert len(found) == 1
    identity, name, _ = found[0]
    if CPU in NAMES:
        assert (identity, name) == NAMES[CPU]
    else:  # qemu's max has an identity that no core has
        assert name == ""
        assert identity


def test_doctor_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    from neoserve.cli.main import main

    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(core["identity"], core["name"]) for core in report["cores"]] == [core[:2] for core in _native.cores()]
    if CPU in NAMES:
        assert report["cores"][0]["name"] == NAMES[CPU][1]
