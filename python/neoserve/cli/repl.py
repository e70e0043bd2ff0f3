"""The conversation of ``neoserve chat``: reads turns, streams answers, keeps the history."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TextIO

from neoserve.types.errors import NeoServeError

Message = dict[str, str]
Answer = Callable[[list[Message]], Iterator[str]]

HELP = "/reset forgets the conversation, /exit (or Ctrl-D) leaves, /help shows this. Ctrl-C stops an answer."


class Conversation:
    """Turns between a user and a model.

    ``answer`` gets the messages so far and yields the pieces of the next one; closing it early stops the model.
    ``read`` returns a line for a prompt text, and raises EOFError at the end of input.
    """

    def __init__(self, answer: Answer, read: Callable[[str], str], out: TextIO, system: str | None = None) -> None:
        self._answer = answer
        self._read = read
        self._out = out
        self._opening: list[Message] = [{"role": "system", "content": system}] if system else []
        self.messages: list[Message] = list(self._opening)

    def run(self) -> None:
        """Until /exit or the end of input."""
        while True:
            try:
                line = self._read("> ").strip()
            except (EOFError, KeyboardInterrupt):
                self._out.write("\n")
                return
            if line == "/exit":
                return
            if line:
                self._take(line)

    def _take(self, line: str) -> None:
        if line == "/reset":
            self.messages = list(self._opening)
            self._say("the conversation is forgotten")
        elif line == "/help":
            self._say(HELP)
        elif line.startswith("/") and " " not in line and "/" not in line[1:]:
            self._say(f"{line} is no command; {HELP}")
        else:
            self._turn(line)

    def _turn(self, line: str) -> None:
        """One question and its answer; what was stopped half-way stays in the history as far as it came."""
        question: Message = {"role": "user", "content": line}
        pieces: list[str] = []
        answer = self._answer([*self.messages, question])
        try:
            for piece in answer:
                pieces.append(piece)
                self._out.write(piece)
                self._out.flush()
        except KeyboardInterrupt:
            close = getattr(answer, "close", None)
            if close is not None:
                close()
        except NeoServeError as error:
            self._say(f"{error}; the question is left out of the conversation (/reset starts a new one)")
            return
        self._out.write("\n")
        self._out.flush()
        self.messages += [question, {"role": "assistant", "content": "".join(pieces)}]

    def _say(self, text: str) -> None:
        self._out.write(f"{text}\n")
        self._out.flush()
