"""Page sizes, and where the pages of this process's weights, KV cache and arenas really are."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from neoserve import _native
from neoserve.program.machine.files import ROOT, parse_count, read, read_count

_AREA = re.compile(r"([0-9a-f]{1,16})-([0-9a-f]{1,16}) ")
_HEXADECIMAL = re.compile(r"[0-9a-f]{1,16}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HugePages:
    """``mode`` of transparent huge pages (always, madvise, never; "absent" without them); pages of the reserved pool
    (hugetlb): ``reserved`` in all and ``reserved_free``, of ``reserved_bytes`` each."""

    mode: str
    reserved: int
    reserved_free: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """Bytes in memory; of these on huge pages (transparent or reserved); and by NUMA node, empty where the kernel
    does not say."""

    bytes: int
    huge_bytes: int
    node_bytes: dict[int, int]

    def line(self) -> str:
        """In MiB, for a log."""
        nodes = "".join(f"; node {node}: {size >> 20} MiB" for node, size in sorted(self.node_bytes.items()))
        return f"{self.bytes >> 20} MiB resident, {self.huge_bytes >> 20} MiB on huge pages{nodes}"


def huge_pages(root: Path = ROOT) -> HugePages:
    """What the system offers (kernel: Documentation/admin-guide/mm/transhuge.rst, hugetlbpage.rst)."""
    text = read(root / "sys/kernel/mm/transparent_hugepage/enabled")
    mode = next((word.strip("[]") for word in text.split() if word.startswith("[")), "absent")
    default = 0
    for line in read(root / "proc/meminfo").splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == "Hugepagesize:":
            default = parse_count(words[1]) or 0
    pool = root / f"sys/kernel/mm/hugepages/hugepages-{default}kB"
    return HugePages(
        mode=mode,
        reserved=read_count(pool / "nr_hugepages") or 0,
        reserved_free=read_count(pool / "free_hugepages") or 0,
        reserved_bytes=default * 1024,
    )


def resident(mappings: Sequence[tuple[int, int]] | None = None, root: Path = ROOT) -> Resident:
    """Where the pages of ``mappings`` (address, bytes; default: all of the native library) are now.

    From /proc/self/smaps and numa_maps (proc(5)), which containers allow where move_pages is refused. The kernel may
    have joined a mapping with its neighbours, which are then counted with it.
    """
    ranges = sorted(_native.memory_mappings() if mappings is None else mappings)
    areas = [area for area in _areas(root) if _overlaps(area, ranges)]
    starts = {area.start for area in areas}
    nodes: dict[int, int] = {}
    for line in read(root / "proc/self/numa_maps").splitlines() if areas else ():
        start, _, rest = line.partition(" ")
        if _HEXADECIMAL.fullmatch(start) and int(start, 16) in starts:
            _count_nodes(rest.split(), nodes)
    return Resident(
        bytes=sum(area.resident for area in areas), huge_bytes=sum(area.huge for area in areas), node_bytes=nodes
    )


@dataclass(slots=True)
class _Area:
    start: int
    end: int
    resident: int = 0
    huge: int = 0


def _areas(root: Path) -> Iterator[_Area]:
    area: _Area | None = None
    for line in read(root / "proc/self/smaps").splitlines():
        words = line.split()
        if head := _AREA.match(line):
            if area is not None:
                yield area
            area = _Area(int(head[1], 16), int(head[2], 16))
        elif area is not None and len(words) >= 2 and (kib := parse_count(words[1])) is not None:
            if words[0] == "Rss:":
                area.resident += kib * 1024
            elif words[0] == "AnonHugePages:":
                area.huge += kib * 1024
            elif words[0] in ("Private_Hugetlb:", "Shared_Hugetlb:"):  # not part of Rss
                area.resident += kib * 1024
                area.huge += kib * 1024
    if area is not None:
        yield area


def _overlaps(area: _Area, ranges: Sequence[tuple[int, int]]) -> bool:
    """Whether one of ``ranges`` (ascending, apart from each other) lies partly in ``area``."""
    before = bisect_left(ranges, (area.end, 0))  # of those that start before the area's end, the last reaches farthest
    return before > 0 and sum(ranges[before - 1]) > area.start


def _count_nodes(words: Sequence[str], nodes: dict[int, int]) -> None:
    """Adds ``N0=12 N1=3 kernelpagesize_kB=4`` to bytes by node."""
    fields = dict(word.split("=", 1) for word in words if "=" in word)
    page = (parse_count(fields.get("kernelpagesize_kB", "")) or 4) * 1024
    for name, value in fields.items():
        node, count = parse_count(name[1:]), parse_count(value)
        if name.startswith("N") and node is not None and count is not None:
            nodes[node] = nodes.get(node, 0) + count * page
