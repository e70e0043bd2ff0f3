"""Published models: the native executor against the contract in numpy, bit for bit, on the weights as stored."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from neoserve.models.registry import build_program
from neoserve.program.executor import build_executor, build_reference_executor
from neoserve.types.options import EngineOptions
from neoserve.types.step import Executor, Float32Array

from .real_models import MODELS, open_model

OPTIONS = EngineOptions(max_tokens_per_step=64, max_running_requests=1, kv_cache_bytes=64 << 20, context_length=64)
IDS = (504, 3575, 282, 4649)


def run(executor: Executor) -> Float32Array:
    """Logits of IDS in one step."""
    step, count = executor.step, len(IDS)
    step.num_tokens = step.num_logit_rows = count
    step.num_sequences = 1
    step.token_ids[:count] = IDS
    step.positions[:count] = step.logit_rows[:count] = np.arange(count)
    step.query_start[:2] = (0, count)
    step.context_len[0] = count
    for table in step.block_tables:
        table[0, :4] = (2, 0, 3, 1)
    executor.forward()
    return executor.logits().copy()


@pytest.mark.parametrize("name", MODELS)
def test_native_equals_the_contract(name: str) -> None:
    with open_model(name) as checkpoint:
        native = build_executor(checkpoint, replace(OPTIONS, num_threads=2), build_program)
        try:
            found = run(native)
        finally:
            native.close()
        expected = run(build_reference_executor(checkpoint, OPTIONS, build_program, precision="contract"))
    np.testing.assert_array_equal(found, expected)
    assert expected.std() > 1
