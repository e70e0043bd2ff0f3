"""``neoserve serve``: the OpenAI-compatible HTTP server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from neoserve.cli import options as opt

if TYPE_CHECKING:
    from neoserve.api.server import Loaded
    from neoserve.types.options import EngineOptions


def serve(
    model: opt.ModelArgument = None,
    model_option: opt.ModelOption = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name that requests use; may be repeated. [default: the model's]")
    ] = None,
    dtype: opt.DType = "auto",
    quantization: opt.QuantizationOption = None,
    context_length: opt.ContextLength = None,
    threads: opt.Threads = None,
    numa: opt.Numa = "auto",
    huge_pages: opt.HugePages = "auto",
    max_running_requests: opt.MaxRunning = 32,
    max_queued_requests: opt.MaxQueued = 1024,
    chunked_prefill_size: opt.ChunkSize = 512,
    page_size: opt.PageSize = 16,
    kv_cache_memory: opt.KvMemory = None,
    chat_template: opt.ChatTemplateFile = None,
    tokenizer_pre: opt.TokenizerPre = None,
    api_key: Annotated[str | None, typer.Option(help="Refused: keys are not built yet.")] = None,
    log_level: Annotated[
        str, typer.Option(help="debug, info (with one line a request), warning or error.")
    ] = "warning",
    drain_seconds: Annotated[float, typer.Option(help="How long running requests may go on after SIGTERM.")] = 30.0,
    kernels: opt.Kernels = None,
    disable_radix_cache: opt.NoPrefixCache = False,
    show_cached_tokens: opt.ShowCachedTokens = False,
) -> int:
    """Serve a model over HTTP until SIGTERM or SIGINT."""
    from neoserve.api.server import ServerOptions, configure_logging
    from neoserve.api.server import serve as run_server
    from neoserve.types.errors import ConfigurationError

    if api_key is not None:
        raise ConfigurationError("--api-key is not built yet; leave it out and check keys in a proxy before the server")
    server = ServerOptions(
        host=host, port=port, log_level=log_level, drain_seconds=drain_seconds, show_cached_tokens=show_cached_tokens
    )
    engine = opt.engine_options(
        dtype=dtype,
        quantization=quantization,
        context_length=context_length,
        threads=threads,
        numa=numa,
        huge_pages=huge_pages,
        max_running=max_running_requests,
        max_queued=max_queued_requests,
        chunk_size=chunked_prefill_size,
        page_size=page_size,
        kv_memory=kv_cache_memory,
        kernels=kernels,
        prefix_caching=not disable_radix_cache,
    )
    configure_logging(log_level)
    chosen = opt.chosen_model(model, model_option)
    return run_server(lambda: _load(chosen, engine, served_model_name, chat_template, tokenizer_pre), server)


def _load(
    model: str | None,
    options: EngineOptions,
    names: list[str] | None,
    template_file: str | None,
    tokenizer_pre: str | None,
) -> Loaded:
    """The model in an engine, with its text tools; runs beside the server that answers 503 meanwhile."""
    from neoserve.api.model import build_served_model
    from neoserve.api.server import Loaded
    from neoserve.cli.progress import packing
    from neoserve.engine.client import AsyncEngine
    from neoserve.engine.load import load_engine

    loaded = load_engine(model, options, pack_progress=packing())
    served = build_served_model(
        loaded.tokenizer_source,
        names=names or [loaded.served_name],
        generation=loaded.generation,
        context_length=loaded.core.context_length,
        digest=loaded.digest,
        details=loaded.details,
        template_file=template_file,
        tokenizer_pre=tokenizer_pre,
    )
    loaded.core.restrict_vocabulary(served.tokenizer.vocab_size)
    return Loaded(served, AsyncEngine(loaded.core), loaded.summary)
