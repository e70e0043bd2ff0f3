"""``neoserve serve``: the OpenAI-compatible HTTP server."""

from __future__ import annotations

from typing import Annotated

import typer

from neoserve.cli import options as opt


def serve(
    model: opt.ModelArgument = None,
    model_option: opt.ModelOption = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name that requests use; may be repeated. [default: the model's]")
    ] = None,
    dtype: opt.DType = "auto",
    context_length: opt.ContextLength = None,
    threads: opt.Threads = None,
    max_running_requests: opt.MaxRunning = 32,
    max_queued_requests: opt.MaxQueued = 1024,
    chunked_prefill_size: opt.ChunkSize = 512,
    page_size: opt.PageSize = 16,
    kv_cache_memory: opt.KvMemory = None,
    chat_template: opt.ChatTemplateFile = None,
    tokenizer_pre: opt.TokenizerPre = None,
    api_key: Annotated[str | None, typer.Option(help="Not built yet: refused.")] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    drain_seconds: Annotated[float, typer.Option(help="How long running requests may go on after SIGTERM.")] = 30.0,
    kernels: opt.Kernels = None,
) -> int:
    """Serve a model over HTTP until SIGTERM or SIGINT."""
    raise NotImplementedError
