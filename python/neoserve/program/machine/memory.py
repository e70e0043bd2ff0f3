"""How much memory this process can still take, and which limit says so."""

from __future__ import annotations

import resource
from collections.abc import Iterable
from pathlib import Path

import psutil

from neoserve.program.machine.cgroups import Room, memory_room
from neoserve.program.machine.files import ROOT, parse_count, read
from neoserve.program.machine.numa import NumaTopology, read_topology

_LIMITS = ((resource.RLIMIT_AS, "VmSize", "ulimit -v"), (resource.RLIMIT_DATA, "VmData", "ulimit -d"))
_NODE_FREE = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")


def memory_available(root: Path = ROOT, free: int | None = None, limits: dict[int, int] | None = None) -> Room:
    """The least of: free memory (of the NUMA nodes that the cpuset allows); what the control groups leave; what the
    process's own limits of address space and data leave. What the kernel can take back at once counts as free.

    ``free`` defaults to what the system has available; ``limits`` (bytes by RLIMIT_* number, for tests) to the soft
    limits of this process.
    """
    rooms = [Room(_free(root) if free is None else free, "free memory")]
    nodes = _free_of_nodes(root, read_topology(root))
    group = memory_room(root)
    rooms += [room for room in (nodes, group) if room is not None]
    rooms += _own_limits(root, limits)
    least = min(rooms, key=lambda room: room.bytes)
    return Room(max(0, least.bytes), least.reason)


def _free(root: Path) -> int:
    """MemAvailable (proc(5)); kernels before 3.14 lack it and psutil estimates it."""
    kib = _fields(root / "proc/meminfo").get("MemAvailable")
    return psutil.virtual_memory().available if kib is None else kib * 1024


def _free_of_nodes(root: Path, topology: NumaTopology) -> Room | None:
    """Free memory of the allowed nodes, where these are not all: the system's sum would promise too much."""
    allowed, having = topology.memory_nodes, [node for node in topology.nodes if node.has_memory]
    if not allowed or len(allowed) == len(having):
        return None
    total = 0
    for node in allowed:
        fields = _fields(root / f"sys/devices/system/node/node{node}/meminfo")
        if "MemFree" not in fields:
            return None
        total += 1024 * sum(fields.get(name, 0) for name in _NODE_FREE)
    return Room(total, f"free memory of NUMA node {', '.join(map(str, allowed))}, which the cpuset allows")


def _own_limits(root: Path, limits: dict[int, int] | None) -> Iterable[Room]:
    used = _fields(root / "proc/self/status")
    for number, field, name in _LIMITS:
        limit = resource.getrlimit(number)[0] if limits is None else limits.get(number, resource.RLIM_INFINITY)
        if limit != resource.RLIM_INFINITY and limit >= 0:
            yield Room(max(0, limit - 1024 * used.get(field, 0)), f"{name} of {limit} bytes")


def _fields(path: Path) -> dict[str, int]:
    """Numbers by name of ``Name: number kB`` lines, also of those that begin with ``Node N``."""
    found = {}
    for line in read(path).splitlines():
        name, colon, rest = line.partition(":")
        words = rest.split()
        value = parse_count(words[0]) if words else None
        if colon and value is not None:
            found[name.split()[-1] if name.split() else ""] = value
    return found
