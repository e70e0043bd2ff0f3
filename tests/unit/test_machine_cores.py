"""Names of cores: MIDR_EL1 from sysfs, from the register, from /proc/cpuinfo; CPUID of x86 servers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from .machine_files import write

_native = pytest.importorskip("neoserve._native")

N1, V2 = 0x413FD0C1, 0x410FD4F0


def sysfs(midr: dict[int, int]) -> dict[str, str]:
    folder = "sys/devices/system/cpu/cpu{}/regs/identification/midr_el1"
    return {folder.format(cpu): f"0x{value:016x}" for cpu, value in midr.items()}


def cpuinfo(*parts: tuple[int, int]) -> dict[str, str]:
    blocks = [
        f"processor\t: {cpu}\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd\nCPU implementer\t: 0x{implementer:02x}\n"
        f"CPU architecture: 8\nCPU variant\t: 0x3\nCPU part\t: 0x{part:03x}\nCPU revision\t: 1\n"
        for cpu, (implementer, part) in enumerate(parts)
    ]
    return {"proc/cpuinfo": "\n".join(blocks)}


def names(root: Path, cpus: Sequence[int] = (0,), midr: int = 0) -> list[str]:
    return [name or identity for identity, name, _ in _native.arm_cores(str(root), list(cpus), midr)]


class TestArm:
    def test_sysfs_then_the_register_then_cpuinfo(self, tmp_path: Path) -> None:
        root = write(tmp_path, sysfs({0: N1}), cpuinfo((0x41, 0xD40)))
        assert names(root, midr=V2) == ["Neoverse N1"]
        root = write(tmp_path / "no_sysfs", cpuinfo((0x41, 0xD40)))
        assert names(root, midr=V2) == ["Neoverse V2"]
        assert names(root) == ["Neoverse V1"]
        assert names(tmp_path / "nothing") == []

    def test_large_and_small_cores_are_all_named(self, tmp_path: Path) -> None:
        big, small = 0x410FD850, 0x410FD870
        root = write(tmp_path, sysfs({0: small, 1: small, 2: big}))
        assert names(root, (0, 1, 2)) == ["Cortex-A725", "Cortex-X925"]
        assert names(root, (2,)) == ["Cortex-X925"]  # the affinity mask decides
        root = write(tmp_path / "cpuinfo", cpuinfo((0x41, 0xD05), (0x41, 0xD05), (0x41, 0xD0B)))
        assert names(root, (0, 2)) == ["Cortex-A55", "Cortex-A76"]
        assert names(root, (1,)) == ["Cortex-A55"]

    def test_old_kernels_describe_all_processors_once(self, tmp_path: Path) -> None:
        text = "processor : 0\nprocessor : 1\nCPU implementer : 0x41\nCPU part : 0xd08"
        assert names(write(tmp_path, {"proc/cpuinfo": text}), (1,)) == ["Cortex-A72"]
        assert names(tmp_path, (5,)) == []

    def test_an_unknown_core_is_its_numbers(self, tmp_path: Path) -> None:
        assert names(write(tmp_path, sysfs({0: 0x99000ABC0 & 0xFFFFFFFF}))) == ["90:abc"]

    @pytest.mark.parametrize("text", ["", "x", "0x", "0", "-"])
    def test_damaged_files(self, tmp_path: Path, text: str) -> None:
        files = {"sys/devices/system/cpu/cpu0/regs/identification/midr_el1": text}
        files["proc/cpuinfo"] = f"processor : {text}\nCPU implementer : {text}\nCPU part : {text}\n:\n"
        assert names(write(tmp_path, files)) == []

    @pytest.mark.parametrize(
        ("implementer", "part", "name"),
        [
            (0x41, 0xD0C, "Neoverse N1"),
            (0x41, 0xD40, "Neoverse V1"),
            (0x41, 0xD49, "Neoverse N2"),
            (0x41, 0xD4F, "Neoverse V2"),
            (0x41, 0xD8E, "Neoverse N3"),
            (0x41, 0xD84, "Neoverse V3"),
            (0x41, 0xD83, "Neoverse V3AE"),
            (0x6D, 0xD49, "Neoverse N2"),
            (0x41, 0xD08, "Cortex-A72"),
            (0xC0, 0xAC3, "Ampere-1"),
            (0xC0, 0xAC4, "Ampere-1A"),
            (0xC0, 0xAC5, "Ampere-1B"),
            (0x48, 0xD01, "TSV110"),
            (0x4E, 0x010, "Olympus"),
        ],
    )
    def test_servers(self, tmp_path: Path, implementer: int, part: int, name: str) -> None:
        assert names(write(tmp_path, cpuinfo((implementer, part)))) == [name]

    def test_products(self) -> None:
        assert _native.arm_cores("/nowhere", [0], V2)[0][2] == "AWS Graviton4, Google Axion, NVIDIA Grace"


def signature(family: int, model: int, stepping: int) -> int:
    """CPUID leaf 1 EAX: families from 15 on are the extended family added to 15."""
    base, extended = (15, family - 15) if family >= 15 else (family, 0)
    return extended << 20 | (model >> 4) << 16 | base << 8 | (model & 15) << 4 | stepping


@pytest.mark.parametrize(
    ("vendor", "family", "model", "stepping", "name"),
    [
        ("GenuineIntel", 6, 0x55, 4, "Skylake-SP"),
        ("GenuineIntel", 6, 0x55, 6, "Cascade Lake"),
        ("GenuineIntel", 6, 0x55, 7, "Cascade Lake"),
        ("GenuineIntel", 6, 0x55, 11, "Cooper Lake"),
        ("GenuineIntel", 6, 0x6A, 6, "Ice Lake-SP"),
        ("GenuineIntel", 6, 0x8F, 8, "Sapphire Rapids"),
        ("GenuineIntel", 6, 0xCF, 2, "Emerald Rapids"),
        ("GenuineIntel", 6, 0xAD, 1, "Granite Rapids"),
        ("GenuineIntel", 6, 0xAF, 3, "Sierra Forest"),
        ("GenuineIntel", 6, 0xDD, 0, "Clearwater Forest"),
        ("GenuineIntel", 19, 0x01, 0, "Diamond Rapids"),
        ("AuthenticAMD", 0x17, 0x01, 2, "Zen 1"),
        ("AuthenticAMD", 0x17, 0x31, 0, "Zen 2"),
        ("AuthenticAMD", 0x17, 0x71, 0, "Zen 2"),
        ("AuthenticAMD", 0x19, 0x01, 1, "Zen 3"),
        ("AuthenticAMD", 0x19, 0x21, 0, "Zen 3"),
        ("AuthenticAMD", 0x19, 0x11, 1, "Zen 4"),
        ("AuthenticAMD", 0x19, 0x61, 2, "Zen 4"),
        ("AuthenticAMD", 0x19, 0xA0, 2, "Zen 4c"),
        ("AuthenticAMD", 0x1A, 0x02, 1, "Zen 5"),
        ("AuthenticAMD", 0x1A, 0x11, 0, "Zen 5c"),
        ("AuthenticAMD", 0x1A, 0x44, 0, "Zen 5"),
    ],
)
def test_x86_servers(vendor: str, family: int, model: int, stepping: int, name: str) -> None:
    ((identity, found, _),) = _native.cpuid_core(vendor, signature(family, model, stepping))
    assert (identity, found) == (f"{vendor}:{family:x}:{model:x}:{stepping:x}", name)


@pytest.mark.parametrize(
    ("vendor", "family", "model"), [("GenuineIntel", 6, 0x01), ("AuthenticAMD", 0x1B, 0x02), ("X", 6, 0x55)]
)
def test_unknown_x86(vendor: str, family: int, model: int) -> None:
    ((identity, name, products),) = _native.cpuid_core(vendor, signature(family, model, 3))
    assert (identity, name, products) == (f"{vendor}:{family:x}:{model:x}:3", "", "")


def test_this_machine() -> None:
    found = _native.cores()
    assert found
    assert all(identity.count(":") in (1, 3) for identity, _, _ in found)
    assert _native.cores([0])[0] in found or len(found) > 1
