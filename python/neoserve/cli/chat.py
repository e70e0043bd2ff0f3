"""``neoserve chat``: a conversation on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from neoserve.cli import options as opt
from neoserve.cli import sampling


def chat(
    model: opt.ModelArgument = None,
    model_option: opt.ModelOption = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: sampling.MaxTokens = None,
    temperature: sampling.Temperature = None,
    top_p: sampling.TopP = None,
    top_k: sampling.TopK = None,
    min_p: sampling.MinP = None,
    repetition_penalty: sampling.RepetitionPenalty = None,
    seed: sampling.Seed = None,
    dtype: opt.DType = "auto",
    quantization: opt.QuantizationOption = None,
    context_length: opt.ContextLength = None,
    threads: opt.Threads = None,
    numa: opt.Numa = "auto",
    huge_pages: opt.HugePages = "auto",
    kv_cache_memory: opt.KvMemory = None,
    chat_template: opt.ChatTemplateFile = None,
    tokenizer_pre: opt.TokenizerPre = None,
    kernels: opt.Kernels = None,
) -> None:
    """Talk with a model; it keeps the history. /reset, /exit and /help are commands."""
    from neoserve.cli.repl import HELP, Conversation, Message

    options = opt.engine_options(
        dtype=dtype,
        quantization=quantization,
        context_length=context_length,
        threads=threads,
        numa=numa,
        huge_pages=huge_pages,
        kv_memory=kv_cache_memory,
        kernels=kernels,
        max_running=1,
    )
    with opt.open_llm(opt.chosen_model(model, model_option), options, chat_template, tokenizer_pre) as llm:
        params = sampling.sampling_params(
            llm,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
        )

        def answer(messages: list[Message]) -> Iterator[str]:
            return sampling.pieces(llm.stream_chat(messages, params))

        interactive = sys.stdin.isatty()
        if interactive:
            print(f"{llm.loaded.summary}\n{HELP}")
        Conversation(answer, input if interactive else _read_line, sys.stdout, system).run()


def _read_line(_: str) -> str:
    """A line of standard input without a prompt text, for input that is not typed."""
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line
