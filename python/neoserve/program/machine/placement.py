"""Threads, NUMA nodes and huge pages of one engine, chosen together and applied; docs/machine.md has the policy."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from neoserve import _native
from neoserve.program.machine.cpus import ThreadChoice, allowed_cpus, choose_threads, physical_cores
from neoserve.program.machine.files import ROOT, format_ids
from neoserve.program.machine.numa import NumaChoice, choose_numa, read_topology
from neoserve.types.options import EngineOptions

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What an engine gets of the machine.

    ``pinned`` holds one CPU for each thread, or is empty: the scheduler places the threads; ``pinning`` says why.
    ``huge_pages`` is the engine's option.
    """

    threads: ThreadChoice
    numa: NumaChoice
    pinned: tuple[int, ...]
    pinning: str
    huge_pages: str

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user should know before it runs."""
        return (*self.numa.warnings, *((self.threads.warning,) if self.threads.warning else ()))

    def summary(self) -> str:
        """Threads with their reason, and where memory goes if not where the system puts it."""
        count = self.threads.count
        memory = "" if self.numa.mode == "default" else f"; {self.numa.reason}"
        return f"{count} thread{'' if count == 1 else 's'} ({self.threads.reason}){memory}"

    def line(self) -> str:
        """Threads, memory and pinning, each with its reason, in one line."""
        return f"threads {self.threads}; NUMA: {self.numa.reason}; {self.pinning}"

    def details(self) -> dict[str, object]:
        """The same by name (JSON values)."""
        return {
            "threads": self.threads.count,
            "threads_reason": self.threads.reason,
            "numa": self.numa.reason,
            "memory_policy": self.numa.mode,
            "memory_nodes": list(self.numa.nodes),
            "pinned_cpus": format_ids(self.pinned),
            "pinning": self.pinning,
            "huge_pages": self.huge_pages,
        }


def choose_placement(
    options: EngineOptions,
    *,
    root: Path = ROOT,
    cpus: Collection[int] | None = None,
    inherited_policy: bool | None = None,
) -> Placement:
    """Chooses from ``options`` and the machine; changes nothing.

    ``cpus`` defaults to allowed_cpus(), ``inherited_policy`` to what the kernel says of this process. Raises
    ConfigurationError when ``options.numa`` names a node that is not there.
    """
    usable = allowed_cpus(root) if cpus is None else frozenset(cpus)
    inherited = _native.has_inherited_policy() if inherited_policy is None else inherited_policy
    numa = choose_numa(options.numa, usable, read_topology(root), inherited_policy=inherited)
    where = f"allowed on NUMA node {options.numa}" if numa.restricts else "allowed"
    threads = choose_threads(options.num_threads, cpus=numa.cpus, root=root, where=where)
    cores = physical_cores(numa.cpus, root)
    reason = _why_not_pinned(numa, threads)
    return Placement(
        threads=threads,
        numa=numa,
        pinned=() if reason else cores,
        pinning=f"threads not pinned: {reason}" if reason else f"threads pinned to CPUs {format_ids(cores)}",
        huge_pages=options.huge_pages,
    )


@contextlib.contextmanager
def placed(placement: Placement) -> Iterator[None]:
    """Memory that the native library allocates for this thread inside the block goes where ``placement`` says.

    A refusal by the system is a warning, and the memory is placed as it falls.
    """
    if placement.numa.restricts:
        _keep_process_on(placement.numa.cpus)
    _native.set_memory_policy(placement.numa.mode, list(placement.numa.nodes), placement.huge_pages)
    try:
        yield
    finally:
        outcome = _native.reset_memory_policy()
        if outcome["bind_error"]:
            logger.warning(
                "the system refuses to place memory on NUMA nodes (%s): weights and KV cache lie where they are first "
                "touched; %s",
                _name(outcome["bind_error"]),
                "in a container, allow mbind by --cap-add SYS_NICE or a seccomp profile, or use --numa off"
                if outcome["bind_error"] == errno.EPERM
                else "use --numa off to do without",
            )
        if placement.huge_pages == "hugetlb" and (outcome["reserve_error"] or not outcome["reserved_bytes"]):
            logger.warning(
                "huge_pages is hugetlb, but the pool of reserved huge pages does not hold all memory (%s; %d MiB came "
                "from it): the rest uses ordinary pages; reserve more by vm.nr_hugepages",
                _name(outcome["reserve_error"]) if outcome["reserve_error"] else "no block is as large as a page of it",
                outcome["reserved_bytes"] >> 20,
            )


def _why_not_pinned(numa: NumaChoice, threads: ThreadChoice) -> str:
    """Empty when pinning is safe and helps.

    A pinned thread cannot leave a CPU that somebody else takes, and then all others wait for it. So it is done only
    where a thread could otherwise move away from its memory, and where this engine is to have every core anyway: two
    engines that share nodes with fewer threads each would pin to the same CPUs.
    """
    if numa.mode == "default":
        return "memory is on one node or placed by the system"
    if threads.quota is not None and threads.quota.cpus < threads.cores:
        return f"the CPU quota of {threads.quota.cpus:g} is shared out by time"
    if threads.count != threads.cores:
        return f"{threads.count} threads on {threads.cores} cores leave a choice to the scheduler"
    return ""


def _keep_process_on(cpus: Collection[int]) -> None:
    """All threads of this process, as numactl --cpunodebind would have: the HTTP thread beside the workers, too."""
    try:
        for task in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # ended meanwhile
                os.sched_setaffinity(int(task), cpus)
    except OSError as error:
        logger.warning("threads cannot be kept on CPUs %s: %s", format_ids(cpus), error.strerror)


def _name(error: int) -> str:
    return f"{errno.errorcode.get(error, error)}: {os.strerror(error)}"
