"""One linear op over given operands, through the native executor."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .bench import Bench
from .weights import Activation, Weight

Float32 = npt.NDArray[np.float32]


def load_activation(bench: Bench, name: str, x: Activation) -> None:
    """Puts ``x`` into the first rows of a buffer; the padding of int8 rows is zeroed, as `quantize` does."""
    rows, k = x.values.shape
    values = bench.values(name)
    if x.scales is not None and x.sums is not None:
        values[:rows] = 0
        bench.scales(name)[:rows], bench.sums(name)[:rows] = x.scales, x.sums
    values[:rows, :k] = x.values


def run_linear(
    weight: Weight,
    x: Activation,
    force: str,
    *,
    bias: Float32 | None = None,
    into: Float32 | None = None,
    threads: int = 1,
    spare_columns: int = 3,
    repeats: int = 1,
) -> Float32:
    """y [rows, n]; accumulated onto ``into`` when given. The output is a view inside a wider buffer, and the row that
    ``force`` names is checked to have run."""
    rows = len(x.values)
    bench = Bench(
        {"x": (weight.k, weight.format.activation), "y": (weight.n + 2 * spare_columns, "f32")},
        force=force,
        threads=threads,
        tokens=rows + 1,
    )
    load_activation(bench, "x", x)
    packed = weight.pack(force)
    out = bench.buffers["y"].view(spare_columns, weight.n)
    vectors = [] if bias is None else [bench.vector(bias)]
    bench.op("linear", out, bench["x"], bench.weight(packed), *vectors, accumulate=int(into is not None))
    if force.startswith("linear_"):
        assert [row for _, _, row in bench.model.rows()] == [force] == [packed.row_name]
    bench.set_step_counts(rows)
    found = bench.values("y")[:rows, spare_columns : spare_columns + weight.n]
    first: Float32 | None = None
    for _ in range(repeats):
        if into is not None:
            found[:] = into
        bench.run(out)
        assert first is None or found.tobytes() == first.tobytes(), "a second run gave other bits"
        first = found.copy()
    assert first is not None
    return first
