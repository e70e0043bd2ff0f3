"""NeoServe: serves large language models on CPUs. The public names are loaded when first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from neoserve.llm import LLM, AsyncLLM, RequestOutput
    from neoserve.types.sampling import SamplingParams

__version__ = "0.1.0"

__all__ = ["LLM", "AsyncLLM", "RequestOutput", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "neoserve.llm",
    "AsyncLLM": "neoserve.llm",
    "RequestOutput": "neoserve.llm",
    "SamplingParams": "neoserve.types.sampling",
}


def __getattr__(name: str) -> object:
    """Imports a public name on first use, so that ``import neoserve`` stays cheap."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
