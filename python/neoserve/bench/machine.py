"""What NeoServe finds on this machine and what it chooses there: the content of ``neoserve doctor``."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from neoserve import __version__, _native
from neoserve.program.machine import available_memory, cpu_quota, default_threads
from neoserve.types.errors import ConfigurationError

_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class RowChoice:
    """One kernel row of one op: whether it is used here, and if not, why."""

    op: str
    row: str
    feature_set: str
    chosen: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineReport:
    """Facts about machine and process; sizes in bytes.

    ``cpu_quota`` is the control group's limit in CPUs, None without one. ``numa_nodes`` maps a node to its CPUs as
    the kernel writes them. ``threads_reason`` says how the default number of threads came about.
    """

    version: str
    python: str
    system: str
    cpu: str
    core: str
    features: tuple[str, ...]
    vector_bytes: int
    logical_cpus: int
    physical_cores: int
    allowed_cpus: int
    cpu_quota: float | None
    numa_nodes: dict[str, str]
    memory_total: int
    memory_available: int
    page_size: int
    huge_pages: str
    threads: int
    threads_reason: str
    rows: tuple[RowChoice, ...]

    def json_object(self) -> dict[str, object]:
        """Everything as JSON values."""
        return asdict(self)


def inspect_machine(force: str = "", root: Path = _ROOT) -> MachineReport:
    """Looks at this machine. ``force`` names a kernel row or feature set as ``--kernels`` does.

    ``root`` is the root of the file system (tests show another one). Raises ConfigurationError on a bad ``force``.
    """
    allowed = len(psutil.Process().cpu_affinity() or range(psutil.cpu_count() or 1))
    quota = cpu_quota(root)
    threads = default_threads(root)
    return MachineReport(
        version=__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=_cpu_name(root),
        core=_native.core_identity(),
        features=tuple(_native.cpu_features()),
        vector_bytes=_native.sve_vector_bytes(),
        logical_cpus=psutil.cpu_count() or 1,
        physical_cores=psutil.cpu_count(logical=False) or psutil.cpu_count() or 1,
        allowed_cpus=allowed,
        cpu_quota=quota,
        numa_nodes=_numa_nodes(root),
        memory_total=psutil.virtual_memory().total,
        memory_available=available_memory(root),
        page_size=_native.page_size(),
        huge_pages=_huge_pages(root),
        threads=threads,
        threads_reason=_threads_reason(threads, allowed, quota),
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


def _threads_reason(threads: int, allowed: int, quota: float | None) -> str:
    if quota is not None and int(quota) <= threads:
        return f"the CPU quota of the control group is {quota:g}"
    if allowed == threads:
        return f"{allowed} CPUs are allowed"
    return f"{allowed} CPUs are allowed, on {threads} physical cores"


def _cpu_name(root: Path) -> str:
    for line in _read(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model"):
            return value.strip()
    return platform.processor() or "unknown"


def _numa_nodes(root: Path) -> dict[str, str]:
    folder = root / "sys/devices/system/node"
    nodes = sorted(folder.glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
    return {path.name: _read(path / "cpulist") for path in nodes}


def _huge_pages(root: Path) -> str:
    """The mode in brackets, such as madvise; "absent" without transparent huge pages."""
    text = _read(root / "sys/kernel/mm/transparent_hugepage/enabled")
    return next((word.strip("[]") for word in text.split() if word.startswith("[")), "absent")


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
