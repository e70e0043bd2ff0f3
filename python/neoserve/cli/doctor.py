"""``neoserve doctor``: what was found on this machine and what is chosen there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from neoserve.cli import options as opt

if TYPE_CHECKING:
    from neoserve.bench.machine import MachineReport
    from neoserve.types.options import EngineOptions


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    kernels: opt.Kernels = None,
    fingerprint: Annotated[
        str | None,
        typer.Option("--fingerprint", metavar="NAME", help="Hash the logits of a model, to compare machines."),
    ] = None,
    dtype: opt.DType = "auto",
    quantization: opt.QuantizationOption = None,
    threads: opt.Threads = None,
    numa: opt.Numa = "auto",
) -> None:
    """Show cores, features, limits, what an engine would choose here, and the kernel rows with reasons."""
    from neoserve.bench.machine import inspect_machine
    from neoserve.cli.output import print_json
    from neoserve.types.errors import ConfigurationError

    if fingerprint is not None:
        _fingerprint(
            fingerprint,
            opt.engine_options(
                dtype=dtype, quantization=quantization, threads=threads, numa=numa, kernels=kernels, max_running=1
            ),
            as_json,
        )
        return
    if dtype != "auto" or quantization is not None:
        raise ConfigurationError("--dtype and --quantization of doctor belong to --fingerprint MODEL")
    report = inspect_machine(kernels or "", options=opt.engine_options(threads=threads, numa=numa))
    if as_json:
        print_json(report.json_object())
    else:
        _print(report)


def _fingerprint(model: str, options: EngineOptions, as_json: bool) -> None:
    from neoserve.bench.fingerprint import fingerprint
    from neoserve.cli.output import console, print_json

    found = fingerprint(model, options)
    if as_json:
        print_json(found.json_object())
        return
    screen = console()
    screen.print(f"{found.model}: {', '.join(found.formats)} ({found.digest})", markup=False)
    for text in found.texts:
        screen.print(f"  {text!r}", markup=False)
    screen.print(f"kernel rows: {', '.join(found.rows)}", markup=False)
    if found.exempt:
        screen.print(
            f"not comparable with other CPUs, for their rounding differs: {', '.join(found.exempt)}", markup=False
        )
    screen.print(f"fingerprint: {found.logits}", markup=False)


def _print(report: MachineReport) -> None:
    from rich.table import Table

    from neoserve.cli.output import console, size

    quota = report.cpu_quota
    nodes = "; ".join(f"{name}: {what}" for name, what in report.numa_nodes.items()) or "not exposed"
    vectors = f", SVE of {8 * report.vector_bytes} bits" if report.vector_bytes else ""
    facts = {
        "NeoServe": f"{report.version} on Python {report.python}",
        "System": report.system,
        "CPU": report.cpu,
        "Core": "; ".join(map(str, report.cores)) or "unknown",
        "Features": f"{', '.join(report.features) or 'none beyond the baseline'}{vectors}",
        "Cores": f"{report.physical_cores} physical, {report.logical_cpus} logical, {report.allowed_cpus} allowed "
        f"(CPUs {report.allowed_cpu_list})",
        "CPU quota": "none" if quota is None else f"{quota.cpus:g} CPUs, of cgroup {quota.group}",
        "NUMA nodes": nodes,
        "Memory": f"{size(report.memory_available)} available of {size(report.memory_total)} ({report.memory_limit})",
        "Pages": f"{size(report.page_size)}; huge pages: {report.huge_pages}",
        "Threads": f"{report.threads}: {report.threads_reason}",
        "Placement": f"{report.numa}; {report.pinning}",
    }
    for number, warning in enumerate(report.warnings, 1):
        facts[f"Warning {number}"] = warning
    screen = console()
    overview = Table(box=None, show_header=False)
    for name, value in facts.items():
        overview.add_row(name, value)
    screen.print(overview)
    rows = Table("op", "row", "feature set", "", title="Kernel rows, preferred first", title_justify="left", box=None)
    for row in report.rows:
        rows.add_row(row.op, row.row, row.feature_set, "chosen" if row.chosen else f"rejected: {row.reason}")
    screen.print(rows)
