"""One hash over the logits of a fixed set of prompts: equal hashes mean that two machines compute the same bits.

Every prompt is prefilled and continued greedily; the bits of all logits go into the hash. By the op contract
(docs/ops.md) the int8, int4 and f32 rows of every instruction set round alike, so the hash of a model is the same on
all CPUs. The dot-product instructions for bf16 round in their own way: such rows are named as exempt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from neoserve._native import relaxed_rows
from neoserve.llm import LLM
from neoserve.types.errors import NeoServeError
from neoserve.types.options import EngineOptions
from neoserve.types.step import Executor

NEW_TOKENS = 16
LONG_TOKENS = 40
"""The last prompt is repeated to this length, so that products of many rows are among what is hashed."""

PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "def fibonacci(n):",
    "Once upon a time there was a",
    "1, 2, 3, 5, 8, 13,",
    "Dear customer, thank you for",
    "Die Hauptstadt von Deutschland ist",
    "北京是中国的",
    "The three primary colours are red, yellow and",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """What a model computes on this machine.

    ``prompts`` holds, per prompt, the SHA-256 of all its logits (float32, little endian, in order of positions), and
    ``logits`` that of these digests. ``outputs`` are the greedy ids per prompt, ``texts`` the same as text. ``rows``
    are the kernel rows bound, ``exempt`` those among them that do not promise equal bits on other CPUs. ``digest``
    identifies the checkpoint, ``formats`` its weights.
    """

    model: str
    digest: str
    formats: tuple[str, ...]
    logits: str
    prompts: tuple[str, ...]
    outputs: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]
    rows: tuple[str, ...]
    exempt: tuple[str, ...]

    def json_object(self) -> dict[str, object]:
        """Everything as JSON values."""
        return asdict(self)


def fingerprint(model: str | None, options: EngineOptions, limit: int = len(PROMPTS)) -> Fingerprint:
    """Loads a model and takes its fingerprint, of the first ``limit`` prompts only where emulation makes all too slow.

    Raises what loading raises, and NeoServeError if a logit is not finite.
    """
    with LLM(model, **asdict(options)) as llm:
        executor, loaded = llm.core.executor, llm.loaded
        vocabulary = min(llm.tokenizer.vocab_size, executor.limits.vocab_size)
        digests, outputs = [], []
        for prompt in _prompts(llm, executor.limits.max_context)[:limit]:
            logits = hashlib.sha256()
            outputs.append(tuple(_run(executor, prompt, vocabulary, logits)))
            digests.append(logits.hexdigest())
        formats = loaded.details["weight_formats"]
        rows = loaded.details["kernel_rows"]
        relaxed = set(relaxed_rows())
        assert isinstance(formats, list)
        assert isinstance(rows, list)
        return Fingerprint(
            model=loaded.served_name,
            digest=loaded.digest,
            formats=tuple(formats),
            logits=hashlib.sha256("".join(digests).encode()).hexdigest(),
            prompts=tuple(digests),
            outputs=tuple(outputs),
            texts=tuple(llm.tokenizer.decode(output) for output in outputs),
            rows=tuple(rows),
            exempt=tuple(row for row in rows if row in relaxed),
        )


def _prompts(llm: LLM, context: int) -> list[list[int]]:
    """Token ids of PROMPTS, each cut to what the context holds beside the new tokens."""
    tokenizer = llm.tokenizer
    prompts = [tokenizer.encode(text, add_bos=tokenizer.adds_bos, parse_special=True) for text in PROMPTS]
    last = prompts[-1]
    prompts[-1] = (last * (LONG_TOKENS // len(last) + 1))[:LONG_TOKENS]
    return [prompt[: max(1, context - NEW_TOKENS)] for prompt in prompts]


def _run(executor: Executor, prompt: Sequence[int], vocabulary: int, digest: hashlib._Hash) -> list[int]:
    """Greedy ids below ``vocabulary`` (the lowest among equal maxima) after ``prompt``; ``digest`` takes all logits."""
    limits = executor.limits
    ids = list(prompt)
    chunk = min(limits.max_tokens, limits.max_logit_rows)
    done = 0
    output: list[int] = []
    while len(output) < NEW_TOKENS:
        stop = min(done + chunk, len(ids))
        executor.step.fill_single(ids, done, stop, limits.page_size)
        executor.forward()
        rows = executor.logits()
        if not np.isfinite(rows).all():
            raise NeoServeError(f"logits between positions {done} and {stop} are not finite; run: pytest tests/kernels")
        digest.update(np.ascontiguousarray(rows, "<f4").tobytes())
        done = stop
        if done == len(ids):
            output.append(int(rows[-1, :vocabulary].argmax()))
            ids.append(output[-1])
    return output
