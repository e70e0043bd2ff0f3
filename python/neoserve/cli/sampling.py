"""Sampling options of ``generate`` and ``chat``."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from neoserve.types.errors import NeoServeError

if TYPE_CHECKING:
    from neoserve.llm import LLM, TextDelta
    from neoserve.types.sampling import SamplingParams

MaxTokens = Annotated[int | None, typer.Option(help="Most new tokens. [default: the rest of the context]")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy. [default: the model's recommendation]")]
TopP = Annotated[float | None, typer.Option(help="Nucleus size. [default: the model's recommendation]")]
TopK = Annotated[int | None, typer.Option(help="Candidates; 0 is off. [default: the model's recommendation]")]
MinP = Annotated[float | None, typer.Option(help="Least share of the best. [default: the model's recommendation]")]
RepetitionPenalty = Annotated[float | None, typer.Option(help="1 is off. [default: the model's recommendation]")]
Seed = Annotated[int | None, typer.Option(help="Equal seeds give equal answers. [default: a fresh one]")]


def sampling_params(llm: LLM, **given: float | int | None) -> SamplingParams:
    """The model's recommendation with what the user gave; raises InvalidRequestError naming the field."""
    return replace(llm.default_sampling_params(), **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]


def pieces(deltas: Iterable[TextDelta]) -> Generator[str, None, None]:
    """The text of a stream; raises NeoServeError if the engine failed it."""
    for delta in deltas:
        yield delta.text
        if delta.finish_reason == "error":
            raise NeoServeError(f"the answer failed in the engine: {delta.error}")
