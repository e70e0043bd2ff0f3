"""``neoserve bench``: prefill and decode speed, against the machine's measured ceilings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from neoserve.cli import options as opt
from neoserve.cli import progress

if TYPE_CHECKING:
    from neoserve.bench.report import BenchReport


def bench(
    model: opt.ModelArgument = None,
    model_option: opt.ModelOption = None,
    prompt: Annotated[str, typer.Option("-p", "--prompt-tokens", help="Prompt lengths, comma-separated.")] = "512",
    generate: Annotated[str, typer.Option("-n", "--new-tokens", help="Output lengths, comma-separated.")] = "128",
    threads: Annotated[
        str | None, typer.Option("-t", "--threads", help="Numbers of threads, comma-separated. [default: all cores]")
    ] = None,
    batch: Annotated[str, typer.Option("--batch", help="Sequences at once, comma-separated.")] = "1",
    repetitions: Annotated[int, typer.Option("-r", "--repetitions", min=1, help="Runs of each test.")] = 3,
    dtype: opt.DType = "auto",
    quantization: opt.QuantizationOption = None,
    chunked_prefill_size: opt.ChunkSize = 512,
    page_size: opt.PageSize = 16,
    kv_cache_memory: opt.KvMemory = None,
    kernels: opt.Kernels = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure prefill (pp) and decode (tg) speed in tokens per second; -p 0 or -n 0 leaves one out."""
    from neoserve.bench.report import run_bench
    from neoserve.bench.throughput import plan_cases
    from neoserve.cli.output import print_json
    from neoserve.cli.values import parse_counts

    prompts = [] if prompt == "0" else parse_counts("--prompt-tokens", prompt)
    generates = [] if generate == "0" else parse_counts("--new-tokens", generate)
    report = run_bench(
        opt.chosen_model(model, model_option),
        plan_cases(prompts, generates, parse_counts("--batch", batch)),
        [None] if threads is None else [*parse_counts("--threads", threads)],
        opt.engine_options(
            dtype=dtype,
            quantization=quantization,
            chunk_size=chunked_prefill_size,
            page_size=page_size,
            kv_memory=kv_cache_memory,
            kernels=kernels,
        ),
        repetitions,
        progress=progress.show,
    )
    progress.show("")
    if as_json:
        print_json(report.json_object())
    else:
        _print(report)


def _print(report: BenchReport) -> None:
    from rich.table import Table

    from neoserve.cli.output import console, size

    screen = console()
    formats = report.details.get("weight_formats")
    named = ", ".join(formats) if isinstance(formats, list) else "unknown"
    screen.print(f"{report.model}: {size(report.weight_bytes)} of weights read per step ({named})")
    for item in report.ceilings:
        screen.print(
            f"{item.threads} threads: {item.bandwidth:.1f} GB/s read, {item.peak:.0f} GOP/s {item.peak_kind} peak"
        )
    table = Table("test", "batch", "threads", "tokens/s", "of the ceiling", box=None)
    for line in report.lines:
        result = line.measurement
        if line.bandwidth_share is not None:
            share = f"{line.bandwidth_share:.0%} of bandwidth"
        else:
            share = f"{line.peak_share or 0:.0%} of peak"
        speed = f"{result.mean:.1f} ± {result.deviation:.1f}"
        table.add_row(result.case.label, str(result.case.batch), str(line.threads), speed, share)
    screen.print(table)
