"""``neoserve inspect``: what a model is and how it would run here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from neoserve.cli import options as opt

if TYPE_CHECKING:
    from neoserve.engine.inspection import ModelInspection
    from neoserve.types.model import ModelConfig


def inspect(
    model: opt.ModelArgument = None,
    model_option: opt.ModelOption = None,
    program: Annotated[
        bool, typer.Option("--program", help="List the program: shapes, bytes, FLOPs, source lines.")
    ] = False,
    rows: Annotated[
        bool, typer.Option("--rows", help="With --program: pack the weights and show the kernel row of each op.")
    ] = False,
    step_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the step that costs are given for.")] = 16,
    dtype: opt.DType = "auto",
    quantization: opt.QuantizationOption = None,
    context_length: opt.ContextLength = None,
    page_size: opt.PageSize = 16,
    kv_cache_memory: opt.KvMemory = None,
    kernels: opt.Kernels = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show a model's configuration, weight formats and memory; no weight is read without --rows."""
    from neoserve.cli.output import print_json
    from neoserve.engine.inspection import inspect_model

    inspection = inspect_model(
        opt.chosen_model(model, model_option),
        opt.engine_options(
            dtype=dtype,
            quantization=quantization,
            context_length=context_length,
            page_size=page_size,
            kv_memory=kv_cache_memory,
            kernels=kernels,
        ),
        program=program or rows,
        bind=rows,
        step_tokens=step_tokens,
    )
    if as_json:
        print_json(inspection.json_object())
    elif inspection.program is not None:
        print(inspection.program, end="")
    else:
        _print(inspection)


def _print(found: ModelInspection) -> None:
    from rich.table import Table

    from neoserve.cli.output import console, size

    config, defaults = found.config, found.generation
    recommended = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    sampling = [f"{name} {value:g}" for name in recommended if (value := getattr(defaults, name)) is not None]
    stored = ", ".join(f"{item.name}: {item.tensors} ({size(item.nbytes)})" for item in found.stored)
    facts = {
        "Model": f"{found.name} ({found.origin})",
        "Path": found.path,
        "Architecture": config.architecture,
        "Parameters": f"{found.parameters / 1e6:,.1f} million",
        "Layers": f"{config.num_layers} of width {config.hidden_size}, MLP {config.intermediate_size}",
        "Attention": f"{config.num_heads} heads of {config.head_dim}, {config.num_kv_heads} for KV; {_windows(config)}",
        "Vocabulary": f"{config.vocab_size}{' (tied embedding)' if config.tie_embeddings else ''}",
        "Rope": "; ".join(f"{rope.kind}, theta {rope.theta:g}" for rope in config.ropes),
        "Tensors": stored,
        "Runs as": ", ".join(f"{name} ({size(nbytes)})" for name, nbytes in found.weight_formats.items()),
        "KV cache": f"{size(round(found.kv_bytes_per_token))} a token",
        "Context": f"{found.context_length} of {config.max_position} tokens",
        "EOS": ", ".join(str(token) for token in defaults.eos_token_ids) or "none named",
        "Sampling": ", ".join(sampling) or "no recommendation",
        "Chat templates": ", ".join(found.chat_templates) or "none",
        "Digest": found.digest,
    }
    table = Table(box=None, show_header=False)
    for name, value in facts.items():
        table.add_row(name, value)
    screen = console()
    screen.print(table)
    screen.print(found.summary)


def _windows(config: ModelConfig) -> str:
    windowed = [window for window in config.layer_windows if window is not None]
    if not windowed:
        return "full attention"
    spans = ", ".join(str(window) for window in sorted(set(windowed)))
    return f"{len(windowed)} of {config.num_layers} layers see a window of {spans} tokens"
