"""Control groups: v1, v2 and hybrid, nested, with and without namespaces (B02)."""

from __future__ import annotations

from pathlib import Path

import pytest

from neoserve.program.machine.cgroups import cpu_quota, cpuset, groups, memory_room

from .machine_files import v2, write

V2 = v2()
GROUP = "sys/fs/cgroup/a/b"


def mount(root: str, point: str, kind: str = "cgroup2", options: str = "rw") -> str:
    return f"31 23 0:28 {root} {point} rw,nosuid shared:9 - {kind} {kind} {options}"


class TestWhereTheGroupIs:
    def folders(self, root: Path, controller: str = "cpu") -> list[tuple[str, str]]:
        return [(str(group.folder.relative_to(root)), group.name) for group in groups(root, controller)]

    def test_the_group_and_all_its_ancestors(self, tmp_path: Path) -> None:
        assert self.folders(write(tmp_path, V2)) == [
            ("sys/fs/cgroup/a/b", "/a/b"),
            ("sys/fs/cgroup/a", "/a"),
            ("sys/fs/cgroup", "/"),
        ]

    def test_a_namespace_shows_the_group_as_the_root(self, tmp_path: Path) -> None:
        assert self.folders(write(tmp_path, v2("/"))) == [("sys/fs/cgroup", "/")]

    def test_the_path_of_the_host_with_only_the_group_mounted(self, tmp_path: Path) -> None:
        """Docker on cgroup v1: the path is not below the mount, the mount's root field says what is mounted."""
        files = {
            "proc/self/cgroup": "5:cpu,cpuacct:/docker/x/sub\n1:name=systemd:/docker/x",
            "proc/self/mountinfo": mount("/docker/x", "/sys/fs/cgroup/cpu,cpuacct", "cgroup", "rw,cpu,cpuacct"),
        }
        assert self.folders(write(tmp_path, files)) == [
            ("sys/fs/cgroup/cpu,cpuacct/sub", "/docker/x/sub"),
            ("sys/fs/cgroup/cpu,cpuacct", "/docker/x"),
        ]

    @pytest.mark.parametrize(("path", "root"), [("/../y", "/"), ("/elsewhere", "/docker/x"), ("/", "/../..")])
    def test_a_path_outside_the_mount_leaves_the_mount(self, tmp_path: Path, path: str, root: str) -> None:
        files = {"proc/self/cgroup": f"0::{path}", "proc/self/mountinfo": mount(root, "/sys/fs/cgroup")}
        assert [folder for folder, _ in self.folders(write(tmp_path, files))] == ["sys/fs/cgroup"]

    def test_a_namespace_below_an_older_mount(self, tmp_path: Path) -> None:
        """unshare -C: the names between mount and namespace are found by who is in the groups."""
        files = {
            "proc/self/cgroup": "0::/sub",
            "proc/self/stat": "42 (python) R 1",
            "proc/self/mountinfo": mount("/../..", "/sys/fs/cgroup"),
            "sys/fs/cgroup/a/x/sub/cgroup.procs": "7",
            "sys/fs/cgroup/a/b/sub/cgroup.procs": "1\n42\n99",
            "sys/fs/cgroup/a/cgroup.procs": "42",
        }
        assert [folder for folder, _ in self.folders(write(tmp_path, files))] == [
            "sys/fs/cgroup/a/b/sub",
            "sys/fs/cgroup/a/b",
            "sys/fs/cgroup/a",
            "sys/fs/cgroup",
        ]

    def test_the_mount_that_holds_the_path_is_taken(self, tmp_path: Path) -> None:
        mounts = [mount("/o", "/mnt/other"), mount("/a/b", "/mnt/own"), mount("/", "/mnt/all")]
        files = {"proc/self/cgroup": "0::/a/b", "proc/self/mountinfo": "\n".join(mounts)}
        assert [folder for folder, _ in self.folders(write(tmp_path, files))] == ["mnt/all/a/b", "mnt/all/a", "mnt/all"]
        files["proc/self/mountinfo"] = "\n".join(mounts[:2])
        assert [folder for folder, _ in self.folders(write(tmp_path, files))] == ["mnt/own"]

    def test_a_mount_point_with_a_blank(self, tmp_path: Path) -> None:
        files = {"proc/self/cgroup": "0::/", "proc/self/mountinfo": mount("/", r"/mnt/my\040groups")}
        assert self.folders(write(tmp_path, files)) == [("mnt/my groups", "/")]

    def test_hybrid_reads_both(self, tmp_path: Path) -> None:
        files = {
            "proc/self/cgroup": "4:memory:/m\n1:cpu:/c\n0::/u",
            "proc/self/mountinfo": "\n".join(
                [
                    mount("/", "/sys/fs/cgroup/memory", "cgroup", "rw,memory"),
                    mount("/", "/sys/fs/cgroup/cpu", "cgroup", "rw,cpu"),
                    mount("/", "/sys/fs/cgroup/unified"),
                ]
            ),
        }
        assert [folder for folder, _ in self.folders(write(tmp_path, files))] == [
            "sys/fs/cgroup/cpu/c",
            "sys/fs/cgroup/cpu",
            "sys/fs/cgroup/unified/u",
            "sys/fs/cgroup/unified",
        ]

    @pytest.mark.parametrize("text", ["", "garbage", "::", "0", "x:y", "5:cpu"])
    def test_damaged_files(self, tmp_path: Path, text: str) -> None:
        files = {"proc/self/cgroup": text, "proc/self/mountinfo": f"{text}\n1 2 3\n - \n1 2 3 4 5 - cgroup2"}
        root = write(tmp_path, files)
        assert cpu_quota(root) is None
        assert memory_room(root) is None
        assert cpuset(root) is None


class TestQuota:
    @pytest.mark.parametrize(
        ("text", "cpus"),
        [("200000 100000", 2.0), ("765000 100000", 7.65), ("50000 100000", 0.5), ("30000", 0.3), ("1 1000000", 1e-6)],
    )
    def test_v2(self, tmp_path: Path, text: str, cpus: float) -> None:
        quota = cpu_quota(write(tmp_path, V2, {f"{GROUP}/cpu.max": text}))
        assert quota is not None
        assert (quota.cpus, quota.group) == (pytest.approx(cpus), "/a/b")

    @pytest.mark.parametrize("text", ["max 100000", "max", "", "x y", "100000 0", "-1 100000", "0 100000", "1e5 1e5"])
    def test_no_quota(self, tmp_path: Path, text: str) -> None:
        assert cpu_quota(write(tmp_path, V2, {f"{GROUP}/cpu.max": text})) is None

    @pytest.mark.parametrize(("outer", "inner", "group"), [("3", "6", "/a"), ("6", "3", "/a/b")])
    def test_the_tightest_ancestor(self, tmp_path: Path, outer: str, inner: str, group: str) -> None:
        files = {
            "sys/fs/cgroup/a/cpu.max": f"{outer} 1",
            f"{GROUP}/cpu.max": f"{inner} 1",
            "sys/fs/cgroup/cpu.max": "9 1",
        }
        quota = cpu_quota(write(tmp_path, V2, files))
        assert quota is not None
        assert (quota.cpus, quota.group) == (3.0, group)

    @pytest.mark.parametrize(
        ("quota", "period", "cpus"),
        [("250000", "100000", 2.5), ("-1", "100000", None), ("250000", "0", None), ("250000", "", None)],
    )
    def test_v1(self, tmp_path: Path, quota: str, period: str, cpus: float | None) -> None:
        files = {
            "proc/self/cgroup": "5:cpu,cpuacct:/docker/x",
            "proc/self/mountinfo": mount("/", "/sys/fs/cgroup/cpu,cpuacct", "cgroup", "rw,cpu,cpuacct"),
            "sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_quota_us": quota,
            "sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_period_us": period,
        }
        found = cpu_quota(write(tmp_path, files))
        assert (None if found is None else found.cpus) == cpus

    def test_without_mountinfo_the_usual_places(self, tmp_path: Path) -> None:
        files = {"proc/self/cgroup": "0::/a", "sys/fs/cgroup/a/cpu.max": "4 1"}
        quota = cpu_quota(write(tmp_path, files))
        assert quota is not None
        assert quota.cpus == 4


class TestCpuset:
    def test_the_effective_set_of_the_nearest_group_that_says_one(self, tmp_path: Path) -> None:
        files = {"sys/fs/cgroup/a/cpuset.cpus.effective": "0-3", f"{GROUP}/cpuset.cpus.effective": "1,3"}
        root = write(tmp_path, V2, files)
        assert cpuset(root) == {1, 3}
        (root / GROUP / "cpuset.cpus.effective").write_text("\n")
        assert cpuset(root) == {0, 1, 2, 3}

    def test_v1(self, tmp_path: Path) -> None:
        files = {
            "proc/self/cgroup": "3:cpuset:/x",
            "sys/fs/cgroup/cpuset/x/cpuset.cpus": "0-7",
            "sys/fs/cgroup/cpuset/x/cpuset.effective_cpus": "2",
        }
        assert cpuset(write(tmp_path, files)) == {2}


class TestMemory:
    def room(self, root: Path, *files: dict[str, str]) -> int | None:
        found = memory_room(write(root, V2, *files))
        return None if found is None else found.bytes

    def limits(self, folder: str, **values: object) -> dict[str, str]:
        return {f"{folder}/memory.{name}": str(value) for name, value in values.items()}

    def test_limit_minus_use(self, tmp_path: Path) -> None:
        assert self.room(tmp_path, self.limits(GROUP, max=4000, current=1500)) == 2500

    def test_high_is_a_limit_too(self, tmp_path: Path) -> None:
        assert self.room(tmp_path, self.limits(GROUP, max=4000, high=2000, current=1500)) == 500

    def test_what_can_be_reclaimed_is_not_in_use(self, tmp_path: Path) -> None:
        stat = "anon 500\nfile 900\ninactive_file 300\nactive_file 200\nslab_reclaimable 100\nslab_unreclaimable 7"
        assert self.room(tmp_path, self.limits(GROUP, max=4000, current=1500, stat=stat)) == 3100

    def test_reclaimable_is_never_more_than_the_use(self, tmp_path: Path) -> None:
        assert self.room(tmp_path, self.limits(GROUP, max=4000, current=100, stat="inactive_file 900")) == 4000

    def test_the_tightest_ancestor_by_what_it_leaves(self, tmp_path: Path) -> None:
        inner, outer = self.limits(GROUP, max=1000, current=10), self.limits("sys/fs/cgroup/a", max=9000, current=8500)
        found = memory_room(write(tmp_path, V2, inner, outer))
        assert found is not None
        assert found.bytes == 500
        assert "cgroup /a" in found.reason
        assert "/a/b" not in found.reason

    def test_v1_counts_children(self, tmp_path: Path) -> None:
        files = {
            "proc/self/cgroup": "9:memory:/docker/x",
            "proc/self/mountinfo": mount("/docker/x", "/sys/fs/cgroup/memory", "cgroup", "rw,memory"),
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "3000",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "1000",
            "sys/fs/cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 400\ntotal_active_file 100",
        }
        found = memory_room(write(tmp_path, files))
        assert found is not None
        assert found.bytes == 2500

    @pytest.mark.parametrize("limit", ["max", "9223372036854771712", "18446744073709551615", "-1", "", "4k", "9" * 40])
    def test_what_is_no_limit(self, tmp_path: Path, limit: str) -> None:
        assert self.room(tmp_path, self.limits(GROUP, max=limit, current=10)) is None

    def test_no_room_left_is_zero(self, tmp_path: Path) -> None:
        assert self.room(tmp_path, self.limits(GROUP, max=1000, current=1500)) == 0

    def test_a_limit_without_a_use_says_nothing(self, tmp_path: Path) -> None:
        assert self.room(tmp_path, self.limits(GROUP, max=1000)) is None
