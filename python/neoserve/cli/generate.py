"""``neoserve generate``: completes one prompt."""

from __future__ import annotations

import sys
from contextlib import closing
from typing import Annotated

import typer

from neoserve.cli import options as opt
from neoserve.cli import sampling


def generate(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text to complete; - reads standard input.")],
    model: opt.ModelOption = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask it as a chat message instead of completing it.")] = False,
    max_tokens: sampling.MaxTokens = 128,
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
    """Complete a prompt and print the text as it comes."""
    text = sys.stdin.read() if prompt == "-" else prompt
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
    with opt.open_llm(model, options, chat_template, tokenizer_pre) as llm:
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
        messages = [{"role": "user", "content": text}]
        stream = llm.stream_chat(messages, params) if chat else llm.stream(text, params)
        with closing(sampling.pieces(stream)) as answer:
            for piece in answer:
                sys.stdout.write(piece)
                sys.stdout.flush()
    sys.stdout.write("\n")
