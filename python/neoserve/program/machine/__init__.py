"""The machine as it is: CPUs, control groups, memory, NUMA nodes and pages that this process may use (design D9).

``placement`` and ``pages`` load the native library and are imported by name where they are needed.
"""

from neoserve.program.machine.cgroups import Quota, cpu_quota
from neoserve.program.machine.cpus import ThreadChoice, allowed_cpus, choose_threads, physical_cores
from neoserve.program.machine.memory import memory_available
from neoserve.program.machine.numa import NumaChoice, NumaTopology, choose_numa, read_topology

__all__ = [
    "NumaChoice",
    "NumaTopology",
    "Quota",
    "ThreadChoice",
    "allowed_cpus",
    "choose_numa",
    "choose_threads",
    "cpu_quota",
    "memory_available",
    "physical_cores",
    "read_topology",
]
