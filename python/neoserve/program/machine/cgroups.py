"""The control groups of this process and what they limit: cgroup v1, v2, and both at once (cgroups(7))."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath

from neoserve.program.machine.files import ROOT, parse_count, parse_ids, read, read_count

UNLIMITED = 1 << 60
"""cgroup v1 writes a number near 2^63 where there is no memory limit; no machine has so much memory."""

_MOST_FOLDERS = 4096
"""Folders that are looked into for this process; more would hold up the start."""

_DEFAULT_PERIOD = 100_000
_RECLAIMABLE = ("inactive_file", "active_file", "slab_reclaimable")


@dataclass(frozen=True, slots=True)
class Group:
    """One control group: its folder, and its name as people know it (the path inside its hierarchy)."""

    folder: Path
    name: str


@dataclass(frozen=True, slots=True)
class Quota:
    """A CPU quota in CPUs (may be fractional) and the name of the group that sets it."""

    cpus: float
    group: str


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that a limit leaves, and what sets it."""

    bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class _Mount:
    kind: str
    root: str
    point: str
    options: frozenset[str]


def cpu_quota(root: Path = ROOT) -> Quota | None:
    """The tightest CPU quota of this process's group and all its ancestors; None without one."""
    quotas = []
    for group in groups(root, "cpu"):
        words = read(group.folder / "cpu.max").split()
        quota = parse_count(words[0]) if words else None
        period = parse_count(words[1]) if len(words) > 1 else _DEFAULT_PERIOD
        if not words:
            quota = read_count(group.folder / "cpu.cfs_quota_us")
            period = read_count(group.folder / "cpu.cfs_period_us")
        if quota and period:
            quotas.append(Quota(quota / period, group.name))
    return min(quotas, key=lambda quota: quota.cpus, default=None)


def cpuset(root: Path = ROOT) -> frozenset[int] | None:
    """CPUs that the cpuset groups leave this process; None when they say nothing."""
    for group in groups(root, "cpuset"):
        for name in ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"):
            try:
                found = parse_ids(read(group.folder / name))
            except ValueError:
                continue
            if found:
                return frozenset(found)
    return None


def memory_room(root: Path = ROOT) -> Room | None:
    """What the tightest memory group leaves: its limit (memory.max, memory.high, or memory.limit_in_bytes) minus use.

    File pages and slabs that the kernel drops on demand do not count as use. None without a limit.
    """
    rooms = []
    for group in groups(root, "memory"):
        limits = [
            limit
            for name in ("memory.max", "memory.high", "memory.limit_in_bytes")
            if (limit := read_count(group.folder / name)) is not None and limit < UNLIMITED
        ]
        use = read_count(group.folder / "memory.current")
        if use is None:
            use = read_count(group.folder / "memory.usage_in_bytes")
        if limits and use is not None:
            left = min(limits) - max(0, use - _reclaimable(group.folder))
            rooms.append(Room(max(0, left), f"memory limit of {min(limits)} bytes of cgroup {group.name}"))
    return min(rooms, key=lambda room: room.bytes, default=None)


def groups(root: Path, controller: str) -> Iterator[Group]:
    """This process's groups that have ``controller``, each with all its ancestors up to the mount, nearest first.

    /proc/self/cgroup gives the group's path from the root of the cgroup namespace; /proc/self/mountinfo which part of
    the hierarchy is mounted and where. In a container the mounted part is often the group itself, or the path that of
    the host: where it does not lie under the mount, the mount is the nearest that can be read.
    """
    mounts = list(_mounts(root))
    for line in read(root / "proc/self/cgroup").splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0":
            mount = _best([m for m in mounts if m.kind == "cgroup2"], path) or _Mount("cgroup2", "/", "", frozenset())
            fallback = "/sys/fs/cgroup"
        elif controller in controllers.split(","):
            named = [m for m in mounts if m.kind == "cgroup" and controller in m.options]
            mount = _best(named, path) or _Mount("cgroup", "/", "", frozenset())
            fallback = f"/sys/fs/cgroup/{controller}"
            if not (root / fallback[1:]).is_dir():
                fallback = f"/sys/fs/cgroup/{controllers}"
        else:
            continue
        point = root / (mount.point or fallback).lstrip("/")
        inside = _inside(path, mount.root) or _found(point, mount.root, path, read(root / "proc/self/stat"))
        yield from _chain(point, mount.root, inside)


def _chain(point: Path, mounted: str, inside: PurePosixPath | None) -> Iterator[Group]:
    parts = () if inside is None else inside.parts
    top = mounted if ".." not in mounted else "/"
    for depth in range(len(parts), -1, -1):
        yield Group(point.joinpath(*parts[:depth]), str(PurePosixPath(top, *parts[:depth])))


def _inside(path: str, mounted: str) -> PurePosixPath | None:
    """``path`` relative to the mounted part of the hierarchy; None when it lies outside, or cannot be told."""
    if ".." in path.split("/"):
        return None  # a process that was moved out of its namespace
    try:
        return PurePosixPath(path).relative_to(mounted)
    except ValueError:
        return None


def _found(point: Path, mounted: str, path: str, stat: str) -> PurePosixPath | None:
    """The group below a mount that is older than the namespace (its root is ``/..``): the names of the folders between
    are in no file, so the one that lists this process is looked for."""
    steps = PurePosixPath(mounted).parts[1:]
    process = stat.partition(" ")[0]
    if not steps or set(steps) != {".."} or ".." in path.split("/") or not process:
        return None
    for folder in islice(point.glob("/".join("*" for _ in steps)), _MOST_FOLDERS):
        group = folder / path.lstrip("/")
        if process in read(group / "cgroup.procs").split():
            return PurePosixPath(group.relative_to(point))
    return None


def _best(mounts: list[_Mount], path: str) -> _Mount | None:
    """The mount that shows most of the way to ``path``: one that holds it, and of these the one nearest the root."""
    holding = [mount for mount in mounts if _inside(path, mount.root) is not None]
    return min(holding, key=lambda mount: len(mount.root), default=mounts[0] if mounts else None)


def _mounts(root: Path) -> Iterator[_Mount]:
    """Mounts of control groups (proc(5), "/proc/pid/mountinfo": fields 4 and 5, and after the dash)."""
    for line in read(root / "proc/self/mountinfo").splitlines():
        before, dash, after = line.partition(" - ")
        fields, tail = before.split(), after.split()
        if dash and len(fields) >= 5 and tail and tail[0] in ("cgroup", "cgroup2"):
            options = frozenset(tail[2].split(",")) if len(tail) > 2 else frozenset()
            yield _Mount(tail[0], _plain(fields[3]), _plain(fields[4]), options)


def _plain(text: str) -> str:
    """mountinfo writes blanks and backslashes as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _reclaimable(folder: Path) -> int:
    """Bytes of memory.stat that the kernel takes back when the group needs them; v1 counts children in total_*."""
    values: dict[str, int] = {}
    for line in read(folder / "memory.stat").splitlines():
        words = line.split()
        if len(words) == 2 and (value := parse_count(words[1])) is not None:
            values[words[0]] = value
    return sum(values.get(f"total_{name}", values.get(name, 0)) for name in _RECLAIMABLE)
