"""NUMA nodes, and on which of them a process's memory and threads go (docs/machine.md has the policy)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from neoserve.program.machine.files import ROOT, format_ids, parse_count, parse_ids, read, read_ids
from neoserve.types.errors import ConfigurationError

Mode = Literal["default", "preferred", "interleave"]


@dataclass(frozen=True, slots=True)
class NumaNode:
    """One node: its CPUs, whether it has memory, and the distances to all nodes as the firmware gives them (10 is
    the node itself; empty when unknown)."""

    number: int
    cpus: frozenset[int]
    has_memory: bool
    distances: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class NumaTopology:
    """Online nodes, ascending. ``memory_nodes`` have memory that this process may use (cpuset.mems); ``known`` is
    False where the kernel shows no nodes."""

    nodes: tuple[NumaNode, ...]
    memory_nodes: tuple[int, ...]
    known: bool = True

    def node_of(self, cpu: int) -> NumaNode | None:
        """The node that holds ``cpu``."""
        return next((node for node in self.nodes if cpu in node.cpus), None)


@dataclass(frozen=True, slots=True)
class NumaChoice:
    """Where memory goes (``mode`` over ``nodes``) and which CPUs the threads may use. ``restricts`` says that the
    user named nodes, so that the whole process is kept on their CPUs. ``warnings`` are for the log."""

    mode: Mode
    nodes: tuple[int, ...]
    cpus: frozenset[int]
    reason: str
    restricts: bool = False
    warnings: tuple[str, ...] = ()


def read_topology(root: Path = ROOT) -> NumaTopology:
    """Nodes under /sys/devices/system/node (kernel: Documentation/ABI/stable/sysfs-devices-node), and the memory
    nodes of /proc/self/status (Mems_allowed_list)."""
    folder = root / "sys/devices/system/node"
    numbers = read_ids(folder / "online") or _listed(folder)
    with_memory = read_ids(folder / "has_memory") or read_ids(folder / "has_normal_memory")
    nodes = tuple(
        NumaNode(
            number,
            frozenset(read_ids(folder / f"node{number}/cpulist") or ()),
            _has_memory(folder, number) if with_memory is None else number in with_memory,
            _distances(folder, number),
        )
        for number in numbers
    )
    allowed = _allowed_memory(root)
    memory = tuple(node.number for node in nodes if node.has_memory and (allowed is None or node.number in allowed))
    return NumaTopology(nodes, memory, known=bool(nodes))


def choose_numa(
    option: str, cpus: Collection[int], topology: NumaTopology, *, inherited_policy: bool = False
) -> NumaChoice:
    """Placement for a process that may use ``cpus``. ``option`` is EngineOptions.numa.

    ``inherited_policy``: the process was started under numactl's memory options, which auto leaves alone. Raises
    ConfigurationError when ``option`` names a node that the machine has not.
    """
    usable = frozenset(cpus)
    if option == "off":
        return NumaChoice("default", (), usable, "off: the system places memory")
    if not topology.known:
        if option not in ("auto", "interleave"):
            raise ConfigurationError(f"numa is {option!r}, but this system shows no NUMA nodes; use auto or off")
        return NumaChoice("default", (), usable, "this system shows no NUMA nodes")
    if option == "interleave":
        return _spread(_nodes_with_cpus(topology), usable, topology, "interleave as asked")
    if option != "auto":
        try:
            return _named(parse_ids(option), usable, topology)
        except ValueError as error:
            raise ConfigurationError(f"numa is {option!r}: {error}") from None
    if inherited_policy:
        return NumaChoice("default", (), usable, "the memory policy that the process was started under stays")
    homes = sorted({node.number for cpu in usable if (node := topology.node_of(cpu)) is not None})
    text = f"the allowed CPUs are on node{'' if len(homes) == 1 else 's'} {format_ids(homes) or 'unknown'}"
    return _spread(homes, usable, topology, text)


def nearest_memory(node: int, topology: NumaTopology) -> int | None:
    """``node`` if its memory may be used, else the closest node whose memory may; None when there is none.

    Of equally close ones the lowest; of unknown distance, all are equally close.
    """
    if node in topology.memory_nodes:
        return node
    own = next((each for each in topology.nodes if each.number == node), None)
    distances = own.distances if own is not None else ()
    order = [each.number for each in topology.nodes]

    def distance(other: int) -> tuple[int, int]:
        place = order.index(other)
        return (distances[place] if place < len(distances) else 255, other)

    return min(topology.memory_nodes, key=distance, default=None)


def _spread(nodes: Iterable[int], cpus: frozenset[int], topology: NumaTopology, why: str) -> NumaChoice:
    """Memory on ``nodes`` as far as they have memory that is allowed, else on what is nearest to them."""
    wanted = tuple(nodes)
    memory = tuple(node for node in wanted if node in topology.memory_nodes)
    if not memory:
        memory = tuple(sorted({near for node in wanted if (near := nearest_memory(node, topology)) is not None}))
    if len(topology.memory_nodes) <= 1:
        only = f"node {topology.memory_nodes[0]}" if topology.memory_nodes else "no node"
        return NumaChoice("default", (), cpus, f"{why}; {only} alone has memory that may be used")
    if not memory:
        return NumaChoice("default", (), cpus, f"{why}; none of them has memory that may be used")
    if len(memory) == 1:
        return NumaChoice("preferred", memory, cpus, f"{why}; memory on node {memory[0]}, others when it is full")
    return NumaChoice("interleave", memory, cpus, f"{why}; memory page by page over nodes {format_ids(memory)}")


def _named(nodes: tuple[int, ...], cpus: frozenset[int], topology: NumaTopology) -> NumaChoice:
    have = {node.number: node for node in topology.nodes}
    for number in nodes:
        if number not in have:
            raise ConfigurationError(
                f"numa names node {number}, but this machine has node {format_ids(have)}; neoserve doctor shows them"
            )
    wanted = format_ids(nodes)
    warnings = []
    inside = cpus & frozenset().union(*(have[number].cpus for number in nodes))
    if not inside:
        warnings.append(f"no CPU of NUMA node {wanted} may be used here; threads run on CPUs {format_ids(cpus)}")
    barred = [number for number in nodes if have[number].has_memory and number not in topology.memory_nodes]
    if barred:
        warnings.append(f"memory of NUMA node {format_ids(barred)} may not be used here (cpuset.mems)")
    choice = _spread(nodes, inside or cpus, topology, f"node {wanted} as asked")
    return NumaChoice(choice.mode, choice.nodes, choice.cpus, choice.reason, bool(inside), tuple(warnings))


def _nodes_with_cpus(topology: NumaTopology) -> list[int]:
    """Memory without CPUs is slow (CXL) or another device's (a GPU's on Grace Hopper): used only when it is named."""
    return [node.number for node in topology.nodes if node.cpus]


def _listed(folder: Path) -> tuple[int, ...]:
    found = (parse_count(path.name[4:]) for path in folder.glob("node[0-9]*"))
    return tuple(sorted(number for number in found if number is not None))


def _has_memory(folder: Path, number: int) -> bool:
    """For kernels without has_memory: a node counts unless its total is said to be zero."""
    for line in read(folder / f"node{number}/meminfo").splitlines():
        words = line.split()
        if len(words) >= 4 and words[2] == "MemTotal:":
            return words[3] != "0"
    return True


def _distances(folder: Path, number: int) -> tuple[int, ...]:
    values = [parse_count(word) for word in read(folder / f"node{number}/distance").split()]
    return tuple(value for value in values if value is not None) if None not in values else ()


def _allowed_memory(root: Path) -> frozenset[int] | None:
    for line in read(root / "proc/self/status").splitlines():
        name, _, value = line.partition(":")
        if name == "Mems_allowed_list":
            try:
                return frozenset(parse_ids(value)) or None
            except ValueError:
                return None
    return None
