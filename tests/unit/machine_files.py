"""Fake /sys and /proc trees of machines, for the tests of neoserve.program.machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path


def write(root: Path, *trees: Mapping[str, str]) -> Path:
    """Writes files by their path below ``root`` and returns it."""
    for tree in trees:
        for name, text in tree.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
    return root


def cores(*siblings: tuple[int, ...]) -> dict[str, str]:
    """Topology files: one tuple of CPUs for each physical core."""
    return {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": ",".join(map(str, core))
        for core in siblings
        for cpu in core
    }


def single(count: int) -> dict[str, str]:
    """``count`` cores of one hardware thread."""
    return cores(*((cpu,) for cpu in range(count)))


def nodes(
    cpus: Mapping[int, str],
    *,
    memory: Iterable[int] | None = None,
    allowed: str | None = None,
    distances: Mapping[int, str] | None = None,
) -> dict[str, str]:
    """NUMA files: CPU lists by node, the nodes with memory (None: all), Mems_allowed_list (None: not said)."""
    folder = "sys/devices/system/node"
    with_memory = cpus if memory is None else memory
    files = {
        f"{folder}/possible": ",".join(map(str, cpus)),
        f"{folder}/online": ",".join(map(str, cpus)),
        f"{folder}/has_memory": ",".join(map(str, with_memory)),
    }
    for node, text in cpus.items():
        files[f"{folder}/node{node}/cpulist"] = text
    for node, text in (distances or {}).items():
        files[f"{folder}/node{node}/distance"] = text
    if allowed is not None:
        files["proc/self/status"] = f"Name:\tpython\nMems_allowed:\t00000001\nMems_allowed_list:\t{allowed}"
    return files


def v2(path: str = "/a/b") -> dict[str, str]:
    """A unified hierarchy mounted whole, and this process's group in it."""
    return {
        "proc/self/cgroup": f"0::{path}",
        "proc/self/mountinfo": "31 23 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate",
    }
