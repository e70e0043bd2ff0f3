"""NUMA nodes and where memory and threads go (B03, B04)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neoserve.program.machine.numa import NumaChoice, NumaNode, NumaTopology, choose_numa, nearest_memory, read_topology
from neoserve.types.errors import ConfigurationError
from neoserve.types.options import EngineOptions

from .machine_files import nodes, write

ONE = nodes({0: "0-7"}, allowed="0")
TWO = nodes({0: "0-3", 1: "4-7"}, allowed="0-1")
FOUR = nodes(
    {0: "0-1", 1: "2-3", 2: "4-5", 3: "6-7"},
    memory=(0, 1, 3),
    allowed="0-1,3",
    distances={2: "40 30 10 20"},
)
ONLY_NODE_1 = nodes({0: "0-3", 1: "4-7"}, allowed="1")
GRACE_HOPPER = nodes({0: "0-71", 1: ""}, memory=(0, 1), allowed="0-1")


def choose(root: Path, files: Mapping[str, str], option: str = "auto", cpus: str = "0-7", **extra: bool) -> NumaChoice:
    low, _, high = cpus.partition("-")
    return choose_numa(option, range(int(low), int(high or low) + 1), read_topology(write(root, files)), **extra)


def placed(choice: NumaChoice) -> tuple[str, tuple[int, ...]]:
    return choice.mode, choice.nodes


class TestAuto:
    """B03: each of its topologies starts; B04: the policy follows from topology and CPUs alone."""

    @pytest.mark.parametrize(
        ("files", "cpus", "expected"),
        [
            (ONE, "0-7", ("default", ())),
            (TWO, "0-7", ("interleave", (0, 1))),
            (TWO, "3-4", ("interleave", (0, 1))),  # a CPU list that crosses nodes binds both, not the first one's
            (TWO, "0-3", ("preferred", (0,))),
            (TWO, "5", ("preferred", (1,))),
            (FOUR, "0-7", ("interleave", (0, 1, 3))),
            (FOUR, "4-5", ("preferred", (3,))),  # a node without memory: the nearest that has some
            (FOUR, "2-5", ("preferred", (1,))),
            (ONLY_NODE_1, "4-7", ("default", ())),
            (ONLY_NODE_1, "0-7", ("default", ())),
            (GRACE_HOPPER, "0-7", ("preferred", (0,))),  # memory of the GPU is not for weights
            ({}, "0-7", ("default", ())),
        ],
    )
    def test_topologies(
        self, tmp_path: Path, files: Mapping[str, str], cpus: str, expected: tuple[str, tuple[int, ...]]
    ) -> None:
        choice = choose(tmp_path, files, cpus=cpus)
        assert placed(choice) == expected
        low, _, high = cpus.partition("-")
        assert choice.cpus == frozenset(range(int(low), int(high or low) + 1))
        assert not choice.restricts
        assert not choice.warnings
        assert choice.reason

    def test_the_reason_names_nodes(self, tmp_path: Path) -> None:
        assert choose(tmp_path, TWO).reason == ("the allowed CPUs are on nodes 0-1; memory page by page over nodes 0-1")

    def test_numactl_keeps_its_say(self, tmp_path: Path) -> None:
        assert placed(choose(tmp_path, TWO, inherited_policy=True)) == ("default", ())
        assert placed(choose(tmp_path, TWO, "interleave", inherited_policy=True)) == ("interleave", (0, 1))

    @pytest.mark.parametrize("missing", ["has_memory", "possible", "node0/cpulist"])
    def test_files_that_are_missing(self, tmp_path: Path, missing: str) -> None:
        files = {name: text for name, text in TWO.items() if not name.endswith(missing)}
        assert choose(tmp_path, files).cpus == frozenset(range(8))

    def test_old_kernels_tell_memory_by_the_total(self, tmp_path: Path) -> None:
        files = {name: text for name, text in TWO.items() if not name.endswith("has_memory")}
        files["sys/devices/system/node/node0/meminfo"] = "Node 0 MemTotal:       0 kB"
        files["sys/devices/system/node/node1/meminfo"] = "Node 1 MemTotal:    4096 kB"
        assert read_topology(write(tmp_path, files)).memory_nodes == (1,)


class TestAsked:
    def test_off(self, tmp_path: Path) -> None:
        assert placed(choose(tmp_path, TWO, "off")) == ("default", ())

    def test_interleave_takes_nodes_that_have_cpus(self, tmp_path: Path) -> None:
        assert placed(choose(tmp_path, TWO, "interleave", "0-3")) == ("interleave", (0, 1))
        assert placed(choose(tmp_path / "gh", GRACE_HOPPER, "interleave")) == ("preferred", (0,))
        assert placed(choose(tmp_path / "four", FOUR, "interleave")) == ("interleave", (0, 1, 3))

    @pytest.mark.parametrize(
        ("files", "option", "cpus", "expected", "left"),
        [
            (TWO, "1", "0-7", ("preferred", (1,)), range(4, 8)),
            (TWO, "0-1", "2-5", ("interleave", (0, 1)), range(2, 6)),
            (TWO, "0,1", "0-7", ("interleave", (0, 1)), range(8)),
            (FOUR, "2", "0-7", ("preferred", (3,)), range(4, 6)),
            (FOUR, "2-3", "0-7", ("preferred", (3,)), range(4, 8)),
        ],
    )
    def test_nodes(
        self,
        tmp_path: Path,
        files: Mapping[str, str],
        option: str,
        cpus: str,
        expected: tuple[str, tuple[int, ...]],
        left: range,
    ) -> None:
        choice = choose(tmp_path, files, option, cpus)
        assert placed(choice) == expected
        assert choice.cpus == frozenset(left)
        assert choice.restricts
        assert not choice.warnings

    def test_nodes_that_may_not_be_used_are_a_warning(self, tmp_path: Path) -> None:
        choice = choose(tmp_path, ONLY_NODE_1, "0", "4-7")
        assert choice.cpus == frozenset(range(4, 8))
        assert not choice.restricts
        assert len(choice.warnings) == 2
        assert "no CPU of NUMA node 0 may be used here; threads run on CPUs 4-7" in choice.warnings[0]
        assert "memory of NUMA node 0 may not be used here (cpuset.mems)" in choice.warnings[1]

    @pytest.mark.parametrize(("option", "says"), [("2", "node 2"), ("0-5", "node 2"), ("3-1", "'3-1'")])
    def test_nodes_that_are_not_there_are_an_error(self, tmp_path: Path, option: str, says: str) -> None:
        with pytest.raises(ConfigurationError, match=says):
            choose(tmp_path, TWO, option)

    def test_a_system_without_nodes(self, tmp_path: Path) -> None:
        assert placed(choose(tmp_path, {}, "interleave")) == ("default", ())
        with pytest.raises(ConfigurationError, match="shows no NUMA nodes"):
            choose(tmp_path, {}, "0")

    @pytest.mark.parametrize("option", ["", "on", "0,", "-1", "0-", "a", 0, None])
    def test_what_is_no_option(self, option: object) -> None:
        with pytest.raises(ConfigurationError, match=r"numa is .*auto, off, interleave, or a list of nodes"):
            EngineOptions(numa=option)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("option", "ours"), [("distribute", "interleave"), ("isolate", "one node"), ("numactl", "use off")]
    )
    def test_names_of_llama_cpp_are_answered(self, option: str, ours: str) -> None:
        with pytest.raises(ConfigurationError, match=f"llama.cpp's {option}.*{ours}"):
            EngineOptions(numa=option)


def machine(cpu_lists: list[set[int]], memory: set[int], allowed: set[int]) -> NumaTopology:
    all_nodes = tuple(NumaNode(i, frozenset(cpus), i in memory) for i, cpus in enumerate(cpu_lists))
    return NumaTopology(all_nodes, tuple(sorted(n.number for n in all_nodes if n.has_memory and n.number in allowed)))


TOPOLOGIES = st.integers(1, 5).flatmap(
    lambda count: st.builds(
        lambda owner, memory, allowed: machine(
            [{cpu for cpu, node in enumerate(owner) if node == number} for number in range(count)], memory, allowed
        ),
        st.lists(st.integers(0, count - 1), min_size=1, max_size=12),
        st.sets(st.integers(0, count - 1)),
        st.sets(st.integers(0, count - 1)),
    )
)


@given(TOPOLOGIES, st.data())
def test_always_starts_inside_what_is_allowed(topology: NumaTopology, data: st.DataObject) -> None:
    every = sorted(cpu for node in topology.nodes for cpu in node.cpus)
    cpus = data.draw(st.sets(st.sampled_from(every), min_size=1))
    numbers = [node.number for node in topology.nodes]
    listed = ",".join(map(str, data.draw(st.sets(st.sampled_from(numbers), min_size=1))))
    for option in ("auto", "off", "interleave", listed):
        choice = choose_numa(option, cpus, topology)
        assert choice.cpus
        assert choice.cpus <= cpus
        assert set(choice.nodes) <= set(topology.memory_nodes)
        assert choice.mode == ("default", "preferred", "interleave")[min(len(choice.nodes), 2)]
    homes = {node.number for node in topology.nodes if node.cpus & cpus} & set(topology.memory_nodes)
    if len(homes) > 1:
        assert set(choose_numa("auto", cpus, topology).nodes) == homes


def test_the_nearest_memory() -> None:
    three = NumaTopology(
        (
            NumaNode(0, frozenset(), True, (10, 20, 30)),
            NumaNode(1, frozenset({0}), False, (20, 10, 15)),
            NumaNode(4, frozenset(), True, (30, 15, 10)),
        ),
        (0, 4),
    )
    assert [nearest_memory(node, three) for node in (0, 1, 4)] == [0, 4, 4]
    assert nearest_memory(1, NumaTopology(three.nodes, ())) is None
