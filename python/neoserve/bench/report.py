"""Speeds of one model related to what the machine can do: the content of ``neoserve bench``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from neoserve import __version__, _native
from neoserve.bench.machine import inspect_machine
from neoserve.bench.throughput import Case, Measurement, measure
from neoserve.engine.core import EngineCore
from neoserve.engine.load import LoadedModel, load_engine
from neoserve.program.dump import StepShape, cost, weight_bytes
from neoserve.types.errors import ConfigurationError, NeoServeError
from neoserve.types.options import EngineOptions

# Well above every last-level cache, so that memory is measured and not the cache.
_STREAM_BYTES = 512 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """What ``threads`` threads of this machine reach at best, measured just before the tests.

    ``bandwidth`` in GB/s of reading; ``peak`` in GOP/s of ``peak_kind`` (int8 or f32), a multiply-add being two.
    """

    threads: int
    bandwidth: float
    peak: float
    peak_kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One test with one number of threads.

    ``bandwidth_share`` is the weights read per second over the measured bandwidth (decode); ``peak_share`` the
    multiply-adds of the matrix products over the measured peak (prefill). Both are None for the other kind.
    """

    threads: int
    measurement: Measurement
    bandwidth_share: float | None
    peak_share: float | None

    def json_object(self) -> dict[str, object]:
        """As JSON values; speeds in tokens per second."""
        case = self.measurement.case
        return {
            "test": case.label,
            "kind": case.kind,
            "tokens": case.tokens,
            "batch": case.batch,
            "threads": self.threads,
            "tokens_per_second": self.measurement.mean,
            "deviation": self.measurement.deviation,
            "repetitions": list(self.measurement.speeds),
            "bandwidth_share": self.bandwidth_share,
            "peak_share": self.peak_share,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """All of one benchmark. ``weight_bytes`` are read in every decode step."""

    model: str
    details: dict[str, object]
    weight_bytes: int
    ceilings: tuple[Ceilings, ...]
    lines: tuple[Line, ...]

    def json_object(self) -> dict[str, object]:
        """As JSON values, with the machine beside it."""
        machine = inspect_machine()
        return {
            "version": __version__,
            "model": self.model,
            "details": self.details,
            "weight_bytes": self.weight_bytes,
            "cpu": machine.cpu,
            "features": list(machine.features),
            "ceilings": [
                {
                    "threads": item.threads,
                    "read_gb_per_second": item.bandwidth,
                    f"{item.peak_kind}_gop_per_second": item.peak,
                }
                for item in self.ceilings
            ],
            "results": [line.json_object() for line in self.lines],
        }


def run_bench(
    model: str | None,
    cases: Sequence[Case],
    threads: Sequence[int | None],
    options: EngineOptions,
    repetitions: int,
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> BenchReport:
    """Loads ``model`` once per number of threads (None: the default) and runs all ``cases``.

    ``progress`` is told what is being done. Raises what loading raises, and ConfigurationError when a test does not
    fit the model.
    """
    options = replace(
        options,
        context_length=max(case.context for case in cases),
        max_running_requests=max(case.batch for case in cases),
    )
    ceilings: list[Ceilings] = []
    lines: list[Line] = []
    loaded: LoadedModel | None = None
    for count in threads:
        progress("loading the model")
        loaded = load_engine(model, replace(options, num_threads=count))
        try:
            _check_fits(loaded.core, cases)
            used = _threads(loaded)
            progress(f"measuring the machine with {used} threads")
            ceilings.append(_measure_ceilings(loaded, used))
            lines += _run_cases(loaded.core, cases, repetitions, ceilings[-1], progress)
            streamed = streamed_bytes(loaded.core)
        finally:
            loaded.close()
    if loaded is None:
        raise ConfigurationError("there is nothing to measure; give a number of threads (-t)")
    return BenchReport(
        model=loaded.served_name,
        details={key: value for key, value in loaded.details.items() if key != "threads"},
        weight_bytes=streamed,
        ceilings=tuple(ceilings),
        lines=tuple(lines),
    )


def _run_cases(
    core: EngineCore, cases: Sequence[Case], repetitions: int, ceilings: Ceilings, progress: Callable[[str], None]
) -> Iterator[Line]:
    for case in cases:
        progress(f"{case.label}, batch {case.batch}, {ceilings.threads} threads")
        result = measure(core, case, repetitions)
        steps_per_second = result.mean / case.batch
        decode = case.kind == "decode"
        yield Line(
            threads=ceilings.threads,
            measurement=result,
            bandwidth_share=steps_per_second * streamed_bytes(core) / (ceilings.bandwidth * 1e9) if decode else None,
            peak_share=None if decode else result.mean * operations_per_token(core, case) / (ceilings.peak * 1e9),
        )


def streamed_bytes(core: EngineCore) -> int:
    """Bytes of weights that one step reads: every matrix of a product, once (an embedding is not streamed)."""
    program = core.executor.program  # type: ignore[attr-defined]
    names = {operand[1:] for op in program.instructions if op.op == "linear" for operand in _names(op.inputs)}
    return sum(weight_bytes(program.weights[name]) for name in names if name in program.weights)


def operations_per_token(core: EngineCore, case: Case) -> float:
    """Operations of the matrix products per prompt token; logits are computed for one token of each prompt."""
    program = core.executor.program  # type: ignore[attr-defined]
    shape = StepShape(tokens=case.tokens, rows=1, context=case.tokens)
    total = sum(cost(program, op, shape).flops for op in program.instructions if op.op == "linear")
    return total / case.tokens


def _names(operands: Sequence[object]) -> Iterator[str]:
    return (operand for operand in operands if isinstance(operand, str))


def _check_fits(core: EngineCore, cases: Sequence[Case]) -> None:
    """All sequences of a test must run at once, or the test would measure something else."""
    page_size = core.limits.page_size
    pages = min(group.num_pages for group in core.limits.groups)
    for case in cases:
        needed = case.batch * -(-case.context // page_size)
        if needed > pages:
            text = f"{case.label} with batch {case.batch} needs {needed} KV pages, there are {pages}"
            raise ConfigurationError(f"{text}; raise --kv-cache-memory or lower -p, -n or --batch")


def _threads(loaded: LoadedModel) -> int:
    threads = loaded.details.get("threads")
    if not isinstance(threads, int):
        raise NeoServeError("the loaded model does not tell its number of threads")
    return threads


def _measure_ceilings(loaded: LoadedModel, threads: int) -> Ceilings:
    bandwidth = float(_native.measure_read_bandwidth(threads, _STREAM_BYTES))
    formats = loaded.details.get("weight_formats")
    quantised = isinstance(formats, list) and any(str(item).startswith("int") for item in formats)
    peak = _native.measure_int8_peak(threads) if quantised else _native.measure_f32_peak(threads)
    return Ceilings(threads=threads, bandwidth=bandwidth, peak=float(peak), peak_kind="int8" if quantised else "f32")
