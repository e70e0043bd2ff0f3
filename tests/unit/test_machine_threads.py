"""How many threads, and why (B02): affinity masks, hardware threads, quotas, and what the user asks for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from neoserve.program.machine import allowed_cpus, choose_threads, physical_cores

from .machine_files import cores, single, v2, write

V2 = v2()


@pytest.fixture
def mask(monkeypatch: pytest.MonkeyPatch) -> object:
    def set_mask(cpus: set[int]) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: cpus)

    return set_mask


@pytest.mark.parametrize(
    ("quota", "count", "reason"),
    [
        ("200000 100000", 2, "CPU quota of 2 of cgroup /a/b; 8 cores allowed"),
        ("450000 100000", 4, "CPU quota of 4.5 of cgroup /a/b; 8 cores allowed"),
        ("765000 100000", 7, "CPU quota of 7.65 of cgroup /a/b; 8 cores allowed"),
        ("50000 100000", 1, "CPU quota of 0.5 of cgroup /a/b; 8 cores allowed"),
        ("800000 100000", 8, "one for each of 8 cores allowed"),
        ("900000 100000", 8, "one for each of 8 cores allowed"),
        ("max 100000", 8, "one for each of 8 cores allowed"),
    ],
)
def test_quota_rounded_down_with_its_reason(tmp_path: Path, quota: str, count: int, reason: str) -> None:
    """B02 (a) and (d)."""
    root = write(tmp_path, single(8), V2, {"sys/fs/cgroup/a/b/cpu.max": quota})
    choice = choose_threads(cpus=range(8), root=root)
    assert (choice.count, choice.reason, choice.warning) == (count, reason, "")
    assert str(choice) == f"{count}: {reason}"


def test_v1_quota(tmp_path: Path) -> None:
    """B02 (b)."""
    folder = "sys/fs/cgroup/cpu,cpuacct/docker/x"
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/docker/x\n0::/",
        "proc/self/mountinfo": "1 2 0:3 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct",
        f"{folder}/cpu.cfs_quota_us": "250000",
        f"{folder}/cpu.cfs_period_us": "100000",
    }
    assert choose_threads(root=write(tmp_path, single(8), files), cpus=range(8)).count == 2


def test_the_tightest_ancestor_counts(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/a/cpu.max": "3 1", "sys/fs/cgroup/a/b/cpu.max": "6 1"}
    choice = choose_threads(cpus=range(8), root=write(tmp_path, single(8), V2, files))
    assert str(choice) == "3: CPU quota of 3 of cgroup /a; 8 cores allowed"


def test_the_affinity_mask(tmp_path: Path, mask) -> None:
    """B02 (c): what taskset leaves."""
    mask({2, 5})
    assert str(choose_threads(root=write(tmp_path, single(8)))) == "2: one for each of 2 cores allowed"


def test_hardware_threads_of_one_core_count_once(tmp_path: Path) -> None:
    root = write(tmp_path, cores((0, 4), (1, 5), (2, 6), (3, 7)))
    assert str(choose_threads(cpus=range(8), root=root)) == "4: one for each of 4 cores allowed (8 CPUs)"
    assert choose_threads(cpus={0, 4, 5}, root=root).count == 2
    assert physical_cores({7, 4, 0, 5}, root) == (0, 5, 7)


def test_sibling_files_under_the_newer_name_or_damaged(tmp_path: Path) -> None:
    folder = "sys/devices/system/cpu/cpu{}/topology"
    files = {f"{folder.format(cpu)}/core_cpus_list": "0-1" for cpu in (0, 1)}
    files |= {f"{folder.format(cpu)}/thread_siblings_list": "7" for cpu in (2, 3)}  # not even themselves
    assert physical_cores(range(4), write(tmp_path, files)) == (0, 2, 3)


def test_offline_cpus_and_the_cpuset_narrow_the_mask(tmp_path: Path, mask) -> None:
    mask(set(range(8)))
    root = write(tmp_path, single(8), V2, {"sys/devices/system/cpu/online": "0-5"})
    assert allowed_cpus(root) == set(range(6))
    write(root, {"sys/fs/cgroup/a/b/cpuset.cpus.effective": "4-7"})
    assert allowed_cpus(root) == {4, 5}
    write(root, {"sys/devices/system/cpu/online": "0-1"})  # contradicts the set: never empty
    assert allowed_cpus(root) == {4, 5, 6, 7}


def test_more_than_1024_cpus(tmp_path: Path, mask) -> None:
    mask(set(range(1000, 1536)))
    root = write(tmp_path, {"sys/devices/system/cpu/online": "0-1535"})
    assert choose_threads(root=root).count == 536


@pytest.mark.parametrize(
    ("asked", "quota", "says"),
    [
        (3, "2 1", "num_threads is 3, but the CPU quota of cgroup /a/b is 2 CPUs"),
        (9, "max", "num_threads is 9, but only 8 CPUs can be used (4 cores allowed (8 CPUs))"),
        (9, "2 1", "only 8 CPUs can be used"),
        (8, "max", ""),
        (2, "2 1", ""),
        (1, "max", ""),
    ],
)
def test_what_is_asked_for_wins(tmp_path: Path, asked: int, quota: str, says: str) -> None:
    root = write(tmp_path, cores((0, 4), (1, 5), (2, 6), (3, 7)), V2, {"sys/fs/cgroup/a/b/cpu.max": quota})
    choice = choose_threads(asked, cpus=range(8), root=root)
    assert str(choice) == f"{asked}: as asked; 4 cores allowed (8 CPUs)"
    assert says in choice.warning
    assert bool(choice.warning) == bool(says)


def test_this_machine() -> None:
    choice = choose_threads()
    assert 1 <= choice.count <= choice.cores <= choice.cpus == len(allowed_cpus()) <= (os.cpu_count() or 1)
    assert allowed_cpus() <= os.sched_getaffinity(0)
