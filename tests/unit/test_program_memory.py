"""KV memory: page sizes, page counts, context length, and what this process may use of the machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from neoserve.program.ir import KvGroup
from neoserve.program.machine import available_memory, cpu_quota, default_threads
from neoserve.program.memory import page_bytes, plan_kv
from neoserve.types.errors import ConfigurationError

GROUP = KvGroup("full", tuple(range(9)), None, 1, 24)
PAGE = 2 * 9 * 1 * 24 * 2 * 16
"""Bytes of a bf16 page of GROUP: K and V, layers, heads, head_dim, bytes, tokens. Not a multiple of 4096."""


def plan(**changes: object) -> Any:
    arguments: dict[str, Any] = {
        "page_size": 16,
        "kv_dtype": "bf16",
        "max_context": 1000,
        "context_length": None,
        "max_sequences": 4,
        "kv_cache_bytes": None,
        "available_bytes": 1 << 40,
    }
    return plan_kv((GROUP,), **{**arguments, **changes})


class TestPages:
    def test_size(self) -> None:
        assert page_bytes(GROUP, 16, "bf16") == PAGE
        assert page_bytes(GROUP, 16, "f32") == 2 * PAGE
        assert page_bytes(GROUP, 64, "bf16") == 4 * PAGE

    @pytest.mark.parametrize("head_dim", [64, 128, 256])
    def test_pages_do_not_alias_in_cache_sets(self, head_dim: int) -> None:
        group = KvGroup("full", tuple(range(32)), None, 8, head_dim)
        plain = 2 * 32 * 8 * head_dim * 2 * 16
        assert plain % 4096 == 0
        assert page_bytes(group, 16, "bf16") == plain + 64

    def test_all_requests_at_full_length(self) -> None:
        result = plan()
        assert (result.context_length, result.num_pages) == (1000, 4 * 63)
        assert "enough for 4 requests of full length" in result.reason

    def test_half_of_the_available_memory(self) -> None:
        result = plan(available_bytes=2 * 100 * PAGE + 5)
        assert (result.num_pages, result.context_length) == (100, 1000)
        assert result.total_bytes <= 100 * PAGE
        assert "limited by half of the available memory" in result.reason

    def test_context_is_cut_to_what_fits_and_said(self) -> None:
        result = plan(available_bytes=2 * 10 * PAGE)
        assert (result.num_pages, result.context_length) == (10, 160)
        assert "context 160 tokens" in result.reason
        assert "the model's 1000 tokens need" in result.reason

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"kv_cache_bytes": 10 * PAGE}, True),
            ({"kv_cache_bytes": 125 * PAGE}, True),
            ({"kv_cache_bytes": 126 * PAGE}, False),
            ({"kv_cache_bytes": 19 * PAGE, "context_length": 160}, True),
            ({"kv_cache_bytes": 20 * PAGE, "context_length": 160}, False),
            ({}, False),
            ({"max_sequences": 1}, False),
        ],
    )
    def test_room_for_one_full_context_only_is_said(self, changes: dict[str, int], said: bool) -> None:
        reason = plan(**changes).reason
        assert (
            "a request without max_tokens reserves the whole context: set max_tokens or a smaller" in reason
        ) == said
        assert "\n" not in reason

    def test_kv_cache_bytes_wins_over_available_memory(self) -> None:
        assert plan(kv_cache_bytes=20 * PAGE, available_bytes=4 * PAGE).num_pages == 20

    def test_a_chosen_context_length_is_not_cut(self) -> None:
        assert plan(context_length=160, kv_cache_bytes=10 * PAGE).num_pages == 10
        with pytest.raises(
            ConfigurationError, match=r"kv_cache_bytes .* context_length of 161 tokens.*raise kv_cache_bytes"
        ):
            plan(context_length=161, kv_cache_bytes=10 * PAGE)

    def test_not_even_one_page(self) -> None:
        with pytest.raises(ConfigurationError, match=r"half of the available memory is .* KiB"):
            plan(available_bytes=PAGE)

    def test_groups_share_the_budget(self) -> None:
        window = KvGroup("window_8", (9, 10, 11), 8, 1, 24)
        result = plan_kv(
            (GROUP, window), page_size=16, kv_dtype="f32", max_context=64, context_length=None, max_sequences=1,
            kv_cache_bytes=3 * (2 * PAGE + 2 * PAGE // 3), available_bytes=0,
        )  # fmt: skip
        assert result.page_bytes == (2 * PAGE, 2 * PAGE // 3)
        assert (result.num_pages, result.context_length) == (3, 48)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def topology(*cores: tuple[int, ...]) -> dict[str, str]:
    return {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": ",".join(map(str, core))
        for core in cores
        for cpu in core
    }


V2 = {"proc/self/cgroup": "0::/a/b"}


class TestThreads:
    """B02: a container's quota and mask decide, not the host's count."""

    EIGHT = topology(*((cpu,) for cpu in range(8)))

    @pytest.mark.parametrize(
        ("files", "expected"),
        [
            ({}, 8),
            ({**V2, "sys/fs/cgroup/a/b/cpu.max": "200000 100000"}, 2),
            ({**V2, "sys/fs/cgroup/a/b/cpu.max": "765000 100000"}, 7),
            ({**V2, "sys/fs/cgroup/a/b/cpu.max": "50000 100000"}, 1),
            ({**V2, "sys/fs/cgroup/a/b/cpu.max": "max 100000"}, 8),
            ({**V2, "sys/fs/cgroup/a/cpu.max": "300000 100000", "sys/fs/cgroup/a/b/cpu.max": "600000 100000"}, 3),
            ({**V2, "sys/fs/cgroup/cpu.max": "400000 100000"}, 4),
            (
                {
                    "proc/self/cgroup": "5:cpu,cpuacct:/docker/x\n0::/",
                    "sys/fs/cgroup/cpu/docker/x/cpu.cfs_quota_us": "250000",
                    "sys/fs/cgroup/cpu/docker/x/cpu.cfs_period_us": "100000",
                },
                2,
            ),
            (
                {
                    "proc/self/cgroup": "5:cpu,cpuacct:/",
                    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
                    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
                },
                8,
            ),
        ],
    )
    def test_quota(self, tmp_path: Path, files: dict[str, str], expected: int) -> None:
        root = write(tmp_path, {**self.EIGHT, **files})
        assert default_threads(root, set(range(8))) == expected

    def test_mask(self, tmp_path: Path) -> None:
        assert default_threads(write(tmp_path, self.EIGHT), {2, 5}) == 2

    def test_hardware_threads_of_one_core_count_once(self, tmp_path: Path) -> None:
        root = write(tmp_path, topology((0, 4), (1, 5), (2, 6), (3, 7)))
        assert default_threads(root, set(range(8))) == 4
        assert default_threads(root, {0, 4, 5}) == 2

    def test_without_topology_files_each_cpu_counts(self, tmp_path: Path) -> None:
        assert default_threads(tmp_path, {0, 1, 2}) == 3

    def test_this_machine(self) -> None:
        assert 1 <= default_threads() <= (os.cpu_count() or 1)
        quota = cpu_quota()
        assert quota is None or quota > 0


class TestAvailableMemory:
    def test_free_memory_without_a_limit(self, tmp_path: Path) -> None:
        assert available_memory(tmp_path, free=5000) == 5000

    def test_limit_minus_use(self, tmp_path: Path) -> None:
        files = {**V2, "sys/fs/cgroup/a/b/memory.max": "4000", "sys/fs/cgroup/a/b/memory.current": "1500"}
        assert available_memory(write(tmp_path, files), free=5000) == 2500

    def test_page_cache_in_the_use_is_free(self, tmp_path: Path) -> None:
        files = {
            **V2,
            "sys/fs/cgroup/a/b/memory.max": "4000",
            "sys/fs/cgroup/a/b/memory.current": "1500",
            "sys/fs/cgroup/a/b/memory.stat": "anon 500\ninactive_file 900",
        }
        assert available_memory(write(tmp_path, files), free=5000) == 3400

    def test_tightest_ancestor(self, tmp_path: Path) -> None:
        files = {
            **V2,
            "sys/fs/cgroup/a/b/memory.max": "max",
            "sys/fs/cgroup/a/b/memory.current": "10",
            "sys/fs/cgroup/a/memory.max": "1000",
            "sys/fs/cgroup/a/memory.current": "400",
        }
        assert available_memory(write(tmp_path, files), free=5000) == 600

    def test_v1(self, tmp_path: Path) -> None:
        files = {
            "proc/self/cgroup": "9:memory:/docker/x",
            "sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": "3000",
            "sys/fs/cgroup/memory/docker/x/memory.usage_in_bytes": "1000",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "99999999",
        }
        assert available_memory(write(tmp_path, files), free=5000) == 2000

    def test_never_negative(self, tmp_path: Path) -> None:
        files = {**V2, "sys/fs/cgroup/a/b/memory.max": "1000", "sys/fs/cgroup/a/b/memory.current": "1500"}
        assert available_memory(write(tmp_path, files), free=5000) == 0
