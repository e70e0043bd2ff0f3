"""CPUs that this process may use, their physical cores, and how many compute threads that makes."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from neoserve.program.machine.cgroups import Quota, cpu_quota, cpuset
from neoserve.program.machine.files import ROOT, format_ids, read_ids


@dataclass(frozen=True, slots=True)
class ThreadChoice:
    """How many compute threads, and why, in words for a log line. ``warning`` is "" unless the choice is a doubtful
    one of the user. ``cores`` and ``cpus`` count what is allowed; ``quota`` is the tightest CPU quota."""

    count: int
    reason: str
    warning: str
    cores: int
    cpus: int
    quota: Quota | None

    def __str__(self) -> str:
        return f"{self.count}: {self.reason}"


def choose_threads(
    requested: int | None = None, *, cpus: Collection[int] | None = None, root: Path = ROOT, where: str = "allowed"
) -> ThreadChoice:
    """Compute threads: min(physical cores among ``cpus``, CPU quota rounded down), at least 1.

    A thread beyond the quota would be stopped while the others wait for it at the next barrier; the second hardware
    thread of a core adds little to code that fills its vector units. ``requested`` (``--threads``) wins, with a
    warning where it is more than the machine gives. ``cpus`` defaults to allowed_cpus(); ``where`` says in the reason
    what they are ("allowed", "allowed on node 1").
    """
    usable = allowed_cpus(root) if cpus is None else frozenset(cpus)
    cores = max(1, len(physical_cores(usable, root)))
    quota = cpu_quota(root)
    have = f"{_counted(cores, 'core')} {where}"
    if len(usable) > cores:
        have += f" ({len(usable)} CPUs)"
    if requested is not None:
        warning = _excess(requested, len(usable), quota, have)
        return ThreadChoice(requested, f"as asked; {have}", warning, cores, len(usable), quota)
    if quota is not None and int(quota.cpus) < cores:
        count = max(1, int(quota.cpus))
        reason = f"CPU quota of {quota.cpus:g} of cgroup {quota.group}; {have}"
        return ThreadChoice(count, reason, "", cores, len(usable), quota)
    return ThreadChoice(cores, f"one for each of {have}", "", cores, len(usable), quota)


def allowed_cpus(root: Path = ROOT) -> frozenset[int]:
    """CPUs of the affinity mask that are online and in the cpuset; never empty."""
    mask = _affinity()
    for other in (cpuset(root), online_cpus(root)):
        if other is not None and mask & other:  # files of another machine than the mask's are no reason to stop
            mask &= other
    return mask


def online_cpus(root: Path = ROOT) -> frozenset[int] | None:
    """CPUs that are switched on; None when the system does not say."""
    found = read_ids(root / "sys/devices/system/cpu/online")
    return None if found is None else frozenset(found)


def physical_cores(cpus: Collection[int], root: Path = ROOT) -> tuple[int, ...]:
    """The first of ``cpus`` on each physical core, ascending. Without topology files each CPU is a core."""
    first: dict[str, int] = {}
    for cpu in sorted(cpus):
        first.setdefault(_core_of(root, cpu), cpu)
    return tuple(first.values())


def _affinity() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _core_of(root: Path, cpu: int) -> str:
    """Hardware threads of one core list the same siblings (under two names, the older one is still everywhere)."""
    folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    for name in ("thread_siblings_list", "core_cpus_list"):
        siblings = read_ids(folder / name)
        if siblings is not None and cpu in siblings:
            return format_ids(siblings)
    return f"cpu{cpu}"


def _excess(requested: int, cpus: int, quota: Quota | None, have: str) -> str:
    if requested > cpus:
        return (
            f"num_threads is {requested}, but only {_counted(cpus, 'CPU')} can be used ({have}): threads that wait for "
            f"their turn hold up all others; lower --threads to {cpus} or less"
        )
    if quota is not None and requested > quota.cpus:
        return (
            f"num_threads is {requested}, but the CPU quota of cgroup {quota.group} is {quota.cpus:g} CPUs: threads "
            f"are stopped while others wait for them; lower --threads to {max(1, int(quota.cpus))} or raise the quota"
        )
    return ""


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
