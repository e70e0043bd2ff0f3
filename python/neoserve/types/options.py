"""Options of an engine: how much it runs at once, with what memory, on which threads."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from neoserve.types.errors import ConfigurationError

DType = Literal["auto", "float32", "bfloat16"]
DTYPES: tuple[str, ...] = ("auto", "float32", "bfloat16")
Quantization = Literal["int8", "int4", "bf16"]
QUANTIZATIONS: tuple[str, ...] = ("int8", "int4", "bf16")
PAGE_SIZES = (16, 32, 64)
HugePages = Literal["auto", "off", "hugetlb"]
HUGE_PAGES: tuple[str, ...] = ("auto", "off", "hugetlb")
_NUMA = re.compile(r"auto|off|interleave|[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*")
_NUMA_ELSEWHERE = {
    "distribute": "; llama.cpp's distribute is interleave here",
    "isolate": "; for llama.cpp's isolate name one node, such as 0",
    "numactl": "; for llama.cpp's numactl use off",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What a user may choose about an engine. None means: chosen from the model and the machine.

    ``max_running_requests`` requests are computed together; at most ``max_queued_requests`` more may wait.
    ``max_tokens_per_step`` bounds the tokens of one step, decode and prefill together: the chunk size of chunked
    prefill, and with it the longest gap between two tokens of a running request. ``context_length`` is the longest
    prompt plus output in tokens. ``kv_cache_bytes`` is the memory for KV pages of ``page_size`` tokens.
    ``dtype`` is the weight and KV type (auto: as stored). ``quantization`` rounds the matrices at load instead: int8
    per channel, int4 in groups of 32, or bf16 (see program.quantize). ``num_threads`` counts compute threads.
    ``enable_prefix_caching`` keeps the KV of computed prefixes for requests that begin alike (it changes no answer).
    ``kernel_force`` names a kernel row or feature set that must be used. After ``max_failed_steps`` failed steps in
    a row the engine counts as dead.

    Raises ConfigurationError naming the option.
    """

    max_running_requests: int = 32
    max_queued_requests: int = 1024
    max_tokens_per_step: int = 512
    context_length: int | None = None
    page_size: int = 16
    kv_cache_bytes: int | None = None
    dtype: DType = "auto"
    quantization: Quantization | None = None
    num_threads: int | None = None
    kernel_force: str | None = None
    numa: str = "auto"
    huge_pages: HugePages = "auto"
    max_failed_steps: int = 8
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        _check_count("max_running_requests", self.max_running_requests, 1)
        _check_count("max_queued_requests", self.max_queued_requests, 0)
        _check_count("max_tokens_per_step", self.max_tokens_per_step, 1)
        _check_count("max_failed_steps", self.max_failed_steps, 1)
        for name in ("context_length", "kv_cache_bytes", "num_threads"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name), 1)
        if not isinstance(self.enable_prefix_caching, bool):
            raise ConfigurationError(f"enable_prefix_caching is {self.enable_prefix_caching!r}; it must be a boolean")
        if self.page_size not in PAGE_SIZES:
            raise ConfigurationError(f"page_size is {self.page_size!r}; it must be one of {PAGE_SIZES}")
        if self.dtype not in DTYPES:
            raise ConfigurationError(f"dtype is {self.dtype!r}; it must be one of {', '.join(DTYPES)}")
        if self.huge_pages not in HUGE_PAGES:
            raise ConfigurationError(f"huge_pages is {self.huge_pages!r}; it must be one of {', '.join(HUGE_PAGES)}")
        if not isinstance(self.numa, str) or not _NUMA.fullmatch(self.numa):
            elsewhere = _NUMA_ELSEWHERE.get(self.numa, "") if isinstance(self.numa, str) else ""
            raise ConfigurationError(
                f"numa is {self.numa!r}; it must be auto, off, interleave, or a list of nodes such as 0 or 0-1,3"
                f"{elsewhere}"
            )
        self._check_quantization()

    def _check_quantization(self) -> None:
        if self.quantization is None:
            return
        if self.quantization not in QUANTIZATIONS:
            choices = ", ".join(QUANTIZATIONS)
            raise ConfigurationError(f"quantization is {self.quantization!r}; it must be one of {choices}, or None")
        if self.dtype != "auto":
            raise ConfigurationError(
                f"dtype is {self.dtype!r} and quantization is {self.quantization!r}; both choose the weights' type: "
                "leave one out"
            )


def _check_count(name: str, value: object, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ConfigurationError(f"{name} is {value!r}; it must be an integer of at least {low}")
