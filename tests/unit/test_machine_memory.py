"""What memory this process can take: the system, its nodes, control groups and its own limits."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from neoserve.program.machine import memory_available

from .machine_files import nodes, v2, write

V2 = v2()
NO_LIMITS: dict[int, int] = {}


def least(root: Path, **arguments: object) -> tuple[int, str]:
    room = memory_available(root, **{"limits": NO_LIMITS, **arguments})  # type: ignore[arg-type]
    return room.bytes, room.reason


def test_what_the_system_has_available(tmp_path: Path) -> None:
    root = write(tmp_path, {"proc/meminfo": "MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable:   4000 kB"})
    assert least(root) == (4000 * 1024, "free memory")
    assert least(root, free=5000) == (5000, "free memory")


def test_a_control_group(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/a/b/memory.max": "4000", "sys/fs/cgroup/a/b/memory.current": "1500"}
    root = write(tmp_path, V2, files)
    assert least(root, free=5000) == (2500, "memory limit of 4000 bytes of cgroup /a/b")
    assert least(root, free=2000) == (2000, "free memory")


@pytest.mark.parametrize(("number", "name"), [(resource.RLIMIT_AS, "ulimit -v"), (resource.RLIMIT_DATA, "ulimit -d")])
def test_own_limits(tmp_path: Path, number: int, name: str) -> None:
    root = write(tmp_path, {"proc/self/status": "VmSize:\t    2 kB\nVmData:\t    2 kB"})
    assert least(root, free=9000, limits={number: 5000}) == (5000 - 2048, f"{name} of 5000 bytes")
    assert least(root, free=9000, limits={number: 1000}) == (0, f"{name} of 1000 bytes")
    assert least(root, free=9000, limits={number: resource.RLIM_INFINITY}) == (9000, "free memory")


def meminfo(node: int, free: int) -> dict[str, str]:
    text = f"Node {node} MemTotal: 900 kB\nNode {node} MemFree: {free} kB\nNode {node} Inactive(file): 5 kB"
    return {f"sys/devices/system/node/node{node}/meminfo": text}


def test_memory_of_forbidden_nodes_is_not_available(tmp_path: Path) -> None:
    two = {0: "0-3", 1: "4-7"}
    root = write(tmp_path, nodes(two, allowed="1"), meminfo(0, 500), meminfo(1, 30))
    assert least(root, free=1 << 30) == (35 * 1024, "free memory of NUMA node 1, which the cpuset allows")
    root = write(tmp_path, nodes(two, allowed="0-1"))
    assert least(root, free=1 << 30) == (1 << 30, "free memory")


@pytest.mark.parametrize("text", ["", "x", "MemAvailable:", "MemAvailable: x kB", ":", "MemAvailable: -5 kB"])
def test_damaged_files_are_passed_over(tmp_path: Path, text: str) -> None:
    files = {
        "proc/meminfo": text,
        "proc/self/status": text,
        "sys/fs/cgroup/a/b/memory.max": text,
        "sys/fs/cgroup/a/b/memory.stat": text,
    }
    assert memory_available(write(tmp_path, V2, files)).bytes > 0


def test_this_machine() -> None:
    room = memory_available()
    assert room.bytes > 0
    assert room.reason
