"""Parts of the command line that need no model: sizes, foreign flags, the chat conversation."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator

import pytest
import typer

from neoserve.api.schemas import ChatCompletionRequest
from neoserve.cli import foreign_flags
from neoserve.cli.main import app, main
from neoserve.cli.repl import Conversation, Message
from neoserve.cli.values import parse_counts, parse_size
from neoserve.types.errors import ConfigurationError, ContextLengthError

OURS = foreign_flags.flags_of(typer.main.get_command(app).commands)


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
    command = "chat" if "--max-tokens" in ours else "serve"
    sentence = foreign_flags.answer(arguments, command, OURS)
    assert sentence is not None
    assert ours in sentence
    assert sentence.startswith(arguments[0].partition("=")[0])
    assert "\n" not in sentence


def test_our_own_flags_are_never_foreign() -> None:
    assert foreign_flags.answer(["-t", "4"], "bench", OURS) is None
    assert foreign_flags.answer(["--no-such-flag"], "serve", OURS) is None


@pytest.mark.parametrize(
    ("command", "flag", "ours"),
    [
        ("serve", "--temp", "use the request field temperature; serve has no --temperature"),
        ("chat", "--temp", "use --temperature"),
        ("bench", "-c", "; bench sets the context from its tests"),
        ("bench", "--n-predict", "use --max-tokens of chat, generate, or the request field max_tokens;"),
        ("generate", "-m", "use --model"),
        ("doctor", "-m", "doctor takes no model"),
        ("chat", "--alias", "use --served-model-name of serve; chat has no --served-model-name"),
        ("doctor", "--gpu-memory-utilization", "doctor has no --kv-cache-memory"),
        ("no-command", "-c", "use --context-length of serve, chat"),
    ],
)
def test_what_the_command_does_not_have_is_told_with_what_has_it(command: str, flag: str, ours: str) -> None:
    sentence = foreign_flags.answer([flag], command, OURS)
    assert sentence is not None
    assert ours in sentence
    if ours.startswith("use") and ";" not in ours and command in OURS:
        assert sentence.endswith(ours)


@pytest.mark.parametrize("command", list(OURS))
def test_every_flag_that_an_answer_names_exists(command: str) -> None:
    for flag in foreign_flags.FLAGS:
        sentence = foreign_flags.answer([flag], command, OURS)
        if sentence is None:
            assert flag in OURS[command]
            continue
        said = re.sub(r"has no \S+", "", sentence.partition("; ")[2])
        for name, homes in re.findall(r"(--[a-z][a-z-]*)(?: of ([a-z, ]+))?", said):
            named = [home for home in re.findall("[a-z]+", homes) if home in OURS]
            assert all(name in OURS[home] for home in named), sentence
            assert named or name in OURS[command], sentence
        for field in re.findall(r"request field (\w+)", said):
            assert field in ChatCompletionRequest.model_fields, sentence


COMMON = """
--disable-log-requests --generation-config --max-logprobs --allowed-origins --limit-mm-per-prompt --compilation-config
--kv-transfer-config --task -sm -mg -ts -mu -md --embeddings --slots --no-webui --rope-scaling --rope-freq-base --lora
--timeout --no-warmup --threads-http --verbose --chat-template-kwargs --watchdog-timeout --log-requests
--grammar-backend --enable-torch-compile --is-embedding
"""


@pytest.mark.parametrize("flag", COMMON.split())
def test_common_flags_have_an_answer(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", flag, "1"]) == 2
    assert f"neoserve: {flag} is a flag of " in capsys.readouterr().err


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
