"""What NeoServe finds on this machine and what it chooses there: the content of ``neoserve doctor``."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from neoserve import __version__, _native
from neoserve.program.machine import Quota, allowed_cpus, memory_available, read_topology
from neoserve.program.machine.files import format_ids
from neoserve.program.machine.pages import huge_pages
from neoserve.program.machine.placement import choose_placement
from neoserve.types.errors import ConfigurationError
from neoserve.types.options import EngineOptions

_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class RowChoice:
    """One kernel row of one op: whether it is used here, and if not, why."""

    op: str
    row: str
    feature_set: str
    chosen: bool
    reason: str


@dataclass(frozen=True, slots=True)
class CoreReport:
    """A kind of core: its identity, and its name and products when it is known (else empty)."""

    identity: str
    name: str
    products: str

    def __str__(self) -> str:
        if not self.name:
            return f"{self.identity}, not known by name"
        return f"{self.name}{f' (as in {self.products})' if self.products else ''}, {self.identity}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineReport:
    """Facts about machine and process; sizes in bytes.

    ``cores`` are the different cores among the allowed CPUs. ``cpu_quota`` is the tightest of the control groups,
    None without one. ``numa_nodes`` maps a node to its CPUs and whether its memory may be used. ``memory_limit`` says
    what limits the available memory. ``threads`` to ``pinning`` are what an engine would choose with the options
    given. ``warnings`` are what it would warn of.
    """

    version: str
    python: str
    system: str
    cpu: str
    cores: tuple[CoreReport, ...]
    features: tuple[str, ...]
    vector_bytes: int
    logical_cpus: int
    physical_cores: int
    allowed_cpus: int
    allowed_cpu_list: str
    cpu_quota: Quota | None
    numa_nodes: dict[str, str]
    memory_total: int
    memory_available: int
    memory_limit: str
    page_size: int
    huge_pages: str
    threads: int
    threads_reason: str
    numa: str
    pinning: str
    warnings: tuple[str, ...]
    rows: tuple[RowChoice, ...]

    def json_object(self) -> dict[str, object]:
        """Everything as JSON values."""
        return asdict(self)


def inspect_machine(force: str = "", root: Path = _ROOT, options: EngineOptions | None = None) -> MachineReport:
    """Looks at this machine. ``force`` names a kernel row or feature set as ``--kernels`` does.

    ``options`` are those of the engine that would run here. ``root`` is the root of the file system (tests show
    another one). Raises ConfigurationError on a bad ``force`` or a NUMA node that is not there.
    """
    cpus = allowed_cpus(root)
    placement = choose_placement(options or EngineOptions(), root=root, cpus=cpus)
    room = memory_available(root)
    return MachineReport(
        version=__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=_cpu_name(root),
        cores=tuple(CoreReport(*core) for core in _native.cores(sorted(cpus))),
        features=tuple(_native.cpu_features()),
        vector_bytes=_native.sve_vector_bytes(),
        logical_cpus=psutil.cpu_count() or 1,
        physical_cores=psutil.cpu_count(logical=False) or psutil.cpu_count() or 1,
        allowed_cpus=len(cpus),
        allowed_cpu_list=format_ids(cpus),
        cpu_quota=placement.threads.quota,
        numa_nodes=_numa_nodes(root),
        memory_total=psutil.virtual_memory().total,
        memory_available=room.bytes,
        memory_limit=room.reason,
        page_size=_native.page_size(),
        huge_pages=_huge_pages(root),
        threads=placement.threads.count,
        threads_reason=placement.threads.reason,
        numa=placement.numa.reason,
        pinning=placement.pinning,
        warnings=placement.warnings,
        rows=kernel_rows(force),
    )


def kernel_rows(force: str = "") -> tuple[RowChoice, ...]:
    """Every kernel row in order of preference, as it is chosen here; raises ConfigurationError on a bad ``force``."""
    try:
        return tuple(RowChoice(*row) for row in _native.rows(force))
    except ValueError as error:
        raise ConfigurationError(str(error)) from None


def chosen_rows(rows: Iterable[RowChoice]) -> dict[str, str]:
    """The row in use per op."""
    return {row.op: row.row for row in rows if row.chosen}


def _cpu_name(root: Path) -> str:
    for line in _read(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model"):
            return value.strip()
    return platform.processor() or "unknown"


def _numa_nodes(root: Path) -> dict[str, str]:
    topology = read_topology(root)
    told = {}
    for node in topology.nodes:
        memory = "memory" if node.number in topology.memory_nodes else "memory not allowed" if node.has_memory else ""
        cpus = f"CPUs {format_ids(node.cpus)}" if node.cpus else "no CPUs"
        told[f"node{node.number}"] = f"{cpus}, {memory or 'no memory'}"
    return told


def _huge_pages(root: Path) -> str:
    found = huge_pages(root)
    pool = f"; reserved pool: {found.reserved_free} of {found.reserved} free" if found.reserved else ""
    return f"transparent {found.mode}{pool}"


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
