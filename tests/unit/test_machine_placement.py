"""Placement of an engine: pinning, the system calls, refusals, and what became of it (B03, B04, B05)."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from neoserve.types.options import EngineOptions

from .machine_files import cores, nodes, single, v2, write

_native = pytest.importorskip("neoserve._native")

from neoserve.program.machine import pages  # noqa: E402
from neoserve.program.machine.placement import Placement, choose_placement, placed  # noqa: E402

TWO = {**single(8), **nodes({0: "0-3", 1: "4-7"}, allowed="0-1")}
DEFAULTS = EngineOptions()
MPOL_PREFERRED, MPOL_INTERLEAVE = 1, 3


def choose(root: Path, *trees: Mapping[str, str], cpus: range = range(8), **options: object) -> Placement:
    chosen = replace(DEFAULTS, **options)  # type: ignore[arg-type]
    return choose_placement(chosen, root=write(root, *trees), cpus=cpus, inherited_policy=False)


@pytest.fixture
def calls() -> Iterator[None]:
    _native.fake_memory_calls()
    yield
    _native.real_memory_calls()
    _native.reset_memory_policy()


def weight(mib: int) -> object:
    """Memory of the native library: a float weight of ``mib`` MiB."""
    return _native.pack_weight("f32", 256 * mib, 1024)


class TestPinning:
    def test_all_cores_of_two_nodes(self, tmp_path: Path) -> None:
        placement = choose(tmp_path, TWO)
        assert placement.pinned == tuple(range(8))
        assert placement.pinning == "threads pinned to CPUs 0-7"

    def test_one_cpu_for_each_core(self, tmp_path: Path) -> None:
        files = {**TWO, **cores((0, 1), (2, 3), (4, 5), (6, 7))}
        placement = choose(tmp_path, files)
        assert placement.threads.count == len(placement.pinned) == 4
        assert placement.pinned == (0, 2, 4, 6)

    def test_a_node_as_asked(self, tmp_path: Path) -> None:
        placement = choose(tmp_path, TWO, numa="1")
        assert placement.pinned == (4, 5, 6, 7)
        assert placement.threads.reason == "one for each of 4 cores allowed on NUMA node 1"
        assert placement.numa.restricts

    @pytest.mark.parametrize(
        ("options", "extra", "why"),
        [
            ({"numa": "off"}, {}, "placed by the system"),
            ({"num_threads": 7}, {}, "7 threads on 8 cores"),
            ({"num_threads": 9}, {}, "9 threads on 8 cores"),
            ({}, {**v2(), "sys/fs/cgroup/a/b/cpu.max": "4 1"}, "the CPU quota of 4 is shared out by time"),
            ({"num_threads": 8}, {**v2(), "sys/fs/cgroup/a/b/cpu.max": "4 1"}, "the CPU quota of 4 is shared"),
            ({}, nodes({0: "0-7"}, allowed="0"), "memory is on one node"),
        ],
    )
    def test_not_where_it_is_not_safe_or_helps_nobody(
        self, tmp_path: Path, options: dict[str, object], extra: dict[str, str], why: str
    ) -> None:
        placement = choose(tmp_path, TWO, extra, **options)
        assert placement.pinned == ()
        assert why in placement.pinning

    @pytest.mark.parametrize("cpus", [range(1, 7), range(2, 4), range(5, 6), range(8)])
    @pytest.mark.parametrize("numa", ["auto", "off", "interleave", "0", "1", "0-1"])
    def test_workers_never_leave_the_allowed_cpus(self, tmp_path: Path, cpus: range, numa: str) -> None:
        placement = choose(tmp_path, TWO, cpus=cpus, numa=numa)
        assert set(placement.pinned) <= set(cpus)
        assert placement.numa.cpus <= set(cpus)
        assert 1 <= placement.threads.count <= len(cpus)

    def test_the_line_and_details_tell_all(self, tmp_path: Path) -> None:
        placement = choose(tmp_path, TWO, {**v2(), "sys/fs/cgroup/a/b/cpu.max": "450000 100000"})
        assert placement.line() == (
            "threads 4: CPU quota of 4.5 of cgroup /a/b; 8 cores allowed; NUMA: the allowed CPUs are on nodes 0-1; "
            "memory page by page over nodes 0-1; threads not pinned: the CPU quota of 4.5 is shared out by time"
        )
        details = placement.details()
        assert (details["threads"], details["memory_policy"], details["memory_nodes"]) == (4, "interleave", [0, 1])

    def test_the_summary_tells_threads_with_their_reason(self, tmp_path: Path) -> None:
        assert choose(tmp_path, TWO, numa="1", num_threads=1).summary() == (
            "1 thread (as asked; 4 cores allowed on NUMA node 1); node 1 as asked; memory on node 1, others when it is "
            "full"
        )
        assert choose(tmp_path, TWO, numa="off").summary() == "8 threads (one for each of 8 cores allowed)"

    def test_warnings_come_from_both(self, tmp_path: Path) -> None:
        files = {**single(8), **nodes({0: "0-3", 1: "4-7"}, allowed="1")}
        placement = choose(tmp_path, files, numa="0", num_threads=20, cpus=range(4, 8))
        assert len(placement.warnings) == 3


@pytest.mark.usefixtures("calls")
class TestMemoryPolicy:
    def bound(self, placement: Placement, mib: int = 3) -> list[tuple[int, list[int], int]]:
        with placed(placement):
            weight(mib)
        return _native.noted_memory_calls()["bound"]

    def test_a_cpu_list_that_crosses_nodes_binds_memory_to_both(self, tmp_path: Path) -> None:
        assert self.bound(choose(tmp_path, TWO, cpus=range(3, 5))) == [(MPOL_INTERLEAVE, [0, 1], 3 << 20)]

    def test_one_node_is_preferred_not_forced(self, tmp_path: Path) -> None:
        assert self.bound(choose(tmp_path, TWO, cpus=range(4, 8))) == [(MPOL_PREFERRED, [1], 3 << 20)]

    def test_a_node_with_a_large_number(self, tmp_path: Path) -> None:
        files = {**single(8), **nodes({0: "0-3", 130: "4-7"}, allowed="0,130")}
        assert self.bound(choose(tmp_path, files))[0][:2] == (MPOL_INTERLEAVE, [0, 130])

    def test_one_node_needs_no_call(self, tmp_path: Path) -> None:
        assert self.bound(choose(tmp_path, single(8), nodes({0: "0-7"}, allowed="0"))) == []

    def test_nothing_after_the_block(self, tmp_path: Path) -> None:
        before = len(self.bound(choose(tmp_path, TWO)))
        weight(3)
        assert len(_native.noted_memory_calls()["bound"]) == before

    @pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS, errno.EINVAL])
    def test_a_refusal_is_one_warning(self, tmp_path: Path, error: int, caplog: pytest.LogCaptureFixture) -> None:
        _native.fake_memory_calls(bind_error=error)
        with caplog.at_level(logging.WARNING), placed(choose(tmp_path, TWO)):
            kept = [weight(3) for _ in range(5)]
        assert len(kept) == 5
        assert len(_native.noted_memory_calls()["bound"]) == 5
        assert len(caplog.records) == 1
        assert errno.errorcode[error] in caplog.text
        assert ("SYS_NICE" in caplog.text) == (error == errno.EPERM)

    def test_success_says_nothing(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING):
            self.bound(choose(tmp_path, TWO))
        assert not caplog.records

    @pytest.mark.parametrize(
        ("mode", "error", "inherited"),
        [(0, 0, False), (4, 0, False), (2, 0, True), (3 | 1 << 13, 0, True), (2, errno.EPERM, False)],
    )
    def test_a_policy_of_numactl(self, mode: int, error: int, inherited: bool) -> None:
        _native.fake_memory_calls(policy_mode=mode, policy_error=error)
        assert _native.has_inherited_policy() == inherited

    def test_bad_arguments(self) -> None:
        with pytest.raises(ValueError, match="mode is"):
            _native.set_memory_policy("bind", [0])
        with pytest.raises(ValueError, match="huge_pages is"):
            _native.set_memory_policy("default", [], "1G")
        with pytest.raises(ValueError, match="nodes are missing"):
            _native.set_memory_policy("interleave", [])
        with pytest.raises(ValueError, match="nodes must be"):
            _native.set_memory_policy("preferred", [-1])


@pytest.mark.usefixtures("calls")
class TestHugePages:
    @pytest.mark.parametrize(("option", "advice"), [("auto", mmap.MADV_HUGEPAGE), ("off", mmap.MADV_NOHUGEPAGE)])
    def test_transparent(self, tmp_path: Path, option: str, advice: int) -> None:
        with placed(choose(tmp_path, TWO, huge_pages=option)):
            weight(3)
            weight(1)  # too small to matter
        assert _native.noted_memory_calls()["advised"] == [(advice, 3 << 20)]

    def test_none_reserved_is_one_warning_and_ordinary_pages(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """B05."""
        _native.fake_memory_calls(map_error=errno.ENOMEM)
        with caplog.at_level(logging.WARNING), placed(choose(tmp_path, TWO, huge_pages="hugetlb")):
            kept = [weight(6), weight(6)]
        assert len(kept) == 2
        assert _native.noted_memory_calls()["advised"] == [(mmap.MADV_HUGEPAGE, 6 << 20)] * 2
        assert len(caplog.records) == 1
        assert "ENOMEM" in caplog.text
        assert "vm.nr_hugepages" in caplog.text

    def test_the_reserved_pool_is_used(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        size = pages.huge_pages().reserved_bytes
        if not size:
            pytest.skip("this kernel has no hugetlb")
        with caplog.at_level(logging.WARNING), placed(choose(tmp_path, TWO, huge_pages="hugetlb")):
            kept = weight((size >> 20) + 1)
        assert kept.row_name  # type: ignore[attr-defined]
        assert not caplog.records
        noted = _native.noted_memory_calls()
        assert noted["advised"] == []
        assert noted["bound"] == [(MPOL_INTERLEAVE, [0, 1], 2 * size)]


class TestPageSizes:
    """B05: nothing assumes pages of 4 KiB."""

    @pytest.mark.parametrize("page", [4096, 16384, 65536])
    @pytest.mark.parametrize("size", [1, 4095, 4097, 65537, (2 << 20) - 1, 2 << 20, (32 << 20) + 1, (600 << 20) + 5])
    def test_layout(self, page: int, size: int) -> None:
        alignment, length, mapped = _native.mapping_layout(size, page)
        assert length % page == alignment % page == mapped % page == 0
        assert length - page < size <= length
        assert mapped >= length + (alignment if alignment > page else 0)
        huge = page * page // 8
        assert alignment == (huge if size >= huge else max(page, 2 << 20) if size >= 2 << 20 else page)

    def test_overflow(self) -> None:
        with pytest.raises(MemoryError):
            _native.mapping_layout((1 << 64) - 1, 65536)

    def test_the_system_tells(self) -> None:
        assert _native.page_size() == os.sysconf("SC_PAGESIZE")

    def test_checkpoint_files_are_mapped_from_their_start(self) -> None:
        """An offset would have to be a multiple of a page size that the file does not know."""
        import ast

        found = 0
        for path in (Path(__file__).parents[2] / "python/neoserve").rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "mmap.mmap":
                    found += 1
                    assert len(node.args) == 2, path
                    assert ast.unparse(node.args[1]) == "0", path
                    assert {keyword.arg for keyword in node.keywords} <= {"access"}, path
        assert found >= 2


class TestResident:
    SMAPS = """\
10000000-10400000 rw-p 00000000 00:00 0
Size:               4096 kB
Rss:                3072 kB
AnonHugePages:      2048 kB
20000000-20200000 rw-p 00000000 00:00 0                          /anon_hugepage
Rss:                   0 kB
Private_Hugetlb:    2048 kB
30000000-30001000 r-xp 00000000 08:01 77                         /usr/lib/libc.so
Rss:                   4 kB
"""
    NUMA_MAPS = """\
10000000 interleave:0-1 anon=768 dirty=768 N0=384 N1=384 kernelpagesize_kB=4
20000000 prefer:1 file=/anon_hugepage huge anon=1 dirty=1 N1=1 kernelpagesize_kB=2048
30000000 default file=/usr/lib/libc.so mapped=1 N0=1 kernelpagesize_kB=4
"""

    def test_ours_alone_are_counted(self, tmp_path: Path) -> None:
        root = write(tmp_path, {"proc/self/smaps": self.SMAPS, "proc/self/numa_maps": self.NUMA_MAPS})
        found = pages.resident([(0x10100000, 0x200000), (0x20000000, 0x200000)], root)
        assert (found.bytes, found.huge_bytes) == (5 << 20, 4 << 20)
        assert found.node_bytes == {0: 384 * 4096, 1: 384 * 4096 + (2 << 20)}
        assert found.line() == "5 MiB resident, 4 MiB on huge pages; node 0: 1 MiB; node 1: 3 MiB"

    @pytest.mark.parametrize(
        ("ranges", "mib"),
        [
            ([(0x103FFFFF, 1)], 3),
            ([(0x10400000, 0x1000)], 0),
            ([(0x0FFFF000, 0x1000)], 0),
            ([(0x0FFFF000, 0x1001)], 3),
            ([(0x0F000000, 0x100), (0x10000000, 0x100), (0x10300000, 0x100), (0x20000000, 1), (0x40000000, 1)], 5),
        ],
    )
    def test_edges(self, tmp_path: Path, ranges: list[tuple[int, int]], mib: int) -> None:
        assert pages.resident(ranges, write(tmp_path, {"proc/self/smaps": self.SMAPS})).bytes == mib << 20

    @pytest.mark.parametrize(
        "text", ["", "x", "N0=1", "- -", "0-f00 x\nRss: x kB\n0-g00 y\nRss:", "0 default N0=x Nx=1"]
    )
    def test_nothing_to_read(self, tmp_path: Path, text: str) -> None:
        root = write(tmp_path, {"proc/self/smaps": text, "proc/self/numa_maps": text})
        assert pages.resident([(0, 1 << 40)], root).bytes == 0

    def test_real_memory_is_found(self) -> None:
        before = pages.resident().bytes
        kept = weight(8)
        import numpy as np

        kept.put_rows(0, np.ones((2048, 1024), dtype=np.float32))  # type: ignore[attr-defined]
        found = pages.resident()
        assert found.bytes - before >= 8 << 20
        if found.node_bytes:
            assert sum(found.node_bytes.values()) >= 8 << 20

    def test_the_pool_of_a_system(self, tmp_path: Path) -> None:
        files = {
            "proc/meminfo": "HugePages_Total: 4\nHugepagesize:     524288 kB",
            "sys/kernel/mm/hugepages/hugepages-524288kB/nr_hugepages": "4",
            "sys/kernel/mm/hugepages/hugepages-524288kB/free_hugepages": "3",
            "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
        }
        found = pages.huge_pages(write(tmp_path, files))
        assert (found.mode, found.reserved, found.reserved_free, found.reserved_bytes) == ("madvise", 4, 3, 512 << 20)
        assert pages.huge_pages(tmp_path / "nothing").mode == "absent"


class TestEngine:
    """The whole way: options, a loaded model, what it tells."""

    TINY = Path(__file__).parents[1] / "models" / "golden" / "tiny" / "llama"

    def test_named_nodes_keep_all_threads_of_the_process_there(self, tmp_path: Path) -> None:
        """In a process of its own: an affinity mask is not given back."""
        allowed = sorted(os.sched_getaffinity(0))
        script = f"""
import os, threading
from pathlib import Path
from neoserve.program.machine.placement import choose_placement, placed
from neoserve.types.options import EngineOptions
end = threading.Event()
thread = threading.Thread(target=end.wait)
thread.start()
root = Path({str(tmp_path)!r})
with placed(choose_placement(EngineOptions(numa="0"), root=root, cpus={allowed!r}, inherited_policy=False)):
    print(sorted({{cpu for task in os.listdir("/proc/self/task") for cpu in os.sched_getaffinity(int(task))}}))
end.set()
"""
        write(tmp_path, nodes({0: str(allowed[0]), 1: "4000"}, allowed="0-1"))
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == str(allowed[:1])

    def test_what_was_chosen_is_logged_and_told(self, caplog: pytest.LogCaptureFixture) -> None:
        from neoserve.engine.load import load_engine

        options = EngineOptions(num_threads=1, context_length=64, kv_cache_bytes=4 << 20, huge_pages="off")
        with caplog.at_level(logging.INFO):
            loaded = load_engine(str(self.TINY), options)
        try:
            lines = [record.message for record in caplog.records if record.message.startswith("threads ")]
            assert len(lines) == 1
            assert lines[0].startswith("threads 1: as asked; ")
            assert "NUMA: " in lines[0]
            assert loaded.details["threads"] == loaded.core.stats().threads == 1
            assert str(loaded.details["threads_reason"]).startswith("as asked")
            assert loaded.details["huge_pages"] == "off"
            assert "; 1 thread (as asked; " in loaded.summary
            assert "MiB resident" in str(loaded.details["memory"])
        finally:
            loaded.close()

    def test_more_threads_than_cpus_is_a_warning(self, caplog: pytest.LogCaptureFixture) -> None:
        from neoserve.engine.load import load_engine

        many = len(os.sched_getaffinity(0)) + 1
        options = EngineOptions(num_threads=many, context_length=64, kv_cache_bytes=4 << 20)
        with caplog.at_level(logging.WARNING):
            loaded = load_engine(str(self.TINY), options)
        loaded.close()
        assert any(f"num_threads is {many}, but only" in record.message for record in caplog.records)

    def test_a_node_that_is_not_there(self) -> None:
        from neoserve.engine.load import load_engine
        from neoserve.types.errors import ConfigurationError

        with pytest.raises(ConfigurationError, match="numa "):
            load_engine(str(self.TINY), EngineOptions(numa="900", context_length=64, kv_cache_bytes=4 << 20))
