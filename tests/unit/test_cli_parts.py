"""Parts of the command line that need no model: sizes, foreign flags, the chat conversation."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator

import pytest
import typer

from neoserve.cli import foreign_flags
from neoserve.cli.main import app
from neoserve.cli.repl import Conversation, Message
from neoserve.cli.values import parse_counts, parse_size
from neoserve.types.errors import ConfigurationError, ContextLengthError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4", 4 << 30),
        ("1.5", 3 << 29),
        ("512MiB", 512 << 20),
        ("512m", 512 << 20),
        ("2GB", 2 * 10**9),
        ("2 GiB", 2 << 30),
        ("1000000B", 1_000_000),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size("--x", text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "1e3", "many", "1XB", "0.0000000001", "nan"])
def test_bad_sizes_name_the_option(text: str) -> None:
    with pytest.raises(ConfigurationError, match="--x"):
        parse_size("--x", text)


def test_counts() -> None:
    assert parse_counts("-t", "1, 2,16") == [1, 2, 16]
    for text in ("", "0", "1,,2", "-1", "a", "1.5"):
        with pytest.raises(ConfigurationError, match="-t"):
            parse_counts("-t", text)


@pytest.mark.parametrize(
    ("arguments", "ours"),
    [
        (["--max-model-len", "4096"], "use --context-length"),
        (["--max-model-len=4096"], "use --context-length"),
        (["--max-num-seqs", "4"], "use --max-running-requests"),
        (["--gpu-memory-utilization", "0.9"], "not applicable on CPUs"),
        (["--model-path", "x"], "use MODEL or --model"),
        (["--mem-fraction-static", "0.8"], "not applicable on CPUs"),
        (["--tp", "2"], "not needed"),
        (["-c", "4096"], "use --context-length"),
        (["--ctx-size", "4096"], "use --context-length"),
        (["-ngl", "99"], "not applicable on CPUs"),
        (["-m", "x.gguf"], "use MODEL or --model"),
        (["-t", "4"], "use --threads"),
        (["--n-predict", "4"], "use --max-tokens"),
    ],
)
def test_foreign_flags_are_answered_with_ours(arguments: list[str], ours: str) -> None:
    sentence = foreign_flags.answer(arguments, own=set())
    assert sentence is not None
    assert ours in sentence
    assert sentence.startswith(arguments[0].partition("=")[0])
    assert "\n" not in sentence


def test_our_own_flags_are_never_foreign() -> None:
    assert foreign_flags.answer(["-t", "4"], own={"-t"}) is None
    assert foreign_flags.answer(["--no-such-flag"], own=set()) is None


def test_what_is_recommended_exists() -> None:
    """Every flag of ours that an answer names belongs to a command."""
    command = typer.main.get_command(app)
    ours = {flag for one in command.commands.values() for parameter in one.params for flag in parameter.opts}
    named = {flag for row in foreign_flags.FLAGS.values() for flag in re.findall(r"--[a-z-]+", row.answer)}
    assert named - ours == set()
    assert len(named) > 10


def converse(
    lines: list[str], answer: Callable[[list[Message]], Iterator[str]], system: str | None = None
) -> tuple[Conversation, str]:
    left = iter(lines)

    def read(_: str) -> str:
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    out = io.StringIO()
    conversation = Conversation(answer, read, out, system)
    conversation.run()
    return conversation, out.getvalue()


def echo(messages: list[Message]) -> Iterator[str]:
    yield f"{len(messages)}:"
    yield messages[-1]["content"]


def test_a_conversation_keeps_its_history() -> None:
    conversation, out = converse(["a", "", "b"], echo)
    assert out == "1:a\n3:b\n\n"
    assert [message["content"] for message in conversation.messages] == ["a", "1:a", "b", "3:b"]


def test_reset_keeps_the_system_message() -> None:
    conversation, out = converse(["a", "/reset", "b", "/exit", "never"], echo, system="be brief")
    assert out == "2:a\nthe conversation is forgotten\n2:b\n"
    assert [message["role"] for message in conversation.messages] == ["system", "user", "assistant"]


def test_help_and_unknown_commands() -> None:
    _, out = converse(["/help", "/nope", "/usr/bin is a path"], echo)
    assert out.count("/reset forgets") == 2
    assert "/nope is no command" in out
    assert "1:/usr/bin is a path" in out


def test_an_interrupt_stops_the_answer_and_keeps_what_came() -> None:
    closed = []

    def interrupted(messages: list[Message]) -> Iterator[str]:
        try:
            yield "half"
            raise KeyboardInterrupt
        finally:
            closed.append(len(messages))

    conversation, out = converse(["a"], interrupted)
    assert closed == [1]
    assert conversation.messages[-1] == {"role": "assistant", "content": "half"}
    assert out == "half\n\n"


def test_a_full_context_is_told_and_the_conversation_goes_on() -> None:
    def answer(messages: list[Message]) -> Iterator[str]:
        if messages[-1]["content"] == "long":
            raise ContextLengthError("the prompt has 9 tokens, the context 8")
        yield "ok"

    conversation, out = converse(["long", "b"], answer)
    assert "the context 8; the question is left out" in out
    assert [message["content"] for message in conversation.messages] == ["b", "ok"]
