"""What this process may use of the machine: threads and memory, within affinity masks and control groups (design D9).

``root`` arguments name the root of the file system, so that tests can show another machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

_ROOT = Path("/")
_V1_UNLIMITED = 1 << 62
"""cgroup v1 writes a huge number, near 2^63, where there is no memory limit."""


def default_threads(root: Path = _ROOT, allowed: set[int] | None = None) -> int:
    """Compute threads: min(physical cores in the affinity mask, CPU quota rounded down), at least 1.

    ``allowed`` defaults to the affinity mask of this process. The tightest quota of all ancestor groups counts.
    """
    cpus = allowed if allowed is not None else _affinity()
    siblings = {_first_sibling(root, cpu) for cpu in cpus}
    quota = cpu_quota(root)
    cores = max(1, len(siblings))
    return cores if quota is None else max(1, min(cores, int(quota)))


def cpu_quota(root: Path = _ROOT) -> float | None:
    """CPUs that the control groups of this process allow (may be fractional), or None without a quota."""
    quotas = []
    for folder in _groups(root, "cpu"):
        words = _read(folder / "cpu.max").split()
        if len(words) == 2 and words[0] != "max":
            quotas.append(int(words[0]) / int(words[1]))
        quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        if quota and period and int(quota) > 0 and int(period) > 0:
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def available_memory(root: Path = _ROOT, free: int | None = None) -> int:
    """Bytes that this process can still take: min(free memory, limit minus use of every control group).

    ``free`` defaults to what the system has available. Page cache that a group's use includes counts as free.
    """
    room = [psutil.virtual_memory().available if free is None else free]
    for folder in _groups(root, "memory"):
        for limit_file, use_file in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, use = _read(folder / limit_file), _read(folder / use_file)
            if limit.isdigit() and use.isdigit() and int(limit) < _V1_UNLIMITED:
                room.append(int(limit) - int(use) + _inactive_file(folder))
    return max(0, min(room))


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _first_sibling(root: Path, cpu: int) -> str:
    """Hardware threads of one core list the same siblings; without topology files each CPU is a core."""
    path = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    return _read(path) or f"cpu{cpu}"


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's control group and all its ancestors, v2 and v1."""
    mount = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            base = mount
        elif controller in controllers.split(","):
            base = mount / controller if (mount / controller).is_dir() else mount / controllers
        else:
            continue
        # Inside a container the path may be the host's; the limits are then at the mount itself, the last yielded.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            yield base.joinpath(*parts[:depth])


def _inactive_file(folder: Path) -> int:
    for line in _read(folder / "memory.stat").splitlines():
        words = line.split()
        if len(words) == 2 and words[0] in ("inactive_file", "total_inactive_file"):
            return int(words[1])
    return 0


def _read(path: Path) -> str:
    """Stripped text of a small system file; empty when it is absent or may not be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
