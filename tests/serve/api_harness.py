"""A server with a scripted model, for exact tests of the HTTP API.

One token is one byte; two control tokens mark turns. The model says ``SCRIPT`` (or what a test gives it), a byte a
step, then ends its turn. ``Server`` holds all parts; ``Call`` is a client that can watch a stream and leave.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from neoserve.api.app import create_app
from neoserve.api.limits import RequestLimits
from neoserve.api.model import ServedModel
from neoserve.api.state import ServerState
from neoserve.engine.client import AsyncEngine
from neoserve.engine.core import EngineCore
from neoserve.engine.fake import FakeExecutor, fake_limits
from neoserve.text.template import ChatTemplate
from neoserve.text.tokenizer import Tokenizer
from neoserve.text.vocabulary import VocabularyInfo
from neoserve.types.model import GenerationDefaults
from neoserve.types.options import EngineOptions
from neoserve.types.step import StepLimits

START, END = 256, 257
VOCABULARY = 258
CONTEXT = 256
MODEL = "scripted"
SCRIPT = "Hello there!"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HI = [{"role": "user", "content": "hi"}]


def byte_tokenizer() -> Tokenizer:
    """Ids 0 to 255 are bytes, 256 and 257 the control tokens <|im_start|> and <|im_end|>."""
    characters = _byte_characters()
    backend = tokenizers.Tokenizer(models.BPE(vocab={text: byte for byte, text in enumerate(characters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    info = VocabularyInfo(vocab_size=VOCABULARY, bos_id=None, eos_ids=(END,), add_bos=False, longest_token=12)
    return Tokenizer(backend, info)


def _byte_characters() -> list[str]:
    """The printable stand-in of each byte in byte-level BPE vocabularies."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


class Server:
    """The application around a scripted model, in this process."""

    def __init__(
        self,
        script: Any = SCRIPT,
        *,
        template: str | None = TEMPLATE,
        defaults: GenerationDefaults | None = None,
        options: EngineOptions | None = None,
        limits: RequestLimits | None = None,
        step_limits: StepLimits | None = None,
        attach: bool = True,
        names: tuple[str, ...] = (MODEL, "org/alias"),
        **executor: Any,
    ) -> None:
        step_limits = step_limits or fake_limits(vocab_size=VOCABULARY, max_context=CONTEXT, num_pages=256)
        if isinstance(script, (str, bytes)):
            script = list(script.encode() if isinstance(script, str) else script)
        self.executor = FakeExecutor(script, limits=step_limits, eos_token_id=END, **executor)
        self.core = EngineCore(self.executor, options, strict=True)
        self.engine = AsyncEngine(self.core)
        self.tokenizer = byte_tokenizer()
        self.model = ServedModel(
            names=names,
            tokenizer=self.tokenizer,
            chat_template=None if template is None else ChatTemplate({"default": template}, self.tokenizer),
            generation=defaults or GenerationDefaults(temperature=0.0),
            eos_token_ids=(END,),
            context_length=self.core.context_length,
        )
        self.state = ServerState(limits)
        self.app = create_app(self.state)
        if attach:
            self.core.restrict_vocabulary(VOCABULARY)
            self.state.attach(self.model, self.engine)

    async def __aenter__(self) -> Server:
        await self.engine.start()
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app, raise_app_exceptions=False), base_url="http://server"
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()
        await self.engine.stop()
        self.state.close()

    async def chat(self, messages: Any = None, **fields: Any) -> httpx.Response:
        """POST /v1/chat/completions."""
        body = {"model": MODEL, "messages": HI if messages is None else messages, **fields}
        return await self.http.post("/v1/chat/completions", json=body)

    async def complete(self, prompt: Any = "hi", **fields: Any) -> httpx.Response:
        """POST /v1/completions."""
        return await self.http.post("/v1/completions", json={"model": MODEL, "prompt": prompt, **fields})

    async def metric(self, name: str) -> float:
        """The value of one sample, by its exposition name with labels other than the model's."""
        lines = (await self.http.get("/metrics")).text.splitlines()
        for line in lines:
            key, _, value = line.rpartition(" ")
            if key.replace(f'model_name="{self.model.name}"', "").replace("{}", "").replace(",}", "}") == name:
                return float(value)
        raise AssertionError(f"no metric {name}")

    async def idle(self, seconds: float = 2.0) -> None:
        """Waits until nothing runs or waits and all pages are free; fails after ``seconds``."""
        for _ in range(int(seconds / 0.01)):
            stats = self.engine.stats()
            if not (stats.running or stats.waiting or stats.used_pages):
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"still busy: {self.engine.stats()}")

    async def running(self, count: int = 1, seconds: float = 2.0) -> None:
        """Waits until ``count`` requests run."""
        for _ in range(int(seconds / 0.005)):
            if self.engine.stats().running >= count:
                return
            await asyncio.sleep(0.005)
        raise AssertionError(f"not running: {self.engine.stats()}")


class Call:
    """One HTTP request straight into an ASGI application, whose client can read a stream and hang up.

    Without ``whole`` the client never sends the end of its body.
    """

    def __init__(self, app: Any, path: str, body: object, *, whole: bool = True) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.writes: list[bytes] = []
        self._raw = json.dumps(body).encode()
        self._whole = whole
        self._sent = False
        self._gone = asyncio.Event()
        self._news = asyncio.Event()
        self._reads = asyncio.Event()
        self._reads.set()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "scheme": "http",
            "client": ("test", 1),
            "server": ("test", 80),
            "root_path": "",
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, object]:
        if not self._sent:
            self._sent = True
            return {"type": "http.request", "body": self._raw, "more_body": not self._whole}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        elif message.get("body"):
            self.writes.append(message["body"])
        self._news.set()
        await self._reads.wait()

    @property
    def text(self) -> str:
        """All that was received."""
        return b"".join(self.writes).decode()

    async def wait_for_writes(self, count: int) -> None:
        """Waits until so many writes have come."""
        while len(self.writes) < count:
            self._news.clear()
            await asyncio.wait_for(self._news.wait(), 5)

    def stop_reading(self) -> None:
        """Further writes of the server block."""
        self._reads.clear()

    def hang_up(self) -> None:
        """The client closes its connection."""
        self._gone.set()

    async def end(self) -> None:
        """Waits for the application to return."""
        await asyncio.wait_for(self.task, 5)


def events(text: str) -> list[dict[str, Any]]:
    """The JSON events of a whole stream, without the closing [DONE], which must be there."""
    lines = [line for line in text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]", lines[-1]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@contextlib.asynccontextmanager
async def serving(script: Any = SCRIPT, **parts: Any) -> AsyncIterator[Server]:
    """A started server."""
    async with Server(script, **parts) as server:
        yield server
